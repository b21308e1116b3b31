"""Event loop that detects when only time can cause the next event, and that can then advance time.

With a virtual clock, the next timer fires at once. An hour of waiting takes no time, and the same work takes the same
steps in every run. `SimulationLoop.when_quiet` waits until everything has settled, also with the machine's clock. This
module does not depend on networks.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

# One round of the loop, as `_QuietSelector.select` sees it. The clock advances in one place, when nothing else is left:
#
#   is a callback ready?                           yes -> it runs; the clock stands (IO: once in LOOKS rounds)
#        | no
#   has IO arrived, or does a waiter of            yes -> the waiter is woken; the clock stands
#   `when_quiet` have a true predicate?
#        | no
#   is the clock real?                             yes -> the process waits for IO, until the next timer
#        | no
#   is `standing_still` active?                    yes -> the process waits for IO or a thread; Stalled if neither
#        | no                                             can arrive
#   is a timer set?                                yes -> the clock advances to it (`advance`), and it fires
#        | no
#   Stalled: the waiters would wait forever

T = TypeVar("T")
Args = TypeVarTuple("Args")

LOOKS = 64
"""Number of rounds between two checks for IO with a virtual clock, because IO is rare."""
RESOLUTION_S = 1e-6
HORIZON_S = 10 * 86_400.0
"""Maximum virtual time before a run counts as one that never ends. An idle hub wakes twice a second, so a week of virtual
time costs seconds."""


class Stalled(RuntimeError):
    """A task waits although nothing can happen any more, or the limit of virtual time was reached.

    The message names the models that were being asked.
    """


class SimulationLoop(asyncio.SelectorEventLoop):
    """Asyncio event loop with a virtual clock, which starts at 0. ``horizon_s`` is the maximum virtual time.

    If ``is_virtual`` is False, the loop uses the machine's clock.
    """

    def __init__(self, *, is_virtual: bool = True, horizon_s: float = HORIZON_S) -> None:
        self.is_virtual = is_virtual
        self._now_s = 0.0
        self._horizon_s = horizon_s
        self._holds = 0
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._tasks_made = 0
        self._asked: list[str] = []
        self._jobs = 0
        self._threads = set(threading.enumerate())  # threads that do no work for this event loop
        self._outside = _QuietSelector(self)
        super().__init__(self._outside)
        if is_virtual:
            # With a real clock, keep the machine's resolution, so that timers fire together only if they would also do
            # so in a normal loop.
            self._clock_resolution = RESOLUTION_S
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s if self.is_virtual else super().time()

    async def when_quiet(self, predicate: Callable[[], bool] = lambda: True) -> None:
        """Wait until only time can cause the next event and the predicate is true."""
        moment: asyncio.Future[None] = self.create_future()
        entry = (predicate, moment)
        self._waiting.append(entry)
        try:
            await moment
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop virtual time while an external system works, for example a real model. The loop then waits in real
        time."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @contextmanager
    def asking(self, who: str) -> Iterator[None]:
        """Record the name of the user code that is being called, for the message of `Stalled`."""
        self._asked.append(who)
        try:
            yield
        finally:
            self._asked.remove(who)

    def run_in_executor(  # count the jobs, because virtual time must wait for them
        self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        job = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        job.add_done_callback(self._end_job)
        return job

    def _end_job(self, _: object) -> None:
        self._jobs -= 1

    async def shutdown_default_executor(self, *options: Any) -> None:
        with self.standing_still():  # threads end in real time
            await super().shutdown_default_executor(*options)

    def tell_quiet(self) -> bool:
        """Wake the waiters whose predicate is true, if no callback is ready. Return whether a waiter was woken."""
        is_woken = False
        for predicate, moment in list(self._waiting):
            if moment.done():
                continue
            try:
                holds = predicate()
            except Exception as error:  # noqa: BLE001 (the waiter's own predicate failed: hand the error to the waiter)
                moment.set_exception(error)
                return True
            if holds:
                moment.set_result(None)
                is_woken = True
        return is_woken

    def advance(self, by_s: float | None) -> float | None:
        """Advance a virtual clock. Return the number of seconds to wait in real time. Raises `Stalled`."""
        if not self.is_virtual:
            return by_s
        if self._holds:
            if self._asked and not self._is_anything_outside():
                raise Stalled(
                    f"{', '.join(self._asked)} waits, and nothing outside of the event loop is running. Virtual time "
                    "stands still while a real model is asked, so it would wait forever. Use a ScriptedModel, which may "
                    "sleep, or take clock: real"
                )
            return None
        if by_s is None:
            reason = "nothing can happen any more, and something still waits for a future that nothing resolves"
            raise Stalled(reason + self._describe_asked())
        self._now_s += by_s
        if self._now_s > self._horizon_s:
            passed_s, self._horizon_s = self._horizon_s, float("inf")  # let cancelled tasks finish
            raise Stalled(
                f"{passed_s:g} s of virtual time have passed. Does something wait without a limit?{self._describe_asked()}"
            )
        return 0.0

    def _is_anything_outside(self) -> bool:
        """Return whether anything except a timer can cause an event. Possible causes are data on a connection and the
        result of a thread."""
        is_connected = len(self._outside.get_map()) > 1  # the loop itself uses one connection to wake up
        workers = (
            thread
            for thread in threading.enumerate()
            if thread not in self._threads and not thread.name.startswith("asyncio_")
        )
        return is_connected or self._jobs > 0 or any(thread is not threading.current_thread() for thread in workers)

    def _describe_asked(self) -> str:
        return f" (models being asked: {', '.join(self._asked)})" if self._asked else ""

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        self._tasks_made += 1
        return _NumberedTask(self._tasks_made, work, loop=loop, **options)


class _NumberedTask(asyncio.Task[T]):
    """Task with a fixed hash, so that sets of tasks have the same order in every run.

    asyncio cancels the tasks of a group in the order of a set.
    """

    def __init__(self, number: int, work: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # set before super().__init__, which registers the task by its hash
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class _QuietSelector(selectors.DefaultSelector):
    """Selector that checks for IO, and notifies the event loop when no work is left."""

    def __init__(self, loop: SimulationLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Callbacks are ready. With a virtual clock, checking the sockets in each round would cost more than the work
        # itself.
        if timeout is not None and timeout <= 0:
            self._rounds += 1
            return super().select(0) if self._rounds % LOOKS == 0 or not self._loop.is_virtual else []
        events = super().select(0)
        # Check once more before the clock advances: data that has arrived must be handled before any timer.
        if events or self._loop.tell_quiet():
            return events
        wait_s = self._loop.advance(timeout)
        return super().select(wait_s) if wait_s != 0.0 else []


def run(main: Coroutine[Any, Any, T], loop: SimulationLoop) -> T:
    """Run a coroutine to its end on this event loop, as `asyncio.run` does. Then close the loop."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
