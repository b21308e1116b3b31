"""The hub's figures: as a mapping for ``network.status``, as Prometheus text for ``/metrics``. Reads counters, keeps none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .hub import Hub

_HELP = {
    "ready": ("gauge", "1 while the hub accepts connections."),
    "sessions": ("gauge", "Sessions that were welcomed."),
    "sessions_opening": ("gauge", "Connections that were not welcomed yet."),
    "sessions_behind": ("gauge", "Sessions that read pages from the ledger."),
    "participants": ("gauge", "Registered participants."),
    "head": ("gauge", "The ledger's newest seq."),
    "pending_entries": ("gauge", "Entries that wait for the writer."),
    "messages_total": ("counter", "Messages committed since the start."),
    "deliveries_total": ("counter", "Deliveries queued since the start."),
    "pages_total": ("counter", "Pages read from the ledger for sessions."),
    "commits_total": ("counter", "Transactions since the start."),
    "rows_total": ("counter", "Log rows committed since the start."),
    "commit_seconds_total": ("counter", "Time spent in transactions."),
    "connections_total": ("counter", "Connections since the start."),
    "overloaded_total": ("counter", "Frames refused because the writer was behind."),
    "recoveries_total": ("counter", "Times that the ledger failed and was reopened."),
}


def read_metrics(hub: Hub) -> dict[str, float]:
    """The figures by name, in the order of the documentation."""
    board, counts = hub.switchboard, hub.counts
    live = [session for session in board.sessions.values() if session.origin is not None]
    return {
        "ready": int(hub.is_ready),
        "sessions": len(live),
        "sessions_opening": board.opening,
        "sessions_behind": sum(session.outbox.is_behind for session in live),
        "participants": sum(1 for _ in hub.state.participants()),
        "head": hub.state.head,
        "pending_entries": hub.pending,
        "messages_total": counts["messages"],
        "deliveries_total": board.deliveries,
        "pages_total": board.pages,
        "commits_total": counts["commits"],
        "rows_total": counts["rows"],
        "commit_seconds_total": round(hub.commit_s, 6),
        "connections_total": counts["connections"],
        "overloaded_total": counts["overloaded"],
        "recoveries_total": counts["recoveries"],
    }


def metrics_text(hub: Hub) -> str:
    """The figures in the Prometheus text format."""
    lines: list[str] = []
    for name, value in read_metrics(hub).items():
        kind, help_text = _HELP[name]
        lines += [
            f"# HELP roundelay_{name} {help_text}",
            f"# TYPE roundelay_{name} {kind}",
            f"roundelay_{name} {value:g}",
        ]
    return "\n".join(lines) + "\n"
