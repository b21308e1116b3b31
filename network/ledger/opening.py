"""Steps of opening a database file: checks that may refuse the file, SQLite's settings, and the marks of an open file.

`SQLiteLedger` calls these functions on its writer's thread, in the order in which they are defined. It calls
`refuse_foreign_wal` before SQLite opens the file. The functions keep no state: the epoch and the newest seq are
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
"""Page size of new databases, in bytes. A commit of one row changes about three pages, and writes each of them whole
into the WAL. Pages of 4,096 bytes would write four times as much. For messages of 30 KB, pages of 1,024 bytes cost a
fifth more CPU time. Existing databases keep their page size."""
CHECKPOINT_PAGES = 5_000
"""Size of the WAL, in pages, at which SQLite copies it into the database (five megabytes). Commits wait during the
copy: 40 ms for large messages. With SQLite's default of 1,000, every 300th single commit would wait for two fsyncs."""
MAX_CHECKPOINT_BYTES = 10 << 20
"""Size of the WAL, in bytes, at which it is copied into a database with larger pages."""


def refuse_foreign_wal(lock: DatabaseLock, path: Path) -> None:
    """Refuse a WAL of another database before SQLite opens the file. SQLite uses any WAL with the right name, and would
    write the wrong WAL into the database when it closes."""
    if lock.is_wal_foreign:
        raise LedgerError(
            f"{path}-wal does not belong to this database: another one left it that was here before. Put that one back. "
            f"Or move {path}-wal and {path}-shm away, to go on with this one without their content. If both were put "
            f"back together from a copy, move {path}.head away instead."
        )


def configure(db: sqlite3.Connection) -> None:
    """Apply the SQLite settings that do not depend on the durability, and copy the WAL into the database."""
    db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # must come before the WAL, and applies only to new databases
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # the marks of an open file must be durable with every durability
    # This is for macOS, whose fsync leaves data in the drive's cache (sqlite.org/pragma.html#pragma_fullfsync).
    db.execute("PRAGMA fullfsync = ON")
    db.execute("PRAGMA checkpoint_fullfsync = ON")
    db.execute("PRAGMA busy_timeout = 2000")
    (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
    db.execute(f"PRAGMA wal_autocheckpoint = {min(CHECKPOINT_PAGES, MAX_CHECKPOINT_BYTES // page_bytes)}")
    # Copy the WAL into the database, and begin a new WAL. After a failed sync, the kernel still returns the pages of
    # the old WAL, but no later sync writes them (lwn.net/Articles/752063). A power loss would lose these pages, and
    # every commit after them.
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def refuse_damage(db: sqlite3.Connection, path: Path) -> None:
    """Check the file, and refuse it if it is damaged. A damaged file would serve some requests, fail at others, and be
    reopened again and again."""
    (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        reason = " ".join(problem.split())
        raise LedgerError(f"The database {path} is damaged ({reason}). Stop the node, and go on from a backup.")


def refuse_other_history(db: sqlite3.Connection, path: Path, epoch: str, head: int) -> None:
    """Check that a reopened file is the file that this node was writing. Also accept a backup, which has no epoch.
    Check before any write."""
    try:
        row = db.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        is_known = row is None or (row[0] == epoch and read_head(db) >= head)
    except sqlite3.OperationalError:  # the database has no such table
        is_known = False
    if not is_known:
        raise LedgerError(
            f"{path} is not the ledger that this node was writing, or it is an older copy. Put the former file back, or "
            "restart the node to go on with this one."
        )


def begins_new_history(
    meta: Mapping[str, str], head: int, head_file: HeadFile | None, *, boot: str, durability: Durability
) -> bool:
    """Return whether clients may know rows that this file does not have. This is possible if the file is new, is an
    older copy, or has lost its newest rows. In these cases clients must not confuse its seqs with seqs of the old
    history.

    ``boot`` identifies the boot of the machine. ``boot`` is empty if the data that the kernel kept cannot be trusted.
    """
    if "epoch" not in meta:
        return True
    if head_file is None and "has_head_file" in meta:  # files of older releases have no FILE.head
        return True
    if head_file is not None and (head_file.epoch != meta["epoch"] or head_file.head > head):
        return True
    # Data that a killed process wrote stays in the kernel, unless the machine itself went down.
    is_same_boot = bool(boot) and meta.get("boot") == boot
    state = meta.get("state")
    return not is_same_boot and (state == "at_risk" or (state == "open" and durability != "full"))


def mark_open(
    db: sqlite3.Connection, lock: DatabaseLock, epoch: str, head: int, *, name: str, boot: str, durability: Durability
) -> None:
    """Mark the database and ``FILE.head`` as open, with the current history.

    ``FILE.head`` identifies the database to which the WAL belongs by a number in the database's header. The order of
    the steps matters: a crash between any two steps must not make the WAL look foreign, or a history that may have lost
    rows look complete.
    """
    head_file = lock.read_head()
    if head_file is not None:
        # Write no number: after a crash in a later step, the WAL then counts as this database's, whichever number the
        # header has.
        lock.start_head(head_file._replace(base=0))
    base = random_number()
    db.execute(f"PRAGMA application_id = {base}")
    # The checkpoint is busy while another connection reads. The number may then be only in the WAL, and cannot be
    # compared.
    (is_busy, *_) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    # Write this before `meta` gets the epoch: a crash in between leaves another epoch in FILE.head, which causes a new
    # history.
    lock.start_head(HeadFile(epoch, head, 0 if is_busy else base))
    state = "open" if durability == "full" else "at_risk"
    write_meta(db, {"epoch": epoch, "name": name, "state": state, "boot": boot, "has_head_file": "1"})
    db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
    lock.note_state()
