"""An event loop that knows when nothing more can happen without time passing, and may then move time itself.

With a virtual clock the next timer is due at once: an hour of waiting costs nothing, and the same work takes the same
steps in every run. Whoever waits until everything has settled asks `SimulationLoop.when_quiet`, under the machine's own
clock too. It knows nothing of networks.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

# One round of the loop, as `_QuietSelector.select` sees it. The clock moves at one place, when nothing else is left:
#
#   is a callback ready?                           yes -> it runs; the clock stands (IO: once in LOOKS rounds)
#        | no
#   has IO arrived, or does somebody wait in       yes -> who waits is woken; the clock stands
#   `when_quiet` whose predicate holds now?
#        | no
#   is the clock real?                             yes -> the process waits for IO, until the next timer
#        | no
#   is `standing_still` held?                      yes -> the process waits for IO, or for a thread; Stalled where
#        | no                                             nothing of the kind is under way
#   is a timer set?                                yes -> the clock moves to it (`advance`), and it runs
#        | no
#   Stalled: who waits would wait for ever

T = TypeVar("T")
Args = TypeVarTuple("Args")

LOOKS = 64
"""With a virtual clock the operating system is asked for IO once in so many rounds of the loop: usually there is
none."""
RESOLUTION_S = 1e-6
HORIZON_S = 10 * 86_400.0
"""How much virtual time may pass before a run counts as one that will never end. An idle hub wakes twice a second, so a
week costs seconds."""


class Stalled(RuntimeError):
    """Nothing is left that could happen, and somebody still waits; or more virtual time has passed than was allowed.
    Says which models were being asked then."""


class SimulationLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with a clock of its own, from 0, unless ``is_virtual`` is False. ``horizon_s`` ends a run whose
    time flies for nothing."""

    def __init__(self, *, is_virtual: bool = True, horizon_s: float = HORIZON_S) -> None:
        self.is_virtual = is_virtual
        self._now_s = 0.0
        self._horizon_s = horizon_s
        self._holds = 0
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._tasks_made = 0
        self._asked: list[str] = []
        self._jobs = 0
        self._threads = set(threading.enumerate())  # none of them works for this loop
        self._outside = _QuietSelector(self)
        super().__init__(self._outside)
        if is_virtual:
            # Else it is the machine's, and timers that are due together here might not be so elsewhere.
            self._clock_resolution = RESOLUTION_S
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s if self.is_virtual else super().time()

    async def when_quiet(self, predicate: Callable[[], bool] = lambda: True) -> None:
        """Wait for a moment at which nothing can happen without time passing, and at which the predicate holds."""
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
        """While something outside is under way, a real model say, virtual time does not pass: the loop really waits."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    @contextmanager
    def asking(self, who: str) -> Iterator[None]:
        """While somebody is asked whose code is not ours: `Stalled` names it."""
        self._asked.append(who)
        try:
            yield
        finally:
            self._asked.remove(who)

    def run_in_executor(  # in threads, whose end is waited for
        self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        job = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        job.add_done_callback(self._end_job)
        return job

    def _end_job(self, _: object) -> None:
        self._jobs -= 1

    async def shutdown_default_executor(self, *options: Any) -> None:
        with self.standing_still():  # its threads end outside of virtual time
            await super().shutdown_default_executor(*options)

    def tell_quiet(self) -> bool:
        """Nothing is ready: wake who waited for that. True if somebody was woken, and something is ready again."""
        is_woken = False
        for predicate, moment in list(self._waiting):
            if moment.done():
                continue
            try:
                holds = predicate()
            except Exception as error:  # noqa: BLE001 (the predicate's: it goes to whoever gave it)
                moment.set_exception(error)
                return True
            if holds:
                moment.set_result(None)
                is_woken = True
        return is_woken

    def advance(self, by_s: float | None) -> float | None:
        """Move a virtual clock on; gives the seconds that are really to be waited for. Raises `Stalled`."""
        if not self.is_virtual:
            return by_s
        if self._holds:
            if self._asked and not self._is_anything_outside():
                raise Stalled(
                    f"{', '.join(self._asked)} waits, and nothing is under way outside of the event loop: while a "
                    "model is asked that is no script, virtual time stands still, so it would wait for ever. Make it a "
                    "ScriptedModel, which may sleep, or take clock: real"
                )
            return None
        if by_s is None:
            told = "nothing is left that could happen, and somebody still waits: a future that nobody resolves"
            raise Stalled(told + self._describe_asked())
        self._now_s += by_s
        if self._now_s > self._horizon_s:
            passed_s, self._horizon_s = self._horizon_s, float("inf")  # what is cancelled now may take its time to end
            raise Stalled(
                f"{passed_s:g} s of virtual time have passed; a wait without a bound?{self._describe_asked()}"
            )
        return 0.0

    def _is_anything_outside(self) -> bool:
        """Whether something can arrive that is no timer: on a connection, or from a thread."""
        is_connected = len(self._outside.get_map()) > 1  # the loop wakes itself by one
        workers = (it for it in threading.enumerate() if it not in self._threads and not it.name.startswith("asyncio_"))
        return is_connected or self._jobs > 0 or any(it is not threading.current_thread() for it in workers)

    def _describe_asked(self) -> str:
        return f" (being asked: {', '.join(self._asked)})" if self._asked else ""

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        self._tasks_made += 1
        return _NumberedTask(self._tasks_made, work, loop=loop, **options)


class _NumberedTask(asyncio.Task[T]):
    """A task that a set keeps at the same place in every run: asyncio cancels the tasks of a group in the order of a
    set."""

    def __init__(self, number: int, work: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number  # first: asyncio registers the task, by its hash, while it is being made
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class _QuietSelector(selectors.DefaultSelector):
    """Asks the operating system, and tells the loop when there is nothing to do."""

    def __init__(self, loop: SimulationLoop) -> None:
        super().__init__()
        self._loop = loop
        self._rounds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            self._rounds += 1
            return super().select(0) if self._rounds % LOOKS == 0 or not self._loop.is_virtual else []
        found = super().select(0)
        if found or self._loop.tell_quiet():
            return found
        wait_s = self._loop.advance(timeout)
        return super().select(wait_s) if wait_s != 0.0 else []


def run(main: Coroutine[Any, Any, T], loop: SimulationLoop) -> T:
    """Run to the end on this loop, as `asyncio.run` does, and close it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)
