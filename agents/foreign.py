"""Runs code that is not ours, a tool's or a model's, so that whatever it does ends the call and nothing else.

Each call has a task of its own: one that exits, panics, is cancelled by itself or swallows its cancellation reaches
neither the reaction nor the runner. Used by `model_calls`, `tool_calls` and the features that run checks; sync tools
run in the bounded threads of `threads`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long code that was cancelled may take to end; then it is left alone, and goes on unheard if it must."""


class Overdue(Exception):
    """The code had no end within its time."""


class Broken(Exception):
    """The code ended with what is no `Exception`: it exited, was cancelled by itself, or panicked. ``error`` is
    that."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(describe_error(error))
        self.error = error


async def run_foreign(work: Callable[[], Awaitable[T]], *, name: str, timeout_s: float = math.inf) -> T:
    """Await ``work()`` apart. Raises its `Exception` as it is, `Broken` for anything else, `Overdue` when its time is
    over.

    Cancelling the caller cancels the work and waits for it, for `GRACE_S` at most.
    """
    task = asyncio.create_task(_contain(work), name=name)
    try:
        await asyncio.wait({task}, timeout=None if math.isinf(timeout_s) else timeout_s)
    except asyncio.CancelledError:
        await _abandon(task)
        raise
    if not task.done():
        await _abandon(task)
        raise Overdue(f"no end within {timeout_s:g} s")
    if task.cancelled():
        raise Broken(asyncio.CancelledError())
    outcome = task.result()
    if isinstance(outcome, _Failure):
        raise outcome.error
    return outcome


def is_told_to_end(error: BaseException) -> bool:
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
    """Give kind and words of an error, without a traceback."""
    if isinstance(error, Broken):
        error = error.error
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (it is not ours, and all that is wanted are words)
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
        return _Failure(Broken(error))


async def _abandon(task: asyncio.Task[object]) -> None:
    """Cancel, wait a little, and let go of what does not end."""
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


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved: nobody waits for it


_abandoned: set[asyncio.Task[object]] = set()  # the event loop itself holds tasks by weak references only
