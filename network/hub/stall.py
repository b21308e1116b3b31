"""When a slow reader counts as stalled. Decides from what `server` shows it at each look; no IO, no clock.

The hub sees of a reader only how many bytes its TCP has taken and which deliveries it has acknowledged. TCP alone would
condemn some that read: a receive window that was closed opens again in steps of about the receive buffer (on Linux, at
1 KB/s: every 6 s with 4 KiB, every two minutes with the default 128 KiB). So an acknowledgement counts as reading too.
"""

from __future__ import annotations

from enum import Enum

LOOKS_PER_TIMEOUT = 4


class Look(Enum):
    """What a look came to."""

    DONE = "nothing waits"
    MOVING = "something waits, and the timeout has not passed since the reader last moved"
    STALLED = "something waits, and the reader did not move for the timeout"


class StallWatch:
    """One reader's progress while something waits for it. Looked at every ``period_s`` until a look says ``DONE`` or
    ``STALLED``."""

    def __init__(self, timeout_s: float) -> None:
        self.period_s = timeout_s / LOOKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._seen: tuple[int, int] | None = None
        self._moved_at = 0.0

    def forget(self) -> None:
        """Count from the next look on: what was seen so far says nothing of the reader."""
        self._seen = None

    def look(self, now_s: float, *, waiting: int, taken: int, unacked: int) -> Look:
        """Judge by the bytes that wait, those taken so far, and the deliveries that are unacknowledged."""
        if not waiting:
            self._seen = None
            return Look.DONE
        if self._seen is None or taken > self._seen[0] or unacked < self._seen[1]:
            self._moved_at = now_s
        # control frames are not counted as written: while one waits, `taken` is lower by its few bytes
        self._seen = (max(taken, self._seen[0]) if self._seen is not None else taken, unacked)
        return Look.STALLED if now_s - self._moved_at >= self._timeout_s else Look.MOVING
