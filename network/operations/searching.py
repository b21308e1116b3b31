"""The operation ``network.search``: messages by the words in them, as far as the caller may read them, or as they may
enter the prompt of an agent's reaction (`views.View`). Reads, changes nothing."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

from roundelay.network.core.queries import is_chosen, read_query
from roundelay.network.core.tables import Row
from roundelay.network.core.visibility import Visibility, readable_spans
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.ledger import Ledger, take_page
from roundelay.network.ledger.search import list_words

from .reading import Reading
from .views import PAGE, Limit, open_view

Milliseconds = Annotated[int, Meta(ge=0, le=2**53)]
MAX_QUERY_CHARS = 1000
MAX_TERMS = 32
LOOKED_AT = 4000
"""Messages with the words, which the caller may read, that one call looks at where few of them may enter a prompt."""


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
    """The newest messages, below `before`, in which every word of `query` stands, oldest first; case, accents and endings
    do not count; "in quotation marks" a word stands for itself, and `deploy*` for all that begin so. `sender_id`,
    `said_after` and `said_before` (ms) choose by who said it and when, as `from:ID`, `after:2026-11-27` and
    `before:2026-11-28` in `query` do. `next` is the `before` to go on with, if there may be more. With a `trigger` as in
    `network.history`."""
    asked = read_query(query, list_words)
    if asked.wrong is not None:
        raise InvalidArguments(f"{asked.wrong} has no date: write it as 2026-11-27, or 2026-11-27T14:30 (UTC).")
    asked = asked._replace(
        sender_id=asked.sender_id if sender_id is None else sender_id,
        said_after=asked.said_after if said_after is None else said_after,
        said_before=asked.said_before if said_before is None else said_before,
    )
    terms = asked.terms
    if not 1 <= len(terms) <= MAX_TERMS:
        raise InvalidArguments(f"query has {len(terms)} words; it needs 1 to {MAX_TERMS}, of letters or digits.")
    view = await open_view(reading, trigger, visibility)
    if view.until is not None:
        before = min(before or view.until + 1, view.until + 1)
    ledger = reading.hub.ledger
    if asked.said_before is not None:
        end = await _find_seq(ledger, reading.hub.state.head, asked.said_before)
        before = min(before or end, end)
    begin = 0 if asked.said_after is None else await _find_seq(ledger, reading.hub.state.head, asked.said_after)
    origin, state, room = reading.origin, reading.hub.state, reading.hub.limits.max_result_bytes
    participant = state.participant(origin.agent_id)
    sees_all = origin.is_operator and trigger is None
    spans = None if sees_all else readable_spans(state, participant) if participant is not None else []
    found: list[Row] = []
    looked, has_more, size = 0, True, limit + 1
    while has_more and looked < LOOKED_AT and len(found) <= limit and sum(len(row.data) for row in found) <= room:
        page = await ledger.search(
            terms, spans, origin.agent_id, stream=thread_id, before=before, limit=min(size, PAGE), max_bytes=room
        )
        rows = [it for it in page.rows if it.seq >= begin and is_chosen(asked, it.actor, it.at)]
        found[:0] = await view.choose(rows)
        looked, size, has_more = looked + len(page.rows), size * 4, page.has_more
        before = page.end if page.end is not None else page.rows[0].seq if page.rows else before
        looked = looked if page.end is None else LOOKED_AT
        has_more = has_more and (before is None or before > begin)
    shown = take_page(reversed(found), limit, room, newest=True)
    value = {"messages": [Raw(row.data) for row in shown.rows], "has_more": has_more or shown.has_more}
    following = shown.rows[0].seq if shown.has_more else before
    return {**value, "next": following} if value["has_more"] else value


async def _find_seq(ledger: Ledger, head: int, at: int) -> int:
    """Find the first row that was stored at a moment (ms) or later: times of rows never go back."""
    low, high = 0, head + 1
    while low < high:
        middle = (low + high) // 2
        rows = await ledger.rows(middle - 1, 1)
        if rows and rows[0].at < at:
            low = rows[0].seq + 1
        else:
            high = middle
    return low
