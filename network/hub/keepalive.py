"""Keepalive of a WebSocket connection: pings, and the decision that a slow reader is stalled.

The library's keepalive would end a slow reader, whose pongs wait behind a long queue. `StallWatch` decides by the bytes
that TCP has accepted and by acknowledgements (no IO, no clock). `Timers` are a connection's named timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

CHECKS_PER_TIMEOUT = 4


class ReaderProgress(Enum):
    """Result of one check of a reader."""

    IDLE = "nothing waits"
    MOVING = "something waits, and the timeout has not passed since the reader last moved"
    STALLED = "something waits, and the reader did not move for the timeout"


class StallWatch:
    """One reader's progress while data waits for it. Check it every ``period_s`` until the result is ``IDLE`` or
    ``STALLED``.

    The hub sees only two things: how many bytes the reader's TCP has accepted, and which deliveries the reader has
    acknowledged. By TCP alone, some active readers would look stalled. A closed receive window opens again in steps of
    about the receive buffer (on Linux at 1 KB/s: every 6 s with 4 KiB, every two minutes with the default 128 KiB). So
    an acknowledgement counts as progress too.
    """

    def __init__(self, timeout_s: float) -> None:
        self.period_s = timeout_s / CHECKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._last: tuple[int, int] | None = None
        self._moved_at = 0.0

    def reset(self) -> None:
        """Start again at the next check, because the reader could not show progress."""
        self._last = None

    def check(self, now_s: float, *, waiting: int, taken: int, unacked: int) -> ReaderProgress:
        """Judge by the bytes that wait, the bytes accepted so far, and the number of unacknowledged deliveries."""
        # Nothing waits, so nothing can be stalled. The next write starts the watch again.
        if not waiting:
            self._last = None
            return ReaderProgress.IDLE
        if self._last is None or taken > self._last[0] or unacked < self._last[1]:
            self._moved_at = now_s
        # Control frames do not count as written. While one waits, `taken` is too low by its few bytes, so keep the
        # maximum.
        self._last = (max(taken, self._last[0]) if self._last is not None else taken, unacked)
        return ReaderProgress.STALLED if now_s - self._moved_at >= self._timeout_s else ReaderProgress.MOVING


class Timers:
    """Timers by name. Starting a timer replaces the timer of that name."""

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
