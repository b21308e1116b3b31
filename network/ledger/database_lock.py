"""`DatabaseLock`: exclusive use of a database's files by one node, and the check that these files are not exchanged.

The lock keeps a descriptor of the database open from before SQLite opens the file until after SQLite has closed it.
There are two reasons:

- Closing *any* descriptor of a file drops every POSIX lock that the process has on the file, including SQLite's locks
  (sqlite.org/howtocorrupt.html, 2.2). The next program that closes the database then believes that it is the last user,
  and deletes the WAL that is in use. So only SQLite and this module may open the database in a node's process
  (`locked_files` lists the locked files).
- The descriptor carries the lock that keeps other nodes away. The lock belongs to the inode, whatever name the file
  has.

``FILE.head`` is a second file, next to the database. The first line of this file contains the epoch and the newest
stored seq. This line is written after a commit and before the answers to the commit's entries, so it is never ahead of
the database. A database that is behind ``FILE.head`` is an older copy. The second line identifies the database to which
the WAL belongs. SQLite copies a WAL into any database with the right name, which would ruin a copy that was moved to
this name.

  order of writes:      rows (-wal)  ->  synced (durability full)  ->  FILE.head  ->  the sender's answer
  so at each start:     newest seq in the database  >=  seq in FILE.head, or the database is an older copy
  and for the WAL:      number in the database's header  =  number in FILE.head, or the -wal file is foreign

This module runs no SQL. It is called on the ledger's threads and, during opening and closing, on the event loop's
thread.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from roundelay.network.durable_files import describe_os_error, sync
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import (
    CLOSE_ON_EXEC,
    is_range_locked,
    lock_descriptor,
    share_range,
    sync_descriptor,
)

from .locked_files import identify, locked
from .storage_errors import explain

_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""The bytes of the file that SQLite locks as shared while a connection is open in WAL mode (os_unix.c,
"SHARED_FIRST")."""

_HEADER = struct.Struct(">18x2s48xI")
"""Format of the part of a database's header that contains the write version and the application id
(sqlite.org/fileformat.html, 1.3)."""
_ROLLBACK = b"\x01\x01"
"""Write version of a database that never had a WAL."""

_BASE_CHARS = 10
"""Number of characters in the second line of ``FILE.head``. The width is fixed, because the line is overwritten in
place."""


class HeadFile(NamedTuple):
    """The parsed content of ``FILE.head``."""

    epoch: str
    head: int
    base: int
    """Application id in the header of the database file itself, without the WAL. 0 if the id was not certain."""


class DatabaseLock:
    """Lock of one database. Call `acquire` before any other method. All methods raise `LedgerError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The path as configured. Each check follows symbolic links again, to detect a changed link."""
        self._target = path
        """The path without symbolic links. SQLite stores its other files next to this path."""
        self._descriptor: int | None = None
        self._head_descriptor: int | None = None
        self._file_id = (0, 0)
        self._main_state = (0, 0)
        """Size and modification time (ns) of the database after the last write of this process."""
        self._side_files: dict[str, tuple[int, int]] = {}
        """Inode and size of SQLite's other files (``-wal`` and ``-shm``)."""
        self.is_overwritten = False
        """Whether another program has written into the database since `acquire`."""

    # --- exclusive use

    def acquire(self, *, create: bool) -> None:
        """Open the database file and lock it against other nodes. Without ``create``, the file must exist."""
        try:
            with suppress(FileNotFoundError):
                # Check before opening the file: closing the new descriptor would drop the locks of the other ledger.
                if identify(os.stat(self.path)) in locked:
                    raise self._in_use()
            # Use mode 0600, because the file contains all participants' messages. SQLite gives its other files the same
            # mode.
            flags = os.O_RDWR | CLOSE_ON_EXEC | (os.O_CREAT if create else 0)
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise LedgerError(
                    f"The database {self.path} is missing. Put it back, and the node continues."
                ) from error
            raise explain(error, self.path) from error
        try:
            lock_descriptor(descriptor)
        except OSError as error:
            # Closing is safe here: `locked` has shown that no ledger of this process has the file open.
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise self._in_use() from error
            raise explain(error, self.path) from error
        status, target = os.fstat(descriptor), self.path.resolve()
        if status.st_nlink > 1 and not Path(f"{target}.head").exists():
            # SQLite names the WAL after the path, so it cannot find the WAL that belongs to another name of the file.
            os.close(descriptor)
            raise LedgerError(
                f"{self.path} is one of {status.st_nlink} names of one file (hard links), and no node has used this "
                "name. The newest data may be in a WAL next to the other name. Start the node with the other name, or "
                "copy the file and start the node with the copy."
            )
        self._descriptor, self._file_id, self._target = descriptor, identify(status), target
        # Store the inode, not the name: another name of the same file is the same database.
        locked.add(self._file_id)

    def release(self) -> None:
        """Release the lock and close its files."""
        # Close the database last, because closing its descriptor releases the lock that keeps other nodes away.
        for descriptor in (self._head_descriptor, self._descriptor):
            if descriptor is not None:
                os.close(descriptor)
        if self._descriptor is not None:
            locked.discard(self._file_id)
        self._descriptor = self._head_descriptor = None
        self._side_files = {}
        self.is_overwritten = False

    def _in_use(self) -> LedgerError:
        return LedgerError(
            f"{self.path} is in use by another node. Stop that node, or start this one with another --db."
        )

    # --- checks that the files stay the same

    def note_state(self) -> None:
        """Record the state of the files after a write of this process. `check` compares the files with this state."""
        main = self._check_file("")
        self._main_state = (main.st_size, main.st_mtime_ns)
        for suffix in ("-wal", "-shm"):
            status = self._check_file(suffix)
            self._side_files[suffix] = (status.st_ino, status.st_size)

    def check(self) -> None:
        """Check that the next program that opens the path will find the data of this process.

        The database and SQLite's other files must be the same files as before, and none may be shorter. No other
        program may have written into the database. The database changes only when the WAL is copied into it, and only
        this process's writer does so.
        """
        main = self._check_file("")
        # Only checkpoints of this process change the file. A different modification time means that another program has
        # written.
        if main.st_size < self._main_state[0] or main.st_mtime_ns != self._main_state[1]:
            self.is_overwritten = True
            raise LedgerError(
                f"Another program has written into {self.path} while the node was using it. Stop that program. Restore "
                "backups only while no node runs."
            )
        for suffix, (_, size) in self._side_files.items():
            if self._check_file(suffix).st_size < size:
                raise LedgerError(
                    f"Another program has shortened {self._target}{suffix}, which is a part of the database. Stop that "
                    "program."
                )
        if not self._has_sqlite_lock():
            raise LedgerError(
                f"This process has lost its locks on {self.path}, because it opened and closed the file elsewhere. "
                "Restart the node."
            )

    @property
    def is_wal_foreign(self) -> bool:
        """Whether the WAL belongs to another database that this file has replaced.

        The check reads only the first bytes of the database, because no checkpoint changes them. After a power cut
        during a checkpoint, the other bytes may be a mixture of old and new sectors, which only the WAL repairs. So a
        table that is read without the WAL proves nothing.
        """
        if not self.has_wal:
            return False
        assert self._descriptor is not None, "the lock is acquired"
        header = os.pread(self._descriptor, _HEADER.size, 0)
        write_version, base = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if write_version == _ROLLBACK:
            return True
        head_file = self.read_head()
        return head_file is not None and head_file.base not in (0, base)

    @property
    def has_wal(self) -> bool:
        """Whether SQLite has left a WAL with content next to the database."""
        try:
            return os.stat(f"{self._target}-wal").st_size > 0
        except OSError:
            return False

    def block_wal_copy(self) -> None:
        """Prevent SQLite from copying the WAL into the database when it closes. The file may have been replaced.

        SQLite needs an exclusive lock for the copy. This method takes a shared lock, which prevents the copy until
        `release`.
        """
        if self._descriptor is not None:
            share_range(self._descriptor, _SHARED_FIRST, _SHARED_SIZE)

    def delete_wal(self) -> None:
        """Delete SQLite's other files of a deleted database whose content was saved. Otherwise SQLite would open a
        backup that replaces the database with the old WAL."""
        for suffix, (inode, _) in self._side_files.items():
            with suppress(OSError):
                if os.stat(f"{self._target}{suffix}").st_ino == inode:
                    os.unlink(f"{self._target}{suffix}")

    @property
    def is_unlinked(self) -> bool:
        """Whether the database file no longer has a name. The system deletes such a file when its last descriptor is
        closed."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def _check_file(self, suffix: str) -> os.stat_result:
        """Return the file status of the database, or of another SQLite file named by ``suffix``. Raises `LedgerError`
        if the file is missing or was replaced."""
        path, known = (self._target, self._side_files.get(suffix)) if suffix else (self.path, None)
        try:
            status = os.stat(f"{path}{suffix}")
        except OSError as error:
            raise LedgerError(
                f"{path}{suffix} was deleted or moved while the node was using it. Put it back, and the node continues."
            ) from error
        is_same = identify(status) == self._file_id if not suffix else known is None or known[0] == status.st_ino
        if not is_same:
            raise LedgerError(
                f"{path}{suffix} was replaced by another file while the node was using it. Put the original file back, "
                "and the node continues."
            )
        return status

    def _has_sqlite_lock(self) -> bool:
        """Return whether SQLite's shared lock still exists. The locks of this object are of another kind, so they do
        not hide SQLite's lock."""
        return self._descriptor is None or is_range_locked(self._descriptor, _SHARED_FIRST, _SHARED_SIZE)

    # --- FILE.head

    def read_head(self) -> HeadFile | None:
        """Return the content of ``FILE.head``, or None if the file is missing or cannot be parsed."""
        path = Path(f"{self._target}.head")
        try:
            first, base, *_ = [*path.read_text(encoding="utf-8").splitlines(), "", ""]
            epoch, head = first.split()
            # Older releases wrote letters here. Treat them as "not certain".
            return HeadFile(epoch, int(head), int(base) if base.strip().isdecimal() else 0)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            # The file may exist and be correct. Treating it as missing would begin a new history without need.
            raise LedgerError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error

    def start_head(self, content: HeadFile) -> None:
        """Write ``FILE.head`` durably. Call this method before any row is stored under this epoch."""
        text = _head_line(content.epoch, content.head) + f"{content.base:{_BASE_CHARS}}\n".encode()
        try:
            if self._head_descriptor is None:
                self._head_descriptor = os.open(f"{self._target}.head", os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
            # Write in place without emptying the file first: if the write fails, the old content is still there.
            os.pwrite(self._head_descriptor, text, 0)
            os.ftruncate(self._head_descriptor, len(text))
            sync_descriptor(self._head_descriptor)
            sync(self._target.parent)
        except OSError as error:
            raise explain(error, self._target) from error

    def write_head(self, epoch: str, head: int) -> None:
        """Record that all rows up to ``head`` are stored. The write is not synced, because a ``FILE.head`` that is
        behind the database does no harm."""
        if self._head_descriptor is not None:
            try:
                # Use one write of a fixed size. After a kill, the file has either the old line or the new line, never a
                # mixture.
                os.pwrite(self._head_descriptor, _head_line(epoch, head), 0)
            except OSError as error:
                raise explain(error, self._target) from error


def _head_line(epoch: str, head: int) -> bytes:
    """Return the first line of ``FILE.head``. Its length is the same during the whole epoch, because the line is
    overwritten in place."""
    return f"{epoch} {head:020d}\n".encode()
