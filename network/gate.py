"""How many TCP connections a node takes, before any of them says who it is. Counts only; `connection` asks and cuts."""

from __future__ import annotations

from typing import Protocol

from .config import Limits

SPARE_PLACES = 32
"""How many more are let in when all places are taken: not to converse, but so that health and metrics answer just then."""
SPARE_S = 1.0
"""How long each of those may take for its question."""


class Visitor(Protocol):
    def cut(self) -> None:
        """End the connection, now."""


class Gate:
    """Counts TCP connections, also those that never say anything: no more are let in than sessions can come of, and a few beside."""

    def __init__(self, limits: Limits) -> None:
        self._most_waiting = limits.max_unauthenticated
        self._most = limits.max_connections + limits.max_unauthenticated
        self._open = 0
        self._waiting = 0
        self._spare: dict[Visitor, None] = {}

    def enter(self, visitor: Visitor) -> bool:
        """One more, which has yet to ask for a session. False when there are too many: it may ask a question over HTTP.

        It does so on one of a few places that are there for that, and where they are taken, on that of whoever has it for longest.
        """
        if self._waiting >= self._most_waiting or self._open >= self._most:
            self._spare[visitor] = None
            if len(self._spare) > SPARE_PLACES:
                oldest = next(iter(self._spare))
                del self._spare[oldest]
                oldest.cut()
            return False
        self._open += 1
        self._waiting += 1
        return True

    def pass_on(self) -> None:
        """One of those that waited has a session."""
        self._waiting -= 1

    def leave(self, visitor: Visitor, *, was_let_in: bool, was_waiting: bool) -> None:
        if was_let_in:
            self._open -= 1
            self._waiting -= was_waiting
        else:
            self._spare.pop(visitor, None)
