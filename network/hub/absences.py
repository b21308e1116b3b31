"""How long each offline participant has been without a session. Kept in memory; no IO."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

MAX_KNOWN = 10_000
"""Maximum number of participants whose departure is remembered."""


class Absences:
    """Times at which the last sessions of participants ended.

    The times come from the event loop's clock. With the wall clock, which may jump, a participant could seem to have
    been absent for an hour.

    The hub does not store these times. After `restart`, every offline participant counts as absent since the restart. A
    reported absence may therefore be too short, but never too long.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        """Time of the last restart, or time of the newest departure that was dropped because of `MAX_KNOWN`."""
        self._left_at: OrderedDict[str, float] = OrderedDict()

    def restart(self) -> None:
        """Forget all departures and measure absences from now on. Called after the hub has loaded its state."""
        self._left_at.clear()
        self._since = self._loop.time()

    def record(self, agent_id: str) -> None:
        """Record that the last session of a participant has ended."""
        self._left_at[agent_id] = self._loop.time()
        self._left_at.move_to_end(agent_id)
        if len(self._left_at) > MAX_KNOWN:
            self._since = max(self._since, self._left_at.popitem(last=False)[1])

    def measure(self, agent_id: str) -> int:
        """Return how long an offline participant has been absent, in ms. At least 1."""
        return max(1, round((self._loop.time() - self._left_at.get(agent_id, self._since)) * 1000))
