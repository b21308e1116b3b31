"""The operation ``network.memory``: what an agent has written down of threads, as far as it may enter a prompt.

A memory is a record of its agent's: a summary of some messages of a thread, and of an earlier memory of it that it goes
on from. It is made of all messages of that chain, and is shown where each of them may be shown (`views.View`): so it
passes on nothing to whom the messages themselves would not go, and ends with the first of them that is not kept any
more. Reads, changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from roundelay.network.addresses import memory_of
from roundelay.network.core.visibility import Visibility
from roundelay.network.frames import Seq

from .listing import ListPage
from .reading import Reading
from .views import PAGE, View, open_view

MAX_THREADS = 100
MEMORY = "memory"
"""The kind of the record."""


class Memory(Struct, frozen=True):
    """The body of the record: the messages that were summed up, and the memory (its seq) that this one goes on from."""

    thread_id: str
    seqs: list[int]
    text: str
    earlier: int | None = None


async def memory(
    reading: Reading,
    *,
    threads: Annotated[list[str], Meta(max_length=MAX_THREADS)],
    trigger: Seq,
    visibility: Visibility | None = None,
) -> dict[str, Any]:
    """What the caller last wrote down of each of these threads in records of kind `memory`, if every message that it
    was made of may enter the prompt for `trigger`; else what it wrote before that."""
    view = await open_view(reading, trigger, visibility)
    page = ListPage(MAX_THREADS, reading.hub.limits.max_result_bytes)
    for thread_id in dict.fromkeys(threads):
        found = await _find_newest(reading, view, thread_id)
        if found is not None and not page.take(found):
            break
    return {"memories": page.entries}


async def _find_newest(reading: Reading, view: View, thread_id: str) -> dict[str, Any] | None:
    kept = await _read(reading, thread_id)
    shown: dict[int, bool] = {}
    for seq in sorted(kept, reverse=True):
        sources = _trace(kept, seq)
        if sources is not None and await _shows_all(reading, view, sources, shown):
            return {
                "thread_id": thread_id,
                "seq": seq,
                "upto": max(sources),
                "messages": len(sources),
                "text": kept[seq].text,
            }
    return None


async def _read(reading: Reading, thread_id: str) -> dict[int, Memory]:
    """The memories of a thread that the caller wrote, by seq."""
    kept: dict[int, Memory] = {}
    after, has_more = 0, True
    while has_more:
        stream = memory_of(thread_id)
        rows, has_more = await reading.hub.ledger.reaction(stream, after, PAGE, actor=reading.origin.agent_id)
        for row in rows:
            after = row.seq
            if row.label == MEMORY and not row.is_damaged:
                try:
                    kept[row.seq] = msgspec.json.decode(row.data, type=Memory)
                except msgspec.ValidationError:
                    continue  # anybody can write anything into a record of its own
    return kept


def _trace(kept: dict[int, Memory], seq: int) -> list[int] | None:
    """The messages that a memory was made of, the last first; None where that is not known any more."""
    sources: list[int] = []
    at: int | None = seq
    while at is not None:
        if at not in kept:
            return None
        sources += reversed(kept[at].seqs)
        earlier = kept[at].earlier
        if earlier is not None and earlier >= at:
            return None
        at = earlier
    return sources or None


async def _shows_all(reading: Reading, view: View, sources: list[int], known: dict[int, bool]) -> bool:
    """Whether each of these messages may be shown; ``known`` are those that were judged."""
    for start in range(0, len(sources), PAGE):
        asked = [seq for seq in sources[start : start + PAGE] if seq not in known]
        heads = await reading.hub.ledger.heads(asked) if asked else {}
        await view.load(heads.values())
        for seq in asked:
            known[seq] = await view.shows(heads.get(seq))
        if not all(known[seq] for seq in sources[start : start + PAGE]):
            return False
    return True
