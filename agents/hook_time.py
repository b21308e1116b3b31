"""The time that a hook of middleware takes by itself: bounded, so that one that hangs ends its call or its reaction,
rather than holding up a thread for ever.

Used by `chain` around every asynchronous hook. What a hook awaits of the run is not counted, since that has limits of
its own, or is waited for without one on purpose: ``proceed``, `Around.complete`, and the hub (`uncounted`, which
`model_calls`, `retry` and `tool_client` use).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class HookOverdue(TimeoutError):
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


async def run_hook(
    limit_s: float,
    hook: Callable[..., Awaitable[T]],
    *given: object,
    proceed: Callable[..., Awaitable[Any]] | None = None,
) -> T:
    """Await a hook, whose last argument is ``proceed`` if there is one. Raises `HookOverdue` when its time is over."""
    try:
        async with asyncio.timeout(None if math.isinf(limit_s) else limit_s) as timeout:
            meter = _Meter(limit_s, timeout)
            token = _METER.set(meter)
            try:
                if proceed is None:
                    return await hook(*given)
                go_on = proceed
                return await hook(*given, lambda *changed: meter.skip(go_on(*changed)))
            finally:
                _METER.reset(token)
    except TimeoutError as error:
        if not timeout.expired():
            raise  # the hook's own
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise HookOverdue(f"{name} took longer than {limit_s:g} s by itself (hook_timeout_s).") from error


async def uncounted(work: Awaitable[T]) -> T:
    """Await what takes no time of the hook that asks for it, if one does."""
    meter = _METER.get()
    return await (work if meter is None else meter.skip(work))
