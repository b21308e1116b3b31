"""Operations that poll for messages, for clients that cannot keep a connection open.

`receive` returns the messages that the hub would deliver to a session. `acknowledge` and `nack` report which of these
messages were handled and which failed. The reports are durable and ordered in the log. All three operations use the
participant's single ack cursor, so a client may poll today and connect tomorrow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw

from roundelay.network.core.change import ChangeSet
from roundelay.network.core.entries import MarkHandled
from roundelay.network.core.failures import MAX_FAILURES, clear_attempts, record_delivery_failure
from roundelay.network.core.quiet import close_delivery
from roundelay.network.core.rows import Row
from roundelay.network.core.visibility import inbox_spans, is_recipient
from roundelay.network.errors import RateLimited, UnknownMessage
from roundelay.network.frames import Seq

from .paging import ListPage
from .reading import Reading
from .views import Limit

ROWS = 256
"""Number of rows that are read from the ledger in one step."""


async def receive(
    reading: Reading,
    *,
    after: Seq | None = None,
    limit: Limit = 100,
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0,
    peek: bool = False,
    unhandled: bool = False,
) -> dict[str, Any]:
    """The messages delivered to the caller, ascending: those above `after` (with `unhandled`, only those not handled
    yet). Without `after`, the oldest messages that are not handled yet. If there are none, the answer waits for up to
    `wait_ms`.

    To continue, pass `next` as `after`. Returned messages count as delivered, except with `peek`.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_ms / 1000
    hub, agent_id = reading.hub, reading.origin.agent_id
    batch = _Batch(reading, after, limit, is_open=unhandled or after is None)
    # Read before waiting, because the wait ends only when a new message is stored.
    await batch.read_on()
    while not batch.has_any and (left_s := until - loop.time()) > 0:
        await reading.wait_for_message(batch.position, left_s)
        await batch.read_on()
    # Count messages as delivered only after the answer is complete, because some may not have fitted.
    if not peek:
        hub.mark_delivered(agent_id, batch.position, batch.seqs if after is None else None)
    extra = {"damaged": batch.damaged} if batch.damaged else {}
    return {"messages": batch.page.entries, "next": batch.position, "has_more": batch.page.has_more, **extra}


class _Batch:
    """The messages for the answer of one call. The answer is complete up to the seq ``position``."""

    def __init__(self, reading: Reading, after: int | None, limit: int, *, is_open: bool) -> None:
        agent_id = reading.origin.agent_id
        self.page = ListPage(limit, reading.hub.limits.max_result_bytes)
        self.seqs: list[int] = []
        self.damaged: list[int] = []
        cursor, self._below = reading.hub.find_ack_cursor(agent_id) if after is None else (after, [])
        """Seqs of unhandled messages below the cursor. They are read one by one, because most messages between them are
        already handled."""
        self.position = self._below[0] - 1 if self._below else cursor
        self._cursor = cursor
        self._hub = reading.hub
        self._agent_id = agent_id
        self._is_open = is_open
        """Whether the answer contains only unhandled messages."""

    @property
    def has_any(self) -> bool:
        return bool(self.seqs or self.damaged)

    async def read_on(self) -> None:
        """Add messages after ``position`` until the answer is full or the log ends."""
        hub, agent_id, head = self._hub, self._agent_id, self._hub.state.head
        participant = hub.state.participant(agent_id)
        if participant is None:  # the participant was removed after the call began
            return
        if self._below and not await self._read_below():
            return
        spans, max_bytes = inbox_spans(hub.state, participant), hub.limits.max_result_bytes
        has_more = True
        while has_more and self.position < head:
            page = await hub.ledger.inbox(spans, agent_id, self.position, head, ROWS, max_bytes=max_bytes)
            for row in page.rows:
                # Leave `position` before the row that did not fit, so that the next call begins with this row.
                if not self._add(row):
                    return
                self.position = row.seq
            has_more = page.has_more
        self.position = max(self.position, head)

    async def _read_below(self) -> bool:
        """Add unhandled messages below the cursor. Return False if some of them do not fit."""
        for start in range(0, len(self._below), ROWS):
            rows = await self._hub.ledger.messages(self._below[start : start + ROWS])
            for seq in sorted(rows):
                if not self._add(rows[seq]):
                    return False
                self.position = seq
        self._below = []
        self.position = max(self.position, self._cursor)
        return True

    def _add(self, row: Row) -> bool:
        """Add a row if it is a message for the caller. Return False if the row does not fit."""
        hub, agent_id, seq = self._hub, self._agent_id, row.seq
        # Skip a message that waits for its retry. It is not handled, but its retry is not due yet.
        if self._is_open and (hub.is_handled(agent_id, seq) or hub.is_deferred(agent_id, seq)):
            return True
        if row.is_damaged:
            self.damaged.append(seq)
            return True
        if row.actor == agent_id or row.head is None or not is_recipient(hub.state, agent_id, row.head):
            return True
        if not self.page.add(Raw(row.data)):
            return False
        self.seqs.append(seq)
        return True


def acknowledge(change: ChangeSet, *, seqs: Annotated[list[Seq], Meta(min_length=1, max_length=500)]) -> dict[str, Any]:
    """Report that these messages are handled, so that they are not delivered again. The answer comes when the report is
    durable."""
    agent_id = change.origin.agent_id
    _check_delivered(change, seqs)
    # Use the stored cursor instead of the mailbox in memory, because the report must be durable and ordered in the log.
    cursor = change.state.ack_cursor(agent_id)
    handled = sorted({seq for seq in seqs if not _is_handled(change, seq)})
    if handled:
        change.set_value("floor", agent_id, cursor.with_handled(handled))
        change.effects += [MarkHandled(agent_id, seq) for seq in handled]
        for seq in handled:
            change.add_writes(clear_attempts(change.state, agent_id, seq))
            change.add_writes(close_delivery(change.state, agent_id, seq))
    return {"acknowledged": len(handled)}


def nack(
    change: ChangeSet,
    *,
    seq: Seq,
    reason: str,
    retry_after_ms: Annotated[int, Meta(ge=0, le=24 * 3600 * 1000)] | None = None,
) -> dict[str, Any]:
    """Report that handling a message failed. The message is delivered again after `retry_after_ms`. At the fifth
    failure it becomes a dead letter. The answer comes when the report is durable."""
    _check_delivered(change, [seq])
    if _is_handled(change, seq):
        return {"attempts": 0, "is_dead": False}
    tried, limits = change.state.attempts(change.origin.agent_id), change.rules.limits
    # Apply the same limit as for the frame `nack`, because each failed message needs a stored attempt and a timer.
    if len(tried) >= limits.max_put_off and seq not in tried:
        raise RateLimited(
            f"{len(tried)} failed messages of {change.origin.agent_id} are not handled yet, the maximum (max_put_off). "
            "Acknowledge some of them, or call network.nack again later."
        )
    sender_id = change.facts.heads[seq].sender_id
    failures = record_delivery_failure(change, seq, sender_id, reason[: limits.max_reason_chars], retry_after_ms)
    return {"attempts": failures, "is_dead": failures >= MAX_FAILURES}


def _is_handled(change: ChangeSet, seq: int) -> bool:
    """Return whether the caller has handled a message. A restored dead letter is unhandled even if it is below the ack
    cursor."""
    attempt = change.state.attempts(change.origin.agent_id).get(seq)
    return change.state.ack_cursor(change.origin.agent_id).is_handled(seq) and not (attempt and attempt.is_revived)


def _check_delivered(change: ChangeSet, seqs: Sequence[int]) -> None:
    """Raise `UnknownMessage` unless each of these messages was delivered to the caller."""
    agent_id = change.origin.agent_id
    for seq in seqs:
        head = change.facts.heads.get(seq)
        # Raise the same error for missing messages, so that an agent cannot find out which seqs are messages.
        if head is None or head.sender_id == agent_id or not is_recipient(change.state, agent_id, head):
            raise UnknownMessage(
                f"There is no message {seq} that was delivered to {agent_id}. network.receive returns the delivered "
                "messages."
            )
