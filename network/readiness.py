"""The answer of ``/readyz`` as JSON: whether a node accepts sessions, and if not, why.

`hub.server` writes it, commands and probes read it. The same path answers one line of text to everybody else.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class SharedLogReadiness(Struct):
    """The log that a node shares with other nodes, as the node knows it."""

    leads: bool
    leader: str
    """Address of the node that leads, if another one does and is known."""
    behind: int | None
    """Number of records that the node has to follow, or None before it has looked."""
    log: str
    durability: str
    waits: str
    """Why the node neither leads nor follows, or an empty string."""


class Readiness(Struct, omit_defaults=True):
    """Whether a node accepts sessions. ``detail`` is the answer as text."""

    ready: bool
    state: Literal["ready", "recovering", "stalled", "starting", "following", "waiting"]
    detail: str
    shared_log: SharedLogReadiness | None = None
