"""`SQLiteLedger`: the durable ledger, one file in WAL mode.

One connection writes and two read, each on its own thread. `append` is one transaction. With ``durability="full"`` it
is on the disk when `append` returns: ``synchronous=FULL`` is set on the connection, because the file does not store
this setting. The statements are in `writes`, `queries` and `retention`, the tables in `schema`, and the checks of a
file that is opened in `opening`. `database_lock` keeps other nodes away, and detects if the file is exchanged. Every
error of SQLite is raised as `LedgerError`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roundelay.network.config import Durability
from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.tables import Facts, LookupRequest, Table, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import boot_id

from . import MAX_PAGE_BYTES, HeadAt, Meta, Page, SearchPage, ThreadSummary, Trim, Trimmed, TrimStep, collect_page
from .backup import rescue
from .connection import SqliteConnection
from .database_lock import DatabaseLock
from .memtable import FLUSHED_TO, Memtable, load_memtable
from .opening import begins_new_history, configure, mark_open, refuse_damage, refuse_foreign_wal, refuse_other_history
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
    inbox_values,
    list_calls,
    list_cold,
    list_first_seqs,
    list_newest_heads,
    load_meta,
    load_state,
    read_heads,
    select_at_place,
)
from .retention import Marks, TrimProgress, apply_trim, plan_trim, read_beginning, read_head, read_marks, read_stamp
from .row_reader import FAILURES, Damage, read_rows
from .schema import CHECKED_FROM, ROW_COLUMNS, SCHEMA_VERSION, migrate, refuse_schema
from .search import SearchIndex, holds, is_within
from .storage_errors import explain
from .writes import check_batch, encode_batch, flush_memtable, store_batch, write_meta

EXPIRY_STEP = 1000
"""Number of call results that are examined at a time."""
INDEX_STEP = 500
"""Number of messages that are added to the search index at a time."""
MAX_SEARCHED, SEARCH_STEP = 4000, 1000
"""Number of messages that one search examines if few of them are within its spans, and the maximum at a time."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class SQLiteLedger:
    """A `Ledger` in one SQLite file.

    ``new_epoch`` returns the string that marks a new history. A history begins in three cases: at creation, if the file
    is an older copy of the stored data, and after an unclean stop that may have lost acknowledged rows. The last case
    requires that ``durability`` is not ``full`` and the machine was restarted. ``boot`` identifies the boot of the
    machine, and is empty if unknown. The file of an index of a shared log needs ``is_index``: otherwise it would begin
    its own history.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        new_epoch: Callable[[], str],
        name: str = "roundelay",
        durability: Durability = "full",
        boot: str | None = None,
        is_index: bool = False,
    ) -> None:
        self.path = Path(path)
        self._memtable = Memtable(0)
        self._is_index = is_index
        self._new_epoch = new_epoch
        self._name = name
        self._durability = durability
        self._boot = boot_id() if boot is None else boot
        self._lock = DatabaseLock(self.path)
        self._writer: SqliteConnection | None = None
        self._reader: SqliteConnection | None = None
        """Connection for deliveries."""
        self._browser: SqliteConnection | None = None
        """Connection for requests, because a long request must not delay deliveries."""
        self._index: SearchIndex | None = None
        self._epoch = ""
        self._first = 1
        """Seq below which no message is kept."""
        self._head = 0
        """Newest seq that this object has stored or found. A reopened file must have this seq."""
        self._is_suspect = False
        """Whether SQLite has found damage since the last check of the file."""
        self._damage = Damage(self._log_damaged)
        self._is_rescued = False
        """Whether the content of the deleted database was saved as ``FILE.rescued``."""

    # --- lifetime

    @property
    def is_answering(self) -> bool:
        return True  # there is no engine

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        # Held from before SQLite opens the file until after it has closed it (`database_lock`). A reopened file must
        # exist: a new file would be an empty history.
        self._lock.acquire(create=not self._epoch)
        try:
            refuse_foreign_wal(self._lock, self.path)
            self._writer = await self._connect()
            meta, writes = await self._run(self._writer, self._prepare)
            self._reader = await self._connect()
            self._browser = await self._connect()
            self._index = SearchIndex(Path(f"{self.path}.search"))
        except BaseException:
            await self.close()
            raise
        return meta, writes

    async def reload(self) -> tuple[Meta, list[TableWrite]]:
        """Return the result of `open` for the current state."""

        def load(db: sqlite3.Connection) -> tuple[Meta, list[TableWrite]]:
            meta, head, stamp = load_meta(db), read_head(db), read_stamp(self._damage, db)
            first = int(meta.get("first_seq", "1"))
            info = Meta(epoch=self._epoch, name=self._name, first_seq=first, head=head, stamp=stamp)
            return info, load_state(self._damage, db)

        return await self._run(self._writer, load)

    async def close(self) -> None:
        connections = (self._writer, self._browser, self._reader)
        writer, browser, _ = connections
        self._writer = self._browser = self._reader = None
        index, self._index = self._index, None
        if index is not None:
            await index.close()
        try:
            if writer is not None and browser is not None:  # a refused file stays unchanged
                with suppress(sqlite3.Error, LedgerError):  # a failing database stays marked as unclean
                    await writer.run(self._finish)
        finally:
            try:
                async with AsyncExitStack() as closing:
                    # closed in reverse, the writer last: the last one copies the WAL into the database
                    for connection in connections:
                        if connection is not None:
                            closing.push_async_callback(connection.close)
                if self._is_rescued:
                    self._lock.delete_wal()
            except sqlite3.Error as error:
                raise await asyncio.to_thread(self._explain, error) from error
            finally:
                self._is_rescued = False
                self._lock.release()  # whatever failed: otherwise no node could open the file again

    async def verify(self) -> None:
        await self._run(self._writer, lambda _: self._lock.check())

    async def _connect(self) -> SqliteConnection:
        connection = SqliteConnection(self.path)
        try:
            await connection.open()
        except sqlite3.Error as error:
            await connection.close()
            raise await asyncio.to_thread(self._explain, error) from error
        return connection

    async def _run(self, connection: SqliteConnection | None, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on a connection's thread. The function contains all statements of one task, because a change
        of threads costs more than a small transaction."""
        if connection is None:
            raise LedgerError(f"The ledger {self.path} is closed.")

        def guarded(db: sqlite3.Connection) -> T:
            try:
                return function(db)
            except FAILURES as error:
                raise self._explain(error) from error

        return await connection.run(guarded)

    async def _change(self, function: Callable[[sqlite3.Connection], T], *, head: int | None = None) -> T:
        """Run a function that writes, on the writer's thread. ``head`` is the newest seq afterwards, if it changes.

        The files are checked first: a row that was written into a file without a path must not be acknowledged.
        """

        def change(db: sqlite3.Connection) -> T:
            self._lock.check()
            result = function(db)
            self._lock.note_state()
            # after the commit, and before its answers: FILE.head is never ahead of the database
            if head is not None:
                self._lock.write_head(self._epoch, head)
                self._head = head
            return result

        return await self._run(self._writer, change)

    def _finish(self, db: sqlite3.Connection) -> None:
        """End the writer's work before it closes."""
        if self._lock.is_unlinked:
            self._is_rescued = rescue(db, self.path)
        try:
            self._lock.check()
        except LedgerError:
            if self._lock.is_overwritten:
                self._lock.block_wal_copy()
                self._is_suspect = True
            raise
        with suppress(sqlite3.Error):  # a full disk: the next start reads these rows again
            flush_memtable(self._memtable, db)
        write_meta(db, {"state": "clean"})

    @property
    def damaged(self) -> int:
        return len(self._damage.rows)

    def _log_damaged(self, row: int | str) -> None:
        where = {"seq": row} if isinstance(row, int) else {"row": row}
        log.error("a row of the ledger is damaged and left out", extra={**where, "database": str(self.path)})

    def _explain(self, error: Exception) -> LedgerError:
        """Return the error to raise instead. It asks the system for the cause that SQLite hides. So it runs on a
        thread: a hanging disk must not block the loop."""
        self._is_suspect = self._is_suspect or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT
        return explain(error, self.path)

    def _prepare(self, db: sqlite3.Connection) -> tuple[Meta, list[TableWrite]]:
        """Prepare the opened file: first the checks that may refuse it, then loading, and last marking it as open."""
        refuse_schema(db)  # before any change: another program's database stays unchanged
        configure(db)
        self._lock.note_state()
        if self._is_suspect:
            refuse_damage(db, self.path)
            self._is_suspect = False
        if self._epoch:
            refuse_other_history(db, self.path, self._epoch, self._head)
        migrate(db)
        if not self._is_index and db.execute("SELECT 1 FROM state WHERE tbl = 'followed'").fetchone():
            raise LedgerError(
                f"{self.path} is a node's index of a shared log, and holds nothing of its own: name the log with --log."
            )
        meta = load_meta(db, (CHECKED_FROM, FLUSHED_TO))
        self._damage.restart(int(meta[CHECKED_FROM]))
        writes = load_state(self._damage, db)
        first, head = int(meta.get("first_seq", "1")), read_head(db)
        self._first = first
        self._memtable = load_memtable(db, int(meta[FLUSHED_TO]))
        stamp = read_stamp(self._damage, db)  # no older timestamp is assigned
        name = meta.get("name", self._name)
        epoch = meta.get("epoch", "")
        # A failed sync may have lost pages without a sign. So a ledger that was reopened after a failure does not rely
        # on the data that the kernel kept.
        boot = "" if self._epoch else self._boot
        if begins_new_history(meta, head, self._lock.read_head(), boot=boot, durability=self._durability):
            if epoch and not self._is_index:  # an index gets lost rows from its log again, and the epoch too
                log.warning("a new epoch begins: the database may have lost its newest messages", extra={"head": head})
            epoch = self._new_epoch()
        mark_open(db, self._lock, epoch, head, name=name, boot=self._boot, durability=self._durability)
        # Last: `refuse_other_history` compares a reopened file with these values, so they must name only stored rows.
        self._epoch, self._head = epoch, head
        return Meta(epoch=epoch, name=name, first_seq=first, head=head, stamp=stamp), writes

    # --- writing

    async def append(
        self, rows: Sequence[Row], writes: Sequence[TableWrite], *, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Like `Ledger.append`. ``before_commit`` is called on the writer's thread before the transaction is committed.
        If it raises, the transaction is rolled back."""
        change = partial(store_batch, encode_batch(rows, writes), self._memtable, before_commit)
        await self._change(change, head=rows[-1].seq if rows else None)

    def check(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        check_batch(encode_batch(rows, writes))

    # --- reading

    async def lookup(self, request: LookupRequest) -> Facts:
        if not request:
            return Facts()
        # on the writer's connection: it sees its own last commit without a new read transaction
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
        values = inbox_values(spans, sender, after, until, limit + 1, self._memtable, newest=newest)
        sql = INBOX.replace("{columns}", ROW_COLUMNS).replace("{order}", "DESC" if newest else "ASC")
        # windows read the newest messages, deliveries the oldest
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
        rows = self._memtable.find([(place, after, end)], limit + 1, newest=newest)
        sql, values = select_at_place(place, after, end, rows, limit + 1, order="DESC" if newest else "ASC")
        return await self._read_page(self._browser, sql, values, limit, max_bytes, newest)

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        # no separate place: nearly all records of a reaction are its agent's
        where = None if actor is None else ("actor", actor)
        return await self._read_place(f"re/{reaction}", after, limit, max_bytes, where)

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        values = inbox_values(spans, sender, after, until, limit, self._memtable, newest=True)
        sql = INBOX.replace("{columns}", HEAD_COLUMNS).replace("{order}", "DESC")
        return await self._run(self._browser, partial(read_heads, sql, values))

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        end = before if before is not None else 2**62
        ranges = {
            stream: (seq, self._memtable.find([(f"in/{stream}", seq, end)], limit, newest=True))
            for stream, seq in after.items()
        }
        return await self._run(self._browser, partial(list_newest_heads, ranges, end, limit))

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        newest = {stream: self._memtable.find([(f"in/{stream}", 0, 2**62)], 1) for stream in threads}
        return await self._run(self._browser, partial(list_first_seqs, newest))

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

        def collect(rows: Iterator[Row]) -> Page:
            matching = (row for row in rows if is_within(row, spans, sender, stream) and holds(row, terms))
            return collect_page(matching, limit + 1, max_bytes, newest=True)

        end, matches, size = before if before is not None else 2**62, list[Row](), 0
        searched, step = 0, limit + 1
        while len(matches) <= limit and size <= max_bytes:
            if searched >= MAX_SEARCHED:
                return SearchPage(matches[::-1], True, end)
            # The index proposes and the log decides: words that were indexed from a damaged or deleted row are filtered
            # here.
            seqs = await index.find(terms, spans, sender, stream, end, step)
            if not seqs:
                break
            page = await self._read(self._browser, NEWEST_BY_SEQ, [json.dumps(seqs)], collect)
            matches += reversed(page.rows)
            size += sum(len(row.data) for row in page.rows)
            end = page.rows[0].seq if page.has_more else seqs[-1]
            # each `find` scans all matching words again, so take more at a time if few rows are within the spans
            searched, step = searched + len(seqs), min(step * 4, SEARCH_STEP)
        return SearchPage(*collect_page(matches, limit, max_bytes, newest=True))

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
        """Return the search index, with every message in it."""
        if self._index is None:
            raise LedgerError(f"The ledger {self.path} is closed.")
        index = self._index
        await index.catch_up(f"{self._epoch}/{self._boot}", self._first, self._head, self._list_messages)
        return index

    async def _list_messages(self, after: int) -> list[Row]:
        sql = f"SELECT {ROW_COLUMNS} FROM log WHERE seq > ? AND type = 'message' ORDER BY seq LIMIT ?"
        return (await self._read_page(self._browser, sql, (after, INDEX_STEP), INDEX_STEP, MAX_PAGE_BYTES)).rows

    async def forget_dropped(self) -> None:
        if self._index is not None:
            await self._index.forget(self._first)

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
        def collect(rows: Iterator[Row]) -> dict[int, Row]:
            return {row.seq: row for row in rows if row.type in ("message", "damaged")}

        return await self._read(self._reader, BY_SEQ, [json.dumps(list(seqs))], collect)

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        def collect(rows: Iterator[Row]) -> dict[int, MessageHead]:  # one whole row in memory at a time
            return {row.seq: row.head for row in rows if row.head is not None}

        return await self._read(self._browser, BY_SEQ, [json.dumps(list(seqs))], collect)

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        return await self._run(self._browser, partial(list_cold, self._damage, table, prefix, limit, after))

    async def lookup_cold(self, table: Table, key: str) -> Any:
        return await self._run(self._browser, partial(find_cold, self._damage, table, key))

    async def expire_calls(self, before: int) -> None:
        after: str | None = ""
        while after is not None:
            old, next_after = await self.find_old_calls(before, after)
            if old:
                # Check the time again in the transaction: a repeated call may have a new result by now.
                await self._change(partial(drop_calls, old, before))
            after = next_after

    async def find_old_calls(self, before: int, after: str) -> tuple[list[str], str | None]:
        """Examine some calls after the key ``after``. Return the keys whose results are older than a time (ms), and the
        last examined key, or None at the end. Does not block the writer."""
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
        """Return the step that `trim` would delete now, or None, and whether the pin keeps old rows."""
        return await self._run(self._writer, partial(plan_trim, trim, self._damage))

    async def drop(self, step: TrimStep) -> int:
        """Delete everything in a step, in several transactions. Return the number of deleted rows. Rows deleted earlier
        do not count, so an interrupted call can be repeated."""
        progress, dropped = await self._apply_trim(step), 0
        while not progress.is_done:
            dropped += progress.dropped
            progress = await self._apply_trim(step)
        return dropped + progress.dropped

    async def _apply_trim(self, step: TrimStep) -> TrimProgress:
        progress = await self._change(partial(apply_trim, step, self._damage, self._memtable))
        self._first = progress.first_seq
        return progress

    async def read_beginning(self) -> TrimStep:
        """Return how much was deleted so far."""
        return await self._run(self._writer, partial(read_beginning, self._damage))

    async def holds_up_to(self, seq: int) -> bool:
        """Return whether any row up to a seq still exists."""
        sql = "SELECT EXISTS (SELECT 1 FROM log WHERE seq <= ?)"
        return bool(await self._run(self._writer, lambda db: db.execute(sql, (seq,)).fetchone()[0]))

    async def read_marks(self) -> Marks:
        """Return the seqs at which messages and records begin."""
        return await self._run(self._writer, read_marks)

    @property
    def head(self) -> int:
        """Newest seq."""
        return self._head

    @property
    def first_seq(self) -> int:
        """Smallest seq whose message can still be delivered."""
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
        # by the agent's records of the kind: other agents may use the same reaction id, and their rows would be read
        where = None if reaction is None else ("stream", reaction)
        return await self._read_place(f"of/{agent_id}/{kind}", after, limit, max_bytes, where)

    async def _read_place(
        self, place: str, after: int, limit: int, max_bytes: int, where: tuple[str, str] | None
    ) -> Page:
        """Return a page of the rows at a place, ascending. ``where`` is the argument of `select_at_place`."""
        rows = self._memtable.find([(place, after, 2**62)], limit + 1 if where is None else -1)
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
        """Return a page of a query that returns at most one row beyond it. ``newest`` says that its rows descend."""
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
