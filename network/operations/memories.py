"""The operation ``network.memory``: returns summaries of threads that an agent wrote, if they may enter a prompt.

A memory is a record of its agent. It summarizes some messages of a thread, and may continue an earlier memory. It
covers all messages of this chain, and is shown only if every covered message may be shown (`views.View`). So a memory
reveals nothing that its messages would not reveal. A memory becomes invalid when one of its messages is deleted. The
operation changes nothing.
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
"""Maximum number of messages that one memory summarizes. A record with more messages is ignored."""
MAX_KNOWN = 4096
"""Maximum number of memories that are cached per thread. The newest memories stay in the cache."""
MAX_GROUPS = 65_536
"""Maximum number of channel and broadcast messages that all memories of one thread may cover. Further memories are
ignored."""
MAX_GROUPS_AT_ONCE = 32
"""Maximum number of message groups in a set that a memory shares with the memory that it continues. Larger sets are
stored separately for each memory."""
_MEMORY_BYTES = 400
MEMORY = "memory"
"""Kind of the records that contain memories."""


class MemoryBody(Struct, frozen=True):
    """Body of a record that contains a memory: the summary, the seqs of the summarized messages, and the seq of the
    memory that it continues."""

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
    """For each of these threads, the newest record of kind `memory` that the caller wrote and that may enter the prompt
    for `trigger`. Every message that the memory covers must be allowed in that prompt."""
    view = await open_view(reading, trigger, visibility)
    page = ListPage(MAX_THREADS, reading.hub.limits.max_result_bytes)
    for thread_id in dict.fromkeys(threads):
        entry = await _find_newest(reading, view, thread_id)
        if entry is not None and not page.add(entry):
            break
    return {"memories": page.entries}


async def _find_newest(reading: Reading, view: View, thread_id: str) -> dict[str, Any] | None:
    """Return the newest memory of a thread that the view may show, or None."""
    while True:
        memories = await _read_memories(reading, thread_id)
        newest = memories.find_newest(view)
        if newest is None:
            return None
        # Read the text from the ledger, because the cache stores memories without their texts.
        rows = await reading.hub.ledger.rows(newest.seq - 1, 1)
        body = _read(rows[0]) if rows and rows[0].seq == newest.seq else None
        if body is not None:
            entry = {"thread_id": thread_id, "seq": newest.seq, "upto": newest.upto, "messages": newest.messages}
            return {**entry, "text": body.text}
        # The memory was deleted or damaged after it was cached. Discard the cache of the thread, because every memory
        # that continues this one is invalid too.
        reading.hub.recent.discard(_key(reading, thread_id))


def _key(reading: Reading, thread_id: str) -> Hashable:
    return "memory", reading.origin.agent_id, thread_id


class _Memory:
    """A memory without its text, but with the data that decides whether it may be shown."""

    __slots__ = ("earlier", "groups", "messages", "seq", "upto")

    def __init__(self, seq: int, seqs: Sequence[int], groups: frozenset[HeadGroup], earlier: _Memory | None) -> None:
        self.seq = seq
        self.upto: int = max([0 if earlier is None else earlier.upto, *seqs])
        """Seq of the newest message that the memory covers."""
        self.messages: int = len(seqs) + (0 if earlier is None else earlier.messages)
        self.groups = groups
        """Groups of the messages that the memory covers, without the groups of the memory in ``earlier``."""
        self.earlier = earlier
        if earlier is not None and len(groups | earlier.groups) <= MAX_GROUPS_AT_ONCE:
            # Share one set among all memories of a chain. In a direct thread, thousands of messages belong to a few
            # groups.
            self.groups = earlier.groups if groups <= earlier.groups else groups | earlier.groups
            self.earlier = earlier.earlier


class _Memories:
    """Cache of the memories that an agent wrote about a thread. Each memory is read from the ledger only once."""

    def __init__(self, is_person: IsPerson) -> None:
        self.upto = 0
        """Seq up to which all records were read."""
        self._grouping = Grouping(is_person)
        self._known: OrderedDict[int, _Memory] = OrderedDict()
        self._shared: dict[int, HeadGroup] = {}
        """Groups of channel and broadcast messages, by seq. Each such message is its own group."""

    @property
    def size(self) -> int:
        """Estimated memory of this object, in bytes."""
        return _MEMORY_BYTES * (len(self._known) + 1) + self._grouping.size

    def add(
        self, seq: int, body: MemoryBody, heads: Mapping[int, MessageHead], labels: Mapping[int, MessageHead]
    ) -> None:
        """Add the next memory if all messages that it covers are stored."""
        earlier = None if body.earlier is None else self._known.get(body.earlier)
        if (body.earlier is not None and earlier is None) or not all(covered in heads for covered in body.seqs):
            return
        # Ignore a record beyond the limit, because agents may write any number of memories.
        if self._grouping.count + len(body.seqs) > MAX_GROUPS:
            return
        groups = frozenset(self._find_group(heads[covered], labels) for covered in dict.fromkeys(body.seqs))
        memory = _Memory(seq, body.seqs, groups, earlier)
        if memory.messages:
            self._known[seq] = memory
        if len(self._known) > MAX_KNOWN:
            # Forget the oldest memory. A later memory that continues it still works, because the later memory
            # refers directly to its predecessor.
            self._known.popitem(last=False)

    def _find_group(self, head: MessageHead, labels: Mapping[int, MessageHead]) -> HeadGroup:
        group = self._shared.get(head.seq) or self._grouping.find(head, labels)
        if head.kind not in PRIVATE:
            self._shared[head.seq] = group
        return group

    def find_newest(self, view: View) -> _Memory | None:
        """Return the newest memory whose covered messages may all be shown, or None."""
        assert view.until is not None, "a memory is asked for with a trigger"
        hidden: set[_Memory] = set()
        for candidate in reversed(self._known.values()):
            if candidate.upto > view.until:
                continue
            path: list[_Memory] = []
            part: _Memory | None = candidate
            while part is not None and part not in hidden and all(map(view.shows_group, part.groups)):
                path.append(part)
                part = part.earlier
            if part is None:
                return candidate
            # A memory is hidden if any memory in its chain is hidden. Remember the hidden memories, so that they are
            # not checked again for the next candidates.
            hidden.update(path)
            hidden.add(part)
        return None


async def _read_memories(reading: Reading, thread_id: str) -> _Memories:
    """Read the memories of a thread that were written since the last call. Return all memories of the thread."""
    ledger, recent, key = reading.hub.ledger, reading.hub.recent, _key(reading, thread_id)
    room = reading.hub.limits.max_result_bytes
    cached = recent.find(key)
    memories = cached if isinstance(cached, _Memories) else _Memories(recent.is_person)
    while True:
        after = memories.upto
        rows, has_more = await ledger.reaction(
            memory_of(thread_id), after, PAGE, actor=reading.origin.agent_id, max_bytes=room
        )
        read = []
        for row in rows:
            body = _read(row)
            # Accept only memories that cover earlier messages. Each earlier message is either stored by now or will
            # never be stored.
            if body is not None and all(covered < row.seq for covered in body.seqs):
                heads = await ledger.heads(body.seqs)
                missing = {head.label for head in heads.values()} - heads.keys()
                read.append((row.seq, body, heads, heads | (await ledger.heads(missing) if missing else {})))
        if memories.upto == after:  # otherwise a concurrent call has already read these rows
            recent.discard(key)
            for arguments in read:
                memories.add(*arguments)
            memories.upto = rows[-1].seq if rows else after
            recent.store(key, memories)
            if not has_more:
                return memories


def _read(row: Row) -> MemoryBody | None:
    if row.label != MEMORY or row.is_damaged:
        return None
    try:
        return msgspec.json.decode(row.data, type=MemoryBody)
    except msgspec.ValidationError:
        return None  # ignore an invalid body, because agents may write any body into their records
