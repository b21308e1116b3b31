"""Operations that change nothing: they run beside the batches, on the committed state and the ledger, and each answers for itself."""

from __future__ import annotations

import logging
from typing import cast

import msgspec
from msgspec import Raw

from .clock import NewId
from .entries import Origin, error_bytes
from .errors import InternalError, LedgerError, RoundelayError
from .frames import ResultFrame, encode
from .mod import HubView, Operation, Reading
from .outage import Outage
from .room import Place

log = logging.getLogger(__name__)


async def answer_read(
    hub: HubView,
    origin: Origin,
    operation: Operation,
    call_id: str,
    args: msgspec.Struct,
    new_id: NewId,
    outage: Outage,
    place: Place | None = None,
) -> bytes:
    """Perform one reading operation; gives the ``result`` or ``error`` frame, whatever happens. ``place`` is the room that it has for its result."""
    who = f"{operation.op} of {origin.agent_id}"
    try:
        reading = Reading(origin, hub, operation.op.partition(".")[0], place)
        arguments = {name: getattr(args, name) for name in args.__struct_fields__}
        value = await operation.function(reading, **arguments)
        if outage.is_on:
            outage.end(who)
        return encode(ResultFrame(call_id=call_id, value=cast(Raw, value)))  # at once: a result has megabytes
    except LedgerError as error:
        quote = outage.fail(error, who)
        internal = InternalError(f"The hub cannot read its ledger; call again, or quote {quote} to its operator.")
        return error_bytes(internal, {"call_id": call_id})
    except RoundelayError as error:
        return error_bytes(error, {"call_id": call_id})
    except Exception:  # a defect of one operation must not end the hub
        quote = new_id()
        log.exception("an operation failed", extra={"quote": quote, "op": operation.op})
        internal = InternalError(f"The hub failed on this call; quote {quote} to its operator.")
        return error_bytes(internal, {"call_id": call_id})
