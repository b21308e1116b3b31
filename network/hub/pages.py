"""Bring sessions that are behind up to date with pages from the ledger, until published messages reach these sessions
directly.

A session is behind at its start and after its queue has overflowed. The newest published messages stay in memory and
close the gap between the last page and the head. This module reads the ledger and changes nothing in it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from roundelay.network.config import Limits
from roundelay.network.core.revisions import revise_all
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
#   recent                      55 ....... 60 61 62 63      the newest published messages, in memory
#                 position ^           ^ until       ^ head
#
#   1. A page brings `position` to its last row. While there is more, the next page is read when the queue is empty.
#   2. The last page brings `position` to `until`. Messages that were published meanwhile (61 to 63) are in `recent`, and
#      `_go_live` pushes them.
#   3. Only then `is_behind` ends. There is no await between 2 and 3, so nothing is published in between. From here on
#      `publisher` pushes into the outbox. While `is_behind` holds, `publisher` passes the session over.
#
# If `recent` begins above `position` + 1, there is a gap: the session reads a further page first.

PAGE_ROWS, PAGE_BYTES = 256, 1 << 18
"""Maximum number of rows and bytes of a page. Pages are small because each session needs memory for its own page, while
live sessions share their frames."""
MAX_CONCURRENT_PAGES = 16
"""Maximum number of pages that are read at once, for all sessions. One thread reads the pages, and the results wait in
memory until the event loop handles them."""
RECENT_ROWS, RECENT_BYTES = 2048, 4 << 20
"""Maximum number and total bytes of the published messages that stay in memory."""


class RecentRows:
    """The newest published messages, oldest first, limited in number and bytes."""

    def __init__(self, participants: LiveParticipants) -> None:
        self.rows: deque[Row] = deque()
        self._participants = participants
        self._bytes = 0

    def add(self, rows: list[Row]) -> None:
        """Add the messages of a batch, and drop the oldest ones beyond the limits."""
        self.rows.extend(rows)
        self._bytes += sum(len(row.data) for row in rows)
        while self._bytes > RECENT_BYTES or len(self.rows) > RECENT_ROWS:
            self._bytes -= len(self.rows.popleft().data)

    def revise(self, changes: Sequence[Row]) -> None:
        """Replace the messages that were edited or deleted."""
        revised = revise_all(self.rows, changes)
        if revised:
            rows = [revised.get(row.seq, row) for row in self.rows]
            self.clear()
            self.add(rows)

    def clear(self) -> None:
        self.rows.clear()
        self._bytes = 0

    def may_have_new(self, agent_id: str, after: int) -> bool:
        """Return whether a message above ``after`` may exist for a participant. If the messages in memory do not reach
        back to ``after``, return True."""
        state = self._participants.state
        if state.head <= after:
            return False
        if not self.rows or self.rows[0].seq > after + 1:
            return True
        newer = itertools.takewhile(lambda row: row.seq > after, reversed(self.rows))
        return any(
            row.actor != agent_id and row.head is not None and is_recipient(state, agent_id, row.head) for row in newer
        )


class Pages:
    """Reads pages from the ledger for the sessions that are behind."""

    def __init__(
        self,
        output: SessionOutput,
        participants: LiveParticipants,
        ledger: Ledger,
        limits: Limits,
        read_errors: RepeatedErrorLog,
        recent: RecentRows,
    ) -> None:
        self.pages_read = 0
        self._output = output
        self._participants = participants
        self._ledger = ledger
        self._limits = limits
        self._read_errors = read_errors
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_PAGES)
        self._recent = recent

    def start(self, session: Session) -> None:
        """Read pages for a session that is behind, until the session is live or its queue is full."""
        session.outbox.is_paging = True
        self._output.spawn(self._read_pages(session))

    async def _read_pages(self, session: Session) -> None:
        outbox, agent_id = session.outbox, session.live_origin().agent_id
        try:
            while session.state is SessionState.LIVE and outbox.is_behind:
                participant = self._participants.state.participant(agent_id)
                if participant is None:
                    return
                # Read the head before the page. `recent` will contain messages that are published during the read.
                until = self._participants.state.head
                # Compute the spans for each page: memberships may change between two pages.
                spans = inbox_spans(self._participants.state, participant)
                max_bytes = min(PAGE_BYTES, self._limits.session_queue_bytes)
                # Hold no lock while the page is read. Commits continue, and `_go_live` adds the messages that they
                # publish.
                async with self._turns:
                    page = await self._ledger.inbox(
                        spans, agent_id, outbox.position, until, PAGE_ROWS, max_bytes=max_bytes
                    )
                self.pages_read += 1
                if self._read_errors.is_failing:
                    self._read_errors.record_success(agent_id)
                # If the session has ended during the read, leave its outbox alone.
                if session.state is not SessionState.LIVE:
                    return
                if self._push_page(session, page.rows):
                    return
                if page.has_more:
                    continue
                # The page contains every row up to `until` that is for this session. Without this line, the next page
                # would start too low.
                outbox.position = max(outbox.position, until)
                self._go_live(session)
        except LedgerError as error:
            self._read_errors.record(error, agent_id)
            if session.state is SessionState.LIVE:
                reason = "The hub cannot read what is to be delivered; reconnect and resume."
                self._output.end(session, 4503, reason)
        finally:
            outbox.is_paging = False
            # During this page, a request for another page may have been ignored because of `is_paging`, or the queue
            # may have become empty. The flush starts the next page.
            self._output.schedule_flush(session)

    def _push_page(self, session: Session, rows: Iterable[Row]) -> bool:
        """Queue the rows of a page. Return True if there is no room for more until the client acknowledges messages."""
        outbox = session.outbox
        for row in rows:
            if row.seq <= outbox.position:
                continue
            if row.is_damaged:
                self._skip_damaged(session, row.seq)
                continue
            frame = self._build_frame(session, row)
            if frame is None:
                outbox.position = row.seq
                continue
            # `position` stays below this row, so the next page will contain the row again.
            if outbox.queued_bytes and outbox.queued_bytes + len(frame) > self._limits.session_queue_bytes:
                return True
            self._output.deliveries += 1
            outbox.push((row.seq, frame, session.live_origin().agent_id != row.actor))
        self._output.flush_session(session)
        return outbox.queued > 0

    def _skip_damaged(self, session: Session, seq: int) -> None:
        """Skip a row that cannot be read because it is damaged. Send the reader a notice instead. The notice is
        repeated in later sessions until the ack cursor has passed the row."""
        mailbox = self._participants.find_mailbox(session.live_origin().agent_id)
        session.outbox.position = seq
        if mailbox is None or session.outbox.is_own(seq):
            return
        is_handled = session.starts_at_ack_cursor and session.handled_at_join.is_handled(seq)
        if is_handled or (session.starts_at_ack_cursor and seq in mailbox.awaiting_retry):
            return  # if a retry is waiting, its timer sends the notice when the retry is due
        self._output.notice([session], "damaged", None, {"seq": seq})

    def _build_frame(self, session: Session, row: Row) -> bytes | None:
        """Return the ``deliver`` frame of a row for a session. Return None if the session does not receive the row."""
        agent_id = session.live_origin().agent_id
        assert row.head is not None
        if not is_recipient(self._participants.state, agent_id, row.head):
            return None
        live = self._participants.get(agent_id)
        assert live is not None
        mailbox = live.mailbox
        if session.outbox.is_own(row.seq):
            return None
        if session.starts_at_ack_cursor:  # a session with an explicit cursor receives all messages, even handled ones
            if row.actor == agent_id and row.seq <= session.joined_at:
                return None
            # Use the state at the time of the join: the deliveries of a session must not depend on how fast it reads.
            # If a message was handled then and is unhandled now, an operator has restored it since. The session then
            # receives it as another attempt.
            if session.handled_at_join.is_handled(row.seq):
                if mailbox.is_handled(row.seq):
                    return None
                if row.seq in mailbox.awaiting_retry:
                    session.outbox.skipped.add(row.seq)  # the timer will deliver the message to this session too
                    return None
        # A page may contain a message that failed before. The attempt number of this message must be the same as in a
        # redelivery.
        attempt = self._participants.find_attempt(agent_id, row.seq) if row.seq in mailbox.failed else None
        return deliver_bytes(row.data, attempt.failures + 1 if attempt is not None else 1)

    def _go_live(self, session: Session) -> None:
        """Push the messages that were published since the last page. After that, `publisher` pushes new messages to the
        session."""
        outbox, head, recent = session.outbox, self._participants.state.head, self._recent.rows
        if outbox.position < head:
            if not recent or recent[0].seq > outbox.position + 1:
                return  # the messages in memory do not reach back to the page, so read another page
            if self._push_page(session, [row for row in recent if row.seq > outbox.position]):
                return
            outbox.position = max(outbox.position, head)
        outbox.is_behind = False
