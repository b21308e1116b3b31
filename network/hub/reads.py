"""`ReadService`: reads, which are operations that change nothing. Reads run in parallel to the batches, on the
committed state and the ledger.

`intake` starts one task per read. Each task waits for the read budget, which limits the memory of unread results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import msgspec
from msgspec import Raw

from roundelay.network.clock import NewId
from roundelay.network.core.access import check_right
from roundelay.network.core.entries import Origin, error_bytes
from roundelay.network.core.mod import Operation
from roundelay.network.errors import InternalError, LedgerError, RoundelayError
from roundelay.network.frames import ResultFrame, encode
from roundelay.network.operations.reading import Reading

from .hub_view import LiveHubView
from .read_budget import ReadSlot
from .session import LIVE, Session
from .sessions import SessionRegistry

log = logging.getLogger(__name__)

Complete: TypeAlias = Callable[[Any, RoundelayError | None], None]
"""Callback that receives the result of an operation's IO, or the error that refuses the call."""


class ReadService:
    """Performs reading operations for sessions."""

    def __init__(self, registry: SessionRegistry, view: LiveHubView, new_id: NewId) -> None:
        self._registry = registry
        self._view = view
        self._new_id = new_id

    def start(self, session: Session, operation: Operation, call_id: str, args: msgspec.Struct, size: int) -> None:
        """Start one read. ``size`` is the size of its frame. The frame counts against the session's limit until the
        read has ended."""
        reads = self._registry.open_reads(session)
        reads.in_progress += 1
        reads.request_bytes += size
        self._registry.spawn(self._run(session, operation, call_id, args, size))

    def start_prepare(
        self, session: Session, operation: Operation, args: msgspec.Struct, size: int, complete: Complete
    ) -> None:
        """Start the IO of a changing operation. Unless the session ends first, ``complete`` receives the result or the
        error."""
        reads = self._registry.open_reads(session)
        reads.in_progress += 1
        reads.request_bytes += size
        self._registry.spawn(self._prepare(session, operation, args, size, complete))

    async def _prepare(
        self, session: Session, operation: Operation, args: msgspec.Struct, size: int, complete: Complete
    ) -> None:
        if session.state is not LIVE or session.reads is None:
            return
        reads = session.reads
        slot = ReadSlot(self._registry.read_budget, reads)
        prepared, refusal = None, None
        try:
            await slot.acquire()
            reading = Reading(session.live_origin(), self._view, operation.op.partition(".")[0], slot)
            check_right(self._view.state, reading.origin, "call", operation.op)
            prepared = await operation.run_prepare(reading, args)
        except RoundelayError as error:
            refusal = error
        except Exception:  # a bug in one operation must not end the hub
            quote = self._new_id()
            log.exception("the IO of an operation failed", extra={"quote": quote, "op": operation.op})
            refusal = InternalError(f"The hub failed on this call; quote {quote} to its operator.")
        finally:
            reads.in_progress -= 1
            reads.request_bytes -= size
            slot.release()
        if session.state is LIVE:
            complete(prepared, refusal)

    async def _run(self, session: Session, operation: Operation, call_id: str, args: msgspec.Struct, size: int) -> None:
        """Wait for the budget, read, and queue the result."""
        if session.state is not LIVE or session.reads is None:
            return
        reads = session.reads
        slot = ReadSlot(self._registry.read_budget, reads)
        try:
            await slot.acquire()
            data = await self._answer(session.live_origin(), operation, call_id, args, slot)
            if session.state is LIVE:
                # Count the result in the budget before `finally` releases the read. Otherwise the bytes would not be
                # counted for a moment.
                self._registry.write_result(session, data)
        finally:
            reads.in_progress -= 1
            reads.request_bytes -= size
            slot.release()

    async def _answer(
        self, origin: Origin, operation: Operation, call_id: str, args: msgspec.Struct, slot: ReadSlot
    ) -> bytes:
        """Perform one operation. Return its ``result`` frame, or an ``error`` frame for any failure."""
        keys = {"call_id": call_id}
        read_errors, reader = self._registry.read_errors, f"{operation.op} of {origin.agent_id}"
        try:
            # Set this before the read, which may wait: rows that become visible during the wait may be missing in the
            # result.
            as_of = self._view.as_of()
            reading = Reading(origin, self._view, operation.op.partition(".")[0], slot)
            value = await operation.call(reading, args)
            if read_errors.is_failing:
                read_errors.record_success(reader)
            # Encode at once, to free the value early: a large result needs megabytes as a value and again as a frame.
            return encode(ResultFrame(call_id=call_id, value=cast(Raw, value), as_of=as_of))
        except LedgerError as error:
            quote = read_errors.record(error, reader)
            internal = InternalError(f"The hub cannot read its ledger; call again, or quote {quote} to its operator.")
            return error_bytes(internal, keys)
        except RoundelayError as error:
            return error_bytes(error, keys)
        except Exception:  # a bug in one operation must not end the hub
            quote = self._new_id()
            log.exception("an operation failed", extra={"quote": quote, "op": operation.op})
            return error_bytes(InternalError(f"The hub failed on this call; quote {quote} to its operator."), keys)
