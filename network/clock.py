"""Where time and identifiers come from: the only module of the network that reads them.

The core takes both as arguments, so that replay and simulation give it their own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Gives the present in milliseconds since the Unix epoch; may go back (`SteadyClock` does not)."""

NewId = Callable[[], str]
"""Gives a new identifier of 1 to 128 visible ASCII characters, unlikely to repeat."""


def system_clock() -> int:
    """The machine's wall clock, in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def random_id() -> str:
    """128 random bits, in 22 characters of base64url."""
    return secrets.token_urlsafe(16)


def random_number() -> int:
    """Any of 1 to 2**31 - 1."""
    return secrets.randbelow(2**31 - 1) + 1


def ordered_id() -> str:
    """32 hex digits: the time in milliseconds, then 80 random bits. Ids sort by when they were made, as
    those of UUID version 7 do (RFC 9562, 5.7)."""
    return f"{system_clock():012x}{secrets.token_hex(10)}"


class SteadyClock:
    """A `Clock` that follows another one and never goes back. While it is ahead, after a jump of the other one, it runs
    at half speed: it neither stands still, which would stop every rate and every retry, nor stays ahead for ever."""

    def __init__(self, source: Clock) -> None:
        self._source = source
        self._seen = source()
        self._time: float = self._seen

    def __call__(self) -> int:
        seen = self._source()
        elapsed, self._seen = max(0, seen - self._seen), seen
        self._time = max(seen, self._time + elapsed / 2)
        return int(self._time)

    def not_before(self, time: int) -> None:
        """Go on from this time, if it is later: it was used before."""
        self()  # what has passed since it was read last is over: it does not come on top of that time
        self._time = max(self._time, time)


def make_token() -> str:
    """32 random bytes in base64url: what a client saves before its first ``hello``."""
    return secrets.token_urlsafe(32)
