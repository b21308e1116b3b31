"""When an agent is ready: connected, in its channels, woken by whoever writes to it. Part of `runner`."""

from __future__ import annotations

import asyncio


class Readiness:
    """Of the run that is under way, or comes next."""

    def __init__(self) -> None:
        self._reached: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait for it. Raises what ended the run before."""
        await asyncio.shield(self._open())

    def reach(self) -> None:
        """The agent is ready. Idempotent."""
        if not self._open().done():
            self._open().set_result(None)

    def end(self, failure: Exception) -> None:
        """The run has ended: whoever still waits waits in vain."""
        reached, self._reached = self._reached, None
        if reached is not None and not reached.done():
            reached.set_exception(failure)
            reached.exception()  # retrieved: perhaps nobody waits

    def _open(self) -> asyncio.Future[None]:
        if self._reached is None:
            self._reached = asyncio.get_running_loop().create_future()
        return self._reached
