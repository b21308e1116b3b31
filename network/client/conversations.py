"""Methods of `NetworkClient` that read conversations: history, the window of a prompt, and open items."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Unpack

from roundelay.network.errors import RetryLater

from .values import History, OpenItems, Window, WindowSizes

MAX_QUIET_WAIT_S = 25.0
"""Maximum time that one `network.open_items` call waits at the hub, in seconds."""


class ConversationReads:
    """The part of `NetworkClient` that reads threads and conversations."""

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        raise NotImplementedError

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        """Return the newest ``limit`` messages of a thread before the seq ``before``, oldest first."""
        args = _drop_none(thread_id=thread_id, limit=limit, before=before)
        return History.read(await self.call("network.history", args))

    async def window(
        self,
        trigger: int,
        *,
        threads: int | list[str] | None = None,
        **sizes: Unpack[WindowSizes],
    ) -> Window:
        """Return the messages that may enter a prompt for the message ``trigger``. The order of threads is stable."""
        args = _drop_none(trigger=trigger, threads=threads, **sizes)
        return Window.read(await self.call("network.window", args))

    async def open_items(self, root: int, *, others: bool = False, wait_s: float = 0.0, limit: int = 100) -> OpenItems:
        """Return the open items of the conversation that the message ``root`` started, oldest first.

        The hub answers when the conversation is quiet, or after ``wait_s`` seconds (at most 30). With ``others``, items
        of this participant do not count.
        """
        args = {"root": root, "others": others, "wait_ms": int(wait_s * 1000), "limit": limit}
        return OpenItems.read(await self.call("network.open_items", args))

    async def wait_until_quiet(self, root: int, timeout_s: float | None = None, *, others: bool = False) -> OpenItems:
        """Wait until a conversation has no open items, or until the timeout (None: no limit). Return the items that are
        still open. `OpenItems.is_quiet` is false after a timeout.

        A lost connection or a busy hub does not end the wait. With ``others``, items of this participant do not count,
        so an agent can wait inside its own reaction.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        while True:
            left_s = MAX_QUIET_WAIT_S if until is None else max(until - loop.time(), 0.0)
            try:
                found = await self.open_items(root, others=others, wait_s=min(left_s, MAX_QUIET_WAIT_S))
            except RetryLater as error:
                await asyncio.sleep(error.retry_after_ms / 1000)
                continue
            if found.is_quiet or (until is not None and loop.time() >= until):
                return found


def _drop_none(**args: object) -> dict[str, object]:
    """Return the arguments whose value is not None."""
    return {name: value for name, value in args.items() if value is not None}
