"""Heads of the newest messages, in memory: what an agent may read, and what each thread holds.

`network.window` is asked at every reaction and looks thousands of messages back. It decides here, by heads that were
read once, and reads the rows of the messages that it shows. Each call reads the heads that have come since the last
one, so that its cost does not grow with an agent's past. Heads are facts of the log and never change. Who may read them
is asked of the state at each call. No rules, no clock.
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
"""Memory of all heads together, as estimated. The list that was asked for least recently is forgotten first."""
_SEQ_BYTES, _GROUP_BYTES = 48, 700
_PAIRS = frozenset({"direct", "mod"})
"""Kinds of messages whose readers do not depend on when they were sent."""


IsPerson = Callable[[str], bool]


class KeptInMemory(Protocol):
    """What is kept in memory for one key."""

    @property
    def size(self) -> int:
        """Return the estimated memory, in bytes."""


class HeadGroup:
    """Messages of one thread that each rule of who may read them treats alike.

    ``head`` is the oldest of them, ``label`` the message whose people are their audience. ``alike`` is a group, of this
    thread or of another, that only `visibility: current` tells from this one.
    """

    __slots__ = ("alike", "head", "is_settled", "label", "parties", "thread_id")

    def __init__(self, head: MessageHead, label: MessageHead, alike: HeadGroup | None, *, is_settled: bool) -> None:
        self.head = head
        self.label = label
        self.thread_id = head.thread_id
        self.alike = alike or self
        self.parties = frozenset(parties(label)) if label.kind in _PAIRS else None
        """Nobody else is among the people of these messages; None where those come and go."""
        self.is_settled = is_settled
        """Whether each message of the thread, of all times, has the same parties."""


class Grouping:
    """The groups of heads that are kept together."""

    def __init__(self, is_person: IsPerson) -> None:
        self._is_person = is_person
        self._alike: dict[Hashable, HeadGroup] = {}
        self._known: dict[Hashable, HeadGroup] = {}
        self.count = 0

    @property
    def size(self) -> int:
        """Estimated memory, in bytes."""
        return _GROUP_BYTES * (self.count + 1)

    def find(self, head: MessageHead, labels: Mapping[int, MessageHead]) -> HeadGroup:
        """Return the group of a head, a new one if there is none; ``labels`` has the message that its label names."""
        label = head if head.label == head.seq else labels.get(head.label, head)
        if head.kind not in _PAIRS:  # readers of a place of many come and go: each message is judged by itself
            self.count += 1
            return HeadGroup(head, label, None, is_settled=False)
        rule = (_describe(head), None if label is head else _describe(label))
        group = self._known.get((head.thread_id, rule))
        if group is None:
            self.count += 1
            # in a direct thread with a person, which takes part in it for ever, each message is its own label
            is_settled = head.kind == "direct" and label is head and any(map(self._is_person, parties(head)))
            group = HeadGroup(head, label, self._alike.get(rule), is_settled=is_settled)
            self._known[head.thread_id, rule] = group
            self._alike.setdefault(rule, group)
        return group

    def retain(self, kept: Set[HeadGroup | None]) -> None:
        """Forget all groups but these."""
        self._known = {key: it for key, it in self._known.items() if it in kept}
        alike = {it.alike for it in kept if it is not None}
        self._alike = {key: it for key, it in self._alike.items() if it in alike}
        self.count = len(kept)


class Heads:
    """The newest messages of one place, ascending: their seqs, and the group of each (None: the row is damaged)."""

    def __init__(self, at_most: int, is_person: IsPerson) -> None:
        self.seqs: list[int] = []
        self.groups: list[HeadGroup | None] = []
        self.upto = 0
        """Everything of the place up to this seq was read."""
        self.is_cut = False
        """Whether the place may have older messages than these."""
        self.begin: int | None = None
        """The first seq of the place, where it was asked for."""
        self._at_most = at_most
        self._grouping = Grouping(is_person)

    @property
    def size(self) -> int:
        """Estimated memory, in bytes."""
        return _SEQ_BYTES * len(self.seqs) + self._grouping.size

    def add(self, newer: Iterable[HeadAt], labels: Mapping[int, MessageHead], upto: int) -> None:
        """Add ascending heads, which are newer than all that are here."""
        for seq, head in newer:
            self.seqs.append(seq)
            self.groups.append(self._grouping.find(head, labels) if head is not None else None)
        self.upto = upto
        if len(self.seqs) > 2 * self._at_most:  # cut now and then, not with each message
            gone = len(self.seqs) - self._at_most - self._at_most // 2
            del self.seqs[:gone], self.groups[:gone]
            self.is_cut = True
            self._grouping.retain(set(self.groups))

    def newest(self, until: int) -> NewestHeads | None:
        """The newest of them up to a seq; None if too few of those are kept."""
        end = bisect_right(self.seqs, until)
        if end <= self._at_most and self.is_cut:
            return None
        start = max(0, end - self._at_most)
        return NewestHeads(self.seqs[start:end], self.groups[start:end], start > 0, self)


class NewestHeads(NamedTuple):
    """The newest messages of a place up to a seq, ascending: seqs, and the group of each."""

    seqs: list[int]
    groups: list[HeadGroup | None]
    has_older: bool
    kept: Heads

    def find_group(self, seq: int) -> HeadGroup | None:
        """Return the group of one of these messages; None for any other, and for a damaged one."""
        place = bisect_left(self.seqs, seq)
        return self.groups[place] if place < len(self.seqs) and self.seqs[place] == seq else None


def _describe(head: MessageHead) -> Hashable:
    if head.kind not in _PAIRS:
        return head.seq
    return head.kind, head.sender_id, head.sender_kind, head.to, head.excluded


class RecentHeads:
    """The heads that the readers of one hub have asked for lately. Make a new one when old messages were dropped."""

    def __init__(self, is_person: IsPerson, max_bytes: int = MAX_BYTES) -> None:
        """``is_person`` tells of whom it is asked whether that is a person; a kind never changes."""
        self.is_person = is_person
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, KeptInMemory] = OrderedDict()
        self.bytes = 0

    async def inbox(
        self, ledger: Ledger, spans: Sequence[Span], agent_id: str, until: int, at_most: int
    ) -> NewestHeads:
        """The newest messages up to ``until`` that lie in these spans or that the agent sent privately."""
        # other spans are another place: with a channel's history its old messages come in between
        key = (agent_id, *((it.target, it.after, it.before) for it in spans))

        async def read(after: int, limit: int) -> list[HeadAt]:
            return await ledger.inbox_heads(spans, agent_id, after, until, limit)

        return await self._find(ledger, key, until, at_most, read)

    async def threads(
        self, ledger: Ledger, newest: Mapping[str, int], until: int, at_most: int
    ) -> dict[str, NewestHeads]:
        """The newest messages up to ``until`` of each of these threads. ``newest``: up to which seq a thread has to be
        read, as nothing is in it between that and ``until``."""
        behind: dict[str, int] = {}
        for thread_id, seq in newest.items():
            kept = self._find_heads(thread_id)
            if kept is None or kept.upto < seq:
                behind[thread_id] = 0 if kept is None else kept.upto
        read = await ledger.newest_heads(behind, at_most + 1, before=until + 1) if behind else {}
        found: dict[str, NewestHeads] = {}
        for thread_id in newest:

            async def look(after: int, limit: int, thread_id: str = thread_id) -> list[HeadAt]:
                if after == behind.get(thread_id) and limit <= at_most + 1:
                    return read[thread_id]
                return (await ledger.newest_heads({thread_id: after}, limit, before=until + 1))[thread_id]

            found[thread_id] = await self._find(ledger, thread_id, newest[thread_id], at_most, look, until)
        return found

    async def find_begin(self, ledger: Ledger, thread_id: str, found: NewestHeads) -> int:
        """The first seq of a thread."""
        if not found.has_older:
            return found.seqs[0]
        if found.kept.begin is None:
            found.kept.begin = (await ledger.thread(thread_id, limit=1, newest=False)).rows[0].seq
        return found.kept.begin

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
                found = heads.newest(until)
                if found is None:  # somebody asks for what was said long before: it is read, and not kept
                    old = await self._make(ledger, await read(0, at_most + 1), at_most, until)
                    found = old.newest(until)
                    assert found is not None, "one more than is asked for was read"
                elif key in self._kept:
                    self._kept.move_to_end(key)
                return found
            newer = await read(after, at_most + 1)
            if heads is None or len(newer) > at_most:  # nothing of what is kept would be left
                made = await self._make(ledger, newer, at_most, until)
                if self._kept.get(key) is heads:
                    self.store(key, made)
            else:
                labels = await _find_labels(ledger, newer)
                # another call may have read the same meanwhile
                if self._kept.get(key) is heads and heads.upto == after:
                    self.bytes -= heads.size
                    heads.add(reversed(newer), labels, until)
                    self.bytes += heads.size
                    self._forget_oldest(key)

    async def _make(self, ledger: Ledger, descending_key: list[HeadAt], at_most: int, until: int) -> Heads:
        made = Heads(at_most, self.is_person)
        made.is_cut = len(descending_key) > at_most
        made.add(reversed(descending_key), await _find_labels(ledger, descending_key), until)
        return made

    def _find_heads(self, key: Hashable) -> Heads | None:
        kept = self._kept.get(key)
        return kept if isinstance(kept, Heads) else None

    def find(self, key: Hashable) -> KeptInMemory | None:
        """Return what is kept for a key."""
        return self._kept.get(key)

    def discard(self, key: Hashable) -> None:
        """Forget what is kept for a key, if anything is. Whoever changes a value takes it out so, and keeps it again: its
        size is counted as of then."""
        gone = self._kept.pop(key, None)
        self.bytes -= gone.size if gone is not None else 0

    def store(self, key: Hashable, value: KeptInMemory) -> None:
        """Keep a value for a key, and forget what was asked for least recently if there is too much."""
        self.discard(key)
        self._kept[key] = value
        self.bytes += value.size
        self._forget_oldest(key)

    def _forget_oldest(self, key: Hashable) -> None:
        """Keep within the bound; the list that is being used stays, whatever its size."""
        self._kept.move_to_end(key)
        while self.bytes > self._max_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self.bytes -= gone.size


async def _find_labels(ledger: Ledger, heads: Iterable[HeadAt]) -> dict[int, MessageHead]:
    known = {seq: head for seq, head in heads if head is not None}
    missing = {head.label for head in known.values()} - known.keys()
    return known | (await ledger.heads(missing) if missing else {})
