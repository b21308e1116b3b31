"""The operation ``network.search``: messages by the words in them, as far as the caller may read them, or as they may
enter the prompt of an agent's reaction (`views.View`). Reads, changes nothing."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Raw

from roundelay.network.core.tables import Row
from roundelay.network.core.visibility import Visibility, readable_spans
from roundelay.network.errors import InvalidArguments
from roundelay.network.frames import Seq
from roundelay.network.ledger import take_page
from roundelay.network.ledger.search import read_terms

from .reading import Reading
from .views import PAGE, Limit, open_view

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
) -> dict[str, Any]:
    """The newest messages, below `before`, in which every word of `query` stands, oldest first; case and accents do not
    count, and a word that ends in `*` stands for all that begin so. `next` is the `before` to go on with, if there may
    be more. With a `trigger` as in `network.history`."""
    terms = read_terms(query)
    if not 1 <= len(terms) <= MAX_TERMS:
        raise InvalidArguments(f"query has {len(terms)} words; it needs 1 to {MAX_TERMS}, of letters or digits.")
    view = await open_view(reading, trigger, visibility)
    if view.until is not None:
        before = min(before or view.until + 1, view.until + 1)
    origin, state, room = reading.origin, reading.hub.state, reading.hub.limits.max_result_bytes
    participant = state.participant(origin.agent_id)
    sees_all = origin.is_operator and trigger is None
    spans = None if sees_all else readable_spans(state, participant) if participant is not None else []
    found: list[Row] = []
    looked, has_more, size = 0, True, limit + 1
    while has_more and looked < LOOKED_AT and len(found) <= limit and sum(len(row.data) for row in found) <= room:
        page = await reading.hub.ledger.search(
            terms, spans, origin.agent_id, stream=thread_id, before=before, limit=min(size, PAGE), max_bytes=room
        )
        found[:0] = await view.choose(page.rows)
        looked, size, has_more = looked + len(page.rows), size * 4, page.has_more
        before = page.end if page.end is not None else page.rows[0].seq if page.rows else before
        looked = looked if page.end is None else LOOKED_AT
    shown = take_page(reversed(found), limit, room, newest=True)
    value = {"messages": [Raw(row.data) for row in shown.rows], "has_more": has_more or shown.has_more}
    following = shown.rows[0].seq if shown.has_more else before
    return {**value, "next": following} if value["has_more"] else value
