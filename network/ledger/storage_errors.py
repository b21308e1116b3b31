"""Explanations for errors of a database's files: what failed, where, and what to do.

SQLite reports "disk I/O error" for many causes, and "unable to open database file" for most others. The operating
system names the cause more precisely. So `explain` repeats the system calls that SQLite made, with a test file next to
the database.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from roundelay.network.durable_files import ERRNO_ALIASES, FileAction, explain_errno
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import CLOSE_ON_EXEC, is_read_only, sync_descriptor, try_record_lock

from .locked_files import is_locked_here

_HIDDEN = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_NOMEM: errno.ENOMEM, sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY, sqlite3.SQLITE_PROTOCOL: errno.EBUSY, sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_PERM: errno.EACCES, sqlite3.SQLITE_READONLY: errno.EACCES, sqlite3.SQLITE_CANTOPEN: 0,
    sqlite3.SQLITE_CORRUPT: 0, sqlite3.SQLITE_NOTADB: 0,
}  # fmt: skip
"""SQLite's result codes that hide the cause. If the repeated system calls succeed, the errno of the code is
reported."""

_MIN_SIDE_FILE_BYTES = 32 * 1024
"""Size of a new ``-shm`` file, in bytes."""


def explain(error: Exception, path: Path, action: FileAction = "write") -> LedgerError:
    """Return the `LedgerError` for an error of the system or of SQLite that concerns a database's file or a file next
    to it."""
    if isinstance(error, sqlite3.Error):
        return LedgerError(_describe_sqlite(error, path, action))
    number = errno.ELOOP if isinstance(error, RuntimeError) else getattr(error, "errno", None) or 0
    return LedgerError(_describe(ERRNO_ALIASES.get(number, number), error, path, action))


def find_errno(path: Path, action: FileAction) -> int:
    """Repeat the plain system calls and return their errno, or 0 if they succeed. For the action "write", this writes a
    small file next to the database and deletes it again."""
    try:
        if path.is_dir():
            return errno.EISDIR
        if action == "write":
            _try_to_write(path.resolve())
        elif not is_locked_here(path):
            _try_to_read(path)
    except OSError as error:
        return ERRNO_ALIASES.get(error.errno or 0, error.errno or 0)
    except RuntimeError:  # raised by `Path.resolve` for links that form a circle
        return errno.ELOOP
    return 0


def _describe_sqlite(error: sqlite3.Error, path: Path, action: FileAction) -> str:
    code = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return f"The database {path} was moved or deleted while it was in use. Put it back."
    number = find_errno(path, action) if primary in _HIDDEN else 0
    if primary == sqlite3.SQLITE_NOTADB and not number:
        return f"{path} is not a database ({error}). Name another file with --db, or restore a backup if it was one."
    if primary == sqlite3.SQLITE_CORRUPT and action == "write":  # SQLite also reports EIO with this code
        return (
            f"The database {path} is damaged, or its disk cannot read it ({error}). Stop the node. If `roundelay "
            "doctor` also reports damage, restore a backup."
        )
    if primary == sqlite3.SQLITE_CORRUPT and not number:
        return f"The database {path} is damaged ({error}). Stop the node, and restore a backup."
    required: FileAction = action
    if (
        not number and action == "read" and primary in _HIDDEN
    ):  # even for reading, SQLite locks the database and writes files next to it
        number, required = find_errno(path, "write"), "write"
    number = number or _HIDDEN.get(primary, 0)
    return _describe(number, error, path, action, required=required)


def _describe(
    number: int, error: Exception, path: Path, action: FileAction, *, required: FileAction | None = None
) -> str:
    if number == errno.ENOENT and action == "read":
        return f"There is no database {path}. Name the database of a node, or an export of one."
    cause, advice = explain_errno(number, error, path, required or action)
    code = getattr(error, "sqlite_errorname", "") if number in (errno.EIO, errno.EBUSY) else ""
    verb = "read" if action == "read" else "written"
    return f"The database {path} cannot be {verb}: {cause}{f' ({code})' if code else ''}; {advice}."


def _try_to_read(path: Path) -> None:
    """Read the whole file, because a disk may fail at any position. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | CLOSE_ON_EXEC)
    try:
        offset = 0
        while data := os.pread(descriptor, 1 << 20, offset):
            offset += len(data)
    finally:
        os.close(descriptor)


def _try_to_write(path: Path) -> None:
    """Perform a node's file operations on a test file next to the database, and delete this file. Raises `OSError`."""
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise OSError(errno.EROFS if is_read_only(path) else errno.EACCES, "")
    sizes = (os.stat(file).st_size for file in (path, f"{path}-wal") if os.path.exists(file))
    size = max(_MIN_SIDE_FILE_BYTES, *sizes, 0)
    probe = f"{path}-probe-{os.getpid()}"
    # Use a separate file, never the database: closing a descriptor of the database would drop SQLite's locks.
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        os.pwrite(descriptor, bytes(4096), 0)
        # A sparse file needs no space on the disk, but shows whether a limit on file sizes is exceeded.
        os.pwrite(descriptor, b"\0", size)
        try_record_lock(descriptor)
        # Sync the file, because many failures of a disk appear only during a sync.
        sync_descriptor(descriptor)
        os.pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(probe)
