"""The files of a SQLite ledger, held by the one node that writes them.

`HeldFiles` keeps a descriptor of the database open from before SQLite opens the file until after SQLite has closed it. Two rules
depend on it. Closing *any* descriptor of a file drops every POSIX lock that the process has on it, SQLite's own included
(sqlite.org/howtocorrupt.html, 2.2); the next program that closes the database then takes itself for the last one and deletes the
live log. So nothing in a node's process opens the database but SQLite and this module. And the descriptor carries the lock that
keeps other nodes away: it belongs to the inode, whatever name the file is reached by.

Beside the database stands ``FILE.head``: the epoch, and the newest seq that was stored. It is written after a commit and before its
answers, so that it is never ahead of the database; a database that is behind it is an older copy. Its second line names the database
that SQLite's log belongs to: SQLite would put a log into whatever file lies beside it, and a copy that was put there is ruined by that.

No SQL here. Called on the ledger's threads and, while it opens and closes, on the loop's.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .durable_files import sync
from .errors import LedgerError
from .ledger_failures import describe_os_error, explain
from .ledger_held import held, identify

_FLOCK = "hhqqi4x"
"""C's ``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""
_SHARED_FIRST, _SHARED_SIZE = 0x40000002, 510
"""The bytes on which SQLite holds its shared lock while a connection is open in WAL mode (os_unix.c, "SHARED_FIRST")."""

_VERSION_AT, _ROLLBACK = 18, b"\x01\x01"
"""Where a database's header says how it is written, and what it says without a log (sqlite.org/fileformat.html, 1.3.4)."""

_BASE_CHARS = 22
"""So that the second line of ``FILE.head`` is whole after each write in place."""


class HeadFile(NamedTuple):
    """What ``FILE.head`` says."""

    epoch: str
    head: int
    base: str
    """What the database itself, without its log, says that it is (`is_foreign_log`); empty where that was not certain."""


class HeldFiles:
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
        """Open the database's file for as long as it is used, and keep other nodes off it. Without ``create`` it must be there."""
        try:
            with suppress(FileNotFoundError):
                if identify(os.stat(self.path)) in held:
                    raise self._in_use()
            # 0600: it holds everybody's messages. SQLite gives the files that it makes beside it the same mode.
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                raise LedgerError(f"The database {self.path} is gone; put it back, and the node goes on.") from error
            raise explain(error, self.path) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)  # no SQLite of this process has it open: `held` says so
            if isinstance(error, BlockingIOError):
                raise self._in_use() from error
            raise explain(error, self.path) from error
        found, place = os.fstat(descriptor), self.path.resolve()
        if found.st_nlink > 1 and not Path(f"{place}.head").exists():
            os.close(descriptor)
            raise LedgerError(
                f"{self.path} is one of {found.st_nlink} names of one file (hard links), and not the one that a node has used: what was "
                "stored last may lie beside the other. Start the node with that one, or copy the file and start it with the copy."
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

        The database and SQLite's files beside it are the same files as before, none is shorter, and nobody else has written into
        the database: it changes when the log goes back into it, which only this process's writer does.
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
                f"This process has lost its locks on {self.path}: something in it has opened the file and closed it again."
            )

    def is_foreign_log(self, base: str | None) -> bool:
        """Whether the log beside the database was begun for another file than this one, which was put in its place. ``base`` is what
        the database says without its log; None if it says nothing."""
        if not self.has_log:
            return False
        assert self._descriptor is not None, "the files are taken"
        if os.pread(self._descriptor, len(_ROLLBACK), _VERSION_AT) == _ROLLBACK:  # a backup: it never had one
            return True
        known = self.read_head()
        return known is not None and known.base not in ("", base)

    @property
    def has_log(self) -> bool:
        """Whether SQLite left a log beside the database that holds anything."""
        try:
            return os.stat(f"{self._place}-wal").st_size > 0
        except OSError:
            return False

    def keep_log_apart(self) -> None:
        """Let SQLite not write the log back when it closes: what the database holds by now may not be what the log was begun for.

        It needs an exclusive lock for that, which this shared one refuses it, until `release`.
        """
        if self._descriptor is not None and hasattr(fcntl, "F_OFD_SETLK"):
            shared = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, _SHARED_FIRST, _SHARED_SIZE, 0)
            with suppress(OSError):
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, shared)

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
                f"{path}{suffix} was replaced by another file while the node was writing it; put the first one back, and the "
                "node goes on."
            )
        return found

    def _is_locked(self) -> bool:
        """Whether SQLite's shared lock is still there: asked through a descriptor whose own locks are of the other kind."""
        if self._descriptor is None or not hasattr(fcntl, "F_OFD_GETLK"):
            return True
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _SHARED_FIRST, _SHARED_SIZE, 0)
        try:
            kind = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked))[0]
        except OSError:  # a file system that does not tell: SQLite, which asks it for more, says what is wrong
            return True
        return bool(kind != fcntl.F_UNLCK)

    # --- what was stored

    def read_head(self) -> HeadFile | None:
        """What ``FILE.head`` tells; None when there is none, or it cannot be understood."""
        path = Path(f"{self._place}.head")
        try:
            first, base, *_ = [*path.read_text(encoding="utf-8").splitlines(), "", ""]
            epoch, head = first.split()
            return HeadFile(epoch, int(head), base.strip())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:  # it may be there, and right: that it cannot be read now makes no new history
            raise LedgerError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error

    def begin_head(self, known: HeadFile) -> None:
        """Write ``FILE.head`` anew, durably, before anything is stored under this epoch. In place: the old one is there until the new
        one is, also where there is no room for it."""
        text = _head_line(known.epoch, known.head) + f"{known.base:{_BASE_CHARS}}\n".encode()
        try:
            if self._head is None:
                self._head = os.open(f"{self._place}.head", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.pwrite(self._head, text, 0)  # not emptied before: where that fails, what it said is still there
            os.ftruncate(self._head, len(text))
            os.fsync(self._head)
            sync(self._place.parent)
        except OSError as error:
            raise explain(error, self._place) from error

    def write_head(self, epoch: str, head: int) -> None:
        """Say that everything up to ``head`` is stored. Not synced: to be behind costs nothing, and ahead it never is."""
        if self._head is not None:
            try:
                os.pwrite(self._head, _head_line(epoch, head), 0)
            except OSError as error:
                raise explain(error, self._place) from error


def _head_line(epoch: str, head: int) -> bytes:
    """Of one length under one epoch: it is written in place."""
    return f"{epoch} {head:020d}\n".encode()
