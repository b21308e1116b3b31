"""Writes the records and the answer of one reaction to the hub, in order, and several records in one commit.

`journal` adds the writes. If an effect depends on a write, the caller awaits the write, and all queued writes are sent
at once. Other writes are sent after `MAX_DELAY_S`. If the process is killed during this delay, only repeatable work is
lost. Writes are stored in the order in which they were added. Without batches, and in a replay, each write is stored
separately and at once.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Raw

from roundelay.network.client.values import Stored
from roundelay.network.errors import IdConflict, RetryLater, RoundelayError
from roundelay.network.frames import RecordFrame, SendFrame

from .isolation import pause_hook_timer, wait_retry_delay

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

MAX_DELAY_S = 0.05
"""Maximum time that a write waits for other writes of the same batch, in seconds. Readers see records later by this
time. The delay saves two of the five commits of an answer with a tool call, because the tool's result is stored
together with the reply that requested the call.
"""
DRAIN_S = 2.0
"""Maximum time that a runner spends at its end to store queued writes, in seconds."""
_FRAME_BYTES = 512
"""Estimated size of a frame without its content, in bytes."""


@dataclass(slots=True, eq=False)
class Write:
    """One record or message to store. With ``may_conflict``, it is no error if the hub already has other content under
    the same id. The earlier content stays.
    """

    store: Callable[[], Awaitable[Stored]]
    """Stores the write with a separate request."""

    make_frame: Callable[[], SendFrame | RecordFrame]
    may_conflict: bool = False
    is_independent: bool = False
    """Whether only the caller depends on this write. If the hub refuses the write or is busy, only the caller gets the
    error, and later writes are stored. If the caller is cancelled before the write is sent, the write is not sent.
    """

    is_withdrawn: bool = False
    """Whether the caller of an independent write was cancelled."""

    is_stored: bool = False
    is_duplicate: bool = False
    stored: Stored | None = None
    error: Exception | None = None
    is_awaited: bool = False
    is_lost: bool = False
    """Whether this write was not stored because an earlier write was refused."""

    frame: SendFrame | RecordFrame | None = None

    @property
    def size(self) -> int:
        """Approximate size of the frame in bytes."""
        assert self.frame is not None
        body: Raw = self.frame.content if isinstance(self.frame, SendFrame) else self.frame.body
        return len(bytes(body)) + _FRAME_BYTES

    @property
    def is_refused(self) -> bool:
        """Whether the hub refused this write itself, and not an earlier write."""
        return self.error is not None and not self.is_lost

    def complete(self, stored: Stored | None) -> None:
        """Mark the write as stored. ``stored`` is None if the hub has other content under the same id."""
        self.is_stored, self.stored = True, stored
        self.is_duplicate = stored is None or stored.duplicate


@dataclass(slots=True, eq=False)
class RecordQueue:
    """Queue of the writes of one reaction and of the runs inside it. ``max_batch`` is the hub's limit for the writes of
    one frame. With a limit of 1, each write is stored separately.
    """

    client: NetworkClient
    max_batch: int = 1
    max_bytes: int = 262_144
    is_held: bool = False
    _waiting: list[Write] = field(default_factory=list)
    _sent: list[Write] = field(default_factory=list)
    """The writes of the batch that was sent last."""

    _timer: asyncio.TimerHandle | None = None
    _writer: asyncio.Task[None] | None = None
    _failure: Exception | None = None
    """Refusal of a write that nobody awaited. Until `forget_failure` is called, every later write raises this error,
    because it may depend on the lost write.
    """

    def check_open(self) -> None:
        """Raise `CancelledError` while the queue is held."""
        # Raise a cancellation instead of another error, because calling code might try to record the other error.
        if self.is_held:
            raise asyncio.CancelledError

    async def write(self, *writes: Write, may_wait: bool = False) -> None:
        """Add writes to the queue. Unless they ``may_wait``, return when all of them are stored. If the hub refuses a
        write, raise the refusal. Writes after a refused write are not stored either.
        """
        self.check_open()
        if self.max_batch <= 1:
            for write in writes:
                await self._store_alone(write)
                if write.error is not None:
                    raise write.error
            return
        self._raise_failure()
        for write in writes:
            write.frame = write.make_frame()  # make the frame here, so that the caller gets the error of invalid JSON
        self._waiting += writes
        if may_wait:
            if self._timer is None and self._writer is None:
                self._timer = asyncio.get_running_loop().call_later(MAX_DELAY_S, self._start_writer)
            return
        for write in writes:
            write.is_awaited = True
        try:
            await pause_hook_timer(self._settle(writes))
        except asyncio.CancelledError:
            # A stopped call sends no more messages. Records of a stopped call stay queued, because later records depend
            # on them.
            for write in writes:
                write.is_withdrawn = write.is_independent
            raise

    async def flush(self) -> None:
        """Store all queued writes. Raises the hub's refusal of a write that nobody awaited."""
        self.check_open()
        while self._waiting or self._writer is not None:
            await self._wait_for_writer()
        self._raise_failure()

    def forget_failure(self) -> None:
        """Accept writes again, because the run that depended on the lost write has ended."""
        self._failure = None

    def hold(self) -> None:
        """Stop writing until ``is_held`` is cleared. Unsent writes stay in the queue."""
        self.is_held = True
        self._stop_timer()
        if self._writer is not None:
            self._writer.cancel()
            self._writer = None
            # The hub may have stored these writes already. Sending these writes again under the same ids changes
            # nothing.
            self._waiting[:0] = [write for write in self._sent if not write.is_stored]

    async def drain(self) -> None:
        """Store the queued writes even while the queue is held, if the hub accepts them within `DRAIN_S`."""
        with suppress(RoundelayError, TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                while self._waiting:
                    await self._wait_for_writer()

    async def _settle(self, writes: Sequence[Write]) -> None:
        while not all(write.is_stored or write.error is not None for write in writes):
            await self._wait_for_writer()
        for write in writes:
            if write.error is not None:
                raise write.error

    async def _wait_for_writer(self) -> None:
        self._start_writer()
        assert self._writer is not None
        # Shield the task: the cancellation of one caller must not cancel the writes of other callers.
        await asyncio.shield(self._writer)

    def _start_writer(self) -> None:
        # Write in a separate task, so that parallel calls of one turn add their writes before the first batch is sent.
        self._stop_timer()
        if self._writer is None:
            # Do not copy the caller's context: the timer of the caller's hook must not include the time of this task.
            context = contextvars.Context()
            self._writer = asyncio.create_task(self._store_waiting(), name="reaction-writer", context=context)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _store_waiting(self) -> None:
        try:
            while self._waiting:
                batch = self._sent = self._take_batch()
                try:
                    await self._store(batch)
                except Exception as error:  # noqa: BLE001 (raised again by the waiting callers, or by the next write)
                    # Store no write after a refused write, because a resumed run could not interpret the later records.
                    # An independent write that was refused earlier keeps its own error.
                    unstored = (write for write in batch if not write.is_stored)
                    lost = [*(it for it in unstored if it.error is None or it.error is error), *self._waiting]
                    self._waiting.clear()
                    for write in lost:
                        write.error, write.is_lost = error, write is not lost[0]
                    if not all(write.is_awaited for write in lost):
                        self._failure = error
        finally:
            if self._writer is asyncio.current_task():
                self._writer = None

    def _take_batch(self) -> list[Write]:
        """Remove and return the next writes that fit into one frame."""
        size = count = 0
        for write in self._waiting[: self.max_batch]:
            size += write.size
            if count and size > self.max_bytes:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _store(self, batch: list[Write]) -> None:
        left = batch
        # Remove withdrawn writes again after each delay: a call may be stopped while the hub is busy with an earlier
        # record.
        while left := [write for write in left if not write.is_withdrawn]:
            if len(left) == 1:
                await self._store_alone(left[0])
                return
            try:
                done = await self.client.store_batch([write.frame for write in left if write.frame is not None])
            except RetryLater as busy:
                await wait_retry_delay(busy)
                continue
            for write, stored in zip(left, done.stored, strict=False):
                write.complete(stored)
            left = left[len(done.stored) :]
            if done.error is not None and left[0].is_independent:
                left.pop(0).error = done.error
            elif isinstance(done.error, RetryLater):
                await wait_retry_delay(done.error)
            elif isinstance(done.error, IdConflict) and left[0].may_conflict:
                left.pop(0).complete(None)
            elif done.error is not None:
                raise done.error

    async def _store_alone(self, write: Write) -> None:
        """Store one write. While the hub is busy, repeat the request without a limit. A repeat is safe, because it has
        the same derived id. Raises the hub's refusal, unless the write is independent.
        """
        while True:
            try:
                write.complete(await write.store())
            except RoundelayError as error:
                if isinstance(error, RetryLater) and not write.is_independent:
                    await wait_retry_delay(error)
                    continue
                if isinstance(error, IdConflict) and write.may_conflict:
                    write.complete(None)
                    return
                write.error = error
                if not write.is_independent:
                    raise
            return
