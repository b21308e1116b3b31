"""The time for which participants have been without a session. In memory; no IO."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

MAX_KNOWN = 10_000
"""Maximum number of remembered departures."""


class Absences:
    """When the last sessions of participants ended, by the time of the event loop. A wall clock may jump, and somebody
    would seem to have been absent for an hour.

    The hub does not store this. After `restart` everybody counts as absent since then, so that nobody seems to have been
    absent for longer than is certain.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        """Time of the last restart, or of the newest departure that was forgotten."""
        self._left_at: OrderedDict[str, float] = OrderedDict()

    def restart(self) -> None:
        """Begin to count again, because the hub has loaded its state."""
        self._left_at.clear()
        self._since = self._loop.time()

    def record(self, agent_id: str) -> None:
        """Record that the last session of a participant has ended."""
        self._left_at[agent_id] = self._loop.time()
        self._left_at.move_to_end(agent_id)
        if len(self._left_at) > MAX_KNOWN:
            self._since = max(self._since, self._left_at.popitem(last=False)[1])

    def measure(self, agent_id: str) -> int:
        """Return the time in ms since the last session of an offline participant ended. At least 1."""
        return max(1, round((self._loop.time() - self._left_at.get(agent_id, self._since)) * 1000))
