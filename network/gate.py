"""How many TCP connections a node takes, before any of them says who it is. Counts only; `connection` asks and cuts."""

from __future__ import annotations

from .config import Limits


class Gate:
    """Counts TCP connections, also those that never say anything: no more are let in than sessions can come of."""

    def __init__(self, limits: Limits) -> None:
        self._most_waiting = limits.max_unauthenticated
        self._most = limits.max_connections + limits.max_unauthenticated
        self._open = 0
        self._waiting = 0

    def enter(self) -> bool:
        """One more, which has yet to ask for a session. False when there are too many: it is to be cut."""
        if self._waiting >= self._most_waiting or self._open >= self._most:
            return False
        self._open += 1
        self._waiting += 1
        return True

    def pass_on(self) -> None:
        """One of those that waited has a session."""
        self._waiting -= 1

    def leave(self, *, was_waiting: bool) -> None:
        self._open -= 1
        self._waiting -= was_waiting
