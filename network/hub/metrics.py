"""The hub's figures: what only the hub counts is kept here, everything else is read where it stands.

For ``network.status`` as a mapping, for ``/metrics`` as Prometheus text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from roundelay.network.ledger import Ledger
from roundelay.network.operations.operators import count_near_quota

from .publisher import SessionRegistry

if TYPE_CHECKING:
    from roundelay.network.cluster.shared_log import LogStatus

RECENT_COMMITS = 1024
"""Of so many the figures tell the sizes and times."""


class Metric(NamedTuple):
    """One of the hub's figures. One whose name ends with ``_total`` only grows."""

    name: str
    help: str
    value: float


class CommitStats:
    """How many transactions there were, of what size and time: the hub counts."""

    def __init__(self) -> None:
        self.number = 0
        self.rows = 0
        self.seconds = 0.0
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT_COMMITS)
        """Rows and seconds of the last ones."""


def list_metrics(
    board: SessionRegistry,
    ledger: Ledger,
    counts: Counter[str],
    commits: CommitStats,
    *,
    is_ready: bool,
    pending: int,
    made_room: int,
) -> list[Metric]:
    """All figures, in the order of the documentation. ``pending``: entries before the writer."""
    behind = deliveries = size = unacked = 0
    for session in board.sessions.values():  # those that were not welcomed have none of it
        outbox = session.outbox
        behind += outbox.is_behind and not outbox.is_silent and session.origin is not None
        deliveries += outbox.queued
        size += outbox.queued_bytes
        unacked += outbox.unacked
    sizes = sorted(rows for rows, _ in commits.recent) or [0]
    times_ms = sorted(seconds * 1000 for _, seconds in commits.recent) or [0.0]
    return [
        Metric("ready", "1 while the hub accepts connections.", int(is_ready)),
        Metric("sessions", "Sessions that were welcomed.", board.joined),
        Metric("sessions_opening", "Connections that were not welcomed yet.", board.opening),
        Metric("sessions_behind", "Sessions that read pages from the ledger.", behind),
        Metric("backlog_deliveries", "Deliveries that wait in sessions' queues.", deliveries),
        Metric("backlog_bytes", "Bytes that wait in sessions' queues.", size),
        Metric("reads_waiting", "Calls that wait for room for their results.", board.room.waiting),
        Metric(
            "result_bytes",
            "Bytes of results that were not taken, with what reads under way may come to.",
            board.room.used,
        ),
        Metric("unacked_deliveries", "Deliveries that were handed over and not acknowledged.", unacked),
        Metric("open_reactions", "Reactions begun and not finished.", board.state.count("reaction")),
        Metric("participants", "Registered participants.", board.state.count_participants()),
        Metric(
            "participants_near_quota",
            "Participants that have used nine tenths of a quota, or all of it.",
            count_near_quota(board.state),
        ),
        Metric("head", "The ledger's newest seq.", board.state.head),
        Metric("pending_entries", "Entries that wait for the writer.", pending),
        Metric("messages_total", "Messages committed since the start.", counts["messages"]),
        Metric("deliveries_total", "Deliveries queued since the start.", board.deliveries),
        Metric("pages_total", "Pages read from the ledger for sessions.", board.pages.pages_read),
        Metric("commits_total", "Transactions since the start.", commits.number),
        Metric("rows_total", "Log rows committed since the start.", commits.rows),
        Metric("commit_seconds_total", "Time spent in transactions.", round(commits.seconds, 6)),
        Metric("commit_rows_p50", "Rows of a transaction, median of the last 1024.", sizes[len(sizes) // 2]),
        Metric("commit_rows_max", "Rows of a transaction, the most in the last 1024.", sizes[-1]),
        Metric(
            "commit_ms_p50",
            "Milliseconds of a transaction, median of the last 1024.",
            round(times_ms[len(times_ms) // 2], 3),
        ),
        Metric(
            "commit_ms_p99",
            "Milliseconds of a transaction, 99th percentile of the last 1024.",
            round(times_ms[len(times_ms) * 99 // 100], 3),
        ),
        Metric("connections_total", "Connections since the start.", counts["connections"]),
        Metric(
            "made_room_total", "Connections without a welcome that were ended, since as many others came.", made_room
        ),
        Metric("signals_dropped_total", "Signals beyond signals_per_s.", counts["signals_dropped"]),
        Metric("overloaded_total", "Frames refused because the writer was behind.", counts["overloaded"]),
        Metric("loops_stopped_total", "Conversations, and agents, that stopped at a limit.", counts["loops_stopped"]),
        Metric("recoveries_total", "Times that the ledger failed and was reopened.", counts["recoveries"]),
        Metric("damaged_rows", "Rows of the ledger that were read and found damaged.", ledger.damaged),
    ]


def list_log_metrics(standing: LogStatus) -> list[Metric]:
    """Those of a node that shares its log with others; what it does not know yet is left out."""
    figures = [
        Metric("log_leading", "1 while this node leads the shared log.", int(standing.leads)),
        Metric(
            "log_full", "1 while the log's servers show that they sync each record.", int(standing.durability == "full")
        ),
    ]
    if standing.behind is not None:
        figures.append(
            Metric("log_records_behind", "Records of the log that this node has to follow.", standing.behind)
        )
    if standing.answered_s is not None:
        age_s = round(standing.answered_s, 3)
        figures.append(Metric("log_age_seconds", "Seconds since the log last answered this node.", age_s))
    return figures


def metrics_text(figures: Iterable[Metric]) -> str:
    """The figures in the Prometheus text format."""
    lines: list[str] = []
    for name, help_text, value in figures:
        lines += [
            f"# HELP roundelay_{name} {help_text}",
            f"# TYPE roundelay_{name} {'counter' if name.endswith('_total') else 'gauge'}",
            f"roundelay_{name} {int(value) if value == int(value) else value!r}",
        ]
    return "\n".join(lines) + "\n"
