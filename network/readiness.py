"""The JSON answer of ``/readyz``: whether a node accepts sessions, and if not, the reason.

`hub.server` sends this answer to commands and probes that request JSON. Other clients receive one line of text from the
same path.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class SharedLogReadiness(Struct):
    """State of the shared log, as this node sees it."""

    leads: bool
    leader: str
    """Address of the leader if another node is the leader and its address is known, otherwise an empty string."""
    behind: int | None
    """Number of records of the shared log that the node has not read yet, or None before the node's first check."""
    log: str
    durability: str
    waits: str
    """Reason why the node is neither a leader nor a follower, or an empty string."""


class Readiness(Struct, omit_defaults=True):
    """Whether a node accepts sessions. ``detail`` is the line that clients receive if they do not request JSON."""

    ready: bool
    state: Literal["ready", "recovering", "stalled", "starting", "following", "waiting"]
    detail: str
    shared_log: SharedLogReadiness | None = None
