"""Keepalive of a WebSocket connection: pings, and the decision whether a slow reader is stalled.

The keepalive of the `websockets` library would close the connection of a slow reader, because the reader's pongs wait
behind a long queue. `StallWatch` looks at the bytes that TCP has accepted and at acknowledgements (no IO, no clock).
`Timers` holds the named timers of one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

CHECKS_PER_TIMEOUT = 4


class ReaderProgress(Enum):
    """Result of one check of a reader's progress."""

    IDLE = "nothing waits"
    MOVING = "something waits, and the timeout has not passed since the reader last moved"
    STALLED = "something waits, and the reader did not move for the timeout"


class StallWatch:
    """Progress of one reader while data waits for it. Call `check` every ``period_s`` until the result is ``IDLE`` or
    ``STALLED``.

    The hub sees only two facts: how many bytes the reader's TCP has accepted, and which deliveries the reader has
    acknowledged. The TCP bytes alone would make some active readers look stalled, because a closed receive window opens
    again in steps of about the size of the receive buffer. For a reader of 1 KB/s on Linux, the window opens every 6 s
    with a buffer of 4 KiB, and every two minutes with the default of 128 KiB. So an acknowledgement counts as progress
    too.
    """

    def __init__(self, timeout_s: float) -> None:
        self.period_s = timeout_s / CHECKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._last: tuple[int, int] | None = None
        self._moved_at = 0.0

    def reset(self) -> None:
        """Forget the progress so far. The next check starts a new timeout. Used when the reader had no way to show
        progress."""
        self._last = None

    def check(self, now_s: float, *, waiting: int, taken: int, unacked: int) -> ReaderProgress:
        """Return whether the reader is stalled. ``waiting`` and ``taken`` are the bytes that wait and that TCP has
        accepted; ``unacked`` is the number of unacknowledged deliveries."""
        # Without waiting data, a reader cannot be stalled. The next write starts the timeout again.
        if not waiting:
            self._last = None
            return ReaderProgress.IDLE
        if self._last is None or taken > self._last[0] or unacked < self._last[1]:
            self._moved_at = now_s
        # Control frames are not counted as written, so `taken` is a few bytes too low while a control frame waits. Keep
        # the maximum.
        self._last = (max(taken, self._last[0]) if self._last is not None else taken, unacked)
        return ReaderProgress.STALLED if now_s - self._moved_at >= self._timeout_s else ReaderProgress.MOVING


class Timers:
    """Timers by name. Starting a timer replaces the timer with the same name."""

    __slots__ = ("_loop", "_timers")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._timers

    def start(self, name: str, delay_s: float, act: Callable[[], object]) -> None:
        # A timer that was replaced must not fire.
        self.cancel(name)
        self._timers[name] = self._loop.call_later(delay_s, act)

    def cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def cancel_all(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
