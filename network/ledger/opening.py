"""Steps of opening a database file: checks that may refuse the file, SQLite's settings, and the marks of an open file.

`SQLiteLedger` calls these functions in the order of their definition. It calls `refuse_foreign_wal` before SQLite opens
the file, and the others on its writer's thread. The functions keep no state: the epoch and the newest seq are
arguments.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from roundelay.network.clock import random_number
from roundelay.network.config import Durability
from roundelay.network.errors import LedgerError

from .database_lock import DatabaseLock, HeadFile
from .retention import read_head
from .writes import write_meta

_SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL", "memory": "OFF"}
PAGE_BYTES = 1024
"""Page size of new databases, in bytes. A commit of one row changes about three pages, and each of them is written
completely into the WAL. Pages of 4,096 bytes would write four times as much. For messages of 30 KB, however, pages of
1,024 bytes cost a fifth more CPU time. Existing databases keep their page size."""
CHECKPOINT_PAGES = 5_000
"""Size of the WAL, in pages, at which SQLite copies it into the database (five megabytes). Commits wait during the
copy, for example 40 ms with large messages. With SQLite's default of 1,000, every 300th commit of a single row would
wait for two fsyncs."""
MAX_CHECKPOINT_BYTES = 10 << 20
"""Size of the WAL, in bytes, at which SQLite copies it into a database with larger pages."""


def refuse_foreign_wal(lock: DatabaseLock, path: Path) -> None:
    """Refuse a WAL that belongs to another database, before SQLite opens the file. SQLite accepts any WAL with the
    right name, and would write the wrong WAL into the database when it closes."""
    if lock.is_wal_foreign:
        raise LedgerError(
            f"{path}-wal belongs to another database that had this name before. Put that database back. To continue "
            f"with this database and without the data in the WAL, move {path}-wal and {path}-shm away. If the "
            f"database and its WAL were restored together from a copy, move {path}.head away instead."
        )


def configure(db: sqlite3.Connection) -> None:
    """Apply the SQLite settings that do not depend on the durability, and copy the WAL into the database."""
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # This must precede the WAL mode, and affects only new databases.
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # The marks of an open file must be durable with every durability.
    # For macOS, where fsync leaves data in the drive's cache (sqlite.org/pragma.html#pragma_fullfsync).
    db.execute("PRAGMA fullfsync = ON")
    db.execute("PRAGMA checkpoint_fullfsync = ON")
    db.execute("PRAGMA busy_timeout = 2000")
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    db.execute(f"PRAGMA wal_autocheckpoint = {min(CHECKPOINT_PAGES, MAX_CHECKPOINT_BYTES // page_bytes)}")
    # Copy the WAL into the database and begin a new WAL. After a failed sync, the kernel still returns the pages of the
    # old WAL, but no later sync writes them (lwn.net/Articles/752063). A power loss would then lose these pages and
    # every later commit.
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def refuse_damage(db: sqlite3.Connection, path: Path) -> None:
    """Check the file and refuse it if it is damaged. With a damaged file, some requests would succeed and others fail,
    and the ledger would be reopened again and again."""
    (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        reason = " ".join(problem.split())
        raise LedgerError(f"The database {path} is damaged ({reason}). Stop the node, and restore a backup.")


def refuse_other_history(db: sqlite3.Connection, path: Path, epoch: str, head: int) -> None:
    """Refuse a reopened file unless it is the file that this node was writing. Also accept a backup, which has no
    epoch. Call this function before any write."""
    try:
        row = db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        is_known = row is None or (row[0] == epoch and read_head(db) >= head)
    except sqlite3.OperationalError:  # the database has no such table
        is_known = False
    if not is_known:
        raise LedgerError(
            f"{path} is not the ledger that this node was writing, or it is an older copy. Put the original file back, "
            "or restart the node to continue with this file."
        )


def begins_new_history(
    meta: Mapping[str, str], head: int, head_file: HeadFile | None, *, boot: str, durability: Durability
) -> bool:
    """Return whether clients may know rows that this file does not contain. This is possible if the file is new, is an
    older copy, or has lost its newest rows. Then a new history must begin, so that clients do not confuse its seqs with
    seqs of the old history.

    ``boot`` identifies the boot of the machine. It is empty if data that only the kernel has must not be trusted.
    """
    if "epoch" not in meta:
        return True
    if head_file is None and "has_head_file" in meta:  # files of older releases have no FILE.head
        return True
    if head_file is not None and (head_file.epoch != meta["epoch"] or head_file.head > head):
        return True
    # If a process is killed, its written data stays in the kernel. Only a restart of the machine loses it.
    is_same_boot = bool(boot) and meta.get("boot") == boot
    state = meta.get("state")
    return not is_same_boot and (state == "at_risk" or (state == "open" and durability != "full"))


def mark_open(
    db: sqlite3.Connection, lock: DatabaseLock, epoch: str, head: int, *, name: str, boot: str, durability: Durability
) -> None:
    """Mark the database and ``FILE.head`` as open, with the current history.

    A number in the database's header and in ``FILE.head`` identifies the database to which the WAL belongs. The order
    of the steps matters. After a crash between any two steps, the WAL must not look foreign, and a history that may
    have lost rows must not look complete.
    """
    head_file = lock.read_head()
    if head_file is not None:
        # First write 0 as the number. After a crash in a later step, the WAL then counts as this database's own,
        # whatever number the header has.
        lock.start_head(head_file._replace(base=0))
    base = random_number()
    db.execute(f"PRAGMA application_id = {base}")
    # The checkpoint is busy while another connection reads. Then the number may be only in the WAL and cannot be
    # compared.
    (is_busy, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # Write FILE.head before `meta` gets the epoch. After a crash in between, the epochs differ, so a new history
    # begins.
    lock.start_head(HeadFile(epoch, head, 0 if is_busy else base))
    state = "open" if durability == "full" else "at_risk"
    write_meta(db, {"epoch": epoch, "name": name, "state": state, "boot": boot, "has_head_file": "1"})
    db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
    lock.note_state()
