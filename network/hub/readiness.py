"""The answer of ``/readyz``: a line of text, or JSON where the request accepts ``application/json``.

Programs read the JSON (`Readiness`); the text is for people and for probes that look at the status code alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from .metrics import LogStatusSource
from .status import HubStatus

if TYPE_CHECKING:
    from roundelay.network.cluster.shared_log import LogStatus


class SharedLogReadiness(Struct, omit_defaults=True):
    """The log that a node shares with other nodes, as the node knows it."""

    leads: bool
    log: str
    durability: str = ""
    leader: str = ""
    """Address of the node that leads, if another one does and is known."""
    behind: int | None = None
    """Number of records that the node has to follow, or None before it has looked."""
    waits: str = ""
    """Why the node neither leads nor follows."""

    @classmethod
    def from_status(cls, status: LogStatus) -> SharedLogReadiness:
        return cls(status.leads, status.log, status.durability, status.leader, status.behind, status.waits)


class Readiness(Struct, omit_defaults=True):
    """Whether a node accepts sessions, and why not. ``detail`` is the answer as text."""

    ready: bool
    state: Literal["ready", "recovering", "stalled", "starting", "following", "waiting"]
    detail: str
    shared_log: SharedLogReadiness | None = None


def describe_readiness(status: HubStatus, shared_log: LogStatusSource | None, *, is_ready: bool) -> Readiness:
    """Return what a node answers. ``is_ready``: the hub is ready, and the node lets sessions in."""
    log_status = shared_log.status if shared_log is not None else None
    log = SharedLogReadiness.from_status(log_status) if log_status is not None else None
    if is_ready:
        return Readiness(True, "ready", f"ready, {log_status}" if log_status is not None else "ready", log)
    if status.is_open:
        return Readiness(False, "stalled", "the ledger does not answer", log)
    if log_status is None or log_status.leads:
        detail = "recovering" if log_status is None else str(log_status)
        return Readiness(False, "recovering", detail, log)
    if log_status.waits:
        return Readiness(False, "waiting", str(log_status), log)
    return Readiness(False, "starting" if log_status.behind is None else "following", str(log_status), log)
