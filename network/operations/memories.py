"""The operation ``network.memory``: what an agent has written down of threads, as far as it may enter a prompt.

A memory is a record of its agent's: a summary of some messages of a thread, and of an earlier memory of it that it goes
on from. It is made of all messages of that chain, and is shown where each of them may be shown (`views.View`): so it
passes on nothing to whom the messages themselves would not go, and ends with the first of them that is not kept any
more. Reads, changes nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from roundelay.network.addresses import memory_of
from roundelay.network.core.tables import Row
from roundelay.network.core.visibility import Visibility
from roundelay.network.frames import Seq

from .listing import ListPage
from .reading import Reading
from .views import PAGE, View, open_view

MAX_THREADS = 100
MAX_SEQS = 1000
"""Messages that one record sums up; of more it is no memory."""
MAX_KNOWN = 4096
"""Memories of a thread that a later one can go on from: of those that may be shown, the newest."""
MEMORY = "memory"
"""The kind of the record."""


class MemoryBody(Struct, frozen=True):
    """The body of the record: the messages that were summed up, and the memory (its seq) that this one goes on from."""

    thread_id: str
    seqs: Annotated[list[Seq], Meta(max_length=MAX_SEQS)]
    text: str
    earlier: Seq | None = None


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
    """The newest memory of a thread that may be shown.

    A memory goes on from an earlier one, so in the order of the log each is judged by its own messages alone, and of
    what was read before only the sums are kept: an agent may write as many and as long ones as it likes.
    """
    known: dict[int, _Sum] = {}
    newest: dict[str, Any] | None = None
    stream, after, has_more = memory_of(thread_id), 0, True
    room = reading.hub.limits.max_result_bytes
    while has_more:
        rows, has_more = await reading.hub.ledger.reaction(
            stream, after, PAGE, actor=reading.origin.agent_id, max_bytes=room
        )
        for row in rows:
            after = row.seq
            it = _read(row)
            before = _NOTHING if it is None or it.earlier is None else known.get(it.earlier)
            if it is None or before is None or not await _shows_all(reading, view, it.seqs):
                continue
            upto, messages = made_of = _Sum(max([before.upto, *it.seqs]), before.messages + len(it.seqs))
            if not messages:
                continue
            known[row.seq] = made_of
            if len(known) > MAX_KNOWN:
                del known[next(iter(known))]
            newest = {"thread_id": thread_id, "seq": row.seq, "upto": upto, "messages": messages, "text": it.text}
    return newest


class _Sum(NamedTuple):
    """What a memory was made of: its newest message, and how many."""

    upto: int
    messages: int


_NOTHING = _Sum(0, 0)


def _read(row: Row) -> MemoryBody | None:
    if row.label != MEMORY or row.is_damaged:
        return None
    try:
        return msgspec.json.decode(row.data, type=MemoryBody)
    except msgspec.ValidationError:
        return None  # anybody can write anything into a record of its own


async def _shows_all(reading: Reading, view: View, seqs: list[int]) -> bool:
    """Whether each of these messages may be shown."""
    heads = await reading.hub.ledger.heads(seqs)
    await view.load(heads.values())
    for seq in seqs:
        if not await view.shows(heads.get(seq)):
            return False
    return True
