"""Repeats a request to the hub while the hub says "later".

Used wherever an agent sends, calls or records. Waits as long as the hub asks; every other error passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roundelay.network.errors import RetryLater

T = TypeVar("T")


async def retry_later(attempt: Callable[[], Awaitable[T]], *, attempts: int | None = None) -> T:
    """Await ``attempt()``, again after `RetryLater`, ``attempts`` times in all or without bound. It must be safe to repeat (derived ids are)."""
    made = 0
    while True:
        try:
            return await attempt()
        except RetryLater as error:
            made += 1
            if attempts is not None and made >= attempts:
                raise
            await asyncio.sleep(error.retry_after_ms / 1000)
