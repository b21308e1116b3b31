"""The places of connections that were not welcomed yet, bounded in number: a newcomer always gets one, and of the others one makes room.

Who makes room is of the address that holds most places, and of those the one that got on last (came, or asked for a session) the longest ago.
So an address can neither keep others out, nor, by connections that say nothing, those that share it: a newcomer is out of their reach
until as many came after it as there are places. Decides in memory; `connection` ends what has to go.
"""

from __future__ import annotations

from typing import Protocol


class Newcomer(Protocol):
    """A connection that has a place. ``crowd``: what counts as one address (`peer.crowd_of`)."""

    crowd: str

    def make_room(self) -> None:
        """End the connection, now."""


class Gate:
    """At most ``places`` newcomers at a time. ``made_room`` counts those that were ended for others."""

    def __init__(self, places: int) -> None:
        self.made_room = 0
        self._places = places
        self._taken = 0
        self._lines: dict[str, dict[Newcomer, None]] = {}
        """By crowd, in the order in which they got on; no line is empty."""

    def enter(self, newcomer: Newcomer) -> None:
        """One more has come, or will be no participant's connection after all. Idempotent."""
        line = self._lines.setdefault(newcomer.crowd, {})
        if newcomer in line:
            return
        line[newcomer] = None
        self._taken += 1
        if self._taken > self._places:
            self.clear_place()

    def get_on(self, newcomer: Newcomer) -> None:
        """It has done the next step towards its welcome."""
        line = self._lines.get(newcomer.crowd, {})
        if newcomer in line:
            del line[newcomer]
            line[newcomer] = None

    def leave(self, newcomer: Newcomer) -> None:
        """It needs its place no longer: the hub knows who it is, or it is gone. Idempotent."""
        line = self._lines.get(newcomer.crowd, {})
        if newcomer in line:
            del line[newcomer]
            self._taken -= 1
            if not line:
                del self._lines[newcomer.crowd]

    def clear_place(self) -> bool:
        """One of them makes room. False if there is none."""
        if not self._lines:
            return False
        crowded = max(self._lines.values(), key=len)
        oldest = next(iter(crowded))
        self.leave(oldest)
        self.made_room += 1
        oldest.make_room()
        return True

    def clear(self) -> None:
        """All of them go: nobody is let in any more."""
        while self.clear_place():
            pass
