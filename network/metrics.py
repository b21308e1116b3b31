"""The hub's figures: as a mapping for ``network.status``, as Prometheus text for ``/metrics``. Reads counters, keeps none."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .quota_operations import count_near

if TYPE_CHECKING:
    from .hub import Hub

RECENT_COMMITS = 1024

_HELP = {
    "ready": ("gauge", "1 while the hub accepts connections."),
    "sessions": ("gauge", "Sessions that were welcomed."),
    "sessions_opening": ("gauge", "Connections that were not welcomed yet."),
    "sessions_behind": ("gauge", "Sessions that read pages from the ledger."),
    "backlog_deliveries": ("gauge", "Deliveries that wait in sessions' queues."),
    "backlog_bytes": ("gauge", "Bytes that wait in sessions' queues."),
    "reads_waiting": ("gauge", "Calls that wait for room for their results."),
    "result_bytes": ("gauge", "Bytes of results that were not taken, with what reads under way may come to."),
    "unacked_deliveries": ("gauge", "Deliveries that were handed over and not acknowledged."),
    "open_reactions": ("gauge", "Reactions begun and not finished."),
    "participants": ("gauge", "Registered participants."),
    "participants_near_quota": ("gauge", "Participants that have used nine tenths of a quota, or all of it."),
    "head": ("gauge", "The ledger's newest seq."),
    "pending_entries": ("gauge", "Entries that wait for the writer."),
    "messages_total": ("counter", "Messages committed since the start."),
    "deliveries_total": ("counter", "Deliveries queued since the start."),
    "pages_total": ("counter", "Pages read from the ledger for sessions."),
    "commits_total": ("counter", "Transactions since the start."),
    "rows_total": ("counter", "Log rows committed since the start."),
    "commit_seconds_total": ("counter", "Time spent in transactions."),
    "commit_rows_p50": ("gauge", "Rows of a transaction, median of the last 1024."),
    "commit_rows_max": ("gauge", "Rows of a transaction, the most in the last 1024."),
    "commit_ms_p50": ("gauge", "Milliseconds of a transaction, median of the last 1024."),
    "commit_ms_p99": ("gauge", "Milliseconds of a transaction, 99th percentile of the last 1024."),
    "connections_total": ("counter", "Connections since the start."),
    "made_room_total": ("counter", "Connections without a welcome that were ended, since as many others came."),
    "signals_dropped_total": ("counter", "Signals beyond signals_per_s."),
    "overloaded_total": ("counter", "Frames refused because the writer was behind."),
    "recoveries_total": ("counter", "Times that the ledger failed and was reopened."),
    "damaged_rows": ("gauge", "Rows of the ledger that were read and found damaged."),
}


class CommitFigures:
    """How many transactions there were, of what size and time."""

    def __init__(self) -> None:
        self.commits = 0
        self.rows = 0
        self.seconds = 0.0
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_COMMITS)

    def add(self, rows: int, seconds: float) -> None:
        self.commits += 1
        self.rows += rows
        self.seconds += seconds
        self._recent.append((rows, seconds))

    def recent(self) -> dict[str, float]:
        """Sizes and milliseconds of the last transactions; zeros before the first."""
        sizes = sorted(rows for rows, _ in self._recent) or [0]
        times_ms = sorted(seconds * 1000 for _, seconds in self._recent) or [0.0]
        return {
            "commit_rows_p50": sizes[len(sizes) // 2],
            "commit_rows_max": sizes[-1],
            "commit_ms_p50": round(times_ms[len(times_ms) // 2], 3),
            "commit_ms_p99": round(times_ms[len(times_ms) * 99 // 100], 3),
        }


def read_metrics(hub: Hub) -> dict[str, float]:
    """The figures by name, in the order of the documentation."""
    board, counts = hub.switchboard, hub.counts
    behind = deliveries = size = unacked = 0
    for session in board.sessions.values():  # those that were not welcomed have none of it
        outbox = session.outbox
        behind += outbox.is_behind and session.origin is not None
        deliveries += outbox.queued
        size += outbox.queued_bytes
        unacked += outbox.unacked
    return {
        "ready": int(hub.is_ready),
        "sessions": board.joined,
        "sessions_opening": board.opening,
        "sessions_behind": behind,
        "backlog_deliveries": deliveries,
        "backlog_bytes": size,
        "reads_waiting": board.room.waiting,
        "result_bytes": board.room.held,
        "unacked_deliveries": unacked,
        "open_reactions": hub.state.count("reaction"),
        "participants": hub.state.count_participants(),
        "participants_near_quota": count_near(hub.state),
        "head": hub.state.head,
        "pending_entries": hub.pending,
        "messages_total": counts["messages"],
        "deliveries_total": board.deliveries,
        "pages_total": board.pages.read,
        "commits_total": hub.commits.commits,
        "rows_total": hub.commits.rows,
        "commit_seconds_total": round(hub.commits.seconds, 6),
        **hub.commits.recent(),
        "connections_total": counts["connections"],
        "made_room_total": hub.newcomers.made_room if hub.newcomers is not None else 0,
        "signals_dropped_total": counts["signals_dropped"],
        "overloaded_total": counts["overloaded"],
        "recoveries_total": counts["recoveries"],
        "damaged_rows": hub.ledger.damaged,
    }


def metrics_text(hub: Hub) -> str:
    """The figures in the Prometheus text format."""
    lines: list[str] = []
    for name, value in read_metrics(hub).items():
        kind, help_text = _HELP[name]
        lines += [
            f"# HELP roundelay_{name} {help_text}",
            f"# TYPE roundelay_{name} {kind}",
            f"roundelay_{name} {int(value) if value == int(value) else value!r}",
        ]
    return "\n".join(lines) + "\n"
