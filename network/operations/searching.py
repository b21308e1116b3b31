"""The operation ``network.search``: finds messages that contain given words. It shows only messages that the caller may
read. With a trigger, it shows only messages that may enter the prompt of the reaction (`views.View`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw

from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.search_query import Query, is_chosen, read_query
from roundelay.network.core.visibility import Visibility, readable_spans
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.ledger import Ledger, collect_page
from roundelay.network.ledger.search import holds, is_within, list_words

from .head_cache import NewestHeads
from .reading import Reading
from .views import PAGE, ROWS_AT_ONCE, SCANNED, Limit, View, open_view

Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]
MAX_QUERY_CHARS = 1000
MAX_TERMS = 32
MAX_EXAMINED = 4000
"""Maximum number of matching messages that one call checks, even if few of them may be shown."""


async def search(
    reading: Reading,
    *,
    query: Annotated[str, Meta(max_length=MAX_QUERY_CHARS)],
    thread_id: str | None = None,
    before: Seq | None = None,
    limit: Limit = 20,
    trigger: Seq | None = None,
    visibility: Visibility | None = None,
    sender_id: str | None = None,
    said_after: Milliseconds | None = None,
    said_before: Milliseconds | None = None,
) -> dict[str, Any]:
    """The newest messages below `before` that contain every word of `query`, oldest first. Case, accents and endings
    are ignored. Words "in quotation marks" match exactly, and `deploy*` matches all words with that beginning.
    `sender_id`, `said_after` and `said_before` (ms) filter by sender and time, like `from:ID`, `after:2026-11-27` and
    `before:2026-11-28` in `query`. Continue with `next` as `before`. `trigger` works as in `network.history`."""
    parsed = read_query(query, list_words)
    if parsed.wrong is not None:
        raise InvalidArguments(f"{parsed.wrong} is not a date. Write it as 2026-11-27, or 2026-11-27T14:30 (UTC).")
    parsed = parsed._replace(
        sender_id=parsed.sender_id if sender_id is None else sender_id,
        said_after=parsed.said_after if said_after is None else said_after,
        said_before=parsed.said_before if said_before is None else said_before,
    )
    terms = parsed.terms
    if not 1 <= len(terms) <= MAX_TERMS:
        raise InvalidArguments(f"query has {len(terms)} words. It needs 1 to {MAX_TERMS} words of letters or digits.")
    view = await open_view(reading, trigger, visibility)
    if view.until is not None:
        # Search only up to the trigger, because a prompt shows nothing after its trigger.
        before = min(before or view.until + 1, view.until + 1)
    ledger = reading.hub.ledger
    if parsed.said_before is not None:
        end = await _find_seq(ledger, reading.hub.state.head, parsed.said_before)
        before = min(before or end, end)
    begin = 0 if parsed.said_after is None else await _find_seq(ledger, reading.hub.state.head, parsed.said_after)
    origin, state, room = reading.origin, reading.hub.state, reading.hub.limits.max_result_bytes
    participant = state.participant(origin.agent_id)
    sees_all = origin.is_operator and trigger is None
    # With a trigger, ignore operator rights, because a prompt shows only messages that the agent itself may read.
    spans = None if sees_all else readable_spans(state, participant) if participant is not None else []
    search = _Search(reading, view, parsed, spans, thread_id, begin, limit)
    if view.trigger is None:
        await search.find_readable(before)
    else:
        await search.find_for_prompt(view.trigger, spans or [], view.trigger.seq + 1 if before is None else before)
    rows, has_more, before = search.found, search.has_more, search.before
    shown = collect_page(reversed(rows), limit, room, newest=True)
    value = {"messages": [Raw(row.data) for row in shown.rows], "has_more": has_more or shown.has_more}
    following = shown.rows[0].seq if shown.has_more else before
    return {**value, "next": following} if value["has_more"] else value


class _Search:
    """The rows that one search call has found, oldest first, and the position at which the next call continues."""

    def __init__(
        self,
        reading: Reading,
        view: View,
        query: Query,
        spans: Sequence[Span] | None,
        thread_id: str | None,
        begin: int,
        limit: int,
    ) -> None:
        self.found: list[Row] = []
        self.has_more = True
        self.before: int | None = None
        self._reading = reading
        self._view = view
        self._query = query
        self._spans = spans
        self._thread_id = thread_id
        self._begin = begin
        self._limit = limit
        self._room = reading.hub.limits.max_result_bytes

    @property
    def _is_full(self) -> bool:
        return len(self.found) > self._limit or sum(len(row.data) for row in self.found) > self._room

    async def find_readable(self, before: int | None) -> None:
        """Find matching rows that the caller may read."""
        ledger, agent_id = self._reading.hub.ledger, self._reading.origin.agent_id
        looked, size = 0, self._limit + 1
        self.before = before
        while self.has_more and looked < MAX_EXAMINED and not self._is_full:
            page = await ledger.search(
                self._query.terms, self._spans, agent_id, stream=self._thread_id, before=self.before,
                limit=min(size, PAGE), max_bytes=self._room,
            )  # fmt: skip
            await self._add(page.rows)
            # Read more rows in each round. If few rows pass the filters, many small reads would be slow.
            looked, size = looked + len(page.rows), size * 4
            self.before = page.end if page.end is not None else page.rows[0].seq if page.rows else self.before
            looked = looked if page.end is None else MAX_EXAMINED
            self.has_more = page.has_more and (self.before is None or self.before > self._begin)

    async def find_for_prompt(self, trigger: MessageHead, spans: Sequence[Span], before: int) -> None:
        """Find matching rows that may enter the prompt for ``trigger``. The heads of messages decide which rows are
        read, and most heads are in memory. Otherwise the search would read thousands of matching messages from
        conversations with other people."""
        self.before = before
        if self._view.shows_own_thread_alone and self._thread_id not in (None, trigger.thread_id):
            self.has_more = False
            return
        stream = trigger.thread_id if self._view.shows_own_thread_alone else self._thread_id
        ledger, agent_id = self._reading.hub.ledger, self._reading.origin.agent_id
        # Use the same cache as `network.window`. A tool usually searches during a reaction, and the reaction's window
        # has just loaded these heads.
        recent = await self._reading.hub.recent.inbox(ledger, spans, agent_id, trigger.seq, SCANNED)
        looked, size = 0, self._limit + 1
        while self.has_more and looked < MAX_EXAMINED and not self._is_full:
            size = min(size, PAGE, MAX_EXAMINED - looked)
            # Read only seqs first. The heads, most of which are in memory, then decide which rows to read.
            seqs = await ledger.search_seqs(
                self._query.terms, spans, agent_id, stream=stream, before=self.before, limit=size + 1
            )
            has_more, seqs = len(seqs) > size, seqs[:size]
            looked, size = looked + len(seqs), size * 4
            # Check the heads before reading rows, because rows may be large and most of them may be hidden.
            admitted = await self._admit([candidate for candidate in seqs if candidate >= self._begin], recent)
            while admitted and not self._is_full:
                chosen, admitted = admitted[:ROWS_AT_ONCE], admitted[ROWS_AT_ONCE:]
                rows = await ledger.messages(chosen)
                whole = (rows[candidate] for candidate in reversed(chosen) if candidate in rows)
                await self._add(
                    candidate
                    for candidate in whole
                    if is_within(candidate, spans, agent_id, self._thread_id) and holds(candidate, self._query.terms)
                )
                self.before = chosen[-1]
            # If the page became full in the middle of a batch, the next call must continue after the last row that was
            # shown.
            self.before = seqs[-1] if seqs and not admitted else self.before
            self.has_more = bool(admitted) or (has_more and self.before > self._begin)

    async def _admit(self, seqs: Sequence[int], recent: NewestHeads) -> list[int]:
        """Return the seqs of those messages that may be shown. Only the heads of the messages are checked."""
        oldest = recent.seqs[0] if recent.has_older else 0
        old = [candidate for candidate in seqs if candidate < oldest]
        older = await self._reading.hub.ledger.heads(old) if old else {}
        await self._view.load(older.values())
        sender_id = self._query.sender_id
        admitted: list[int] = []
        for seq in seqs:
            if seq >= oldest:
                group = recent.find_group(seq)
                is_shown = group is not None and self._view.shows_group(group)
                # All messages of a group have the same sender, so the head of the group is enough.
                head = group.head if group is not None else None
            else:
                head = older.get(seq)
                is_shown = await self._view.shows(head)
            if head is not None and is_shown and sender_id in (None, head.sender_id):
                admitted.append(seq)
        return admitted

    async def _add(self, rows: Iterable[Row]) -> None:
        """Add those rows that match the query. They must be older than the rows of earlier calls."""
        chosen = [row for row in rows if row.seq >= self._begin and is_chosen(self._query, row.actor, row.at)]
        # Insert the rows at the front, because each round finds older messages than the round before.
        self.found[:0] = await self._view.choose(chosen)


async def _find_seq(ledger: Ledger, head: int, at: int) -> int:
    """Return the seq of the first row that was stored at or after a time (ms). The times of rows never decrease, so a
    binary search finds it."""
    # There is no index by time, because it would require an additional write for every message.
    low, high = 0, head + 1
    while low < high:
        middle = (low + high) // 2
        rows = await ledger.rows(middle - 1, 1)
        if rows and rows[0].at < at:
            low = rows[0].seq + 1
        else:
            high = middle
    return low
