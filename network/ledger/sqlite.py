"""`SQLiteLedger`: the durable ledger, one file in WAL mode.

`append` is one transaction. With ``durability="full"``, the transaction is on the disk when `append` returns. The SQL
statements are in `writes`, `queries` and `retention`, and the tables in `schema`. `database_file` opens and checks the
file. Most reads of new rows are answered from memory (`newest_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from roundelay.network.config import Durability
from roundelay.network.core.revisions import REVISIONS, list_revised
from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.tables import Facts, LookupRequest, Table, TableWrite
from roundelay.network.errors import LedgerError

from . import (
    MAX_PAGE_BYTES,
    HeadAt,
    KeyTaken,
    LogFull,
    Page,
    SearchPage,
    ThreadSummary,
    Trim,
    Trimmed,
    TrimStep,
    Unstorable,
    collect_page,
)
from .connection import SqliteConnection
from .database_file import DatabaseFile
from .memtable import MemtableRows, Range
from .queries import (
    ALL_THREADS,
    BY_SEQ,
    HEAD_COLUMNS,
    INBOX,
    NEWEST_BY_SEQ,
    THREADS,
    THREADS_AMONG,
    answer_lookup,
    cut_spans,
    drop_calls,
    find_cold,
    inbox_ranges,
    inbox_values,
    list_calls,
    list_cold,
    list_first_seqs,
    list_newest_heads,
    read_heads,
    select_at_place,
)
from .retention import Marks, TrimProgress, apply_trim, plan_trim, read_beginning, read_marks
from .row_reader import read_rows
from .schema import ROW_COLUMNS, SCHEMA_VERSION
from .search import SearchIndex, collect_matches, holds, is_within
from .writes import check_batch, encode_batch, store_batch

EXPIRY_STEP = 1000
"""Maximum number of call results that are examined in one step."""
_INDEXED = ", ".join(f"'{type_}'" for type_ in ("message", *sorted(REVISIONS)))
INDEX_STEP = 500
"""Maximum number of messages that are added to the search index in one step."""

T = TypeVar("T")


class SQLiteLedger(DatabaseFile):
    """A `Ledger` in one SQLite file."""

    # --- writing

    async def append(
        self, rows: Sequence[Row], writes: Sequence[TableWrite], *, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Implement `Ledger.append`. ``before_commit`` is called on the writer's thread just before the transaction is
        committed. If it raises an error, the transaction is rolled back."""
        change = partial(store_batch, encode_batch(rows, writes), self._memtable, before_commit)
        revising = [seq for row in rows if row.type in REVISIONS for seq in list_revised(row)]
        self._newest.begin_revising(revising)
        try:
            revised = await self._change(change, head=rows[-1].seq if rows else None)
        except (KeyTaken, Unstorable, LogFull):  # nothing was stored
            self._newest.end_revising(revising, ())
            raise
        except BaseException:
            self._newest.forget()
            raise
        self._newest.add(rows, writes)
        if revising:
            self._newest.end_revising(revising, revised)
            self._has_revised = True

    def check(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        check_batch(encode_batch(rows, writes))

    # --- reading

    def recall(self, request: LookupRequest) -> Facts | None:
        return self._newest.recall(request)

    def _recall_rows(self, ranges: Iterable[Range], limit: int, *, newest: bool = False) -> list[Row] | None:
        """Return the first rows in these ranges, or with ``newest`` the last rows, descending. Return None if the file
        may contain more rows."""
        seqs = self._memtable.find_all(ranges, limit, newest=newest)
        if seqs is None:
            return None
        chosen = sorted(set(seqs), reverse=newest)[: limit if limit >= 0 else None]
        rows = self._newest.find(chosen)
        # Until a commit returns, its rows are in the memtable but not in the cache.
        return [*rows.values()] if rows is not None and len(rows) == len(chosen) else None

    async def lookup(self, request: LookupRequest) -> Facts:
        if not request:
            return Facts()
        # Use the writer's connection, which sees its own last commit without a new read transaction.
        return await self._run(self._writer, partial(answer_lookup, request, self._damage, self._memtable))

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
        rows = self._recall_rows(inbox_ranges(spans, sender, after, until), limit + 1, newest=newest)
        if rows is not None:
            return collect_page(rows, limit, max_bytes, newest=newest)
        values = inbox_values(spans, sender, after, until, limit + 1, self._memtable, newest=newest)
        sql = INBOX.replace("{columns}", ROW_COLUMNS).replace("{order}", "DESC" if newest else "ASC")
        # Use separate connections. Windows read the newest messages and deliveries read the oldest, so neither delays
        # the other.
        return await self._read_page(self._browser if newest else self._reader, sql, values, limit, max_bytes, newest)

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
        end = before if before is not None else 2**62
        place = f"in/{stream}"
        recalled = self._recall_rows([(place, after, end)], limit + 1, newest=newest)
        if recalled is not None:
            return collect_page(recalled, limit, max_bytes, newest=newest)
        rows = self._memtable.find([(place, after, end)], limit + 1, newest=newest)
        sql, values = select_at_place(place, after, end, rows, limit + 1, order="DESC" if newest else "ASC")
        return await self._read_page(self._browser, sql, values, limit, max_bytes, newest)

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        # Use the place of the reaction: nearly all records of a reaction were written by its agent.
        where = None if actor is None else ("actor", actor)
        return await self._read_place(f"re/{reaction}", after, limit, max_bytes, where)

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        rows = self._recall_rows(inbox_ranges(spans, sender, after, until), limit, newest=True)
        if rows is not None:
            return [(row.seq, row.head) for row in rows]
        values = inbox_values(spans, sender, after, until, limit, self._memtable, newest=True)
        sql = INBOX.replace("{columns}", HEAD_COLUMNS).replace("{order}", "DESC")
        return await self._run(self._browser, partial(read_heads, sql, values))

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        end = before if before is not None else 2**62
        heads: dict[str, list[HeadAt]] = {}
        ranges: dict[str, tuple[int, MemtableRows]] = {}
        for stream, seq in after.items():
            place = (f"in/{stream}", seq, end)
            rows = self._recall_rows([place], limit, newest=True)
            if rows is None:
                ranges[stream] = seq, self._memtable.find([place], limit, newest=True)
            else:
                heads[stream] = [(row.seq, row.head) for row in rows]
        return heads | (
            await self._run(self._browser, partial(list_newest_heads, ranges, end, limit)) if ranges else {}
        )

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        seqs: dict[str, int] = {}
        newest: dict[str, MemtableRows] = {}
        for stream in threads:
            place = (f"in/{stream}", 0, 2**62)
            recalled = self._memtable.find_all([place], 1)
            if recalled is None:
                newest[stream] = self._memtable.find([place], 1)
            elif recalled:
                seqs[stream] = recalled[0]
        return seqs | (await self._run(self._browser, partial(list_first_seqs, newest)) if newest else {})

    async def threads(
        self,
        spans: Sequence[Span],
        sender: str,
        *,
        before: int | None = None,
        limit: int = 2**31,
        among: Collection[str] | None = None,
    ) -> list[ThreadSummary]:
        end = before if before is not None else 2**62
        values = inbox_values(spans, sender, 0, 2**62, -1, self._memtable)
        sql = THREADS
        if among is not None:
            rows = self._memtable.find((f"in/{thread_id}", 0, 2**62) for thread_id in among)
            values = {
                "spans": json.dumps(cut_spans(spans, 0, 2**62)), "sender": sender, "threads": json.dumps(list(among)),
                "flushed_to": rows.flushed_to, "newest": json.dumps(rows.seqs),
            }  # fmt: skip
            sql = THREADS_AMONG
        return await self._list_threads(sql, {**values, "end": end, "most": limit})

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
        index = await self._update_search_index()

        async def find(end: int, step: int) -> list[int]:
            return await index.find(terms, spans, sender, stream, end, step)

        async def read(seqs: Sequence[int], collect: Callable[[Iterator[Row]], Page]) -> Page:
            return await self._read(self._browser, NEWEST_BY_SEQ, [json.dumps(seqs)], collect)

        def is_match(row: Row) -> bool:
            return is_within(row, spans, sender, stream) and holds(row, terms)

        return await collect_matches(find, read, is_match, before if before is not None else 2**62, limit, max_bytes)

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
        return await (await self._update_search_index()).find(terms, spans, sender, stream, before, limit)

    async def _update_search_index(self) -> SearchIndex:
        """Add all missing messages to the search index, and return the index."""
        if self._index is None:
            raise LedgerError(f"The ledger {self.path} is closed.")
        index = self._index
        await index.catch_up(f"{self._epoch}/{self._boot}", self._first, self._head, self._list_messages)
        return index

    async def _list_messages(self, after: int) -> list[Row]:
        sql = f"SELECT {ROW_COLUMNS} FROM log WHERE seq > ? AND type IN ({_INDEXED}) ORDER BY seq LIMIT ?"
        page = (await self._read_page(self._browser, sql, (after, INDEX_STEP), INDEX_STEP, MAX_PAGE_BYTES)).rows
        named = {seq for row in page if row.type in REVISIONS for seq in list_revised(row) if seq <= after}
        revised = await self.messages(named) if named else {}
        return [*revised.values(), *page]

    async def forget_dropped(self) -> None:
        if self._index is not None:
            await self._index.forget(self._first)
            if self._has_revised and self._index.exists:
                await self._update_search_index()
            self._has_revised = False

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        which = "place >= 'in/' AND place < 'in0'"  # '0' follows '/'
        if among is not None:
            which = "place IN (SELECT 'in/' || value FROM json_each(:threads))"
        flushed_to, newest = self._memtable.summarize("in/", among)
        values = {
            "end": before if before is not None else 2**62, "most": limit, "flushed_to": flushed_to,
            "newest": json.dumps(newest), "threads": json.dumps(list(among or ())),
        }  # fmt: skip
        return await self._list_threads(ALL_THREADS.replace("{which}", which), values)

    async def _list_threads(self, sql: str, values: Mapping[str, object]) -> list[ThreadSummary]:
        summaries = await self._run(self._browser, lambda db: db.execute(sql, values).fetchall())
        return [ThreadSummary(*columns) for columns in summaries]

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        seqs = [*seqs]
        recalled = self._newest.find(seqs)
        if recalled is not None:
            return {seq: row for seq, row in recalled.items() if row.type == "message"}

        def collect(rows: Iterator[Row]) -> dict[int, Row]:
            return {row.seq: row for row in rows if row.type in ("message", "damaged")}

        return await self._read(self._reader, BY_SEQ, [json.dumps(seqs)], collect)

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        seqs = [*seqs]
        recalled = self._newest.find(seqs)
        if recalled is not None:
            return {seq: row.head for seq, row in recalled.items() if row.head is not None}

        def collect(rows: Iterator[Row]) -> dict[int, MessageHead]:  # hold only one whole row in memory at a time
            return {row.seq: row.head for row in rows if row.head is not None}

        return await self._read(self._browser, BY_SEQ, [json.dumps(seqs)], collect)

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        return await self._run(self._browser, partial(list_cold, self._damage, table, prefix, limit, after))

    async def lookup_cold(self, table: Table, key: str) -> Any:
        if self._newest.knows_value(table, key):
            return self._newest.value(table, key)
        return await self._run(self._browser, partial(find_cold, self._damage, table, key))

    async def expire_calls(self, before: int) -> None:
        after: str | None = ""
        while after is not None:
            old, next_after = await self.find_old_calls(before, after)
            if old:
                # Check the time again in the transaction, because a repeated call may have got a new result since.
                await self._change(partial(drop_calls, old, before))
            after = next_after

    async def find_old_calls(self, before: int, after: str) -> tuple[list[str], str | None]:
        """Examine some calls after the key ``after``. Return the keys of calls whose results are older than ``before``
        (ms), and the last examined key. The last key is None at the end. Does not block the writer."""
        calls = await self._run(self._browser, partial(list_calls, after, EXPIRY_STEP))
        old = [key for key, at in calls if at is not None and at < before]
        return old, calls[-1][0] if len(calls) == EXPIRY_STEP else None

    async def trim(self, trim: Trim) -> Trimmed:
        step, is_pinned = await self.plan_trim(trim)
        if step is None:
            return Trimmed(dropped=0, first_seq=self._first, is_pinned=is_pinned)
        progress = await self._apply_trim(step)
        return Trimmed(dropped=progress.dropped, first_seq=progress.first_seq, is_pinned=is_pinned)

    async def plan_trim(self, trim: Trim) -> tuple[TrimStep | None, bool]:
        """Return the step that `trim` would delete now, and whether the pin keeps old rows. The step is None if nothing
        may be deleted."""
        return await self._run(self._writer, partial(plan_trim, trim, self._damage))

    async def drop(self, step: TrimStep) -> int:
        """Delete all rows of a step, in several transactions. Return the number of deleted rows. Rows that were already
        missing do not count, so an interrupted call can be repeated."""
        progress, dropped = await self._apply_trim(step), 0
        while not progress.is_done:
            dropped += progress.dropped
            progress = await self._apply_trim(step)
        return dropped + progress.dropped

    async def _apply_trim(self, step: TrimStep) -> TrimProgress:
        try:
            progress = await self._change(partial(apply_trim, step, self._damage, self._memtable))
        finally:
            self._newest.forget()  # the cache may contain deleted rows
        self._first = progress.first_seq
        return progress

    async def read_beginning(self) -> TrimStep:
        """Return a `TrimStep` that describes all deletions so far: the seqs at which the kept messages and the kept
        records begin."""
        return await self._run(self._writer, partial(read_beginning, self._damage))

    async def holds_up_to(self, seq: int) -> bool:
        """Return whether any row at or below a seq still exists."""
        sql = "SELECT EXISTS (SELECT 1 FROM log WHERE seq <= ?)"
        return bool(await self._run(self._writer, lambda db: db.execute(sql, (seq,)).fetchone()[0]))

    async def read_marks(self) -> Marks:
        """Return the lowest seqs that retention has kept (`Marks`)."""
        return await self._run(self._writer, read_marks)

    @property
    def head(self) -> int:
        """The newest seq."""
        return self._head

    @property
    def first_seq(self) -> int:
        """The lowest seq whose message can still be delivered."""
        return self._first

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
        # Use the place of the agent's records of this kind. Other agents may use the same reaction id, and the place of
        # the reaction also contains their rows.
        where = None if reaction is None else ("stream", reaction)
        return await self._read_place(f"of/{agent_id}/{kind}", after, limit, max_bytes, where)

    async def _read_place(
        self, place: str, after: int, limit: int, max_bytes: int, where: tuple[str, str] | None
    ) -> Page:
        """Return a page of the rows at a place, ascending. ``where`` has the same meaning as in `select_at_place`."""
        ranges, bound = [(place, after, 2**62)], limit + 1 if where is None else -1
        recalled = self._recall_rows(ranges, bound)
        if recalled is not None:
            matching = (row for row in recalled if where is None or getattr(row, where[0]) == where[1])
            return collect_page(matching, limit, max_bytes)
        rows = self._memtable.find(ranges, bound)
        sql, values = select_at_place(place, after, 2**62, rows, limit + 1, where=where)
        return await self._read_page(self._browser, sql, values, limit, max_bytes)

    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        sql = f"SELECT {ROW_COLUMNS} FROM log WHERE seq > ? ORDER BY seq LIMIT ?"
        bound = 2**62 if max_bytes is None else max_bytes
        return (await self._read_page(self._browser, sql, (after, limit), limit, bound)).rows

    async def _read_page(
        self,
        db: SqliteConnection | None,
        sql: str,
        values: Sequence[object] | Mapping[str, object],
        limit: int,
        max_bytes: int,
        newest: bool = False,
    ) -> Page:
        """Return a page of a query that returns at most one row beyond the page. ``newest`` says that the rows
        descend."""
        return await self._read(db, sql, values, lambda rows: collect_page(rows, limit, max_bytes, newest=newest))

    async def _read(
        self,
        db: SqliteConnection | None,
        sql: str,
        values: Sequence[object] | Mapping[str, object],
        collect: Callable[[Iterator[Row]], T],
    ) -> T:
        return await self._run(db, partial(read_rows, self._damage, sql, values, collect))


__all__ = ["SCHEMA_VERSION", "Durability", "SQLiteLedger"]
