"""The files of a SQLite ledger: held by the one node that writes them, locked, and watched; and what is wrong with
them, in a sentence.

`DatabaseLock` keeps a descriptor of the database open from before SQLite opens the file until after SQLite has closed it.
Two rules depend on it. Closing *any* descriptor of a file drops every POSIX lock that the process has on it, SQLite's
own included (sqlite.org/howtocorrupt.html, 2.2); the next program that closes the database then takes itself for the
last one and deletes the live log. So nothing in a node's process opens the database but SQLite and this module
(`is_held` tells others when not to). And the descriptor carries the lock that keeps other nodes away: it belongs to the
inode, whatever name the file is reached by.

Beside the database stands ``FILE.head``: the epoch, and the newest seq that was stored. It is written after a commit
and before its answers, so that it is never ahead of the database; a database that is behind it is an older copy. Its
second line names the database that SQLite's log belongs to: SQLite would put a log into whatever file lies beside it,
and a copy that was put there is ruined by that.

    written, in this order:   rows (-wal)  ->  synced (durability full)  ->  FILE.head  ->  the sender's answer
    so at each start:         the newest seq in the database  >=  that of FILE.head, or the database is an older copy
    and beside it:            the number in the database's header  =  that of FILE.head, or the -wal file is another's

SQLite says "disk I/O error" for many things, and "unable to open database file" for most others. The system knows
better: so `explain` tries the plain call that SQLite made, on a file beside the database.

No SQL here. Called on the ledger's threads and, while it opens and closes, on the loop's.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from roundelay.network.durable_files import ERRNO_ALIASES, FileAction, describe_os_error, explain_errno, sync
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import (
    CLOSE_ON_EXEC,
    is_range_locked,
    is_read_only,
    lock_descriptor,
    share_range,
    sync_descriptor,
    try_record_lock,
)

Inode = tuple[int, int]
"""A file's device and number."""

held: set[Inode] = set()
"""The databases that ledgers of this process hold. Kept by `DatabaseLock`."""


def is_held(path: Path) -> bool:
    """Whether a ledger of this process holds the file."""
    try:
        return identify(os.stat(path)) in held
    except OSError:
        return False


def identify(found: os.stat_result) -> Inode:
    return found.st_dev, found.st_ino


_HIDDEN = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_NOMEM: errno.ENOMEM, sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY, sqlite3.SQLITE_PROTOCOL: errno.EBUSY, sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_PERM: errno.EACCES, sqlite3.SQLITE_READONLY: errno.EACCES, sqlite3.SQLITE_CANTOPEN: 0,
    sqlite3.SQLITE_CORRUPT: 0, sqlite3.SQLITE_NOTADB: 0,
}  # fmt: skip
"""The result codes of SQLite's that hide what the system said, and what each stands for when the system has nothing to
say."""

_FEWEST_BYTES = 32 * 1024
"""SQLite gives a file beside a database in WAL mode this size at once."""


def explain(error: Exception, path: Path, doing: FileAction = "write") -> LedgerError:
    """The `LedgerError` for what the system or SQLite raised at a database's file, or at a file beside it: what, where,
    and what next."""
    if isinstance(error, sqlite3.Error):
        return LedgerError(_describe_sqlite(error, path, doing))
    number = errno.ELOOP if isinstance(error, RuntimeError) else getattr(error, "errno", None) or 0
    return LedgerError(_sentence(ERRNO_ALIASES.get(number, number), error, path, doing))


def find_errno(path: Path, doing: FileAction) -> int:
    """The errno that the plain calls come to; 0 where they succeed. It may write a small file beside it, and deletes
    that."""
    try:
        if path.is_dir():
            return errno.EISDIR
        if doing == "write":
            _try_to_write(path.resolve())
        elif not is_held(path):
            _try_to_read(path)
    except OSError as error:
        return ERRNO_ALIASES.get(error.errno or 0, error.errno or 0)
    except RuntimeError:  # `Path.resolve` says so of links in a circle
        return errno.ELOOP
    return 0


def _describe_sqlite(error: sqlite3.Error, path: Path, doing: FileAction) -> str:
    code = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return f"The database {path} was moved or deleted while it was in use; put it back."
    number = find_errno(path, doing) if primary in _HIDDEN else 0
    if primary == sqlite3.SQLITE_NOTADB and not number:
        return f"{path} is no database ({error}); name another one with --db, or go on from a backup if it was one."
    if primary == sqlite3.SQLITE_CORRUPT and doing == "write":  # this is what EIO is to SQLite too
        return (
            f"The database {path} is damaged, or its disk fails to give it back ({error}); stop the node, and go on "
            "from a backup if `roundelay doctor` says so too."
        )
    if primary == sqlite3.SQLITE_CORRUPT and not number:
        return f"The database {path} is damaged ({error}); stop the node, and go on from a backup."
    needs: FileAction = doing
    if not number and doing == "read" and primary in _HIDDEN:  # to read it, SQLite locks it, and writes beside it
        number, needs = find_errno(path, "write"), "write"
    number = number or _HIDDEN.get(primary, 0)
    return _sentence(number, error, path, doing, needs=needs)


def _sentence(number: int, error: Exception, path: Path, doing: FileAction, *, needs: FileAction | None = None) -> str:
    if number == errno.ENOENT and doing == "read":
        return f"There is no database {path}; name a node's, or an export of one."
    what, advice = explain_errno(number, error, path, needs or doing)
    hint = getattr(error, "sqlite_errorname", "") if number in (errno.EIO, errno.EBUSY) else ""
    verb = "read" if doing == "read" else "written"
    return f"The database {path} cannot be {verb}: {what}{f' ({hint})' if hint else ''}; {advice}."


def _try_to_read(path: Path) -> None:
    """Read all of it, as SQLite does with time: a disk may fail at any place. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | CLOSE_ON_EXEC)
    try:
        place = 0
        while data := os.pread(descriptor, 1 << 20, place):
            place += len(data)
    finally:
        os.close(descriptor)


def _try_to_write(file: Path) -> None:
    """Do what a node does with its files, with one that is made for it and deleted. Raises `OSError`."""
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        raise OSError(errno.EROFS if is_read_only(file) else errno.EACCES, "")
    size = max(_FEWEST_BYTES, *(os.stat(it).st_size for it in (file, f"{file}-wal") if os.path.exists(it)), 0)
    probe = f"{file}-probe-{os.getpid()}"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        os.pwrite(descriptor, bytes(4096), 0)
        os.pwrite(descriptor, b"\0", size)  # takes no room, but meets a limit of how large a file may be
        try_record_lock(descriptor)
        sync_descriptor(descriptor)
        os.pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(probe)


_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""The bytes on which SQLite holds its shared lock while a connection is open in WAL mode (os_unix.c,
"SHARED_FIRST")."""

_HEADER = struct.Struct(">18x2s48xI")
"""Of a database's header: how it is written, and its application id (sqlite.org/fileformat.html, 1.3)."""
_ROLLBACK = b"\x01\x01"
"""How a database is written that never had a log."""

_BASE_CHARS = 10
"""So that the second line of ``FILE.head`` is whole after each write in place."""


class HeadFile(NamedTuple):
    """What ``FILE.head`` says."""

    epoch: str
    head: int
    base: int
    """The number that the database's own header, without its log, has for its application id (`is_log_foreign`); 0
    where that was not certain."""


class DatabaseLock:
    """One database's files, from `take` to `release`. Every method but `release` raises `LedgerError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """As it was given; a link is followed anew with each look, so that one that is bent elsewhere is noticed."""
        self._place = path
        """Where links lead from it: SQLite keeps its other files there."""
        self._descriptor: int | None = None
        self._head: int | None = None
        """A descriptor of ``FILE.head``."""
        self._inode = (0, 0)
        self._main = (0, 0)
        """The database's size and time of change (ns), as this process left them."""
        self._beside: dict[str, tuple[int, int]] = {}
        """Inode and size of the files that SQLite keeps beside it."""
        self.is_overwritten = False
        """Whether another program has written into the database since it was taken."""

    # --- one writer

    def take(self, *, create: bool) -> None:
        """Open the database's file for as long as it is used, and keep other nodes off it. Without ``create`` it must
        be there."""
        try:
            with suppress(FileNotFoundError):
                if identify(os.stat(self.path)) in held:
                    raise self._in_use()
            # 0600: it holds everybody's messages. SQLite gives the files that it makes beside it the same mode.
            flags = os.O_RDWR | CLOSE_ON_EXEC | (os.O_CREAT if create else 0)
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise LedgerError(f"The database {self.path} is gone; put it back, and the node goes on.") from error
            raise explain(error, self.path) from error
        try:
            lock_descriptor(descriptor)
        except OSError as error:
            os.close(descriptor)  # no SQLite of this process has it open: `held` says so
            if isinstance(error, BlockingIOError):
                raise self._in_use() from error
            raise explain(error, self.path) from error
        found, place = os.fstat(descriptor), self.path.resolve()
        if found.st_nlink > 1 and not Path(f"{place}.head").exists():
            os.close(descriptor)
            raise LedgerError(
                f"{self.path} is one of {found.st_nlink} names of one file (hard links), and not the one that a node "
                "has used: what was stored last may lie beside the other. Start the node with that one, or copy the "
                "file and start it with the copy."
            )
        self._descriptor, self._inode, self._place = descriptor, identify(found), place
        held.add(self._inode)

    def release(self) -> None:
        """Let go of the files. SQLite has closed them before. Idempotent."""
        for descriptor in (self._head, self._descriptor):
            if descriptor is not None:
                os.close(descriptor)
        if self._descriptor is not None:
            held.discard(self._inode)
        self._descriptor = self._head = None
        self._beside = {}
        self.is_overwritten = False

    def _in_use(self) -> LedgerError:
        return LedgerError(f"{self.path} is in use by another node; stop that one, or give this one another --db.")

    # --- the same files

    def remember(self) -> None:
        """Take the files as they are now for what this process left; after each of its own writes."""
        main = self._look("")
        self._main = (main.st_size, main.st_mtime_ns)
        for suffix in ("-wal", "-shm"):
            beside = self._look(suffix)
            self._beside[suffix] = (beside.st_ino, beside.st_size)

    def check(self) -> None:
        """Make sure that what is written here is what the next reader of the path finds.

        The database and SQLite's files beside it are the same files as before, none is shorter, and nobody else has
        written into the database: it changes when the log goes back into it, which only this process's writer does.
        """
        main = self._look("")
        if main.st_size < self._main[0] or main.st_mtime_ns != self._main[1]:
            self.is_overwritten = True
            raise LedgerError(
                f"Another program has written into {self.path} under the node; stop that program, and restore backups "
                "while no node runs."
            )
        for suffix, (_, size) in self._beside.items():
            if self._look(suffix).st_size < size:
                raise LedgerError(f"Another program has cut {self._place}{suffix}, which is a part of the database.")
        if not self._is_locked():
            raise LedgerError(
                f"This process has lost its locks on {self.path}: something in it has opened the file and closed it "
                "again."
            )

    @property
    def is_log_foreign(self) -> bool:
        """Whether the log beside the database was begun for another file than this one, which was put in its place.

        The database's first bytes alone tell it, those that no checkpoint changes. Of all others a power cut in a
        checkpoint may have left any mixture of old and new sectors, which the log mends: read without the log, a table
        says anything.
        """
        if not self.has_log:
            return False
        assert self._descriptor is not None, "the files are taken"
        header = os.pread(self._descriptor, _HEADER.size, 0)
        way, base = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if way == _ROLLBACK:
            return True
        known = self.read_head()
        return known is not None and known.base not in (0, base)

    @property
    def has_log(self) -> bool:
        """Whether SQLite left a log beside the database that holds anything."""
        try:
            return os.stat(f"{self._place}-wal").st_size > 0
        except OSError:
            return False

    def keep_log_apart(self) -> None:
        """Let SQLite not write the log back when it closes: what the database holds by now may not be what the log was
        begun for.

        It needs an exclusive lock for that, which this shared one refuses it, until `release`.
        """
        if self._descriptor is not None:
            share_range(self._descriptor, _SHARED_FIRST, _SHARED_SIZE)

    def drop_log(self) -> None:
        """Delete the files that SQLite kept beside a database that is gone, and was saved with all that they held."""
        for suffix, (inode, _) in self._beside.items():
            with suppress(OSError):
                if os.stat(f"{self._place}{suffix}").st_ino == inode:
                    os.unlink(f"{self._place}{suffix}")

    @property
    def is_unlinked(self) -> bool:
        """Whether no name leads to the database any more: then it ends with its last descriptor."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def _look(self, suffix: str) -> os.stat_result:
        """What is at the place of one of the files. Raises when it is another one than before, or none."""
        path, known = (self._place, self._beside.get(suffix)) if suffix else (self.path, None)
        try:
            found = os.stat(f"{path}{suffix}")
        except OSError as error:
            raise LedgerError(
                f"{path}{suffix} was deleted or moved while the node was writing it; put it back, and the node goes on."
            ) from error
        is_same = identify(found) == self._inode if not suffix else known is None or known[0] == found.st_ino
        if not is_same:
            raise LedgerError(
                f"{path}{suffix} was replaced by another file while the node was writing it; put the first one back, "
                "and the node goes on."
            )
        return found

    def _is_locked(self) -> bool:
        """Whether SQLite's shared lock is still there: asked through a descriptor whose own locks are of the other
        kind."""
        return self._descriptor is None or is_range_locked(self._descriptor, _SHARED_FIRST, _SHARED_SIZE)

    # --- what was stored

    def read_head(self) -> HeadFile | None:
        """What ``FILE.head`` tells; None when there is none, or it cannot be understood."""
        path = Path(f"{self._place}.head")
        try:
            first, base, *_ = [*path.read_text(encoding="utf-8").splitlines(), "", ""]
            epoch, head = first.split()
            # of letters, it is from before the database's header had it, and tells nothing
            return HeadFile(epoch, int(head), int(base) if base.strip().isdecimal() else 0)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:  # it may be there, and right: that it cannot be read now makes no new history
            raise LedgerError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error

    def begin_head(self, known: HeadFile) -> None:
        """Write ``FILE.head`` anew, durably, before anything is stored under this epoch. In place: the old one is there
        until the new one is, also where there is no room for it."""
        text = _head_line(known.epoch, known.head) + f"{known.base:{_BASE_CHARS}}\n".encode()
        try:
            if self._head is None:
                self._head = os.open(f"{self._place}.head", os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
            os.pwrite(self._head, text, 0)  # not emptied before: where that fails, what it said is still there
            os.ftruncate(self._head, len(text))
            sync_descriptor(self._head)
            sync(self._place.parent)
        except OSError as error:
            raise explain(error, self._place) from error

    def write_head(self, epoch: str, head: int) -> None:
        """Say that everything up to ``head`` is stored. Not synced: to be behind costs nothing, and ahead it never
        is."""
        if self._head is not None:
            try:
                os.pwrite(self._head, _head_line(epoch, head), 0)
            except OSError as error:
                raise explain(error, self._place) from error


def _head_line(epoch: str, head: int) -> bytes:
    """Of one length under one epoch: it is written in place."""
    return f"{epoch} {head:020d}\n".encode()
