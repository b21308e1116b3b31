"""What is wrong with a database that cannot be opened, read or written: one sentence that says what, where and what next.

SQLite says "disk I/O error" for many things, and "unable to open database file" for most others. The system knows better: so the plain
call is tried here that SQLite made, on a file beside the database. Never on the database itself while a connection may be open: closing
any other descriptor of it drops the locks that SQLite holds on it (sqlite.org/howtocorrupt.html, 2.2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Literal

from .errors import LedgerError
from .ledger_held import is_held

Doing = Literal["read", "write"]

_HIDDEN = {
    sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_NOMEM: errno.ENOMEM, sqlite3.SQLITE_BUSY: errno.EBUSY,
    sqlite3.SQLITE_LOCKED: errno.EBUSY, sqlite3.SQLITE_PROTOCOL: errno.EBUSY, sqlite3.SQLITE_IOERR: errno.EIO,
    sqlite3.SQLITE_PERM: errno.EACCES, sqlite3.SQLITE_READONLY: errno.EACCES, sqlite3.SQLITE_CANTOPEN: 0, sqlite3.SQLITE_CORRUPT: 0,
    sqlite3.SQLITE_NOTADB: 0,
}  # fmt: skip
"""The result codes of SQLite's that hide what the system said, and what each stands for when the system has nothing to say."""

_SAYINGS = {
    errno.ENOTDIR: ("part of its path is no folder", "name another place for it"),
    errno.EISDIR: ("it is a folder", "name a file in it"),
    errno.ELOOP: ("its link leads back to itself", "name the file itself"),
    errno.ENAMETOOLONG: ("its name is too long", "choose a shorter one"),
    errno.EROFS: ("its file system is read-only", "have it mounted for writing, or choose another place for it"),
    errno.ENOLCK: ("its file system refuses locks", "choose a place for it on a local disk"),
    errno.EOPNOTSUPP: ("its file system has no locks", "choose a place for it on a local disk"),
    errno.EBUSY: ("another program holds a lock on it", "end that program, which `fuser` names"),
    errno.ENOSPC: ("no space is left on its disk", "make room; nothing acknowledged is lost"),
    errno.EDQUOT: ("the user's quota on its disk is used up", "make room; nothing acknowledged is lost"),
    errno.EFBIG: ("the file may not grow further", "raise the limit of file sizes (ulimit -f)"),
    errno.EMFILE: ("this process may open no more files", "raise its limit (ulimit -n), or lower max_connections"),
    errno.ENFILE: ("the system can open no more files", "end what holds so many, or raise fs.file-max"),
    errno.ENOMEM: ("there is no memory left", "end what uses so much"),
    errno.EIO: ("its disk reports an error", "see the system's log (dmesg); if it stays, go on from a backup on another disk"),
}  # fmt: skip
_FEWEST_BYTES = 32 * 1024
"""SQLite gives a file beside a database in WAL mode this size at once."""
_SAME = {errno.EAGAIN: errno.EBUSY, errno.ETXTBSY: errno.EBUSY, errno.EPERM: errno.EACCES}


def explain(error: Exception, path: Path, doing: Doing = "write") -> LedgerError:
    """The `LedgerError` for what the system or SQLite raised at a database's file, or at a file beside it."""
    return LedgerError(_describe(error, path, doing))


def describe_os_error(error: OSError, path: Path, doing: Doing = "write") -> str:
    """What is wrong with any file of a node, and what to do about it, without the subject and the full stop."""
    return "; ".join(_say(_SAME.get(error.errno or 0, error.errno or 0), error, path, doing))


def find_errno(path: Path, doing: Doing) -> int:
    """The errno that the plain calls come to; 0 where they succeed. It may write a small file beside it, and deletes that."""
    try:
        if path.is_dir():
            return errno.EISDIR
        if doing == "write":
            _try_to_write(path.resolve())
        elif not is_held(path):
            _try_to_read(path)
    except OSError as error:
        return _SAME.get(error.errno or 0, error.errno or 0)
    except RuntimeError:  # `Path.resolve` says so of links in a circle
        return errno.ELOOP
    return 0


def _describe(error: Exception, path: Path, doing: Doing) -> str:
    if isinstance(error, sqlite3.Error):
        return _describe_sqlite(error, path, doing)
    number = errno.ELOOP if isinstance(error, RuntimeError) else getattr(error, "errno", None) or 0
    return _sentence(_SAME.get(number, number), error, path, doing)


def _describe_sqlite(error: sqlite3.Error, path: Path, doing: Doing) -> str:
    code = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return f"The database {path} was moved or deleted while it was in use; put it back."
    number = find_errno(path, doing) if primary in _HIDDEN else 0
    if primary == sqlite3.SQLITE_NOTADB and not number:
        return f"{path} is no database ({error}); name another one with --db, or go on from a backup if it was one."
    if primary == sqlite3.SQLITE_CORRUPT and doing == "write":  # this is what EIO is to SQLite too
        return (
            f"The database {path} is damaged, or its disk fails to give it back ({error}); stop the node, and go on from a "
            "backup if `roundelay doctor` says so too."
        )
    if primary == sqlite3.SQLITE_CORRUPT and not number:
        return f"The database {path} is damaged ({error}); stop the node, and go on from a backup."
    needs: Doing = doing
    if not number and doing == "read" and primary in _HIDDEN:  # to read it, SQLite locks it, and writes beside it
        number, needs = find_errno(path, "write"), "write"
    number = number or _HIDDEN.get(primary, 0)
    return _sentence(number, error, path, doing, needs=needs)


def _sentence(number: int, error: Exception, path: Path, doing: Doing, *, needs: Doing | None = None) -> str:
    if number == errno.ENOENT and doing == "read":
        return f"There is no database {path}; name the node's with --db."
    what, advice = _say(number, error, path, needs or doing)
    hint = getattr(error, "sqlite_errorname", "") if number in (errno.EIO, errno.EBUSY) else ""
    verb = "read" if doing == "read" else "written"
    return f"The database {path} cannot be {verb}: {what}{f' ({hint})' if hint else ''}; {advice}."


def _say(number: int, error: Exception, path: Path, doing: Doing) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if number == errno.ENOENT and doing == "read":
        return "there is no such file", "check its path"
    if number == errno.ENOENT:
        return f"there is no folder {path.resolve().parent}", "make it, or choose another place for it"
    if number == errno.EACCES:
        return _describe_rights(path, doing), "give its user that right, or choose another place for it"
    if number in _SAYINGS:
        return _SAYINGS[number]
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    return reason, "`roundelay doctor` checks it"


def _describe_rights(path: Path, doing: Doing) -> str:
    """Which right is missing, as far as it shows from here."""
    with suppress(OSError):
        file = path.resolve()
        if file.exists() and not os.access(file, os.R_OK if doing == "read" else os.R_OK | os.W_OK):
            verb = "write" if os.access(file, os.R_OK) else "read"
            return f"permission denied: this user may not {verb} the file (mode {file.stat().st_mode & 0o777:o})"
        folder = next(it for it in file.parents if it.exists())
        if doing == "write" and not os.access(folder, os.W_OK | os.X_OK):
            return f"permission denied: this user may not write in the folder {folder}"
    return "permission denied"


def _try_to_read(path: Path) -> None:
    """Read all of it, as SQLite does with time: a disk may fail at any place. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        place = 0
        while data := os.pread(descriptor, 1 << 20, place):
            place += len(data)
    finally:
        os.close(descriptor)


def _try_to_write(file: Path) -> None:
    """Do what a node does with its files, with one that is made for it and deleted. Raises `OSError`."""
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        is_fixed = os.statvfs(file).f_flag & os.ST_RDONLY
        raise OSError(errno.EROFS if is_fixed else errno.EACCES, "")
    size = max(_FEWEST_BYTES, *(os.stat(it).st_size for it in (file, f"{file}-wal") if os.path.exists(it)), 0)
    probe = f"{file}-probe-{os.getpid()}"
    descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, bytes(4096), 0)
        os.pwrite(descriptor, b"\0", size)  # takes no room, but meets a limit of how large a file may be
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fsync(descriptor)
        os.pread(descriptor, 4096, 0)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(probe)
