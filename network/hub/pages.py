"""Sessions that are behind are brought up to date from the ledger, page by page, until what is published reaches them
directly.

A session begins behind, and falls behind when its queue overflows. The newest messages are kept in memory, bounded, to
close the gap between the last page and what was published meanwhile. Reads the ledger; changes nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from roundelay.network.config import Limits
from roundelay.network.core.rows import Row
from roundelay.network.core.visibility import inbox_spans, is_recipient
from roundelay.network.errors import LedgerError
from roundelay.network.frames import deliver_bytes
from roundelay.network.ledger import Ledger

from .participants import LiveParticipants
from .repeated_errors import RepeatedErrorLog
from .session import Session, SessionOutput, SessionState

# From pages to live, without a gap and without a repeat. Seqs grow to the right:
#
#   ledger   ...... 40 | 41 ....... 60 |                    read as pages, up to the head that was known before
#   recent                      55 ....... 60 61 62 63      the newest published messages, kept in memory
#                 position ^           ^ until       ^ head
#
#   1. A page brings `position` to its last row. The next one is read when its queue is empty, as long as there is more.
#   2. The last page brings it to `until`. What was published meanwhile (61 to 63) is in `recent`: `_go_live` pushes it.
#   3. Only then `is_behind` ends. There is no await between 2 and 3, so nothing is published in between; from here on
#      `publisher` pushes into the outbox itself. While `is_behind` holds, `publisher` passes the session over.
#
# Where `recent` begins above `position` + 1 there is a gap: the session reads a further page first.

PAGE_ROWS, PAGE_BYTES = 256, 1 << 18
"""One page of a session that is behind. It has its pages to itself, where those that are live share each frame: so they
are small."""
PAGES_AT_ONCE = 16
"""So many pages are read at once for all sessions, the others wait in turn: one thread reads them, and what it has read
waits for the loop."""


class Pages:
    """Reads pages for sessions. ``recent`` are the newest of the published messages, in order."""

    def __init__(
        self,
        outlet: SessionOutput,
        mailboxes: LiveParticipants,
        ledger: Ledger,
        limits: Limits,
        outage: RepeatedErrorLog,
        recent: deque[Row],
    ) -> None:
        self.pages_read = 0
        """How many pages were read."""
        self._outlet = outlet
        self._mailboxes = mailboxes
        self._ledger = ledger
        self._limits = limits
        self._outage = outage
        self._turns = asyncio.Semaphore(PAGES_AT_ONCE)
        self._recent = recent

    def start(self, session: Session) -> None:
        """Read pages for a session that is behind, until it is not or its window is full."""
        session.outbox.is_paging = True
        self._outlet.spawn(self._read_pages(session))

    async def _read_pages(self, session: Session) -> None:
        """Bring a session up to date from the ledger, as far as its window goes, then let it go live without a gap."""
        outbox, agent_id = session.outbox, session.live_origin().agent_id
        try:
            while session.state is SessionState.LIVE and outbox.is_behind:
                participant = self._mailboxes.state.participant(agent_id)
                if participant is None:
                    return
                until = self._mailboxes.state.head
                spans = inbox_spans(self._mailboxes.state, participant)
                max_bytes = min(PAGE_BYTES, self._limits.session_queue_bytes)
                async with self._turns:
                    page = await self._ledger.inbox(
                        spans, agent_id, outbox.position, until, PAGE_ROWS, max_bytes=max_bytes
                    )
                self.pages_read += 1
                if self._outage.is_failing:
                    self._outage.record_success(agent_id)
                if session.state is not SessionState.LIVE:
                    return
                if self._push_page(session, page.rows):
                    return
                if page.has_more:
                    continue
                outbox.position = max(outbox.position, until)
                self._go_live(session)
        except LedgerError as error:
            self._outage.record(error, agent_id)
            if session.state is SessionState.LIVE:
                self._outlet.end(session, 4503, "The hub cannot read what is to be delivered; reconnect and resume.")
        finally:
            outbox.is_paging = False
            self._outlet.schedule_flush(session)

    def _push_page(self, session: Session, rows: Iterable[Row]) -> bool:
        """Queue a page's rows. True when the queue has no room for another page before some are acknowledged."""
        outbox = session.outbox
        for row in rows:
            if row.seq <= outbox.position:
                continue
            if row.is_damaged:
                self._pass_damaged(session, row.seq)
                continue
            frame = self._frame_for(session, row)
            if frame is None:
                outbox.position = row.seq
                continue
            if outbox.queued_bytes and outbox.queued_bytes + len(frame) > self._limits.session_queue_bytes:
                return True
            self._outlet.deliveries += 1
            outbox.push((row.seq, frame, session.live_origin().agent_id != row.actor))
            outbox.is_behind = True
        self._outlet.flush_session(session)
        return outbox.queued > 0

    def _pass_damaged(self, session: Session, seq: int) -> None:
        """Go on after a row that can no longer be read. Its reader is told each time that it would have come, until its
        floor is beyond."""
        mailbox = self._mailboxes.find_mailbox(session.live_origin().agent_id)
        session.outbox.position = seq
        if mailbox is None or session.outbox.is_own(seq):
            return
        if session.starts_at_ack_cursor and (session.handled_at_join.is_handled(seq) or seq in mailbox.awaiting_retry):
            return  # of what waits, its timer tells
        self._outlet.notice([session], "damaged", None, {"seq": seq})

    def _frame_for(self, session: Session, row: Row) -> bytes | None:
        """The ``deliver`` frame of a row for a session, or None when it is not for it."""
        agent_id = session.live_origin().agent_id
        assert row.head is not None
        if not is_recipient(self._mailboxes.state, agent_id, row.head):
            return None
        live = self._mailboxes.get(agent_id)
        assert live is not None
        mailbox = live.mailbox
        if session.outbox.is_own(row.seq):
            return None
        if session.starts_at_ack_cursor:  # from a cursor nothing is left out
            if row.actor == agent_id and row.seq <= session.joined_at:
                return None
            # By the moment of joining alone: how fast a session reads must not decide what it is given. What was
            # settled then and is not handled now has been taken back since: it comes as another attempt.
            if session.handled_at_join.is_handled(row.seq):
                if mailbox.is_handled(row.seq):
                    return None
                if row.seq in mailbox.awaiting_retry:
                    session.outbox.skipped.add(row.seq)
                    return None  # its timer brings it
        attempt = self._mailboxes.find_attempt(agent_id, row.seq) if row.seq in mailbox.failed else None
        return deliver_bytes(row.data, attempt.failures + 1 if attempt is not None else 1)

    def _go_live(self, session: Session) -> None:
        """Close the gap between the last page and what was published meanwhile, from memory; then publish reaches the
        session."""
        outbox = session.outbox
        if outbox.position < self._mailboxes.state.head:
            if not self._recent or self._recent[0].seq > outbox.position + 1:
                return
            missed = [row for row in self._recent if row.seq > outbox.position]
            if self._push_page(session, missed):
                return
            outbox.position = max(outbox.position, self._mailboxes.state.head)
        outbox.is_behind = False
