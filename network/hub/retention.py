"""Retention decides which rows the ledger may delete. It deletes them in small transactions between the hub's
commits.
"""

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

from .sessions import SessionRegistry

log = logging.getLogger(__name__)

PERIOD_S = 60.0
ROUNDS_BETWEEN_EXPIRIES = 60
"""Number of one-minute rounds between two expiries of call results. With 60, results expire once an hour."""
LEAP_MS = DAY_MS
"""Minimum leap of the clock, in ms, after which the time may be wrong."""
DOUBT_S = 3600.0
"""Time in seconds for which retention deletes nothing because of age after the clock has leapt. An operator can correct
the clock during this time."""
KEEP_ALL = Retain()
TOO_LATE = "Messages that this session has not received yet were deleted by retention; reconnect and resume."


class ClockWatch:
    """Detects that a clock (ms) leaps ahead. ``seconds`` is a second clock. It never leaps, and keeps running while the
    machine sleeps."""

    def __init__(self, clock: Clock, seconds: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._last: tuple[int, float] | None = None
        self._suspect_until: float | None = None
        self.leap_ms = 0
        """Size of the last leap, in ms."""

    def check(self, known: int = 0) -> None:
        """Compare the clock with its value at the last check. The first check compares it with ``known``, a time in the
        past."""
        now, seconds = self._clock(), self._seconds()
        # At the start, compare the clock with the newest stored row: the clock may have been wrong since before the
        # start.
        last_time, last_seconds = self._last or (known or now, seconds)
        self._last = now, seconds
        leap_ms = now - last_time - int((seconds - last_seconds) * 1000)
        if leap_ms > LEAP_MS:
            self._suspect_until, self.leap_ms = seconds + DOUBT_S, leap_ms

    @property
    def is_suspect(self) -> bool:
        """Whether the clock has leapt within the last hour."""
        return self._suspect_until is not None and self._seconds() < self._suspect_until


def plan_trim(retain: Retain, registry: SessionRegistry, now: int) -> Trim:
    """Return the rows that may be deleted now. Messages that the prompt of an open reaction may contain, and messages
    that a connected session has not received, are kept."""
    return Trim(
        messages_before=None if retain.days is None else now - retain.days * DAY_MS,
        records_before=None if retain.record_days is None else now - retain.record_days * DAY_MS,
        max_bytes=retain.bytes,
        # Without pins, every stored row may be deleted because of its age or size.
        pinned=min(_find_pins(registry, now), default=registry.state.head + 1),
    )


def _find_pins(registry: SessionRegistry, now: int) -> Iterator[int]:
    """Yield the seqs of messages that must be kept. Also record since when each session has been waiting for its first
    undelivered message."""
    for reaction in registry.state.reactions_by_oldest():
        if registry.state.present(reaction.agent_id) is not None:  # a removed agent never continues its reaction
            yield reaction.oldest
            break
    for live in registry.participants.online():
        # A redelivery reads its row when it is due, so the row must still exist then.
        yield from live.mailbox.awaiting_retry
    for session in registry.sessions.values():
        if session.origin is None:
            continue
        undelivered = session.outbox.first_undelivered()
        # Progress restarts the time limit: a session counts as stalled only if it stays at the same message.
        if undelivered != session.undelivered_seq:
            session.undelivered_seq, session.undelivered_since = undelivered, now
        if undelivered is not None:
            yield undelivered


def _end_stalled(registry: SessionRegistry, pinned: int, patience_ms: int, now: int) -> bool:
    """End the sessions that have kept the message ``pinned`` from deletion for longer than ``patience_ms``. Return
    whether any session was ended. The clients reconnect and are welcomed as ``limited``."""
    stalled = [
        session
        for session in registry.sessions.values()
        if session.origin is not None
        and session.outbox.first_undelivered() == pinned == session.undelivered_seq
        and now - session.undelivered_since >= patience_ms
    ]
    for session in stalled:
        log.info("ending a session that reads nothing", extra={"session_id": session.session_id, "seq": pinned})
        registry.end(session, 4503, TOO_LATE)
    return bool(stalled)


def drop_before(registry: SessionRegistry, first_seq: int) -> None:
    """Apply a trim that the leader has decided. End the sessions that have not received all of the deleted messages.
    Their clients reconnect and are welcomed as ``limited``."""
    registry.meta = msgspec.structs.replace(registry.meta, first_seq=first_seq)
    for session in list(registry.sessions.values()):
        undelivered = session.outbox.first_undelivered() if session.origin is not None else None
        if undelivered is not None and undelivered < first_seq:
            registry.end(session, 4503, TOO_LATE)


async def enforce_retention(
    retain: Retain, registry: SessionRegistry, ledger: Ledger, clock: Clock, commit_lock: asyncio.Lock
) -> int:
    """Delete rows beyond the retention limits, and return their number. Raises `LedgerError`."""
    total = 0
    while True:
        # Hold the lock from the plan to the deletion, so that no commit runs in between. Otherwise a session could
        # join, or a reaction could begin, with rows that are just being deleted.
        async with commit_lock:
            now = clock()
            plan = plan_trim(retain, registry, now)
            trimmed = await ledger.trim(plan)
            registry.meta = msgspec.structs.replace(registry.meta, first_seq=trimmed.first_seq)
        total += trimmed.dropped
        # One transaction deletes a limited number of rows. Between two transactions the lock is free, so commits
        # continue.
        if trimmed.dropped:
            continue
        # If stalled sessions were ended, more rows may be deleted, so plan again.
        if not trimmed.is_pinned or not _end_stalled(registry, plan.pinned, retain.patience_minutes * MINUTE_MS, now):
            await ledger.forget_dropped()  # called without the lock, so that no commit waits for it
            return total


async def run_retention(
    retain: Retain,
    registry: SessionRegistry,
    ledger: Ledger,
    clock: Clock,
    commit_lock: asyncio.Lock,
    clock_watch: ClockWatch,
) -> None:
    """Enforce retention every minute, until cancelled. At the start and then every hour, also expire the results of
    calls, whatever the retention settings are."""
    regardless_of_age = retain.model_copy(update={"days": None, "record_days": None})
    was_suspect, is_expiry_due = False, False
    for number in itertools.count():
        clock_watch.check()
        # Log once per leap, and only if the leap changes which rows are deleted.
        if clock_watch.is_suspect and not was_suspect and retain != regardless_of_age:
            log.warning(
                "the clock is %.1f days ahead of the newest stored row. If it is wrong, correct it: for one hour, no "
                "row is dropped because of its age",
                clock_watch.leap_ms / DAY_MS,
            )
        was_suspect = clock_watch.is_suspect
        effective = regardless_of_age if was_suspect else retain
        try:
            if effective != KEEP_ALL:
                dropped = await enforce_retention(effective, registry, ledger, clock, commit_lock)
                if dropped:
                    log.info("old rows were dropped", extra={"rows": dropped, "first_seq": registry.meta.first_seq})
            # Keep the flag until an expiry succeeds. An expiry that fails, or that is postponed by a suspect clock, is
            # repeated in a later round.
            is_expiry_due = is_expiry_due or number % ROUNDS_BETWEEN_EXPIRIES == 0
            if is_expiry_due and not was_suspect:
                await ledger.expire_calls(clock() - RESULT_TTL_MS)
                is_expiry_due = False
        except LedgerError as error:
            log.error("old rows could not be dropped: %s", error)
        await asyncio.sleep(PERIOD_S)
