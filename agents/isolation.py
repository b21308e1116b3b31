"""Isolated calls of user code (tools, models, hooks). A failure of the code ends only its own call.

`run_isolated` runs each call in a separate task, and abandons the task if it does not end within a grace period. Code
that exits, crashes, cancels itself or ignores its cancellation affects neither the reaction nor the runner.
`run_in_thread` runs a sync tool in one of a limited number of threads. If agents share a process, each agent has its
own limit (`running_agent`). `run_hook` limits the time of a hook. The time that a hook waits for the rest of the run
(``proceed``, `Around.complete`, the hub: `pause_hook_timer`) does not count, because these calls have their own limits.
`retry_later` repeats a request that a busy hub postpones.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from roundelay.network.credentials import hide_secrets
from roundelay.network.errors import RetryLater

T = TypeVar("T")

running_agent: ContextVar[str] = ContextVar("roundelay_running_agent", default="")
"""Id of the agent whose code is running, in a process that several agents share. Empty in all other processes."""


class HookTimedOut(TimeoutError):
    """Hook that took longer than ``hook_timeout_s`` and was stopped."""


class _HookTimer:
    """Time limit of one hook. The timer pauses while the hook awaits work whose time does not count."""

    def __init__(self, limit_s: float, timeout: asyncio.Timeout) -> None:
        self._left_s = limit_s
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._pauses = 0

    async def skip(self, work: Awaitable[T]) -> T:
        """Await work whose time does not count. A hook may await several such calls in parallel."""
        self._pauses += 1
        if self._pauses == 1:
            self._left_s -= self._loop.time() - self._since
            self._set(None)
        try:
            return await work
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._since = self._loop.time()
                self._set(None if math.isinf(self._left_s) else self._since + self._left_s)

    def _set(self, when: float | None) -> None:
        try:
            self._timeout.reschedule(when)
        except RuntimeError:
            return  # the hook has ended, and tasks that it left behind have no time limit


_hook_timer: ContextVar[_HookTimer | None] = ContextVar("roundelay_hook_time", default=None)


PLAIN_HOOKS = ("list_tools", "list_parts", "store", "describe_turn")
"""Hooks that synchronous code calls. Such code cannot await the result of a hook."""


def check_hook(name: str, hook: object) -> None:
    """Raise `TypeError` for a hook that would never run: a generator function, or a coroutine function where the caller
    cannot await the result.
    """
    call = _find_code(hook)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise TypeError(f"The hook {name} is a generator, which would not be run: return a value instead of yielding.")
    if name in PLAIN_HOOKS:
        check_plain(f"The hook {name}", hook)


def check_plain(what: str, function: object) -> None:
    """Raise `TypeError` for a coroutine or generator function where only a plain function works. Its return value would
    never be awaited and would always count as true.
    """
    call = _find_code(function)
    for is_kind, kind in (
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.isasyncgenfunction, "a generator"),
    ):
        if is_kind(call):
            raise TypeError(f"{what} is {kind}, which would not be run: write a plain function (def, with return).")


def _find_code(function: object) -> object:
    """Return the object that contains a function's code: the function inside a `partial`, or the method of a callable
    object.
    """
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004


async def run_hook(
    limit_s: float,
    hook: Callable[..., T | Awaitable[T]],
    *args: object,
    proceed: Callable[..., Awaitable[Any]] | None = None,
    named: object = None,
) -> T:
    """Call a hook and await its result if necessary. ``proceed``, if given, becomes the hook's last argument. ``named``
    is an object to name in the error instead of the hook. Raises `HookTimedOut`.
    """
    try:
        async with asyncio.timeout(None if math.isinf(limit_s) else limit_s) as timeout:
            timer = _HookTimer(limit_s, timeout)
            token = _hook_timer.set(timer)
            try:
                last = () if proceed is None else (partial(_skip, timer, proceed),)
                result = hook(*args, *last)
                return await result if inspect.isawaitable(result) else result
            finally:
                _hook_timer.reset(token)
    except TimeoutError as error:
        if not timeout.expired():
            raise  # the hook itself raised this error
        named = named or hook
        name = getattr(named, "__qualname__", type(named).__qualname__)
        raise HookTimedOut(f"{name} took longer than {limit_s:g} s by itself (hook_timeout_s).") from error


def _skip(timer: _HookTimer, proceed: Callable[..., Awaitable[T]], *args: object) -> Awaitable[T]:
    return timer.skip(proceed(*args))


async def await_result(result: object) -> None:
    """Await the result of a user's function if the result is awaitable."""
    if inspect.isawaitable(result):
        await result


async def pause_hook_timer(work: Awaitable[T]) -> T:
    """Await work whose time does not count toward the limit of the current hook. Outside of a hook, only await the
    work.
    """
    timer = _hook_timer.get()
    return await (work if timer is None else timer.skip(work))


_logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Maximum time that cancelled code may take to end, in seconds. Code that runs longer is abandoned, and its result is
ignored.
"""


class CallTimedOut(Exception):
    """Isolated code that did not end within its time limit."""


class CallCrashed(Exception):
    """Isolated code that did not end with an `Exception`: it exited, cancelled itself or crashed. ``error`` is the
    cause.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe_error(error))
        self.error = error


async def run_isolated(work: Callable[[], Awaitable[T]], *, name: str, timeout_s: float = math.inf) -> T:
    """Await ``work()`` in a separate task.

    If the work raises an `Exception`, this function raises it unchanged. It raises `CallCrashed` if the work ends in
    any other abnormal way, and `CallTimedOut` after ``timeout_s`` seconds. Cancelling the caller cancels the work and
    waits at most `GRACE_S` seconds for its end.
    """
    # Use a separate task, because a task can be abandoned. If the caller awaited the code directly, code that ignores
    # its cancellation would block the caller.
    task = asyncio.create_task(_catch(work), name=name)
    try:
        # `wait` neither cancels the task nor raises its errors, so the following code can distinguish the outcomes.
        await asyncio.wait({task}, timeout=None if math.isinf(timeout_s) else timeout_s)
    except asyncio.CancelledError:
        await abandon(task)
        raise
    if not task.done():
        await abandon(task)
        raise CallTimedOut(f"no end within {timeout_s:g} s")
    # cancelled by its own code; an unchanged CancelledError would look as if the caller were cancelled
    if task.cancelled():
        raise CallCrashed(asyncio.CancelledError())
    outcome = task.result()
    if isinstance(outcome, _Failure):
        raise outcome.error
    return outcome


async def run_together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. If one raises an error, cancel the others and raise that error."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:  # a tool's model reads one error, not a group
        raise errors.exceptions[0] from None


async def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait up to `GRACE_S` seconds for its end. If the task still runs after that, abandon it."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=GRACE_S)
    finally:
        if task.done():
            _forget(task)
        else:
            _logger.error("work continues after its cancellation", extra={"work": task.get_name()})
            _abandoned[task] = running_agent.get()
            task.add_done_callback(_forget)


def is_cancelled_by_caller(error: BaseException) -> bool:
    """Return whether another task cancelled the current task. Return False if the code inside the current task raised
    the error itself.
    """
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        # Only `Task.cancel` increments this count. The count is zero if the code itself raised CancelledError.
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group that is not itself a group. That error caused the cancellation of the other
    tasks.
    """
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error, without traceback and secrets."""
    if isinstance(error, CallCrashed):
        error = error.error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (user code, which must not break the report of its error)
        text = ""
    return f"{type(error).__name__}: {hide_secrets(text)}" if text else type(error).__name__


def redact_error(error: BaseException, causes: int = 8) -> BaseException:
    """Return a copy of an error for logs, with the same type name and traceback but without its text. The text of an
    error from user code may quote the conversation. Up to ``causes`` chained causes are included.
    """
    kind = type(error)
    # Create a type with the same name. The log then shows which error occurred, without its text.
    named = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    redacted: BaseException = named().with_traceback(error.__traceback__)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    redacted.__cause__ = redact_error(cause, causes - 1) if cause is not None and causes else None
    return redacted


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception


async def _catch(work: Callable[[], Awaitable[T]]) -> T | _Failure:
    """Return an error instead of raising it. If a task raised some errors, such as SystemExit, the event loop would
    end.
    """
    try:
        return await work()
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 (raised again in the caller's task)
        return _Failure(error)
    except BaseException as error:  # noqa: BLE001 (raised again in the caller's task)
        return _Failure(CallCrashed(error))


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.pop(task, None)
    if not task.cancelled():
        task.exception()  # mark the error as retrieved, because nobody awaits the task


# Abandoned tasks and their agents. This dictionary keeps strong references, because the event loop itself has only weak
# references.
_abandoned: dict[asyncio.Task[object], str] = {}


run_inline: contextvars.ContextVar[bool] = contextvars.ContextVar("run_inline", default=False)
"""Set in a simulation: sync tools run directly in the event loop. A thread would end at a different moment in every
run.
"""

MAX_THREADS = 128
"""Maximum number of sync tool calls of an agent that run in parallel. Further calls wait, and this wait counts toward
their time limit. An agent whose tools hang must not stop the tools of other agents in its process.
"""


async def run_in_thread(function: Callable[[], object], name: str) -> object:
    """Run a blocking function in a thread. If the call is cancelled, the wait ends, but the thread runs to its end and
    occupies its slot until then.
    """
    if run_inline.get():
        return function()
    loop = asyncio.get_running_loop()
    slots = _slots[running_agent.get()]
    await slots.acquire(loop)
    outcome: asyncio.Future[object] = loop.create_future()
    # Run the tool with a copy of the current context variables, such as the metadata of its messages.
    context = contextvars.copy_context()

    def set_outcome(result: object, failure: BaseException | None) -> None:
        if outcome.done():
            return  # the call was cancelled in the meantime
        if failure is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(failure)

    def work() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as error:  # a future refuses this type
            failure = RuntimeError(f"StopIteration: {error}")
        except KeyboardInterrupt as error:  # the tool raised it itself: a person's Ctrl+C reaches only the main thread
            failure = CallCrashed(error)
        except BaseException as error:  # noqa: BLE001 (the thread's boundary: the awaiting task gets it)
            failure = error
        slots.release()
        try:
            loop.call_soon_threadsafe(set_outcome, result, failure)
        except RuntimeError:
            pass  # the loop is closed, so nobody waits for the outcome

    try:
        threading.Thread(target=work, name=f"tool-{name}", daemon=True).start()
    except RuntimeError:  # the system cannot start more threads
        slots.release()
        raise
    return await outcome


def count_leftovers(agent_id: str) -> int:
    """Return the number of an agent's threads and abandoned tasks that still run. Only the end of the process stops
    them.
    """
    return _slots[agent_id].used + sum(owner == agent_id for owner in _abandoned.values())


class _ThreadSlots:
    """Thread slots, assigned in the order of the requests. Waiting requests may belong to several event loops, which an
    asyncio semaphore does not support.
    """

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count = self._free = count
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        return self._count - self._free

    async def acquire(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            slot: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, slot))
        try:
            await slot
        except asyncio.CancelledError:
            with self._lock:
                is_waiting = (loop, slot) in self._waiting
                if is_waiting:
                    self._waiting.remove((loop, slot))
            if not is_waiting and slot.done() and not slot.cancelled():
                self.release()  # the slot was granted at the moment of cancellation; release it for the next request
            raise

    def release(self) -> None:
        with self._lock:
            while self._waiting:
                loop, slot = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(self._give, slot)
                    return
                except RuntimeError:
                    continue  # the event loop of this waiter is closed
            self._free += 1

    def _give(self, slot: asyncio.Future[None]) -> None:
        if slot.done():
            self.release()
        else:
            slot.set_result(None)


_slots: defaultdict[str, _ThreadSlots] = defaultdict(lambda: _ThreadSlots(MAX_THREADS))  # slots by agent


async def retry_later(attempt: Callable[[], Awaitable[T]], *, attempts: int | None = None) -> T:
    """Await ``attempt()``, and repeat it while the hub answers that it is busy: up to ``attempts`` times, or without
    limit. The attempt must be safe to repeat, for example because its ids are derived.
    """
    count = 0
    while True:
        count += 1
        try:
            return await attempt()
        except RetryLater as error:
            if count == attempts:
                raise
            busy = error
        await wait_retry_delay(busy)


async def wait_retry_delay(busy: RetryLater) -> None:
    """Wait for the delay that the hub requested."""
    await pause_hook_timer(asyncio.sleep(busy.retry_after_ms / 1000))
