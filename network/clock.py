"""Sources of time and identifiers. No other module of the network reads the system's clock or random numbers.

The core receives times and ids as arguments, so that replay and simulation can supply their own values.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Function that returns the time in milliseconds since the Unix epoch. Only `SteadyClock` never goes back."""

NewId = Callable[[], str]
"""Function that returns a new random identifier of 1 to 128 visible ASCII characters."""


def system_clock() -> int:
    """Return the machine's wall clock, in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def random_id() -> str:
    """Return 128 random bits, as 22 characters of base64url."""
    return secrets.token_urlsafe(16)


def random_number() -> int:
    """Return a random number from 1 to 2**31 - 1."""
    return secrets.randbelow(2**31 - 1) + 1


def ordered_id() -> str:
    """Return 32 hex digits: the time in ms, then 80 random bits. These ids sort by creation time, like UUID version 7
    (RFC 9562, 5.7)."""
    return f"{system_clock():012x}{secrets.token_hex(10)}"


class SteadyClock:
    """A `Clock` that follows another clock and never goes back. When the other clock jumps back, this clock runs at
    half speed until the other clock has caught up. A clock that stood still would block rate limits and retries."""

    def __init__(self, source: Clock) -> None:
        self._source = source
        self._seen = source()
        self._time: float = self._seen

    def __call__(self) -> int:
        seen = self._source()
        # A jump back counts as no elapsed time. Half of each later step is added until the source has caught up.
        elapsed, self._seen = max(0, seen - self._seen), seen
        self._time = max(seen, self._time + elapsed / 2)
        return int(self._time)

    def not_before(self, time: int) -> None:
        """Advance the clock to ``time`` if the clock is earlier, because the hub has already used this time."""
        self()  # update `_seen` first: the time that passed before this call must not be added to the new time
        self._time = max(self._time, time)


def make_token() -> str:
    """Return 32 random bytes as base64url. A client saves its token before its first ``hello``."""
    return secrets.token_urlsafe(32)
