"""How long the ledger keeps what it has: decides what may go, and lets it go in small transactions between the hub's own."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from .clock import Clock
from .config import Retain
from .errors import LedgerError
from .ledger import Ledger, Trim
from .switchboard import Switchboard

log = logging.getLogger(__name__)

EVERY_S = 60.0
DAY_MS = 24 * 3600 * 1000


def plan_trim(retain: Retain, board: Switchboard, now: int) -> Trim:
    """What may be dropped now: never what an open reaction's prompt holds, nor what a connected session has yet to be given."""
    pins = [reaction.oldest for _, reaction in board.state.items("reaction")]
    pins += [session.outbox.delivered + 1 for session in board.sessions.values() if session.origin is not None]
    return Trim(
        messages_before=None if retain.days is None else now - retain.days * DAY_MS,
        records_before=None if retain.record_days is None else now - retain.record_days * DAY_MS,
        max_bytes=retain.bytes,
        pinned=min([*pins, board.state.head + 1]),
    )


async def keep_within(retain: Retain, board: Switchboard, ledger: Ledger, clock: Clock) -> int:
    """Drop what is too old or too much; gives how many rows went. Raises `LedgerError`."""
    total = 0
    while True:
        dropped, first_seq = await ledger.trim(plan_trim(retain, board, clock()))
        board.meta = msgspec.structs.replace(board.meta, first_seq=first_seq)
        total += dropped
        if not dropped:
            return total


async def keep_trimming(retain: Retain, board: Switchboard, ledger: Ledger, clock: Clock) -> None:
    """Do so every minute, until cancelled."""
    if retain == Retain():
        return
    while True:
        try:
            dropped = await keep_within(retain, board, ledger, clock)
            if dropped:
                log.info("old rows were dropped", extra={"rows": dropped, "first_seq": board.meta.first_seq})
        except LedgerError:
            log.exception("old rows could not be dropped")
        await asyncio.sleep(EVERY_S)
