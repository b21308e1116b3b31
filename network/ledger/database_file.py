"""`DatabaseFile`: opens, closes and checks the file of a durable ledger, and runs functions on its connections.

One connection writes and two read. Each has its own thread. With ``durability="full"``, ``synchronous=FULL`` is set on
the connection, because the file does not store this setting. The module `opening` checks each file that is being
opened. `database_lock` keeps other nodes away and detects that the file was exchanged. Every SQLite error is raised as
`LedgerError`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TypeVar

from roundelay.network.config import Durability
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import boot_id

from . import Meta
from .backup import rescue
from .connection import SqliteConnection
from .database_lock import DatabaseLock
from .memtable import FLUSHED_TO, Memtable, load_memtable
from .newest_rows import NewestRows
from .opening import begins_new_history, configure, mark_open, refuse_damage, refuse_foreign_wal, refuse_other_history
from .queries import load_meta, load_state
from .retention import read_head, read_stamp
from .row_reader import FAILURES, Damage
from .schema import CHECKED_FROM, migrate, refuse_schema
from .search import SearchIndex
from .storage_errors import explain
from .writes import flush_memtable, write_meta

T = TypeVar("T")

log = logging.getLogger(__name__)


class DatabaseFile:
    """The file of a `SQLiteLedger` with its connections, its lock and its cached rows.

    ``new_epoch`` returns the string that identifies a new history. A new history begins when the file is created, when
    the file is an older copy of the stored data, and after an unclean stop that may have lost acknowledged rows. Rows
    can be lost only if ``durability`` is not ``full`` and the machine was restarted. ``boot`` identifies the boot of
    the machine, and is empty if unknown. Set ``is_index`` for the index of a shared log, which must not begin its own
    history.
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
        """Connection for requests. It is separate, so that a long request does not delay deliveries."""
        self._index: SearchIndex | None = None
        self._epoch = ""
        self._first = 1
        """Oldest seq whose message may still exist. Messages below this seq were deleted."""
        self._head = 0
        """Newest seq that this object has stored or found. A reopened file must contain this seq."""
        self._is_suspect = False
        """Whether SQLite has found damage since the last check of the file."""
        self._damage = Damage(self._log_damaged)
        self._newest = NewestRows(self._damage)
        self._has_revised = False
        """Whether messages were edited or deleted since the last update of the search index."""
        self._is_rescued = False
        """Whether the content of the deleted database was saved as ``FILE.rescued``."""

    # --- lifetime

    @property
    def is_answering(self) -> bool:
        return True  # a single file has no engine

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        # Hold the lock from before SQLite opens the file until after SQLite has closed it (`database_lock`). When
        # reopening, the file must exist, because a new file would be an empty history.
        self._lock.acquire(create=not self._epoch)
        try:
            refuse_foreign_wal(self._lock, self.path)
            self._writer = await self._connect()
            meta, writes = await self._run(self._writer, self._prepare)
            self._reader = await self._connect()
            self._browser = await self._connect()
            self._index = SearchIndex(Path(f"{self.path}.search"))
            self._newest.restart(meta.head)
        except BaseException:
            await self.close()
            raise
        return meta, writes

    async def reload(self) -> tuple[Meta, list[TableWrite]]:
        """Return the result that `open` would return for the current content of the file."""

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
        self._newest.forget()
        index, self._index = self._index, None
        if index is not None:
            await index.close()
        try:
            if writer is not None and browser is not None:  # a refused file must stay unchanged
                with suppress(sqlite3.Error, LedgerError):  # if this fails, the database stays marked as unclean
                    await writer.run(self._finish)
        finally:
            try:
                async with AsyncExitStack() as closing:
                    # Close in reverse order. The connection that closes last copies the WAL into the database, and must
                    # be the writer.
                    for connection in connections:
                        if connection is not None:
                            closing.push_async_callback(connection.close)
                if self._is_rescued:
                    self._lock.delete_wal()
            except sqlite3.Error as error:
                raise await asyncio.to_thread(self._explain, error) from error
            finally:
                self._is_rescued = False
                # Release the lock even after a failure. Otherwise, no node could open the file again.
                self._lock.release()

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
        """Run a function on a connection's thread. Put all statements of a task into one function, because a switch to
        another thread costs more than a small transaction."""
        if connection is None:
            raise LedgerError(f"The ledger {self.path} is closed.")

        def guarded(db: sqlite3.Connection) -> T:
            try:
                return function(db)
            except FAILURES as error:
                raise self._explain(error) from error

        return await connection.run(guarded)

    async def _change(self, function: Callable[[sqlite3.Connection], T], *, head: int | None = None) -> T:
        """Run a function that writes on the writer's thread. ``head`` is the newest seq after the write, if the write
        changes it.

        The files are checked first: a row that was written into a deleted file must not be acknowledged.
        """

        def change(db: sqlite3.Connection) -> T:
            self._lock.check()
            result = function(db)
            self._lock.note_state()
            # Write FILE.head after the commit, so that it is never ahead of the database, and before the answers are
            # sent.
            if head is not None:
                self._lock.write_head(self._epoch, head)
                self._head = head
            return result

        return await self._run(self._writer, change)

    def _finish(self, db: sqlite3.Connection) -> None:
        """Finish the writer's work before its connection is closed."""
        if self._lock.is_unlinked:
            self._is_rescued = rescue(db, self.path)
        try:
            self._lock.check()
        except LedgerError:
            if self._lock.is_overwritten:
                self._lock.block_wal_copy()
                self._is_suspect = True
            raise
        with suppress(sqlite3.Error):  # on a full disk this may fail; the next start then reads these rows again
            flush_memtable(self._memtable, db)
        write_meta(db, {"state": "clean"})

    @property
    def damaged(self) -> int:
        return len(self._damage.rows)

    def _log_damaged(self, row: int | str) -> None:
        where = {"seq": row} if isinstance(row, int) else {"row": row}
        log.error("a row of the ledger is damaged and left out", extra={**where, "database": str(self.path)})

    def _explain(self, error: Exception) -> LedgerError:
        """Return the `LedgerError` to raise instead of an error. `explain` looks for the cause that SQLite hides. Do
        not call this on the loop, because a hanging disk would block it."""
        self._is_suspect = self._is_suspect or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CORRUPT
        return explain(error, self.path)

    def _prepare(self, db: sqlite3.Connection) -> tuple[Meta, list[TableWrite]]:
        """Prepare the opened file: run the checks that may refuse the file, load its content, and mark it as open."""
        refuse_schema(db)  # check before any change: a database of another program must stay unchanged
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
                f"{self.path} is a node's index of a shared log, and contains no data of its own. Name the log with "
                "--log."
            )
        meta = load_meta(db, (CHECKED_FROM, FLUSHED_TO))
        self._damage.restart(int(meta[CHECKED_FROM]))
        writes = load_state(self._damage, db)
        first, head = int(meta.get("first_seq", "1")), read_head(db)
        self._first = first
        self._memtable = load_memtable(db, int(meta[FLUSHED_TO]))
        stamp = read_stamp(self._damage, db)  # the ledger must not assign an older timestamp
        name = meta.get("name", self._name)
        epoch = meta.get("epoch", "")
        # After a failed sync, the kernel may have lost pages without a sign. So do not trust the kernel's data if the
        # ledger is reopened after a failure.
        boot = "" if self._epoch else self._boot
        if begins_new_history(meta, head, self._lock.read_head(), boot=boot, durability=self._durability):
            if epoch and not self._is_index:  # an index reads lost rows and its epoch from the shared log
                log.warning("a new epoch begins: the database may have lost its newest messages", extra={"head": head})
            epoch = self._new_epoch()
        mark_open(db, self._lock, epoch, head, name=name, boot=self._boot, durability=self._durability)
        # Set these values last. `refuse_other_history` compares a reopened file with them, so they must name only
        # stored rows.
        self._epoch, self._head = epoch, head
        return Meta(epoch=epoch, name=name, first_seq=first, head=head, stamp=stamp), writes
