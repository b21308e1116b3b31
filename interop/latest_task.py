"""Background tasks with at most one running task per key. Starting a task replaces the previous task of its key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class LatestTasks(Generic[KeyT]):
    """Background tasks, one per key, that run until `close`. `start` does not await, so concurrent callers cannot start
    two tasks.
    """

    def __init__(self) -> None:
        self._tasks: dict[KeyT, asyncio.Task[None]] = {}

    def start(self, key: KeyT, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Cancel the current task of this key, and start ``work`` after the cancelled task has ended."""
        previous = self._tasks.get(key)
        if previous is not None:
            previous.cancel()
        self._tasks[key] = asyncio.create_task(self._run_after(key, previous, work), name=name)

    async def cancel(self, key: KeyT) -> None:
        """Cancel the task of this key, and wait until the task has ended."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_after(
        self, key: KeyT, previous: asyncio.Task[None] | None, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        try:
            if previous is not None:
                # Wait until the old task has ended. If both tasks of a key ran at once, both would send the same posts.
                await asyncio.wait([previous])
            await work()
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]
