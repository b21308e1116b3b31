"""Copies of a ledger's file: backups, and the rescue of a database that was deleted while the node was running."""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from msgspec import Struct

from roundelay.network.durable_files import publish_file, sync
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import CLOSE_ON_EXEC

from .blob_files import BlobCheck, copy_blobs, list_blobs_in_use
from .integrity import check
from .retention import read_head
from .schema import CHECKSUMS_SINCE, COPIED_EPOCH, MAX_READ_BYTES, open_to_read, refuse_schema
from .storage_errors import explain, find_errno
from .writes import write_meta

log = logging.getLogger(__name__)


class Backup(Struct, frozen=True):
    """Result of a backup: the newest seq of the copy, and its blobs."""

    head: int
    blobs: BlobCheck


def back_up(source: Path, target: Path, *, with_blobs: bool = True) -> Backup:
    """Copy a ledger into a new file, and its blobs into a new folder next to the new file. A node may write to the
    ledger during the copy. Raises `LedgerError`.

    The copy gets its name only when it is complete and checked. A node that opens the copy begins a new epoch. The copy
    is a fork, so clients must not confuse seqs of the copy with seqs of the original. If no process has the ledger
    open, the backup creates no files next to the original.
    """
    if target.exists():
        raise LedgerError(f"{target} exists. A backup never overwrites: choose another name.")
    try:
        source.stat()
    except OSError as error:
        raise explain(error, source, "read") from error
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        _create_private(draft)
        with closing(sqlite3.connect(draft)) as copy:
            copy.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_READ_BYTES)
            was_open = Path(f"{source}-wal").exists()
            version = _copy_pages(source, copy)
            if not was_open and Path(f"{source}-wal").exists():
                # A node opened the file during the copy. The copy was made without a lock, so it may be inconsistent.
                version = _copy_pages(source, copy)
            # Check the copy, not the source, because the copy is what an operator will restore.
            problems = check(copy)
            if problems:
                raise LedgerError(
                    f"{source} is damaged: {problems[0]}. Restore an earlier backup (docs/operations.md)."
                )
            # Make the copy a single file. A separate WAL could be forgotten when someone moves the copy.
            copy.execute("PRAGMA journal_mode = DELETE")
            _set_epoch_aside(copy, version)
            copy.commit()
            head = read_head(copy)
            names = list_blobs_in_use(copy) if with_blobs else []
        # Copy the blobs after the database. The node keeps a blob for a while after its last reference was deleted, so
        # every blob that the copy refers to still exists.
        blobs = copy_blobs(source, target, names)
        # The file is synced and gets its name only now, so an interrupted backup leaves no file.
        publish_file(draft, target)
    except OSError as error:
        raise explain(error, target) from error
    except sqlite3.Error as error:  # SQLite does not say whether the source or the copy failed
        if find_errno(target, "write"):
            raise explain(error, target) from error
        raise explain(error, source, "read") from error
    finally:
        for leftover in (draft, Path(f"{draft}-journal")):
            leftover.unlink(missing_ok=True)
    return Backup(head, blobs)


def _copy_pages(source: Path, copy: sqlite3.Connection) -> int:
    """Copy the database as it is at one moment. Return its schema version."""
    with open_to_read(source) as db:
        version = refuse_schema(db)
        # Copy in one step, which is one read transaction. With several steps, SQLite would start again whenever the
        # node writes.
        db.backup(copy)
    return version


def _set_epoch_aside(copy: sqlite3.Connection, version: int) -> None:
    """Remove the epoch, so that a node that opens the copy begins a new epoch. Keep the old epoch under another key,
    because readers of the copy derive ids from it."""
    cells = copy.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
    copy.execute("DELETE FROM meta WHERE key IN ('epoch', 'state')")
    if cells is not None and version >= CHECKSUMS_SINCE:
        write_meta(copy, {COPIED_EPOCH: cells[0]})


def rescue(db: sqlite3.Connection, path: Path) -> bool:
    """Save the data that a connection to a deleted database can still read as ``FILE.rescued``. Return whether the data
    was saved.

    Raises no errors: this is the last chance to save the data, and the node closes in any case.
    """
    target = Path(f"{path}.rescued")
    # Give the file its name only when it is complete, because an operator may be waiting for the file to move it.
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _create_private(draft)
        with closing(sqlite3.connect(draft)) as copy:
            db.backup(copy)
        sync(draft)
        target = _link_free_name(draft, target)
        sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        log.critical("the database was deleted under the node, and could not be saved to %s: %s", target, error)
        return False
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    advice = "another file has its name now" if path.exists() else f"move that to {path}"
    log.critical("the database was deleted under the node; its content is in %s: %s", target, advice)
    return True


def _link_free_name(draft: Path, target: Path) -> Path:
    """Give a file its name, or the next free name with a number. An earlier rescue may have used the name, and must not
    be overwritten."""
    for number in itertools.count(1):
        name = target.with_name(f"{target.name}.{number}") if number > 1 else target
        try:
            os.link(draft, name)
        except FileExistsError:
            continue
        return name
    raise AssertionError("numbers do not end")


def _create_private(path: Path) -> None:
    """Create a database file that only its owner may read, because the file will contain all participants' messages.
    Raises `OSError` if the file exists."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | CLOSE_ON_EXEC, 0o600))
