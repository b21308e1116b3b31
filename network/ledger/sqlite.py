"""`SQLiteLedger`: the durable ledger, one file in WAL mode.

One connection writes and two read, each on a thread of its own. `append` is one transaction; with ``durability="full"``
it is on the disk when it returns (``synchronous=FULL`` is set on the connection: it is not stored in the file). What
the connections are asked is in `queries` and `upkeep`, the tables in `schema`; that the file is this node's alone, and
stays the same file, is for `files`. Raises `LedgerError` for whatever SQLite raises.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from roundelay.network.clock import random_number
from roundelay.network.config import Durability
from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.tables import Facts, LookupRequest, Table, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import boot_id

from . import MAX_PAGE_BYTES, Cut, Found, HeadAt, Meta, Page, ThreadSummary, Trim, Trimmed, take_page
from .database_lock import DatabaseLock, HeadFile, explain
from .memtable import PLACED_TO, Unplaced, load_unplaced
from .queries import (
    ALL_THREADS,
    BY_SEQ,
    FAILURES,
    INBOX,
    NEWEST_BY_SEQ,
    OF_HEADS,
    THREADS,
    THREADS_AMONG,
    Damage,
    at_place,
    bind,
    cut_spans,
    drop_calls,
    encode_batch,
    find_cold,
    inbox_values,
    list_calls,
    list_cold,
    list_first_seqs,
    list_newest_heads,
    load_meta,
    load_state,
    look_up,
    place_all,
    put_meta,
    read_heads,
    read_rows,
    store,
)
from .schema import CHECKED_FROM, ROW_COLUMNS, SCHEMA_VERSION, migrate, refuse_schema
from .search import SearchIndex, holds, is_within
from .upkeep import CutMade, Marks, find_cut, make_cut, read_beginning, read_head, read_marks, read_stamp, rescue

_SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL", "memory": "OFF"}
CHECKPOINT_PAGES = 2_500
"""At so many pages, about ten megabytes, the log goes back into the database, and whoever is to be stored waits
meanwhile: of large messages 40 ms, where with 10,000 pages it is 100. SQLite's 1000 makes every 166th single commit
wait for the two fsyncs."""
EXPIRY_STEP = 1000
"""Results of calls that are looked at, and dropped, at a time."""
INDEXED_STEP = 500
"""Messages that are put into the index of searches at a time."""
SEARCHED, SEARCH_STEP = 4000, 1000
"""Messages that one search looks at where few of them are within its spans, and at most at a time."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class SqliteConnection:
    """One SQLite connection, on a thread of its own, which runs one function at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundelay-ledger")
        self._db: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises `sqlite3.Error`."""
        loop = asyncio.get_running_loop()
        self._db = await loop.run_in_executor(self._thread, self._connect)

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the thread, as one hop. It runs to its end also if who awaits it is cancelled."""
        assert self._db is not None, "a connection is opened before it is used"
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._db)

    async def close(self) -> None:
        """Close it after what is under way. Raises `sqlite3.Error`; the thread ends all the same."""
        try:
            if self._db is not None:
                await self.run(sqlite3.Connection.close)
        finally:
            self._thread.shutdown(wait=False)

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, isolation_level=None, cached_statements=256)


class SQLiteLedger:
    """A `Ledger` in one SQLite file.

    ``new_epoch`` gives the string that marks a new history: on creation; when the file is found to be an older copy of
    what was stored here (`files`); and after an unclean stop when ``durability`` is not ``full`` and the machine was
    started since (acknowledged rows may then be gone). ``boot`` names the machine's start; empty when it is not known.
    Without ``is_index`` a file that is one node's index of a shared log is refused: a history of its own would begin.
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
        self._unplaced = Unplaced(0)
        self._is_index = is_index
        self._new_epoch = new_epoch
        self._name = name
        self._durability = durability
        self._boot = boot_id() if boot is None else boot
        self._files = DatabaseLock(self.path)
        self._writer: SqliteConnection | None = None
        self._reader: SqliteConnection | None = None
        """For what is to be delivered."""
        self._browser: SqliteConnection | None = None
        """For what somebody asks: a long look must not hold up deliveries."""
        self._index: SearchIndex | None = None
        self._epoch = ""
        self._first = 1
        """The oldest message that may be there."""
        self._head = 0
        """What this object has stored or found: a file that is opened again must hold it."""
        self._is_suspect = False
        """SQLite has found damage since the file was last looked through."""
        self._damage = Damage(self._tell_damaged)
        self._is_rescued = False
        """What the database held, which was deleted, is in ``FILE.rescued``."""

    # --- lifetime

    @property
    def is_answering(self) -> bool:
        return True  # nobody else is asked

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        self._files.take(create=not self._epoch)
        try:
            self._refuse_foreign_log()
            self._writer = await self._connect()
            meta, puts = await self._run(self._writer, self._prepare)
            self._reader = await self._connect()
            self._browser = await self._connect()
            self._index = SearchIndex(Path(f"{self.path}.search"))
        except BaseException:
            await self.close()
            raise
        return meta, puts

    async def reload(self) -> tuple[Meta, list[TableWrite]]:
        """What `open` gave, as it is now."""

        def look(db: sqlite3.Connection) -> tuple[Meta, list[TableWrite]]:
            meta, head, stamp = load_meta(db), read_head(db), read_stamp(self._damage, db)
            first = int(meta.get("first_seq", "1"))
            found = Meta(epoch=self._epoch, name=self._name, first_seq=first, head=head, stamp=stamp)
            return found, load_state(self._damage, db)

        return await self._run(self._writer, look)

    async def close(self) -> None:
        connections = (self._writer, self._browser, self._reader)
        writer, browser, _ = connections
        self._writer = self._browser = self._reader = None
        index, self._index = self._index, None
        if index is not None:
            await index.close()
        try:
            if writer is not None and browser is not None:  # one that was refused stays as it is
                with suppress(sqlite3.Error, LedgerError):  # a database that failed stays marked unclean
                    await writer.run(self._end)
        finally:
            try:
                async with AsyncExitStack() as closing:  # in reverse: the last to close writes the log back
                    for connection in connections:
                        if connection is not None:
                            closing.push_async_callback(connection.close)
                if self._is_rescued:
                    self._files.drop_log()
            except sqlite3.Error as error:
                raise await asyncio.to_thread(self._failed, error) from error
            finally:
                self._is_rescued = False
                self._files.release()  # whatever failed: else no node could open the file again

    async def verify(self) -> None:
        await self._run(self._writer, lambda _: self._files.check())

    async def _connect(self) -> SqliteConnection:
        connection = SqliteConnection(self.path)
        try:
            await connection.open()
        except sqlite3.Error as error:
            await connection.close()
            raise await asyncio.to_thread(self._failed, error) from error
        return connection

    async def _run(self, connection: SqliteConnection | None, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on a connection's thread: several statements as one hop, which costs more than a small
        transaction."""
        if connection is None:
            raise LedgerError(f"The ledger {self.path} is closed.")

        def guarded(db: sqlite3.Connection) -> T:
            try:
                return function(db)
            except FAILURES as error:
                raise self._failed(error) from error

        return await connection.run(guarded)

    async def _change(self, function: Callable[[sqlite3.Connection], T], *, head: int | None = None) -> T:
        """Run a function that writes, on the writer's thread: between two looks at the files, so that nothing is
        acknowledged that went where nobody finds it. ``head`` is the newest seq afterwards, where it is a new one."""

        def change(db: sqlite3.Connection) -> T:
            self._files.check()
            result = function(db)
            self._files.remember()
            if head is not None:
                self._files.write_head(self._epoch, head)
                self._head = head
            return result

        return await self._run(self._writer, change)

    def _end(self, db: sqlite3.Connection) -> None:
        """What is done on the writer before it closes."""
        if self._files.is_unlinked:
            self._is_rescued = rescue(db, self.path)
        try:
            self._files.check()
        except LedgerError:
            if self._files.is_overwritten:
                self._files.keep_log_apart()
                self._is_suspect = True
            raise
        with suppress(sqlite3.Error):  # a full disk: what is unplaced is read at the next start
            place_all(self._unplaced, db)
        put_meta(db, {"state": "clean"})

    @property
    def damaged(self) -> int:
        return len(self._damage.found)

    def _tell_damaged(self, row: int | str) -> None:
        where = {"seq": row} if isinstance(row, int) else {"row": row}
        log.error("a row of the ledger is damaged and left out", extra={**where, "database": str(self.path)})

    def _failed(self, error: Exception) -> LedgerError:
        """What to raise instead. It asks the system what SQLite hides, so it is called where a disk that hangs holds up
        nobody else."""
        self._is_suspect = self._is_suspect or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT
        return explain(error, self.path)

    def _prepare(self, db: sqlite3.Connection) -> tuple[Meta, list[TableWrite]]:
        """What is done on the writer when it has opened the file: what may refuse it comes first, then what is read,
        and last what says that it is open."""
        refuse_schema(db)  # before anything is changed: another program's database is no WAL's, and stays as it is
        self._set_up(db)
        if self._is_suspect:
            self._refuse_damage(db)
        if self._epoch:
            self._recognise(db)
        migrate(db)
        if not self._is_index and db.execute("SELECT 1 FROM state WHERE tbl = 'followed'").fetchone():
            raise LedgerError(
                f"{self.path} is a node's index of a shared log, and holds nothing of its own; name the log with --log."
            )
        meta = load_meta(db, (CHECKED_FROM, PLACED_TO))
        self._damage.begin(int(meta[CHECKED_FROM]))
        puts = load_state(self._damage, db)
        first, head = int(meta.get("first_seq", "1")), read_head(db)
        self._first = first
        self._unplaced = load_unplaced(db, int(meta[PLACED_TO]))
        stamp = read_stamp(self._damage, db)  # none older is given out
        name = meta.get("name", self._name)
        epoch = meta.get("epoch", "")
        if self._is_new_history(meta, head):
            if epoch and not self._is_index:  # the log brings an index what it lacks, and has the epoch
                log.warning("the database may have lost its newest messages: a new epoch begins", extra={"head": head})
            epoch = self._new_epoch()
        self._begin(db, epoch, name, head)
        return Meta(epoch=epoch, name=name, first_seq=first, head=head, stamp=stamp), puts

    def _set_up(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # for what is said here about the state, whatever the durability
        # macOS alone: its fsync leaves data in the drive's cache (sqlite.org/pragma.html#pragma_fullfsync).
        db.execute("PRAGMA fullfsync = ON")
        db.execute("PRAGMA checkpoint_fullfsync = ON")
        db.execute("PRAGMA busy_timeout = 2000")
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        # What a failed sync left in the log is read back from the kernel, but no later sync writes it
        # (lwn.net/Articles/752063), and after a power loss all that stands behind it would be gone. Here it goes into
        # the database, and the log begins anew.
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self._files.remember()

    def _begin(self, db: sqlite3.Connection, epoch: str, name: str, head: int) -> None:
        """Say in the database, and beside it, which history it holds and that it is open."""
        known = self._files.read_head()
        if known is not None:
            # for a crash in what follows: the log is this database's, whichever number that has by then
            self._files.begin_head(known._replace(base=0))
        base = random_number()
        db.execute(f"PRAGMA application_id = {base}")
        # busy where somebody reads: then the number may be in the log alone
        (is_busy, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        # before the database says that it has one: a crash between the two leaves another epoch beside it, and so a
        # new one
        self._files.begin_head(HeadFile(epoch, head, 0 if is_busy else base))
        state = "open" if self._durability == "full" else "at_risk"
        put_meta(db, {"epoch": epoch, "name": name, "state": state, "boot": self._boot, "has_head_file": "1"})
        db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[self._durability]}")
        self._files.remember()
        self._epoch, self._head = epoch, head

    def _is_new_history(self, meta: dict[str, str], head: int) -> bool:
        """Whether what clients know of this ledger may no longer be so: it is new, was put back from a copy, or has
        lost its newest."""
        if "epoch" not in meta:
            return True
        known = self._files.read_head()
        if known is None and "has_head_file" in meta:  # absent in files from before there was one
            return True
        if known is not None and (known.epoch != meta["epoch"] or known.head > head):
            return True
        # The kernel keeps what a killed process wrote, unless the machine itself went down. What a sync that failed
        # has dropped shows only later; so a ledger that was opened again after a failure takes no comfort from it.
        is_same_boot = bool(self._boot) and meta.get("boot") == self._boot and not self._epoch
        state = meta.get("state")
        return not is_same_boot and (state == "at_risk" or (state == "open" and self._durability != "full"))

    def _recognise(self, db: sqlite3.Connection) -> None:
        """Make sure, before anything is written, that a file that is opened again is the one that this node was
        writing, or a backup that was put in its place, which says so by having no epoch."""
        try:
            found = db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
            is_known = found is None or (found[0] == self._epoch and read_head(db) >= self._head)
        except sqlite3.OperationalError:  # no such table
            is_known = False
        if not is_known:
            raise LedgerError(
                f"{self.path} is not the ledger that this node was writing, or an older copy of it; put that one "
                "back, or restart the node to go on with this one."
            )

    def _refuse_foreign_log(self) -> None:
        """Before SQLite opens the file: it takes whatever log lies beside for its own, and has written it into the
        database by the time it has closed it."""
        if self._files.is_log_foreign:
            raise LedgerError(
                f"{self.path}-wal does not belong to this database: it is what another one has left that was here "
                f"before. Put that one back; or move {self.path}-wal and {self.path}-shm away to go on with this one, "
                f"without what is in them. Where both were put back together from a copy, move {self.path}.head "
                "away instead."
            )

    def _refuse_damage(self, db: sqlite3.Connection) -> None:
        """Look through the file: a damaged one would serve some, fail at others, and be reopened again and again."""
        (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if problem != "ok":
            told = " ".join(problem.split())
            raise LedgerError(f"The database {self.path} is damaged ({told}); stop the node and go on from a backup.")
        self._is_suspect = False

    # --- writing

    async def append(
        self, rows: Sequence[Row], puts: Sequence[TableWrite], *, before_commit: Callable[[], None] = lambda: None
    ) -> None:
        """As `Ledger.append`. ``before_commit`` is called on the writer's thread when all is written but not stored:
        what it raises takes it back."""
        change = partial(store, encode_batch(rows, puts), self._unplaced, before_commit)
        await self._change(change, head=rows[-1].seq if rows else None)

    def check(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        bind(encode_batch(rows, puts))

    # --- reading

    async def lookup(self, wanted: LookupRequest) -> Facts:
        if not wanted:
            return Facts()
        # on the writer's connection: it sees its own last commit without a new read transaction
        return await self._run(self._writer, partial(look_up, wanted, self._damage, self._unplaced))

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
        values = inbox_values(spans, sender, after, until, limit + 1, self._unplaced, newest=newest)
        sql = INBOX.replace("{columns}", ROW_COLUMNS).replace("{order}", "DESC" if newest else "ASC")
        # windows look for the newest, deliveries for the oldest
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
        found = self._unplaced.find([(place, after, end)], limit + 1, newest=newest)
        sql, values = at_place(place, after, end, found, limit + 1, order="DESC" if newest else "ASC")
        return await self._read_page(self._browser, sql, values, limit, max_bytes, newest)

    async def reaction(
        self, reaction: str, after: int, limit: int, *, actor: str | None = None, max_bytes: int = MAX_PAGE_BYTES
    ) -> Page:
        # nearly all of it is its agent's
        where = None if actor is None else ("actor", actor)
        return await self._read_place(f"re/{reaction}", after, limit, max_bytes, where)

    async def inbox_heads(self, spans: Sequence[Span], sender: str, after: int, until: int, limit: int) -> list[HeadAt]:
        values = inbox_values(spans, sender, after, until, limit, self._unplaced, newest=True)
        sql = INBOX.replace("{columns}", OF_HEADS).replace("{order}", "DESC")
        return await self._run(self._browser, partial(read_heads, sql, values))

    async def newest_heads(
        self, after: Mapping[str, int], limit: int, *, before: int | None = None
    ) -> dict[str, list[HeadAt]]:
        end = before if before is not None else 2**62
        asked = {
            stream: (seq, self._unplaced.find([(f"in/{stream}", seq, end)], limit, newest=True))
            for stream, seq in after.items()
        }
        return await self._run(self._browser, partial(list_newest_heads, asked, end, limit))

    async def first_seqs(self, threads: Collection[str]) -> dict[str, int]:
        asked = {it: self._unplaced.find([(f"in/{it}", 0, 2**62)], 1) for it in threads}
        return await self._run(self._browser, partial(list_first_seqs, asked))

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
        values = inbox_values(spans, sender, 0, 2**62, -1, self._unplaced)
        sql = THREADS
        if among is not None:
            found = self._unplaced.find((f"in/{it}", 0, 2**62) for it in among)
            values = {
                "spans": json.dumps(cut_spans(spans, 0, 2**62)), "sender": sender, "asked": json.dumps(list(among)),
                "placed_to": found.placed_to, "newest": json.dumps(found.seqs),
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
    ) -> Found:
        index = await self._index_all()

        def choose(rows: Iterator[Row]) -> Page:
            admitted = (it for it in rows if is_within(it, spans, sender, stream) and holds(it, terms))
            return take_page(admitted, limit + 1, max_bytes, newest=True)

        end, found, size = before if before is not None else 2**62, list[Row](), 0
        looked, step = 0, limit + 1
        while len(found) <= limit and size <= max_bytes:
            if looked >= SEARCHED:
                return Found(found[::-1], True, end)
            seqs = await index.find(terms, spans, sender, stream, end, step)
            if not seqs:
                break
            page = await self._read(self._browser, NEWEST_BY_SEQ, [json.dumps(seqs)], choose)
            found += reversed(page.rows)
            size += sum(len(it.data) for it in page.rows)
            end = page.rows[0].seq if page.has_more else seqs[-1]
            # each `find` looks through all that match anew, and what is not within the spans is found in vain
            looked, step = looked + len(seqs), min(step * 4, SEARCH_STEP)
        return Found(*take_page(found, limit, max_bytes, newest=True))

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
        return await (await self._index_all()).find(terms, spans, sender, stream, before, limit)

    async def _index_all(self) -> SearchIndex:
        """Return the index of words, with every message in it."""
        if self._index is None:
            raise LedgerError(f"The ledger {self.path} is closed.")
        index = self._index
        await index.catch_up(f"{self._epoch}/{self._boot}", self._first, self._head, self._list_messages)
        return index

    async def _list_messages(self, after: int) -> list[Row]:
        sql = f"SELECT {ROW_COLUMNS} FROM log WHERE seq > ? AND type = 'message' ORDER BY seq LIMIT ?"
        return (await self._read_page(self._browser, sql, (after, INDEXED_STEP), INDEXED_STEP, MAX_PAGE_BYTES)).rows

    async def forget_dropped(self) -> None:
        if self._index is not None:
            await self._index.forget(self._first)

    async def all_threads(
        self, *, before: int | None = None, limit: int = 2**31, among: Collection[str] | None = None
    ) -> list[ThreadSummary]:
        which = "place >= 'in/' AND place < 'in0'"  # '0' comes after '/'
        if among is not None:
            which = "place IN (SELECT 'in/' || value FROM json_each(:asked))"
        placed_to, newest = self._unplaced.summarise("in/", among)
        values = {
            "end": before if before is not None else 2**62, "most": limit, "placed_to": placed_to,
            "newest": json.dumps(newest), "asked": json.dumps(list(among or ())),
        }  # fmt: skip
        return await self._list_threads(ALL_THREADS.replace("{which}", which), values)

    async def _list_threads(self, sql: str, values: Mapping[str, object]) -> list[ThreadSummary]:
        found = await self._run(self._browser, lambda db: db.execute(sql, values).fetchall())
        return [ThreadSummary(*row) for row in found]

    async def messages(self, seqs: Iterable[int]) -> dict[int, Row]:
        def take(rows: Iterator[Row]) -> dict[int, Row]:
            return {row.seq: row for row in rows if row.type in ("message", "damaged")}

        return await self._read(self._reader, BY_SEQ, [json.dumps(list(seqs))], take)

    async def heads(self, seqs: Iterable[int]) -> dict[int, MessageHead]:
        def take(rows: Iterator[Row]) -> dict[int, MessageHead]:  # it holds one whole row at a time
            return {row.seq: row.head for row in rows if row.head is not None}

        return await self._read(self._browser, BY_SEQ, [json.dumps(list(seqs))], take)

    async def cold(self, table: Table, prefix: str, limit: int, *, after: str = "") -> list[tuple[str, Any]]:
        return await self._run(self._browser, partial(list_cold, self._damage, table, prefix, limit, after))

    async def lookup_cold(self, table: Table, key: str) -> Any:
        return await self._run(self._browser, partial(find_cold, self._damage, table, key))

    async def expire_calls(self, before: int) -> None:
        after: str | None = ""
        while after is not None:
            old, then = await self.find_old_calls(before, after)
            if old:
                await self._change(partial(drop_calls, old, before))
            after = then

    async def find_old_calls(self, before: int, after: str) -> tuple[list[str], str | None]:
        """The keys of calls whose results are older than a time (ms), of some behind the key ``after``; and the last
        key that was looked at, None at the end. It reads beside the writer."""
        seen = await self._run(self._browser, partial(list_calls, after, EXPIRY_STEP))
        old = [key for key, at in seen if at is not None and at < before]
        return old, seen[-1][0] if len(seen) == EXPIRY_STEP else None

    async def trim(self, trim: Trim) -> Trimmed:
        cut, is_held = await self.find_cut(trim)
        if cut is None:
            return Trimmed(dropped=0, first_seq=self._first, is_held=is_held)
        made = await self._make_cut(cut)
        return Trimmed(dropped=made.dropped, first_seq=made.first_seq, is_held=is_held)

    async def find_cut(self, trim: Trim) -> tuple[Cut | None, bool]:
        """What `trim` would drop now, None where nothing; and whether more was to go but for the pin."""
        return await self._run(self._writer, partial(find_cut, trim, self._damage))

    async def drop(self, cut: Cut) -> int:
        """Drop all that a cut says, and gives how many rows that were; what is gone already is passed over."""
        made, dropped = await self._make_cut(cut), 0
        while not made.is_done:
            dropped += made.dropped
            made = await self._make_cut(cut)
        return dropped + made.dropped

    async def _make_cut(self, cut: Cut) -> CutMade:
        made = await self._change(partial(make_cut, cut, self._damage, self._unplaced))
        self._first = made.first_seq
        return made

    async def read_beginning(self) -> Cut:
        """What was dropped of it by now."""
        return await self._run(self._writer, partial(read_beginning, self._damage))

    async def holds_up_to(self, seq: int) -> bool:
        """Whether there is any row up to that one."""
        sql = "SELECT EXISTS (SELECT 1 FROM log WHERE seq <= ?)"
        return bool(await self._run(self._writer, lambda db: db.execute(sql, (seq,)).fetchone()[0]))

    async def read_marks(self) -> Marks:
        """Where what is kept begins."""
        return await self._run(self._writer, read_marks)

    @property
    def head(self) -> int:
        """The newest seq that is in it."""
        return self._head

    @property
    def first_seq(self) -> int:
        """The smallest seq whose message can still be delivered."""
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
        # at the agent's records of that kind, since others may write under the same reaction's id
        where = None if reaction is None else ("stream", reaction)
        return await self._read_place(f"of/{agent_id}/{kind}", after, limit, max_bytes, where)

    async def _read_place(
        self, place: str, after: int, limit: int, max_bytes: int, where: tuple[str, str] | None
    ) -> Page:
        """A page of the rows at a place, ascending; ``where`` as in `at_place`."""
        found = self._unplaced.find([(place, after, 2**62)], limit + 1 if where is None else -1)
        sql, values = at_place(place, after, 2**62, found, limit + 1, where=where)
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
        """A page of a query that gives at most one row beyond it; ``newest`` says that its rows descend."""
        return await self._read(db, sql, values, lambda rows: take_page(rows, limit, max_bytes, newest=newest))

    async def _read(
        self,
        db: SqliteConnection | None,
        sql: str,
        values: Sequence[object] | Mapping[str, object],
        take: Callable[[Iterator[Row]], T],
    ) -> T:
        return await self._run(db, partial(read_rows, self._damage, sql, values, take))


__all__ = ["SCHEMA_VERSION", "Durability", "SQLiteLedger"]
