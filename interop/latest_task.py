"""Tasks of which there is one for each key at a time: who begins anew ends the one before it, and waits until it is
gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class SucceedingTasks(Generic[KeyT]):
    """Owns its tasks until `close`. To begin one takes no await: callers who ask at once leave one task."""

    def __init__(self) -> None:
        self._tasks: dict[KeyT, asyncio.Task[None]] = {}

    def begin(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Cancel what runs under this key, and do this when it has ended."""
        before = self._tasks.get(key)
        if before is not None:
            before.cancel()
        self._tasks[key] = asyncio.create_task(self._follow(key, before, work), name=name)

    async def end(self, key: KeyT) -> None:
        """Cancel what runs under this key; it has ended when this returns."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self, key: KeyT, before: asyncio.Task[None] | None, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await work()
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]
