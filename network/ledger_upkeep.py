"""Upkeep of the SQLite ledger's file: retention, backup, checks. Plain `sqlite3`; what runs in a node is called on its writer's thread."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from .errors import LedgerError
from .ledger import Trim
from .migrations import SCHEMA_VERSION


def trim_log(trim: Trim, db: sqlite3.Connection) -> tuple[int, int]:
    """`Ledger.trim` on a connection: one transaction of at most ``trim.limit`` rows."""
    db.execute("BEGIN IMMEDIATE")
    try:
        first = _read_mark(db, "first_seq")
        first_record = _read_mark(db, "first_record_seq")
        messages_end = _first_not_before(db, trim.messages_before, trim.pinned, first)
        records_end = _first_not_before(db, trim.records_before, trim.pinned, first_record)
        if trim.max_bytes is not None and _used_bytes(db) > trim.max_bytes:
            oldest = min(first, first_record)
            row = db.execute(
                "SELECT seq FROM log WHERE seq >= ? ORDER BY seq LIMIT 1 OFFSET ?", (oldest, trim.limit)
            ).fetchone()
            size_end = min(trim.pinned, row[0] if row is not None else trim.pinned)
            messages_end, records_end = max(messages_end, size_end), max(records_end, size_end)
        dropped, first = _drop(db, "type <> 'record'", first, messages_end, trim.limit)
        dropped_records, first_record = _drop(db, "type = 'record'", first_record, records_end, trim.limit)
        marks = [("first_seq", str(first)), ("first_record_seq", str(first_record))]
        db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", marks)
        if dropped:
            _drop_cold(db, first)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    return dropped + dropped_records, first


def _read_mark(db: sqlite3.Connection, key: str) -> int:
    found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(found[0]) if found is not None else 1


def _first_not_before(db: sqlite3.Connection, before_ms: int | None, pinned: int, low: int) -> int:
    """The first seq not older than a time, by bisection: stamps never go back as seqs go up. ``low`` if nothing is to go."""
    if before_ms is None:
        return low
    high = max(low, pinned)
    while low < high:
        middle = (low + high) // 2
        found = db.execute("SELECT seq, at FROM log WHERE seq >= ? ORDER BY seq LIMIT 1", (middle,)).fetchone()
        if found is not None and found[0] < high and found[1] < before_ms:
            low = found[0] + 1
        else:
            high = middle
    return low


def _drop(db: sqlite3.Connection, kind: str, start: int, end: int, limit: int) -> tuple[int, int]:
    """Drop rows of a kind in start <= seq < end, at most ``limit``; gives how many, and where the kept ones begin."""
    if end <= start:
        return 0, start
    seqs = [
        seq
        for (seq,) in db.execute(
            f"SELECT seq FROM log WHERE {kind} AND seq >= ? AND seq < ? ORDER BY seq LIMIT ?", (start, end, limit)
        )
    ]
    db.executemany("DELETE FROM log WHERE seq = ?", [(seq,) for seq in seqs])
    return len(seqs), end if len(seqs) < limit else seqs[-1] + 1


def _drop_cold(db: sqlite3.Connection, first: int) -> None:
    """Forget what is kept about dropped messages."""
    db.execute("DELETE FROM state WHERE tbl = 'root' AND CAST(key AS INTEGER) < ?", (first,))
    for table in ("triggered", "dead"):
        sql = "DELETE FROM state WHERE tbl = ? AND CAST(substr(key, instr(key, '/') + 1) AS INTEGER) < ?"
        db.execute(sql, (table, first))


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def back_up(source: Path, target: Path) -> int:
    """Copy a ledger, also one that a node is writing, into a new file; gives its newest seq.

    The copy is complete and checked before it has its name. Opened as a ledger it begins a new epoch: it is a fork, and clients must
    not take its seqs for those of the original. Raises `LedgerError`.
    """
    if target.exists():
        raise LedgerError(f"{target} exists; a backup never overwrites, choose another name.")
    if not source.exists():
        raise LedgerError(f"There is no database {source}; give the node's with --db.")
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as db,
            closing(sqlite3.connect(draft)) as copy,
        ):
            db.backup(copy, pages=4096)
            copy.execute("PRAGMA journal_mode = DELETE")
            copy.execute("DELETE FROM meta WHERE key IN ('epoch', 'state')")
            copy.commit()
            problems = check(copy)
            if problems:
                raise LedgerError(f"The copy of {source} is damaged: {problems[0]}.")
            head = copy.execute("SELECT ifnull(max(seq), 0) FROM log").fetchone()[0]
        _sync(draft)
        os.link(draft, target)
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"Cannot back up {source} to {target}: {error}.") from error
    finally:
        draft.unlink(missing_ok=True)
    return int(head)


def check(db: sqlite3.Connection) -> list[str]:
    """What is wrong with a ledger's file: schema and SQLite's own integrity check. Empty if nothing is."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    problems = [] if version == SCHEMA_VERSION else [f"its schema is {version}, not {SCHEMA_VERSION}"]
    return problems + [text for (text,) in db.execute("PRAGMA integrity_check(10)") if text != "ok"]


def check_file(path: Path) -> list[str]:
    """`check` on a file, which a node may be using. Raises `LedgerError` if it cannot be read at all."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return check(db)
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read as a database: {error}.") from error


def _sync(path: Path) -> None:
    for name, flags in ((path, os.O_RDWR), (path.parent, os.O_RDONLY)):
        descriptor = os.open(name, flags)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
