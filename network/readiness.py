"""The answer of ``/readyz`` as JSON: whether a node accepts sessions, and if not, the reason.

`hub.server` writes this answer for commands and probes that ask for JSON. Other clients get one line of text at the
same path.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class SharedLogReadiness(Struct):
    """State of the shared log, from the view of this node."""

    leads: bool
    leader: str
    """Address of the leader, if another node leads and its address is known."""
    behind: int | None
    """Number of records that the node still has to read, or None before its first check."""
    log: str
    durability: str
    waits: str
    """Why the node neither leads nor follows, or an empty string."""


class Readiness(Struct, omit_defaults=True):
    """Whether a node accepts sessions. ``detail`` is the text answer."""

    ready: bool
    state: Literal["ready", "recovering", "stalled", "starting", "following", "waiting"]
    detail: str
    shared_log: SharedLogReadiness | None = None
