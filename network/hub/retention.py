"""How long the ledger keeps what it has: decides what may go, and lets it go in small transactions between the hub's
own."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator

import msgspec

from roundelay.network.clock import Clock
from roundelay.network.config import Retain
from roundelay.network.core.calls import RESULT_TTL_MS
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import Ledger, Trim
from roundelay.network.units import DAY_MS, MINUTE_MS

from .publisher import SessionRegistry

log = logging.getLogger(__name__)

EVERY_S = 60.0
ROUNDS_BETWEEN_EXPIRIES = 60
LEAP_MS = DAY_MS
"""A clock that is so far ahead of what is known of the time may be wrong."""
DOUBT_S = 3600.0
"""So long nothing is dropped by a clock that may be wrong: somebody may put it right meanwhile."""
KEEP_ALL = Retain()
TOO_LATE = "What this session has yet to be given is too old to be kept; reconnect and go on from there."


class ClockWatch:
    """Notes where a clock (ms) leaps ahead of what is known of the time. ``seconds`` never leaps, nor does it stop
    while the machine sleeps."""

    def __init__(self, clock: Clock, seconds: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._last: tuple[int, float] | None = None
        self._doubted_until: float | None = None
        self.leap_ms = 0
        """How far it was ahead then."""

    def check(self, known: int = 0) -> None:
        """Compare the clock with what it said at the last look; at the first one with ``known``, a past time."""
        now, at = self._clock(), self._seconds()
        before, since = self._last or (known or now, at)
        self._last = now, at
        leap_ms = now - before - int((at - since) * 1000)
        if leap_ms > LEAP_MS:
            self._doubted_until, self.leap_ms = at + DOUBT_S, leap_ms

    @property
    def is_suspect(self) -> bool:
        """Whether it has leapt within the last hour."""
        return self._doubted_until is not None and self._seconds() < self._doubted_until


def plan_trim(retain: Retain, board: SessionRegistry, now: int) -> Trim:
    """What may be dropped now: never what an open reaction's prompt holds, nor what a connected session has yet to be
    given."""
    return Trim(
        messages_before=None if retain.days is None else now - retain.days * DAY_MS,
        records_before=None if retain.record_days is None else now - retain.record_days * DAY_MS,
        max_bytes=retain.bytes,
        pinned=min(_find_pins(board, now), default=board.state.head + 1),
    )


def _find_pins(board: SessionRegistry, now: int) -> Iterator[int]:
    for reaction in board.state.reactions_by_oldest():
        if board.state.present(reaction.agent_id) is not None:  # one that was removed never comes back to it
            yield reaction.oldest
            break
    for live in board.participants.online():
        yield from live.mailbox.awaiting_retry
    for session in board.sessions.values():  # all of them: how long each has owed what it owes is noted here
        if session.origin is None:
            continue
        owed = session.outbox.first_undelivered()
        if owed != session.undelivered_seq:
            session.undelivered_seq, session.undelivered_since = owed, now
        if owed is not None:
            yield owed


def _end_stalled(board: SessionRegistry, pinned: int, patience_ms: int, now: int) -> bool:
    """End the sessions that have long taken nothing and need ``pinned``: they come back and are told `limited`. Whether
    there were any."""
    stalled = [
        session
        for session in board.sessions.values()
        if session.origin is not None
        and session.outbox.first_undelivered() == pinned == session.undelivered_seq
        and now - session.undelivered_since >= patience_ms
    ]
    for session in stalled:
        log.info("a session that takes nothing is ended", extra={"session_id": session.session_id, "seq": pinned})
        board.end(session, 4503, TOO_LATE)
    return bool(stalled)


def drop_before(board: SessionRegistry, first_seq: int) -> None:
    """What is older was dropped, and nobody asked whether it may go: end the sessions that have yet to be given some of
    it. They come back and are told `limited`."""
    board.meta = msgspec.structs.replace(board.meta, first_seq=first_seq)
    for session in list(board.sessions.values()):
        owed = session.outbox.first_undelivered() if session.origin is not None else None
        if owed is not None and owed < first_seq:
            board.end(session, 4503, TOO_LATE)


async def enforce_retention(
    retain: Retain, board: SessionRegistry, ledger: Ledger, clock: Clock, writing: asyncio.Lock
) -> int:
    """Drop what is too old or too much; gives how many rows went. Raises `LedgerError`.

    ``writing`` is held by each commit: between plan and drop nobody is welcomed to what goes, and no reaction begins
    with it."""
    total = 0
    while True:
        async with writing:
            now = clock()
            plan = plan_trim(retain, board, now)
            done = await ledger.trim(plan)
            board.meta = msgspec.structs.replace(board.meta, first_seq=done.first_seq)
        total += done.dropped
        if done.dropped:
            continue
        if not done.is_held or not _end_stalled(board, plan.pinned, retain.patience_minutes * MINUTE_MS, now):
            await ledger.forget_dropped()  # nobody's commit waits for it
            return total


async def run_retention(
    retain: Retain, board: SessionRegistry, ledger: Ledger, clock: Clock, writing: asyncio.Lock, watch: ClockWatch
) -> None:
    """Do so every minute, until cancelled; at once and every hour, forget results of calls too, whatever is
    retained."""
    regardless_of_age = retain.model_copy(update={"days": None, "record_days": None})
    was_doubted, is_expiry_due = False, False
    for number in itertools.count():
        watch.check()
        if watch.is_suspect and not was_doubted and retain != regardless_of_age:
            log.warning(
                "the clock is %.1f days ahead of what was stored last: if it is wrong, put it right; for an hour "
                "nothing is dropped for its age",
                watch.leap_ms / DAY_MS,
            )
        was_doubted = watch.is_suspect
        kept = regardless_of_age if was_doubted else retain
        try:
            if kept != KEEP_ALL:
                dropped = await enforce_retention(kept, board, ledger, clock, writing)
                if dropped:
                    log.info("old rows were dropped", extra={"rows": dropped, "first_seq": board.meta.first_seq})
            is_expiry_due = is_expiry_due or number % ROUNDS_BETWEEN_EXPIRIES == 0
            if is_expiry_due and not was_doubted:
                await ledger.expire_calls(clock() - RESULT_TTL_MS)
                is_expiry_due = False
        except LedgerError as error:
            log.error("old rows could not be dropped: %s", error)
        await asyncio.sleep(EVERY_S)
