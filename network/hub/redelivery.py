"""`Redelivery`: delivers failed messages again when they are due. Each message of a participant has one timer on the
hub's loop.

`core.failures` decides whether an attempt counts. `Redelivery` sends the attempt to one session that can still handle
it, and changes nothing in the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roundelay.network.core.visibility import is_recipient
from roundelay.network.errors import LedgerError
from roundelay.network.frames import deliver_bytes
from roundelay.network.ledger import Ledger

from .participants import LiveParticipant, LiveParticipants
from .repeated_errors import RepeatedErrorLog
from .session import SessionOutput

REREAD_AFTER_MS = 5000
"""Delay before another attempt to read a row from the ledger, in ms, after a read has failed."""


class Redelivery:
    """Timers and deliveries of the messages that wait for another attempt. ``now`` is the hub's clock (ms)."""

    def __init__(
        self,
        output: SessionOutput,
        participants: LiveParticipants,
        ledger: Ledger,
        now: Callable[[], int],
        read_errors: RepeatedErrorLog,
    ) -> None:
        self._output = output
        self._participants = participants
        self._ledger = ledger
        self._now = now
        self._read_errors = read_errors
        self._loop = asyncio.get_running_loop()
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}
        """The newest timer of each message, until its attempt is sent. If a timer is replaced while the row is read,
        the attempt of the old timer delivers nothing."""

    def cancel_all(self) -> None:
        """Cancel and forget every timer. Called before the state is loaded again."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def resume(self, live: LiveParticipant) -> None:
        """Start the timers of all failed messages of a participant that has just joined."""
        for seq in sorted(live.mailbox.awaiting_retry):
            attempt = self._participants.find_attempt(live.agent_id, seq)
            if attempt is not None:
                self.schedule(live.agent_id, seq, attempt.failures + 1, attempt.due_at)

    def reassign(self, live: LiveParticipant) -> None:
        """Schedule messages again that were redelivered only to a session that has ended. A redelivery usually goes to
        one session, so no other session has the message."""
        mailbox = live.mailbox
        for seq in sorted(mailbox.failed - mailbox.awaiting_retry):
            attempt = self._participants.find_attempt(live.agent_id, seq)
            if attempt is not None and not any(session.outbox.has_or_will_get(seq) for session in live.sessions):
                self.schedule(live.agent_id, seq, attempt.failures + 1, attempt.due_at)

    def schedule(self, agent_id: str, seq: int, attempt: int, due_at: int) -> None:
        """Deliver a refused message again at ``due_at`` (ms). Until then, the ack cursor cannot pass the message."""
        live = self._participants.get(agent_id)
        if live is None:
            return
        if live.mailbox.is_handled(seq) and not self._is_revived(agent_id, seq):
            return  # another session acknowledged the message before its refusal arrived
        live.mailbox.schedule_retry(seq)
        # Use one timer per message: a nack and a reconnect may both schedule the same attempt.
        timer = self._timers.pop((agent_id, seq), None)
        if timer is not None:
            timer.cancel()
        # Timestamps are rounded down to a millisecond, so add one to avoid an early delivery.
        delay_s = max(0, due_at + 1 - self._now()) / 1000
        self._timers[agent_id, seq] = self._loop.call_later(delay_s, self._start, agent_id, seq, attempt)

    def _is_revived(self, agent_id: str, seq: int) -> bool:
        """Return whether an operator has restored this dead letter and the message has not failed since."""
        attempt = self._participants.find_attempt(agent_id, seq)
        return attempt is not None and attempt.is_revived and attempt.failures == 0

    def _start(self, agent_id: str, seq: int, attempt: int) -> None:
        self._output.spawn(self._redeliver(agent_id, seq, attempt, self._timers[agent_id, seq]))

    async def _redeliver(self, agent_id: str, seq: int, attempt: int, timer: asyncio.TimerHandle) -> None:
        try:
            # Read the row when it is due, not when the message failed. Otherwise the rows of waiting messages would
            # fill memory.
            row = (await self._ledger.messages([seq])).get(seq)
        except LedgerError as error:
            self._read_errors.record(error, f"{agent_id}/{seq}")
            if self._timers.get((agent_id, seq)) is timer:
                self.schedule(agent_id, seq, attempt, self._now() + REREAD_AFTER_MS)
            return
        if self._read_errors.is_failing:
            self._read_errors.record_success(f"{agent_id}/{seq}")
        # While the row was read, the timer was replaced, or cancelled by a recovery. A newer timer delivers the
        # message.
        if self._timers.get((agent_id, seq)) is not timer:
            return
        del self._timers[agent_id, seq]
        live = self._participants.get(agent_id)
        if live is not None and (row is None or row.is_damaged):
            # If retention deleted the row, the session's welcome has reported `limited`.
            live.mailbox.mark_handled(seq)
            if row is not None:
                self._output.notice(live.sessions, "damaged", None, {"seq": seq})
        if row is None or row.is_damaged or live is None or seq not in live.mailbox.awaiting_retry:
            return
        if row.head is not None and not is_recipient(self._participants.state, agent_id, row.head):
            # The recipient has lost the right to read the message, so pages omit the message too.
            live.mailbox.mark_handled(seq)
            return
        # The participant has no session. When a session joins, `resume` schedules the stored attempt again.
        if not live.sessions:
            # Without a stored attempt, the refusal did not count, so the message will be delivered as if for the first
            # time.
            if self._participants.find_attempt(agent_id, seq) is None:
                live.mailbox.cancel_retry(seq)
            return
        # Skip sessions that have the message: they may still acknowledge it. The session that refused the message no
        # longer has it.
        candidates = [session for session in live.sessions if not (session.outbox.is_silent or session.outbox.has(seq))]
        if not candidates:
            return
        # A session that left the message out of a page relies on this timer, so send the message to all such sessions.
        skipped_by = [session for session in candidates if seq in session.outbox.skipped]
        chosen = skipped_by or [max(candidates, key=lambda session: session.live_origin().fencing_token or 0)]
        # The message stays in `failed` until it is handled, so that an ack of a later message does not cover it.
        live.mailbox.awaiting_retry.discard(seq)
        for session in chosen:
            session.outbox.skipped.discard(seq)
            # If the session has not reached this seq, a later page delivers the message. The message must not be
            # delivered twice.
            if seq <= session.outbox.position:
                session.outbox.push_redelivery(seq, deliver_bytes(row.data, attempt))
                self._output.schedule_flush(session)
