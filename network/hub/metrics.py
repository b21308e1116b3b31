"""The hub's metrics, as a mapping for ``network.status`` and as Prometheus text for ``/metrics``.

This module counts only what the batch writer alone knows. It reads all other metrics from the objects that hold the
values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from roundelay.network.ledger import Ledger
from roundelay.network.operations.operators import count_near_quota

from .sessions import SessionRegistry

if TYPE_CHECKING:
    from roundelay.network.cluster.shared_log import LogStatus

RECENT_COMMITS = 1024
"""Number of recent commits that the percentiles cover."""


class Metric(NamedTuple):
    """One metric of the hub, with its name and its value. The name of a counter ends with ``_total``."""

    name: str
    help: str
    value: float


class LogStatusSource(Protocol):
    """Source of the shared log's state, for metrics and HTTP answers."""

    @property
    def status(self) -> LogStatus: ...

    @property
    def leader_node(self) -> str:
        """Address of the node that leads the shared log, or an empty string if the leader is unknown."""


class CommitStats:
    """Number, sizes and times of the commits since the start."""

    def __init__(self) -> None:
        self.number = 0
        self.rows = 0
        self.seconds = 0.0
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT_COMMITS)
        """Number of rows and duration in seconds of each recent commit."""

    def record(self, rows: int, seconds: float) -> None:
        self.number += 1
        self.rows += rows
        self.seconds += seconds
        # Keep only recent commits: percentiles over all commits would hide that commits have become slow.
        self.recent.append((rows, seconds))


def list_metrics(
    registry: SessionRegistry, ledger: Ledger, commits: CommitStats, *, is_ready: bool, pending: int, evicted: int
) -> list[Metric]:
    """Return all metrics, in the order of docs/operations.md. ``pending`` is the number of entries that wait for the
    batch writer. ``evicted`` is the number of connections that were closed to make room for new connections."""
    behind = deliveries = size = unacked = 0
    # Count on request: counters on the hot path would cost more than an occasional scan.
    for session in registry.sessions.values():  # sessions that are not yet welcomed have empty outboxes
        outbox = session.outbox
        behind += outbox.is_behind and not outbox.is_silent and session.origin is not None
        deliveries += outbox.queued
        size += outbox.queued_bytes
        unacked += outbox.unacked
    counts, state = registry.counts, registry.state
    sizes = sorted(rows for rows, _ in commits.recent) or [0]
    times_ms = sorted(seconds * 1000 for _, seconds in commits.recent) or [0.0]
    p50_ms, p99_ms = times_ms[len(times_ms) // 2], times_ms[len(times_ms) * 99 // 100]
    near_quota = "Participants that have used nine tenths of a quota, or all of it."
    result_bytes = "Bytes of results that were not taken, with what reads under way may come to."
    made_room = "Connections without a welcome that were ended, since as many others came."
    return [
        Metric("ready", "1 while the hub accepts connections.", int(is_ready)),
        Metric("sessions", "Sessions that were welcomed.", registry.joined),
        Metric("sessions_opening", "Connections that were not welcomed yet.", registry.opening),
        Metric("sessions_behind", "Sessions that read pages from the ledger.", behind),
        Metric("backlog_deliveries", "Deliveries that wait in sessions' queues.", deliveries),
        Metric("backlog_bytes", "Bytes that wait in sessions' queues.", size),
        Metric("reads_waiting", "Calls that wait for room for their results.", registry.read_budget.waiting),
        Metric("result_bytes", result_bytes, registry.read_budget.used),
        Metric("unacked_deliveries", "Deliveries that were handed over and not acknowledged.", unacked),
        Metric("open_reactions", "Reactions begun and not finished.", state.count("reaction")),
        Metric("participants", "Registered participants.", state.count_participants()),
        Metric("participants_near_quota", near_quota, count_near_quota(state)),
        Metric("head", "The ledger's newest seq.", state.head),
        Metric("pending_entries", "Entries that wait for the writer.", pending),
        Metric("messages_total", "Messages committed since the start.", counts["messages"]),
        Metric("deliveries_total", "Deliveries queued since the start.", registry.deliveries),
        Metric("pages_total", "Pages read from the ledger for sessions.", registry.pages.pages_read),
        Metric("commits_total", "Transactions since the start.", commits.number),
        Metric("rows_total", "Log rows committed since the start.", commits.rows),
        Metric("commit_seconds_total", "Time spent in transactions.", round(commits.seconds, 6)),
        Metric("commit_rows_p50", "Rows of a transaction, median of the last 1024.", sizes[len(sizes) // 2]),
        Metric("commit_rows_max", "Rows of a transaction, the most in the last 1024.", sizes[-1]),
        Metric("commit_ms_p50", "Milliseconds of a transaction, median of the last 1024.", round(p50_ms, 3)),
        Metric("commit_ms_p99", "Milliseconds of a transaction, 99th percentile of the last 1024.", round(p99_ms, 3)),
        Metric("connections_total", "Connections since the start.", counts["connections"]),
        Metric("made_room_total", made_room, evicted),
        Metric("signals_dropped_total", "Signals beyond signals_per_s.", counts["signals_dropped"]),
        Metric("overloaded_total", "Frames refused because the writer was behind.", counts["overloaded"]),
        Metric("loops_stopped_total", "Conversations, and agents, that stopped at a limit.", counts["loops_stopped"]),
        Metric("recoveries_total", "Times that the ledger failed and was reopened.", counts["recoveries"]),
        Metric("damaged_rows", "Rows of the ledger that were read and found damaged.", ledger.damaged),
    ]


def list_log_metrics(status: LogStatus) -> list[Metric]:
    """Return the metrics of a node that shares its log with other nodes. A metric whose value is unknown is left
    out."""
    is_full = status.durability == "full"
    metrics = [
        Metric("log_leading", "1 while this node leads the shared log.", int(status.leads)),
        Metric("log_full", "1 while the log's servers show that they sync each record.", int(is_full)),
    ]
    if status.behind is not None:
        metrics.append(Metric("log_records_behind", "Records of the log that this node has to follow.", status.behind))
    if status.answered_s is not None:
        age_s = round(status.answered_s, 3)
        metrics.append(Metric("log_age_seconds", "Seconds since the log last answered this node.", age_s))
    return metrics


def format_metrics(metrics: Iterable[Metric]) -> str:
    """Return the metrics in the Prometheus text format."""
    lines: list[str] = []
    for name, help_text, value in metrics:
        lines += [
            f"# HELP roundelay_{name} {help_text}",
            f"# TYPE roundelay_{name} {'counter' if name.endswith('_total') else 'gauge'}",
            f"roundelay_{name} {int(value) if value == int(value) else value!r}",
        ]
    return "\n".join(lines) + "\n"
