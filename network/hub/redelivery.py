"""What failed is delivered again when it is due: timers on the hub's loop, one per message and participant.

When an attempt counts is decided in `reactions`; here it goes out, to one session that can still handle it. Changes
nothing stored."""

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


class Redelivery:
    """The messages that wait for another attempt. ``now`` is the hub's clock (ms), ``outlet`` writes what is due."""

    def __init__(
        self,
        outlet: SessionOutput,
        mailboxes: LiveParticipants,
        ledger: Ledger,
        now: Callable[[], int],
        outage: RepeatedErrorLog,
    ) -> None:
        self._outlet = outlet
        self._mailboxes = mailboxes
        self._ledger = ledger
        self._now = now
        self._outage = outage
        self._loop = asyncio.get_running_loop()
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}
        """The newest of each, until its attempt goes out: one that was overtaken while its row was read brings
        nothing."""

    def cancel_all(self) -> None:
        """Drop every timer: the state is loaded anew."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def resume(self, live: LiveParticipant) -> None:
        """A participant is here: what waits for it gets its timers."""
        for seq in sorted(live.mailbox.awaiting_retry):
            attempt = self._mailboxes.find_attempt(live.agent_id, seq)
            if attempt is not None:
                self.schedule(live.agent_id, seq, attempt.failures + 1, attempt.due_at)

    def reassign(self, live: LiveParticipant) -> None:
        """A message on another attempt goes to one session alone: if that one is gone, another gets it."""
        mailbox = live.mailbox
        for seq in sorted(mailbox.failed - mailbox.awaiting_retry):
            attempt = self._mailboxes.find_attempt(live.agent_id, seq)
            if attempt is not None and not any(session.outbox.has_or_will_get(seq) for session in live.sessions):
                self.schedule(live.agent_id, seq, attempt.failures + 1, attempt.due_at)

    def schedule(self, agent_id: str, seq: int, attempt: int, due_at: int) -> None:
        """Deliver a refused message again when it is due; the participant's floor waits for it."""
        live = self._mailboxes.get(agent_id)
        if live is None:
            return
        if live.mailbox.is_handled(seq) and not self._is_taken_back(agent_id, seq):
            return  # another session acknowledged it while the refusal was on its way
        live.mailbox.schedule_retry(seq)
        timer = self._timers.pop((agent_id, seq), None)
        if timer is not None:
            timer.cancel()
        delay_s = max(0, due_at + 1 - self._now()) / 1000  # a stamp is cut to its millisecond: never early
        self._timers[agent_id, seq] = self._loop.call_later(delay_s, self._redeliver, agent_id, seq, attempt)

    def _is_taken_back(self, agent_id: str, seq: int) -> bool:
        """Whether this is a dead letter that an operator gave another life, not failed since."""
        attempt = self._mailboxes.find_attempt(agent_id, seq)
        return attempt is not None and attempt.is_revived and attempt.failures == 0

    def _redeliver(self, agent_id: str, seq: int, attempt: int) -> None:
        self._outlet.spawn(self._redeliver_row(agent_id, seq, attempt, self._timers[agent_id, seq]))

    async def _redeliver_row(self, agent_id: str, seq: int, attempt: int, timer: asyncio.TimerHandle) -> None:
        try:
            row = (await self._ledger.messages([seq])).get(seq)
        except LedgerError as error:
            self._outage.record(error, f"{agent_id}/{seq}")
            if self._timers.get((agent_id, seq)) is timer:
                self.schedule(agent_id, seq, attempt, self._now() + REREAD_AFTER_MS)
            return
        if self._outage.is_failing:
            self._outage.record_success(f"{agent_id}/{seq}")
        if self._timers.get((agent_id, seq)) is not timer:
            return
        del self._timers[agent_id, seq]
        live = self._mailboxes.get(agent_id)
        if live is not None and (row is None or row.is_damaged):
            live.mailbox.mark_handled(seq)  # retention dropped it: the session's welcome said `limited`
            if row is not None:
                self._outlet.notice(live.sessions, "damaged", None, {"seq": seq})
        if row is None or row.is_damaged or live is None or seq not in live.mailbox.awaiting_retry:
            return
        if row.head is not None and not is_recipient(self._mailboxes.state, agent_id, row.head):
            live.mailbox.mark_handled(seq)  # rights were taken since: pages leave it out too
            return
        if not live.sessions:
            # where nothing is kept of it, its refusal did not count: it comes as if it never went
            if self._mailboxes.find_attempt(agent_id, seq) is None:
                live.mailbox.cancel_retry(seq)
            return
        # a session that has it may yet acknowledge it; the one that refused it does not
        able = [it for it in live.sessions if not (it.outbox.is_silent or it.outbox.has(seq))]
        if not able:
            return
        passed_by = [session for session in able if seq in session.outbox.skipped]
        chosen = passed_by or [max(able, key=lambda session: session.live_origin().fencing_token or 0)]
        live.mailbox.awaiting_retry.discard(seq)
        for session in chosen:
            session.outbox.skipped.discard(seq)
            if seq <= session.outbox.position:  # else its page is still to come, and brings it: once is enough
                session.outbox.push_redelivery(seq, deliver_bytes(row.data, attempt))
                self._outlet.schedule_flush(session)
