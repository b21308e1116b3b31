"""Receiving by asking: the messages that are delivered to a participant, for clients that cannot keep a connection.

A session is delivered what comes; `receive` gives the same messages to whoever asks for them, and `acknowledge` says
which of them are handled, and `nack` which failed, durably and in the log's order. They work on the participant's one
floor, so that a client may ask today and be connected tomorrow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw

from roundelay.network.core.change import ChangeSet
from roundelay.network.core.entries import MarkHandled
from roundelay.network.core.failures import MAX_FAILURES, clear_attempts, record_delivery_failure
from roundelay.network.core.rows import Row
from roundelay.network.core.visibility import inbox_spans, is_recipient
from roundelay.network.errors import RateLimited, UnknownMessage
from roundelay.network.frames import Seq

from .paging import ListPage
from .reading import Reading
from .views import Limit

ROWS = 256
"""So many rows are read at once."""


async def receive(
    reading: Reading,
    *,
    after: Seq | None = None,
    limit: Limit = 100,
    wait_ms: Annotated[int, Meta(ge=0, le=30_000)] = 0,
    peek: bool = False,
    unhandled: bool = False,
) -> dict[str, Any]:
    """The messages that are delivered to the caller, ascending: those above `after` (with `unhandled`, of these what is
    not handled yet), or, without it, the oldest that are not handled yet. If there is none, the answer waits for up to
    `wait_ms`.

    `next` is the `after` to go on with. What is given counts as delivered, unless the caller only looks (`peek`).
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_ms / 1000
    hub, agent_id = reading.hub, reading.origin.agent_id
    given = _Given(reading, after, limit, is_open=unhandled or after is None)
    await given.read_on()
    while not given.has_any and (left_s := until - loop.time()) > 0:
        await reading.wait_for_message(given.position, left_s)
        await given.read_on()
    if not peek:
        hub.mark_delivered(agent_id, given.position, given.seqs if after is None else None)
    told = {"damaged": given.damaged} if given.damaged else {}
    return {"messages": given.page.entries, "next": given.position, "has_more": given.page.has_more, **told}


class _Given:
    """What one call gives, and the ``position`` in the log up to which it gives all that there is."""

    def __init__(self, reading: Reading, after: int | None, limit: int, *, is_open: bool) -> None:
        agent_id = reading.origin.agent_id
        self.page = ListPage(limit, reading.hub.limits.max_result_bytes)
        self.seqs: list[int] = []
        self.damaged: list[int] = []
        floor, self._below = reading.hub.find_ack_cursor(agent_id) if after is None else (after, [])
        """What is still to be given of what lies below the floor: among all that is handled there, so it is read by
        itself."""
        self.position = self._below[0] - 1 if self._below else floor
        self._floor = floor
        self._hub = reading.hub
        self._agent_id = agent_id
        self._is_open = is_open
        """Only what is not handled is given."""

    @property
    def has_any(self) -> bool:
        return bool(self.seqs or self.damaged)

    async def read_on(self) -> None:
        """Take what lies above the position, up to the log's end, as far as the page has room."""
        hub, agent_id, head = self._hub, self._agent_id, self._hub.state.head
        participant = hub.state.participant(agent_id)
        if participant is None:  # it was removed while this was on its way
            return
        if self._below and not await self._read_below():
            return
        spans, max_bytes = inbox_spans(hub.state, participant), hub.limits.max_result_bytes
        has_more = True
        while has_more and self.position < head:
            found = await hub.ledger.inbox(spans, agent_id, self.position, head, ROWS, max_bytes=max_bytes)
            for row in found.rows:
                if not self._take(row):
                    return
                self.position = row.seq
            has_more = found.has_more
        self.position = max(self.position, head)

    async def _read_below(self) -> bool:
        """Take what is not handled below the floor; False where the page has no room for all of it."""
        for start in range(0, len(self._below), ROWS):
            rows = await self._hub.ledger.messages(self._below[start : start + ROWS])
            for seq in sorted(rows):
                if not self._take(rows[seq]):
                    return False
                self.position = seq
        self._below = []
        self.position = max(self.position, self._floor)
        return True

    def _take(self, row: Row) -> bool:
        """Take one row, unless it is not for the caller; False where the page has no room for it."""
        hub, agent_id, seq = self._hub, self._agent_id, row.seq
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
    """Say that these messages are handled: they are not delivered again. It is durable when the answer comes."""
    agent_id = change.origin.agent_id
    _check_given(change, seqs)
    floor = change.state.ack_cursor(agent_id)
    settled = sorted({seq for seq in seqs if not _is_handled(change, seq)})
    if settled:
        change.set_value("floor", agent_id, floor.with_handled(settled))
        change.effects += [MarkHandled(agent_id, seq) for seq in settled]
        for seq in settled:
            change.add_writes(clear_attempts(change.state, agent_id, seq))
    return {"acknowledged": len(settled)}


def nack(
    change: ChangeSet,
    *,
    seq: Seq,
    reason: str,
    retry_after_ms: Annotated[int, Meta(ge=0, le=24 * 3600 * 1000)] | None = None,
) -> dict[str, Any]:
    """Say that handling a message failed: it is given again after `retry_after_ms`, at the fifth failure it becomes a
    dead letter. It is durable when the answer comes."""
    _check_given(change, [seq])
    if _is_handled(change, seq):
        return {"attempts": 0, "is_dead": False}
    tried, limits = change.state.attempts(change.origin.agent_id), change.rules.limits
    if len(tried) >= limits.max_put_off and seq not in tried:
        raise RateLimited(
            f"{len(tried)} messages of {change.origin.agent_id} that failed are not handled yet, the most that may be "
            f"(max_put_off); acknowledge some of them, or say it again later."
        )
    sender_id = change.facts.heads[seq].sender_id
    failures = record_delivery_failure(change, seq, sender_id, reason[: limits.max_reason_chars], retry_after_ms)
    return {"attempts": failures, "is_dead": failures >= MAX_FAILURES}


def _is_handled(change: ChangeSet, seq: int) -> bool:
    """Whether the caller has handled a message. A dead letter that was taken back is not, though its floor says so."""
    attempt = change.state.attempts(change.origin.agent_id).get(seq)
    return change.state.ack_cursor(change.origin.agent_id).is_handled(seq) and not (attempt and attempt.is_revived)


def _check_given(change: ChangeSet, seqs: Sequence[int]) -> None:
    """Raises `UnknownMessage` unless each of these is a message that is delivered to the caller."""
    agent_id = change.origin.agent_id
    for seq in seqs:
        head = change.facts.heads.get(seq)
        if head is None or head.sender_id == agent_id or not is_recipient(change.state, agent_id, head):
            raise UnknownMessage(
                f"There is no message {seq} that was delivered to {agent_id}; network.receive gives those that are."
            )
