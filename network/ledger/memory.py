"""`MemoryLedger`: the ledger's double, for tests, simulation and nodes that need not remember. Nothing outlives the
process."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge, nsmallest
from itertools import groupby, islice
from typing import Any

from roundelay.network.addresses import thread_start
from roundelay.network.core.rows import MessageHead, Row, Span, damaged_row
from roundelay.network.core.tables import LOADED_TABLES, VOLATILE_TABLES, Facts, LookupRequest, Table, TableWrite
from roundelay.network.errors import LedgerError

from . import (
    KEPT_WITH,
    KEYED_BY_SEQ,
    MAX_PAGE_BYTES,
    Found,
    HeadAt,
    KeyTaken,
    Meta,
    Page,
    ThreadSummary,
    Trim,
    Trimmed,
    seq_of,
    take_page,
)
from .search import PRIVATE, holds, is_within


class MemoryLedger:
    """A `Ledger` in dictionaries and sorted lists. Reopening the same object finds what was appended to it."""

    def __init__(self, *, epoch: str, name: str = "roundelay") -> None:
        self._epoch = epoch
        self._name = name
        self._is_open = False
        self._first_seq = 1
        self._head = 0  # with its stamp, also of rows that were trimmed
        self._stamp = 0
        self._rows: dict[int, Row] = {}
        self._order: list[int] = []
        self._keys: dict[tuple[str, str], Row] = {}
        self._targets: dict[str, list[int]] = defaultdict(list)
        self._threads: dict[str, list[int]] = defaultdict(list)
        self._reactions: dict[str, list[int]] = defaultdict(list)
        self._sent: dict[str, list[int]] = defaultdict(list)
        self._records: dict[str, list[int]] = defaultdict(list)
        """Of one agent and kind."""
        self._tables: dict[str, dict[str, Any]] = defaultdict(dict)
        self.damaged = 0
        self.is_answering = True

    def damage(self, seq: int) -> None:
        """Let a row be as one that a disk has damaged: for tests and simulations. Its indexes stay."""
        row = self._rows[seq]
        self._rows[seq] = damaged_row(seq)
        if row.key:
            self._keys[row.actor, row.key] = self._rows[seq]
        self.damaged += 1

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        self._is_open = True
        meta = Meta(epoch=self._epoch, name=self._name, first_seq=self._first_seq, head=self._head, stamp=self._stamp)
        puts = [TableWrite(table, key, value) for table in LOADED_TABLES for key, value in self._tables[table].items()]
        return meta, puts

    async def close(self) -> None:
        self._is_open = False

    async def verify(self) -> None:
        if not self._is_open:
            raise LedgerError("The ledger is closed; open it first.")

    async def lookup(self, wanted: LookupRequest) -> Facts:
        facts = Facts()
        for key in wanted.keys:
            known = self._keys.get(key)
            if known is not None:
                facts.stored[key] = known
        for seq in wanted.seqs:
            row = self._rows.get(seq)
            if row is not None and row.head is not None:
                facts.heads[seq] = row.head
                budget = self._tables["root"].get(str(row.head.root))
                if budget is not None:
                    facts.cold["root", str(row.head.root)] = budget
        for table, name in wanted.cold:
            value = self._tables[table].get(name)
            if value is not None:
                facts.cold[table, name] = value
        return facts

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        if not self._is_open:
            raise LedgerError("The ledger is closed; open it before appending.")
        keyed = {(row.actor, row.key): row for row in rows if row.key}
        if not keyed.keys().isdisjoint(self._keys.keys()):
            raise KeyTaken
        self._keys.update(keyed)
        for row in rows:
            seq = row.seq
            self._rows[seq] = row
            self._order.append(seq)
            if row.target:
                self._targets[row.target].append(seq)
                if row.head is not None and row.head.kind in PRIVATE:
                    self._sent[row.actor].append(seq)
            if row.type == "record":
                self._records[f"{row.actor}/{row.label}"].append(seq)
            if row.stream:
                (self._threads if row.type == "message" else self._reactions)[row.stream].append(seq)
        if rows:
            self._head, self._stamp = rows[-1].seq, rows[-1].at
        for put in puts:
            if put.table in VOLATILE_TABLES:
                continue
            if put.value is None:
                self._tables[put.table].pop(put.key, None)
            else:
                self._tables[put.table][put.key] = put.value

    def check(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        """Nothing is encoded here: everything can be stored."""

    async def inbox(
        self,
        spans: Sequence[Span],
        sender: str,
        after: int,
        until: int,
        limit: int,
        *,
        newest: bool = False,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        return self._page(self._inbox(spans, sender, after, until, newest=newest), limit, max_bytes, newest=newest)

    def _inbox(
        self, spans: Sequence[Span], sender: str, after: int, until: int, *, newest: bool = False
    ) -> Iterator[int]:
        ranges = [
            _between(self._targets.get(span.target, []), max(after, span.after), _end(span, until)) for span in spans
        ]
        ranges.append(_between(self._sent.get(sender, []), after, until + 1))
        if newest:
            ranges = [seqs[::-1] for seqs in ranges]
        return (seq for seq, _ in groupby(merge(*ranges, reverse=newest)))

    def _page(self, seqs: Iterable[int], limit: int, max_bytes: int, *, newest: bool) -> Page:
        return take_page((self._rows[seq] for seq in seqs), limit, max_bytes, newest=newest)

    async def thread(
        self,
        stream: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int,
        newest: bool = True,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        seqs = self._threads.get(stream, [])
        low = bisect_right(seqs, after)
        high = len(seqs) if before is None else bisect_left(seqs, before)
        chosen = seqs[max(low, high - limit - 1) : high][::-1] if newest else seqs[low : min(high, low + limit + 1)]
        return self._page(chosen, limit, max_bytes, newest=newest)

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        seqs = self._reactions.get(reaction, [])
        found = (seq for seq in seqs[bisect_right(seqs, after) :] if actor in (None, self._rows[seq].actor))
        return self._page(found, limit, max_bytes, newest=False)

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        return self._heads(islice(self._inbox(spans, sender, after, until, newest=True), limit))

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        end = before if before is not None else 2**62
        between = {stream: _between(self._threads.get(stream, []), seq, end) for stream, seq in after.items()}
        return {stream: self._heads(islice(reversed(seqs), limit)) for stream, seqs in between.items()}

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        return {it: self._threads[it][0] for it in threads if self._threads.get(it)}

    def _heads(self, seqs: Iterable[int]) -> list[HeadAt]:
        return [(seq, self._rows[seq].head) for seq in seqs]

    async def threads(
        self,
        spans: Sequence[Span],
        sender: str,
        *,
        before: int | None = None,
        limit: int = 2**31,
        among: Collection[str] | None = None,
    ) -> list[ThreadSummary]:
        last = self._order[-1] if self._order else 0
        rows = (self._rows[seq] for seq in self._inbox(spans, sender, 0, last))
        said = (row for row in rows if row.type == "message" and _is_readable(row, spans, sender))
        if among is not None:
            said = (row for row in said if row.stream in among)
        return _summarise(said, before, limit)

    async def search(
        self,
        terms: Sequence[str],
        spans: Sequence[Span] | None,
        sender: str,
        *,
        stream: str | None = None,
        before: int | None = None,
        limit: int,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Found:
        until = self._head if before is None else before - 1
        return Found(*take_page(self._search(terms, spans, sender, stream, until), limit, max_bytes, newest=True))

    async def search_seqs(
        self,
        terms: Sequence[str],
        spans: Sequence[Span],
        sender: str,
        *,
        stream: str | None = None,
        before: int,
        limit: int,
    ) -> list[int]:
        return [row.seq for row in islice(self._search(terms, spans, sender, stream, before - 1), limit)]

    def _search(
        self, terms: Sequence[str], spans: Sequence[Span] | None, sender: str, stream: str | None, until: int
    ) -> Iterator[Row]:
        descending_key = (self._rows[seq] for seq in reversed(self._order[: bisect_right(self._order, until)]))
        return (row for row in descending_key if is_within(row, spans, sender, stream) and holds(row, terms))

    async def forget_dropped(self) -> None:
        """Nothing is kept beside the log."""

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        said = (row for row in self._rows.values() if row.type == "message")
        return _summarise((row for row in said if among is None or row.stream in among), before, limit)

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        found = {seq: self._rows[seq] for seq in seqs if seq in self._rows}
        return {seq: row for seq, row in found.items() if row.type in ("message", "damaged")}

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        return {seq: row.head for seq, row in (await self.messages(seqs)).items() if row.head is not None}

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        names = nsmallest(limit, (key for key in self._tables[table] if key.startswith(prefix) and key > after))
        return [(name, self._tables[table][name]) for name in names]

    async def lookup_cold(self, table: Table, key: str) -> Any:
        return self._tables[table].get(key)

    async def expire_calls(self, before: int) -> None:
        calls = self._tables["call"]
        for key in [key for key, call in calls.items() if call.at < before]:
            del calls[key]

    async def trim(self, trim: Trim) -> Trimmed:
        old = [seq for seq in self._order if _is_old(self._rows[seq], trim)]  # sizes are not counted in memory
        doomed = [seq for seq in old if seq < trim.pinned][: trim.limit]
        for seq in doomed:
            row = self._rows.pop(seq)
            self._keys.pop((row.actor, row.key), None)
            if row.type != "record":
                self._first_seq = max(self._first_seq, seq + 1)
        gone = set(doomed)
        self._order = [seq for seq in self._order if seq not in gone]
        for index in (self._targets, self._threads, self._reactions, self._sent, self._records):
            for name in index:
                index[name] = [seq for seq in index[name] if seq not in gone]
        if doomed:
            self._drop_cold()
        return Trimmed(dropped=len(doomed), first_seq=self._first_seq, is_held=any(seq >= trim.pinned for seq in old))

    def _drop_cold(self) -> None:
        """Forget what is kept about dropped messages, as the other ledger does."""
        for table in (*KEPT_WITH, *KEYED_BY_SEQ):
            values = self._tables[table].items()
            self._tables[table] = {key: it for key, it in values if seq_of(table, key, it) >= self._first_seq}

    async def records(
        self,
        agent_id: str,
        kind: str,
        after: int,
        limit: int,
        *,
        reaction: str | None = None,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:
        seqs = self._records.get(f"{agent_id}/{kind}", [])
        found = (seq for seq in seqs[bisect_right(seqs, after) :] if reaction in (None, self._rows[seq].stream))
        return self._page(found, limit, max_bytes, newest=False)

    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        start = bisect_right(self._order, after)
        chosen = self._order[start : start + limit]
        return self._page(chosen, limit, 2**62 if max_bytes is None else max_bytes, newest=False).rows


def _is_readable(row: Row, spans: Sequence[Span], sender: str) -> bool:
    """Whether one of the messages that `inbox` gives may be read. A reply may be read where the message that began its
    thread lies in the spans too, or where the reply's own span has open threads. One's own are read wherever they
    are."""
    start = thread_start(row.stream)
    is_begun_there = start is None or any(
        it.target == row.target
        and (
            it.after < start < (it.before or 2**63)
            or (it.has_open_threads and it.after < row.seq < (it.before or 2**63))
        )
        for it in spans
    )
    return row.actor == sender or (sender not in row.excluded and is_begun_there)


def _summarise(rows: Iterable[Row], before: int | None, limit: int) -> list[ThreadSummary]:
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        last, count = counts.get(row.stream, (0, 0))
        counts[row.stream] = (max(last, row.seq), count + 1)
    below = (item for item in counts.items() if before is None or item[1][0] < before)
    descending_key = nsmallest(limit, below, key=lambda item: -item[1][0])
    return [ThreadSummary(thread_id, last, count) for thread_id, (last, count) in descending_key]


def _is_old(row: Row, trim: Trim) -> bool:
    before = trim.records_before if row.type == "record" else trim.messages_before
    return before is not None and row.at < before


def _end(span: Span, until: int) -> int:
    return until + 1 if span.before is None else min(span.before, until + 1)


def _between(seqs: Sequence[int], after: int, before: int) -> Sequence[int]:
    return seqs[bisect_right(seqs, after) : bisect_left(seqs, before)]
