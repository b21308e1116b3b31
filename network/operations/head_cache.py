"""Cache for the heads of the newest messages, per reader and per thread.

`network.window` runs for every reaction and examines thousands of messages. It first decides with cached heads, and
then reads only the rows that it shows. Each call reads only heads that are newer than those of the last call, so the
cost does not grow with an agent's history. Heads never change, so cached heads stay valid. The cache contains no access
rules: at each call, the current state decides who may read a message. This module uses no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from roundelay.network.core.rows import MessageHead, Span
from roundelay.network.core.visibility import parties
from roundelay.network.ledger import HeadAt, Ledger

MAX_BYTES = 64 * 1024 * 1024
"""Maximum estimated memory of all cached heads, in bytes. If more is needed, the least recently used lists are
evicted."""
_SEQ_BYTES, _GROUP_BYTES = 48, 700
_PAIRS = frozenset({"direct", "mod"})
"""Kinds of messages whose readers do not depend on the time at which the message was sent."""


IsPerson = Callable[[str], bool]


class CacheEntry(Protocol):
    """Interface of a value in the cache."""

    @property
    def size(self) -> int:
        """Return the estimated memory of the value, in bytes."""


class HeadGroup:
    """A group of messages of one thread that every visibility rule treats in the same way.

    ``head`` is the oldest message of the group. ``label`` is the message that determines the audience of the group.
    ``alike`` is another group, possibly of another thread, for which all rules except `visibility: current` decide in
    the same way.
    """

    __slots__ = ("alike", "head", "is_settled", "label", "parties", "thread_id")

    def __init__(self, head: MessageHead, label: MessageHead, alike: HeadGroup | None, *, is_settled: bool) -> None:
        self.head = head
        self.label = label
        self.thread_id = head.thread_id
        self.alike = alike or self
        self.parties = frozenset(parties(label)) if label.kind in _PAIRS else None
        """The only participants who can ever read these messages, or None if the readers can change."""
        self.is_settled = is_settled
        """Whether all past and future messages of the thread have the same parties."""


class Grouping:
    """The `HeadGroup` objects that belong to one cached value."""

    def __init__(self, is_person: IsPerson) -> None:
        self._is_person = is_person
        self._alike: dict[Hashable, HeadGroup] = {}
        self._known: dict[Hashable, HeadGroup] = {}
        self.count = 0

    @property
    def size(self) -> int:
        """Estimated memory of this object, in bytes."""
        return _GROUP_BYTES * (self.count + 1)

    def find(self, head: MessageHead, labels: Mapping[int, MessageHead]) -> HeadGroup:
        """Return the group of a head, and create it if needed. ``labels`` must contain the message to which the head's
        label refers."""
        label = head if head.label == head.seq else labels.get(head.label, head)
        # The readers of channels and broadcasts can change, so each of their messages is its own group.
        if head.kind not in _PAIRS:
            self.count += 1
            return HeadGroup(head, label, None, is_settled=False)
        # The key must contain all fields that visibility rules use. Otherwise two messages with different rules could
        # share one decision.
        rule = (_describe(head), None if label is head else _describe(label))
        group = self._known.get((head.thread_id, rule))
        if group is None:
            self.count += 1
            # In a direct thread with a person, each message is its own label.
            is_settled = head.kind == "direct" and label is head and any(map(self._is_person, parties(head)))
            group = HeadGroup(head, label, self._alike.get(rule), is_settled=is_settled)
            self._known[head.thread_id, rule] = group
            self._alike.setdefault(rule, group)
        return group

    def retain(self, retained: Set[HeadGroup | None]) -> None:
        """Remove all groups except those in ``retained``."""
        self._known = {key: group for key, group in self._known.items() if group in retained}
        alike = {group.alike for group in retained if group is not None}
        self._alike = {key: group for key, group in self._alike.items() if group in alike}
        self.count = len(retained)


class Heads:
    """Cached seqs and groups of the newest messages of one thread or inbox, ascending. The group of a damaged row is
    None."""

    def __init__(self, at_most: int, is_person: IsPerson) -> None:
        self.seqs: list[int] = []
        self.groups: list[HeadGroup | None] = []
        self.upto = 0
        """Seq up to which all messages were read."""
        self.is_cut = False
        """Whether the thread or inbox may have older messages that are not cached."""
        self.begin: int | None = None
        """Seq of the thread's first message, or None if it was never requested."""
        self._at_most = at_most
        self._grouping = Grouping(is_person)

    @property
    def size(self) -> int:
        """Estimated memory of this object, in bytes."""
        return _SEQ_BYTES * len(self.seqs) + self._grouping.size

    def add(self, newer: Iterable[HeadAt], labels: Mapping[int, MessageHead], upto: int) -> None:
        """Add heads of newer messages. The new heads must be ascending, and newer than all cached heads."""
        for seq, head in newer:
            self.seqs.append(seq)
            self.groups.append(self._grouping.find(head, labels) if head is not None else None)
        self.upto = upto
        # Trim only from time to time, because trimming for each message would be slow.
        if len(self.seqs) > 2 * self._at_most:
            gone = len(self.seqs) - self._at_most - self._at_most // 2
            del self.seqs[:gone], self.groups[:gone]
            self.is_cut = True
            self._grouping.retain(set(self.groups))

    def newest(self, until: int) -> NewestHeads | None:
        """Return the newest cached messages up to the seq ``until``. Return None if the cache has too few of them."""
        end = bisect_right(self.seqs, until)
        if end <= self._at_most and self.is_cut:
            return None
        start = max(0, end - self._at_most)
        return NewestHeads(self.seqs[start:end], self.groups[start:end], start > 0, self)


class NewestHeads(NamedTuple):
    """Seqs and groups of the newest messages up to a seq, ascending."""

    seqs: list[int]
    groups: list[HeadGroup | None]
    has_older: bool
    kept: Heads

    def find_group(self, seq: int) -> HeadGroup | None:
        """Return the group of a message in this list. Return None if the message is damaged or not in the list."""
        index = bisect_left(self.seqs, seq)
        return self.groups[index] if index < len(self.seqs) and self.seqs[index] == seq else None


def _describe(head: MessageHead) -> Hashable:
    if head.kind not in _PAIRS:
        return head.seq
    return head.kind, head.sender_id, head.sender_kind, head.to, head.excluded


class RecentHeads:
    """Cache of the heads that readers of one hub have requested recently. After old messages were deleted, the hub must
    create a new cache."""

    def __init__(self, is_person: IsPerson, max_bytes: int = MAX_BYTES) -> None:
        """Create an empty cache. ``is_person`` returns whether an id belongs to a person. The kind of an id never
        changes."""
        self.is_person = is_person
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        self.bytes = 0

    async def inbox(
        self, ledger: Ledger, spans: Sequence[Span], agent_id: str, until: int, at_most: int
    ) -> NewestHeads:
        """Return the newest messages up to ``until`` that are in one of these spans or that the agent sent to one
        participant or mod."""
        # Include the spans in the key: an agent that joins a channel may get access to the channel's older messages.
        key = (agent_id, *((span.target, span.after, span.before) for span in spans))

        async def read(after: int, limit: int) -> list[HeadAt]:
            return await ledger.inbox_heads(spans, agent_id, after, until, limit)

        return await self._find(ledger, key, until, at_most, read)

    async def threads(
        self, ledger: Ledger, newest: Mapping[str, int], until: int, at_most: int
    ) -> dict[str, NewestHeads]:
        """Return the newest messages up to ``until`` for each of these threads. ``newest`` maps each thread to the seq
        up to which it must be read. The thread has no messages between this seq and ``until``."""
        # Read all threads with new messages at once, because one read per thread would make a window slow.
        behind: dict[str, int] = {}
        for thread_id, seq in newest.items():
            kept = self._find_heads(thread_id)
            if kept is None or kept.upto < seq:
                behind[thread_id] = 0 if kept is None else kept.upto
        read = await ledger.newest_heads(behind, at_most + 1, before=until + 1) if behind else {}
        heads: dict[str, NewestHeads] = {}
        for thread_id in newest:

            async def look(after: int, limit: int, thread_id: str = thread_id) -> list[HeadAt]:
                if after == behind.get(thread_id) and limit <= at_most + 1:
                    return read[thread_id]
                return (await ledger.newest_heads({thread_id: after}, limit, before=until + 1))[thread_id]

            heads[thread_id] = await self._find(ledger, thread_id, newest[thread_id], at_most, look, until)
        return heads

    async def find_begin(self, ledger: Ledger, thread_id: str, heads: NewestHeads) -> int:
        """Return the seq of a thread's first message."""
        if not heads.has_older:
            return heads.seqs[0]
        if heads.kept.begin is None:
            heads.kept.begin = (await ledger.thread(thread_id, limit=1, newest=False)).rows[0].seq
        return heads.kept.begin

    async def _find(
        self,
        ledger: Ledger,
        key: Hashable,
        needed: int,
        at_most: int,
        read: Callable[[int, int], Awaitable[list[HeadAt]]],
        until: int | None = None,
    ) -> NewestHeads:
        until = needed if until is None else until
        while True:
            heads = self._find_heads(key)
            after = 0 if heads is None else heads.upto
            if heads is not None and needed <= after:
                # The cache may contain messages after ``until``, because other calls had newer triggers.
                newest = heads.newest(until)
                if newest is None:  # the position is older than the cache, so read it without caching
                    old = await self._make(ledger, await read(0, at_most + 1), at_most, until)
                    newest = old.newest(until)
                    assert newest is not None, "one more than is asked for was read"
                elif key in self._kept:
                    self._kept.move_to_end(key)
                return newest
            newer = await read(after, at_most + 1)
            # So many new heads would replace the whole cached list, so make a new list.
            if heads is None or len(newer) > at_most:
                new_heads = await self._make(ledger, newer, at_most, until)
                # Store the new value only if no concurrent call has replaced the old value during the read.
                if self._kept.get(key) is heads:
                    self.store(key, new_heads)
            else:
                labels = await _find_labels(ledger, newer)
                # Add the heads only if no concurrent call has already added them.
                if self._kept.get(key) is heads and heads.upto == after:
                    # Subtract the old size first, because the value changes in place.
                    self.bytes -= heads.size
                    heads.add(reversed(newer), labels, until)
                    self.bytes += heads.size
                    self._evict(key)

    async def _make(self, ledger: Ledger, descending_key: list[HeadAt], at_most: int, until: int) -> Heads:
        new_heads = Heads(at_most, self.is_person)
        new_heads.is_cut = len(descending_key) > at_most
        new_heads.add(reversed(descending_key), await _find_labels(ledger, descending_key), until)
        return new_heads

    def _find_heads(self, key: Hashable) -> Heads | None:
        kept = self._kept.get(key)
        return kept if isinstance(kept, Heads) else None

    def find(self, key: Hashable) -> CacheEntry | None:
        """Return the value that is cached under a key, or None."""
        return self._kept.get(key)

    def discard(self, key: Hashable) -> None:
        """Remove the value of a key from the cache, if any. To change a value in place, remove the value first and
        store it again afterwards. Otherwise the cache would count a wrong size."""
        gone = self._kept.pop(key, None)
        self.bytes -= gone.size if gone is not None else 0

    def store(self, key: Hashable, value: CacheEntry) -> None:
        """Store a value under a key. If the cache is then too large, evict the least recently used values."""
        self.discard(key)
        self._kept[key] = value
        self.bytes += value.size
        self._evict(key)

    def _evict(self, key: Hashable) -> None:
        """Evict the least recently used values until the cache is within its limit. The value of ``key`` is in use, so
        it stays even if it is too large."""
        self._kept.move_to_end(key)
        while self.bytes > self._max_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= gone.size


async def _find_labels(ledger: Ledger, heads: Iterable[HeadAt]) -> dict[int, MessageHead]:
    heads_by_seq = {seq: head for seq, head in heads if head is not None}
    # A label may refer to a message that is older than all of these heads, so read the heads of such messages too.
    missing = {head.label for head in heads_by_seq.values()} - heads_by_seq.keys()
    return heads_by_seq | (await ledger.heads(missing) if missing else {})
