"""Repeats a request to the hub while the hub says "later".

Used wherever an agent sends, calls or records. Waits as long as the hub asks, a bounded number of times; every other error passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roundelay.network.errors import RetryLater

T = TypeVar("T")


async def retry_later(attempt: Callable[[], Awaitable[T]], *, attempts: int) -> T:
    """Await ``attempt()``, again after `RetryLater` until it was made ``attempts`` times. It must be safe to repeat (derived ids are)."""
    for left in range(attempts - 1, -1, -1):
        try:
            return await attempt()
        except RetryLater as error:
            if not left:
                raise
            await asyncio.sleep(error.retry_after_ms / 1000)
    raise ValueError(f"attempts is {attempts} and must be at least 1")
