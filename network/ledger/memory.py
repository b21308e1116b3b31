"""`MemoryLedger`: a ledger in memory, for tests, simulations and nodes that need no persistence. Its content is lost
when the process ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge, nsmallest
from itertools import groupby, islice
from typing import Any

from roundelay.network.addresses import thread_start
from roundelay.network.core.revisions import REVISIONS, list_revised, revise_all
from roundelay.network.core.rows import MessageHead, Row, Span, damaged_row
from roundelay.network.core.tables import (
    LOADED_TABLES,
    VOLATILE_TABLES,
    Facts,
    LookupRequest,
    Table,
    TableWrite,
)
from roundelay.network.errors import LedgerError

from . import (
    KEYED_BY_SEQ,
    MAX_PAGE_BYTES,
    RETENTION_FIELDS,
    HeadAt,
    KeyTaken,
    Meta,
    Page,
    SearchPage,
    ThreadSummary,
    Trim,
    Trimmed,
    collect_page,
    retention_seq,
)
from .row_encoding import list_places
from .search import holds, is_within


class _RowStore:
    """Rows by seq, by idempotency key and by place (`row_encoding.list_places`)."""

    def __init__(self) -> None:
        self.by_seq: dict[int, Row] = {}
        self.by_key: dict[tuple[str, str], Row] = {}
        self.order: list[int] = []
        self._places: dict[str, list[int]] = defaultdict(list)

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.by_seq[row.seq] = row
            self.order.append(row.seq)
            if row.key:
                self.by_key[row.actor, row.key] = row
            for place in list_places(row):
                self._places[place].append(row.seq)

    def replace(self, row: Row) -> None:
        """Replace a row by another row with the same seq. Its key and places stay the same."""
        old = self.by_seq[row.seq]
        self.by_seq[row.seq] = row
        if old.key:
            self.by_key[old.actor, old.key] = row

    def drop(self, seqs: Collection[int]) -> None:
        gone = frozenset(seqs)
        for seq in gone:
            row = self.by_seq.pop(seq)
            self.by_key.pop((row.actor, row.key), None)
        self.order = [seq for seq in self.order if seq not in gone]
        for place in self._places:
            self._places[place] = [seq for seq in self._places[place] if seq not in gone]

    def at(self, place: str, after: int = 0, before: int = 2**62) -> Sequence[int]:
        """Return the seqs of the rows at a place with ``after`` < seq < ``before``, ascending."""
        seqs = self._places.get(place, [])
        return seqs[bisect_right(seqs, after) : bisect_left(seqs, before)]

    def inbox(
        self, spans: Sequence[Span], sender: str, after: int, until: int, *, newest: bool = False
    ) -> Iterator[int]:
        """Yield the seqs of the messages that `Ledger.inbox` returns."""
        ranges = [
            self.at(f"to/{span.target}", max(after, span.after), min(span.before or 2**62, until + 1)) for span in spans
        ]
        # Include the sender's own messages, because the sender's other sessions receive them too.
        ranges.append(self.at(f"by/{sender}", after, until + 1))
        if newest:
            ranges = [seqs[::-1] for seqs in ranges]
        # A message may be in several ranges, but must be returned only once.
        return (seq for seq, _ in groupby(merge(*ranges, reverse=newest)))

    def page(self, seqs: Iterable[int], limit: int, max_bytes: int, *, newest: bool = False) -> Page:
        return collect_page((self.by_seq[seq] for seq in seqs), limit, max_bytes, newest=newest)

    def heads(self, seqs: Iterable[int]) -> list[HeadAt]:
        return [(seq, self.by_seq[seq].head) for seq in seqs]


class MemoryLedger:
    """A `Ledger` in dictionaries and sorted lists. When the same object is opened again, it still contains all appended
    rows."""

    def __init__(self, *, epoch: str, name: str = "roundelay") -> None:
        self._epoch = epoch
        self._name = name
        self._is_open = False
        self._first_seq = 1
        self._head = self._stamp = 0  # seq and timestamp of the newest row, even if retention has deleted the row
        self._rows = _RowStore()
        self._tables: dict[str, dict[str, Any]] = defaultdict(dict)
        self.damaged = 0
        self.is_answering = True

    def damage(self, seq: int) -> None:
        """Damage a row, for tests and simulations. Its key and places stay readable, as they may after damage on a
        disk."""
        self._rows.replace(damaged_row(seq))
        self.damaged += 1

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        self._is_open = True
        meta = Meta(epoch=self._epoch, name=self._name, first_seq=self._first_seq, head=self._head, stamp=self._stamp)
        writes = [
            TableWrite(table, key, value) for table in LOADED_TABLES for key, value in self._tables[table].items()
        ]
        return meta, writes

    async def close(self) -> None:
        self._is_open = False

    async def verify(self) -> None:
        if not self._is_open:
            raise LedgerError("The ledger is closed. Open it first.")

    async def lookup(self, request: LookupRequest) -> Facts:
        facts = self.recall(request)
        for key in request.keys:
            row = self._rows.by_key.get(key)
            if row is not None:
                facts.stored[key] = row
        return facts

    def recall(self, request: LookupRequest) -> Facts:
        facts = Facts()
        for seq in request.seqs:
            row = self._rows.by_seq.get(seq)
            if row is not None and row.head is not None:
                facts.heads[seq] = row.head
                budget = self._tables["root"].get(str(row.head.root))
                if budget is not None:
                    facts.cold["root", str(row.head.root)] = budget
        for table, name in request.cold:
            value = self._tables[table].get(name)
            if value is not None:
                facts.cold[table, name] = value
        return facts

    async def append(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        if not self._is_open:
            raise LedgerError("The ledger is closed. Open it before appending.")
        # Check all rows before adding any. If one row is refused, nothing may be stored.
        if any(row.key and (row.actor, row.key) in self._rows.by_key for row in rows):
            raise KeyTaken
        self._rows.add(rows)
        for change in rows:
            if change.type in REVISIONS:
                named = (self._rows.by_seq.get(seq) for seq in list_revised(change))
                for row in revise_all((row for row in named if row is not None), [change]).values():
                    self._rows.replace(row)
        if rows:
            self._head, self._stamp = rows[-1].seq, rows[-1].at
        for write in writes:
            if write.table in VOLATILE_TABLES:
                continue
            if write.value is None:
                self._tables[write.table].pop(write.key, None)
            else:
                self._tables[write.table][write.key] = write.value

    def check(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Accept all rows and writes. This ledger encodes nothing."""

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
        seqs = self._rows.inbox(spans, sender, after, until, newest=newest)
        return self._rows.page(seqs, limit, max_bytes, newest=newest)

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
        seqs = self._rows.at(f"in/{stream}", after, 2**62 if before is None else before)
        chosen = seqs[-limit - 1 :][::-1] if newest else seqs[: limit + 1]
        return self._rows.page(chosen, limit, max_bytes, newest=newest)

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        seqs = self._rows.at(f"re/{reaction}", after)
        return self._rows.page((seq for seq in seqs if actor in (None, self._rows.by_seq[seq].actor)), limit, max_bytes)

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        return self._rows.heads(islice(self._rows.inbox(spans, sender, after, until, newest=True), limit))

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        end = before if before is not None else 2**62
        return {
            stream: self._rows.heads(islice(reversed(self._rows.at(f"in/{stream}", seq, end)), limit))
            for stream, seq in after.items()
        }

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        return {stream: seqs[0] for stream in threads if (seqs := self._rows.at(f"in/{stream}"))}

    async def threads(
        self,
        spans: Sequence[Span],
        sender: str,
        *,
        before: int | None = None,
        limit: int = 2**31,
        among: Collection[str] | None = None,
    ) -> list[ThreadSummary]:
        rows = (self._rows.by_seq[seq] for seq in self._rows.inbox(spans, sender, 0, self._head))
        readable = (row for row in rows if row.type == "message" and _is_readable(row, spans, sender))
        return _summarize(readable, before, limit, among)

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
    ) -> SearchPage:
        until = self._head if before is None else before - 1
        return SearchPage(
            *collect_page(self._search(terms, spans, sender, stream, until), limit, max_bytes, newest=True)
        )

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
        order = self._rows.order
        newest_first = (self._rows.by_seq[seq] for seq in reversed(order[: bisect_right(order, until)]))
        return (row for row in newest_first if is_within(row, spans, sender, stream) and holds(row, terms))

    async def forget_dropped(self) -> None:
        """Do nothing. This ledger has no search index."""

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        messages = (row for row in self._rows.by_seq.values() if row.type == "message")
        return _summarize(messages, before, limit, among)

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        rows = {seq: self._rows.by_seq[seq] for seq in seqs if seq in self._rows.by_seq}
        return {seq: row for seq, row in rows.items() if row.type in ("message", "damaged")}

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        return {seq: row.head for seq, row in (await self.messages(seqs)).items() if row.head is not None}

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        keys = nsmallest(limit, (key for key in self._tables[table] if key.startswith(prefix) and key > after))
        return [(key, self._tables[table][key]) for key in keys]

    async def lookup_cold(self, table: Table, key: str) -> Any:
        return self._tables[table].get(key)

    async def expire_calls(self, before: int) -> None:
        calls = self._tables["call"]
        for key in [key for key, call in calls.items() if call.at < before]:
            del calls[key]

    async def trim(self, trim: Trim) -> Trimmed:
        # Size limits do not apply to this ledger.
        old = [seq for seq in self._rows.order if _is_old(self._rows.by_seq[seq], trim)]
        dropped = [seq for seq in old if seq < trim.pinned][: trim.limit]
        messages = [seq for seq in dropped if self._rows.by_seq[seq].type != "record"]
        self._first_seq = max(self._first_seq, *(seq + 1 for seq in messages), 0)
        if dropped:
            self._rows.drop(dropped)
            self._drop_values()
        is_pinned = any(seq >= trim.pinned for seq in old)
        return Trimmed(dropped=len(dropped), first_seq=self._first_seq, is_pinned=is_pinned)

    def _drop_values(self) -> None:
        """Delete the values that belong to deleted messages, as `retention.apply_trim` does."""
        for table in (*RETENTION_FIELDS, *KEYED_BY_SEQ):
            values = self._tables[table].items()
            self._tables[table] = {
                key: value for key, value in values if retention_seq(table, key, value) >= self._first_seq
            }

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
        seqs = self._rows.at(f"of/{agent_id}/{kind}", after)
        chosen = (seq for seq in seqs if reaction in (None, self._rows.by_seq[seq].stream))
        return self._rows.page(chosen, limit, max_bytes)

    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        start = bisect_right(self._rows.order, after)
        chosen = self._rows.order[start : start + limit]
        return self._rows.page(chosen, limit, 2**62 if max_bytes is None else max_bytes).rows


def _is_readable(row: Row, spans: Sequence[Span], sender: str) -> bool:
    """Return whether the reader of an inbox may read a message.

    A reply is readable if the first message of its thread is in the same span, or if the span that contains the reply
    has open threads. The reader's own messages are always readable.
    """
    start = thread_start(row.stream)
    is_thread_readable = start is None or any(
        span.target == row.target
        and (
            span.after < start < (span.before or 2**63)
            or (span.has_open_threads and span.after < row.seq < (span.before or 2**63))
        )
        for span in spans
    )
    return row.actor == sender or (sender not in row.excluded and is_thread_readable)


def _summarize(
    rows: Iterable[Row], before: int | None, limit: int, among: Collection[str] | None
) -> list[ThreadSummary]:
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        if among is None or row.stream in among:
            last, count = counts.get(row.stream, (0, 0))
            counts[row.stream] = (max(last, row.seq), count + 1)
    below = (item for item in counts.items() if before is None or item[1][0] < before)
    newest_first = nsmallest(limit, below, key=lambda item: -item[1][0])
    return [ThreadSummary(thread_id, last, count) for thread_id, (last, count) in newest_first]


def _is_old(row: Row, trim: Trim) -> bool:
    before = trim.records_before if row.type == "record" else trim.messages_before
    return before is not None and row.at < before
