"""Threads for sync tools: one for each call, bounded in number, dying with the process.

Not the event loop's executor: its few threads are shared, and it waits for them at the end, so one hung tool would stop
the others and the exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable

from .foreign import Broken

run_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("run_inline", default=False)
"""Set in a simulation: a sync tool then runs at once, in the event loop. A thread would end at a moment that no other
run repeats."""

MAX_THREADS = 128
"""Calls of sync tools that run at once in this process; further ones wait, within their own time."""


async def run_in_thread(function: Callable[[], object], name: str) -> object:
    """Run a blocking function. Cancelling stops the waiting; the thread goes on to its end unheard, and holds its place
    until then."""
    if run_inline.get():
        return function()
    loop = asyncio.get_running_loop()
    await _places.take(loop)
    outcome: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: object, failure: BaseException | None) -> None:
        if outcome.done():
            return  # cancelled meanwhile
        if failure is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(failure)

    def work() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as error:  # a future does not take this one
            failure = RuntimeError(f"StopIteration: {error}")
        except KeyboardInterrupt as error:  # its own: one of a person's reaches the main thread only
            failure = Broken(error)
        except BaseException as error:  # noqa: BLE001 (the thread's boundary: whatever it is goes to the awaiting task)
            failure = error
        _places.give_back()
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    try:
        threading.Thread(target=work, name=f"tool-{name}", daemon=True).start()
    except RuntimeError:  # the system has no more threads
        _places.give_back()
        raise
    return await outcome


class _Places:
    """Places for threads, handed on in the order in which they are asked for. Waiters may be of several event loops."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._free = count
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    async def take(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            place: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, place))
        try:
            await place
        except asyncio.CancelledError:
            with self._lock:
                is_waiting = (loop, place) in self._waiting
                if is_waiting:
                    self._waiting.remove((loop, place))
            if not is_waiting and place.done() and not place.cancelled():
                self.give_back()  # it came at the same moment
            raise

    def give_back(self) -> None:
        with self._lock:
            while self._waiting:
                loop, place = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._hand_over, place)
                    return
                except RuntimeError:
                    continue  # its loop is closed
            self._free += 1

    def _hand_over(self, place: asyncio.Future[None]) -> None:
        if place.done():
            self.give_back()
        else:
            place.set_result(None)


_places = _Places(MAX_THREADS)
