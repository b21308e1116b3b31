"""Code that is not ours, a tool's, a model's or a hook's: whatever it does ends its own call and nothing else.

`run_isolated` gives each call a task of its own and lets go of it after a grace: one that exits, panics, is cancelled
by itself or swallows its cancellation reaches neither the reaction nor the runner. `run_in_thread` gives a sync tool a
thread, of a bounded number. `run_hook` bounds the time that a hook of middleware takes by itself; what it awaits of the
run (``proceed``, `Around.complete`, the hub: `pause_hook_timer`) has limits of its own and is not counted. `retry_later`
repeats what a busy hub puts off.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from roundelay.network.credentials import hide_secrets
from roundelay.network.errors import RetryLater

T = TypeVar("T")


class HookTimedOut(TimeoutError):
    """A hook took longer than ``hook_timeout_s`` by itself, and was stopped."""


class _Meter:
    """The time of one hook. It stands still as long as something that is not counted is awaited."""

    def __init__(self, limit_s: float, timeout: asyncio.Timeout) -> None:
        self._left_s = limit_s
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()
        self._pauses = 0

    async def skip(self, work: Awaitable[T]) -> T:
        """Await what is not counted; a hook may await several such things at once."""
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
            return  # the hook is over: what it left running has no time of its own


_METER: ContextVar[_Meter | None] = ContextVar("roundelay_hook_time", default=None)


PLAIN_HOOKS = ("list_tools", "list_parts", "store", "describe_turn")
"""Hooks that are asked where nothing can be awaited."""


def check_hook(name: str, hook: object) -> None:
    """Raise `TypeError` for a function that would be accepted and never run: a generator, or a coroutine where nothing
    is awaited."""
    call = _find_code(hook)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise TypeError(f"The hook {name} is a generator, which would not be run: return a value instead of yielding.")
    if name in PLAIN_HOOKS:
        check_plain(f"The hook {name}", hook)


def check_plain(what: str, function: object) -> None:
    """Raise `TypeError` for a coroutine or generator function where only a plain one is run: nobody would await it, and
    what it gives would pass for true."""
    call = _find_code(function)
    for is_kind, kind in (
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isgeneratorfunction, "a generator"),
        (inspect.isasyncgenfunction, "a generator"),
    ):
        if is_kind(call):
            raise TypeError(f"{what} is {kind}, which would not be run: write a plain function (def, with return).")


def _find_code(function: object) -> object:
    """Return what holds a function's code: inside of `partial`, or of an object that is called."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004


async def run_hook(
    limit_s: float,
    hook: Callable[..., T | Awaitable[T]],
    *given: object,
    proceed: Callable[..., Awaitable[Any]] | None = None,
    named: object = None,
) -> T:
    """Await a hook, whose last argument is ``proceed`` if there is one; one that is a plain function is called.
    ``named`` stands for it in what is told. Raises `HookTimedOut` when its time is over."""
    try:
        async with asyncio.timeout(None if math.isinf(limit_s) else limit_s) as timeout:
            meter = _Meter(limit_s, timeout)
            token = _METER.set(meter)
            try:
                more = () if proceed is None else (partial(_skip, meter, proceed),)
                made = hook(*given, *more)
                return await made if inspect.isawaitable(made) else made
            finally:
                _METER.reset(token)
    except TimeoutError as error:
        if not timeout.expired():
            raise  # the hook's own
        shown = named or hook
        name = getattr(shown, "__qualname__", type(shown).__qualname__)
        raise HookTimedOut(f"{name} took longer than {limit_s:g} s by itself (hook_timeout_s).") from error


def _skip(meter: _Meter, proceed: Callable[..., Awaitable[T]], *changed: object) -> Awaitable[T]:
    return meter.skip(proceed(*changed))


async def await_result(given: object) -> None:
    """Await what a function of a user gave, if it is to be awaited: it may be a plain one."""
    if inspect.isawaitable(given):
        await given


async def pause_hook_timer(work: Awaitable[T]) -> T:
    """Await what takes no time of the hook that asks for it, if one does."""
    meter = _METER.get()
    return await (work if meter is None else meter.skip(work))


_logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long code that was cancelled may take to end; then it is left alone, and goes on unheard if it must."""


class CallTimedOut(Exception):
    """The code had no end within its time."""


class CallCrashed(Exception):
    """The code ended with what is no `Exception`: it exited, was cancelled by itself, or panicked. ``error`` is
    that."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe_error(error))
        self.error = error


async def run_isolated(work: Callable[[], Awaitable[T]], *, name: str, timeout_s: float = math.inf) -> T:
    """Await ``work()`` apart. Raises its `Exception` as it is, `CallCrashed` for anything else, `CallTimedOut` when its time is
    over.

    Cancelling the caller cancels the work and waits for it, for `GRACE_S` at most.
    """
    task = asyncio.create_task(_contain(work), name=name)
    try:
        await asyncio.wait({task}, timeout=None if math.isinf(timeout_s) else timeout_s)
    except asyncio.CancelledError:
        await abandon(task)
        raise
    if not task.done():
        await abandon(task)
        raise CallTimedOut(f"no end within {timeout_s:g} s")
    if task.cancelled():
        raise CallCrashed(asyncio.CancelledError())
    outcome = task.result()
    if isinstance(outcome, _Failure):
        raise outcome.error
    return outcome


async def abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task, wait `GRACE_S` for its end, and let go of it if it has none."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=GRACE_S)
    finally:
        if task.done():
            _forget(task)
        else:
            _logger.error("work goes on after its cancellation", extra={"work": task.get_name()})
            _abandoned.add(task)
            task.add_done_callback(_forget)


def is_cancelled_by_caller(error: BaseException) -> bool:
    """Whether an error ends this task because somebody wants that, rather than because of the code in it."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError):
        return task is None or task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt)


def first_error(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Give the first single error of a group: the tasks beside it were cancelled because of it."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Give kind and words of an error, without a traceback and without secrets."""
    if isinstance(error, CallCrashed):
        error = error.error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (it is not ours, and all that is wanted are words)
        text = ""
    return f"{type(error).__name__}: {hide_secrets(text)}" if text else type(error).__name__


def redact_error(error: BaseException, causes: int = 8) -> BaseException:
    """Give an error of the same name, raised at the same places, that says nothing, with so many of its causes: for a
    log, since what such code raises may quote what was said."""
    kind = type(error)
    named = type(kind.__name__, (Exception,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
    told: BaseException = named().with_traceback(error.__traceback__)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    told.__cause__ = redact_error(cause, causes - 1) if cause is not None and causes else None
    return told


@dataclass(frozen=True, slots=True)
class _Failure:
    error: Exception


async def _contain(work: Callable[[], Awaitable[T]]) -> T | _Failure:
    """Await, and give an error rather than raise it: some (SystemExit) would end the event loop from inside a task."""
    try:
        return await work()
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001 (the boundary: it is raised again in the caller's task)
        return _Failure(error)
    except BaseException as error:  # noqa: BLE001 (likewise)
        return _Failure(CallCrashed(error))


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved: nobody waits for it


_abandoned: set[asyncio.Task[object]] = set()  # the event loop itself holds tasks by weak references only


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
            failure = CallCrashed(error)
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


async def retry_later(attempt: Callable[[], Awaitable[T]], *, attempts: int | None = None) -> T:
    """Await ``attempt()``, again while the hub says "later", up to ``attempts`` times or without bound. It must be safe
    to repeat (derived ids are)."""
    made = 0
    while True:
        made += 1
        try:
            return await attempt()
        except RetryLater as error:
            if made == attempts:
                raise
            busy = error
        await wait_retry_delay(busy)


async def wait_retry_delay(busy: RetryLater) -> None:
    """Wait as long as the hub asked for."""
    await pause_hook_timer(asyncio.sleep(busy.retry_after_ms / 1000))
