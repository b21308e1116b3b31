"""Repeats what failed in a way that may pass, by `stamina`; each caller has a budget of its own.

Used wherever an agent asks the hub (`retry_later`) or its model (`retry`). Waits as long as the other side asks; every
other error passes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from roundelay.network.errors import RetryLater

from .hook_time import uncounted

T = TypeVar("T")


async def retry(
    attempt: Callable[[], Awaitable[T]], *, judge: Callable[[Exception], bool | float], attempts: int | None
) -> T:
    """Await ``attempt()`` up to ``attempts`` times, or without bound. ``judge`` gives the seconds before the next one,
    or False for none."""
    try:
        return await attempt()  # nearly always the last: what follows is not for the hot path
    except Exception as error:  # of any kind: `judge` says which ones may pass, the others are raised again
        delay_s = judge(error)
        if delay_s is False or attempts == 1:
            raise
    await asyncio.sleep(delay_s)
    import stamina  # only where it is needed: it costs time to import

    left = None if attempts is None else attempts - 1
    async for trial in stamina.retry_context(on=judge, attempts=left, timeout=None):
        with trial:
            return await attempt()
    raise AssertionError("the last attempt gives a value or raises")


async def retry_later(attempt: Callable[[], Awaitable[T]], *, attempts: int | None = None) -> T:
    """Await ``attempt()``, again while the hub says "later". It must be safe to repeat (derived ids are)."""
    return await uncounted(retry(attempt, judge=_wait_for_hub, attempts=attempts))


def _wait_for_hub(error: Exception) -> bool | float:
    return error.retry_after_ms / 1000 if isinstance(error, RetryLater) else False
