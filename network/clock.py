"""Where time and identifiers come from: the only module of the network that reads them.

The core takes both as arguments, so that replay and simulation give it their own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

Clock = Callable[[], int]
"""Gives the present in milliseconds since the Unix epoch; may go back (the hub's stamps do not)."""

NewId = Callable[[], str]
"""Gives a new identifier of 1 to 128 visible ASCII characters, unlikely to repeat."""


def system_clock() -> int:
    """The machine's wall clock, in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def random_id() -> str:
    """128 random bits, in 22 characters of base64url."""
    return secrets.token_urlsafe(16)
