"""The operation ``network.memory``: what an agent has written down of threads, as far as it may enter a prompt.

A memory is a record of its agent's: a summary of some messages of a thread, and of an earlier memory of it that it goes
on from. It is made of all messages of that chain, and is shown where each of them may be shown (`views.View`): so it
passes on nothing to whom the messages themselves would not go, and ends with the first of them that is not kept any
more. Reads, changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from roundelay.network.addresses import memory_of
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.visibility import Visibility
from roundelay.network.frames import Seq
from roundelay.network.ledger.search import PRIVATE

from .head_cache import Grouping, HeadGroup, IsPerson
from .paging import ListPage
from .reading import Reading
from .views import PAGE, View, open_view

MAX_THREADS = 100
MAX_SEQS = 1000
"""Messages that one record sums up; of more it is no memory."""
MAX_KNOWN = 4096
"""Memories of a thread that are known: the newest."""
MAX_GROUPS = 65_536
"""Messages of channels and broadcasts of which the memories of one thread are made; of more, the next one is none."""
MAX_GROUPS_AT_ONCE = 32
"""Groups of messages up to which a memory has those of the one that it goes on from in its own set."""
_MEMORY_BYTES = 400
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
        if found is not None and not page.add(found):
            break
    return {"memories": page.entries}


async def _find_newest(reading: Reading, view: View, thread_id: str) -> dict[str, Any] | None:
    """The newest memory of a thread that may be shown."""
    while True:
        known = await _read_memories(reading, thread_id)
        found = known.find_newest(view)
        if found is None:
            return None
        rows = await reading.hub.ledger.rows(found.seq - 1, 1)
        body = _read(rows[0]) if rows and rows[0].seq == found.seq else None
        if body is not None:
            entry = {"thread_id": thread_id, "seq": found.seq, "upto": found.upto, "messages": found.messages}
            return {**entry, "text": body.text}
        # dropped or damaged since it was read: without it, all that go on from it are none either
        reading.hub.recent.discard(_key(reading, thread_id))


def _key(reading: Reading, thread_id: str) -> Hashable:
    return "memory", reading.origin.agent_id, thread_id


class _Memory:
    """A memory, and what decides whether it may be shown; without its text."""

    __slots__ = ("earlier", "groups", "messages", "seq", "upto")

    def __init__(self, seq: int, seqs: Sequence[int], groups: frozenset[HeadGroup], earlier: _Memory | None) -> None:
        self.seq = seq
        self.upto: int = max([0 if earlier is None else earlier.upto, *seqs])
        """The newest message that it was made of."""
        self.messages: int = len(seqs) + (0 if earlier is None else earlier.messages)
        self.groups = groups
        """The groups of the messages that it was made of, but for those of ``earlier``."""
        self.earlier = earlier
        if earlier is not None and len(groups | earlier.groups) <= MAX_GROUPS_AT_ONCE:
            # one set for a chain: in a thread of two, thousands of messages are of a few groups
            self.groups = earlier.groups if groups <= earlier.groups else groups | earlier.groups
            self.earlier = earlier.earlier


class _Memories:
    """The memories that an agent wrote of a thread, as they were read: each once, however often they are asked for."""

    def __init__(self, is_person: IsPerson) -> None:
        self.upto = 0
        """Every record up to this seq was read."""
        self._grouping = Grouping(is_person)
        self._known: OrderedDict[int, _Memory] = OrderedDict()
        self._shared: dict[int, HeadGroup] = {}
        """The groups of messages of channels and broadcasts, by their seqs: each is one of its own."""

    @property
    def size(self) -> int:
        """Estimated memory, in bytes."""
        return _MEMORY_BYTES * (len(self._known) + 1) + self._grouping.size

    def add(
        self, seq: int, body: MemoryBody, heads: Mapping[int, MessageHead], labels: Mapping[int, MessageHead]
    ) -> None:
        """Add the next memory, if all that it was made of is there."""
        earlier = None if body.earlier is None else self._known.get(body.earlier)
        if (body.earlier is not None and earlier is None) or not all(it in heads for it in body.seqs):
            return
        if self._grouping.count + len(body.seqs) > MAX_GROUPS:
            return
        groups = frozenset(self._find_group(heads[it], labels) for it in dict.fromkeys(body.seqs))
        made = _Memory(seq, body.seqs, groups, earlier)
        if made.messages:
            self._known[seq] = made
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _find_group(self, head: MessageHead, labels: Mapping[int, MessageHead]) -> HeadGroup:
        group = self._shared.get(head.seq) or self._grouping.find(head, labels)
        if head.kind not in PRIVATE:
            self._shared[head.seq] = group
        return group

    def find_newest(self, view: View) -> _Memory | None:
        """Return the newest one of which everything may be shown."""
        assert view.until is not None, "a memory is asked for with a trigger"
        hidden: set[_Memory] = set()
        for it in reversed(self._known.values()):
            if it.upto > view.until:
                continue
            path: list[_Memory] = []
            part: _Memory | None = it
            while part is not None and part not in hidden and all(map(view.shows_group, part.groups)):
                path.append(part)
                part = part.earlier
            if part is None:
                return it
            hidden.update(path)
            hidden.add(part)
        return None


async def _read_memories(reading: Reading, thread_id: str) -> _Memories:
    """Read the memories that were written since the last call."""
    ledger, recent, key = reading.hub.ledger, reading.hub.recent, _key(reading, thread_id)
    room = reading.hub.limits.max_result_bytes
    found = recent.find(key)
    known = found if isinstance(found, _Memories) else _Memories(recent.is_person)
    while True:
        after = known.upto
        rows, has_more = await ledger.reaction(
            memory_of(thread_id), after, PAGE, actor=reading.origin.agent_id, max_bytes=room
        )
        read = []
        for row in rows:
            body = _read(row)
            # no memory is made of what was said after it: as of now, all these are there or will never be
            if body is not None and all(it < row.seq for it in body.seqs):
                heads = await ledger.heads(body.seqs)
                missing = {head.label for head in heads.values()} - heads.keys()
                read.append((row.seq, body, heads, heads | (await ledger.heads(missing) if missing else {})))
        if known.upto == after:  # else another call has read the same meanwhile
            recent.discard(key)
            for it in read:
                known.add(*it)
            known.upto = rows[-1].seq if rows else after
            recent.store(key, known)
            if not has_more:
                return known


def _read(row: Row) -> MemoryBody | None:
    if row.label != MEMORY or row.is_damaged:
        return None
    try:
        return msgspec.json.decode(row.data, type=MemoryBody)
    except msgspec.ValidationError:
        return None  # anybody can write anything into a record of its own
