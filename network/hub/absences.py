"""The time for which participants have been without a session. In memory; no IO."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

MAX_KNOWN = 10_000
"""Maximum number of participants whose departure is remembered."""


class Absences:
    """Times at which the last sessions of participants ended, by the clock of the event loop. With a wall clock that
    jumps, a participant could seem to have been absent for an hour.

    The hub does not store these times. After `restart`, every offline participant counts as absent since the restart,
    so that no absence is reported as longer than is certain.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        """Time of the last restart, or of the newest departure that was forgotten to limit memory."""
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
