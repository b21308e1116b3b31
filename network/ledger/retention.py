"""Retention in the SQLite ledger's file: decides which rows a trim may delete, and deletes them. Runs on the writer's
thread.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from roundelay.network.core.rows import Row

from . import KEYED_BY_SEQ, RETENTION_FIELDS, Trim, TrimStep
from .memtable import Memtable
from .queries import integer_in
from .row_encoding import hash_key, list_places
from .row_reader import Damage, pass_once, read_rows
from .schema import ROW_COLUMNS
from .writes import write_meta

MAX_DROPPED_BYTES = 16 * 1024 * 1024
"""Maximum size in bytes of the rows that one transaction deletes. Rows must be read to be deleted, so the limit bounds
the memory."""


class Marks(Struct, frozen=True):
    """The lowest seqs that are kept: for messages and other rows, for records, and for values about messages."""

    first_seq: int
    first_record_seq: int
    first_cold: int


class TrimProgress(Struct, frozen=True):
    """Result of one transaction of a `TrimStep`. ``is_done`` says whether the whole step is done."""

    dropped: int
    first_seq: int
    is_done: bool


def read_mark(db: sqlite3.Connection, key: str, default: int = 1) -> int:
    cells = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(cells[0]) if cells is not None else default


def read_marks(db: sqlite3.Connection) -> Marks:
    return Marks(*(read_mark(db, key) for key in Marks.__struct_fields__))


def read_head(db: sqlite3.Connection) -> int:
    """Return the newest seq that was assigned, even if its row was deleted. No seq may be assigned twice."""
    newest = int(db.execute("SELECT ifnull(max(seq), 0) FROM log").fetchone()[0])
    return max(newest, read_mark(db, "first_seq") - 1, read_mark(db, "first_record_seq") - 1)


def read_stamp(damage: Damage, db: sqlite3.Connection) -> int:
    """Return the newest timestamp (ms) that was assigned, even if its row was deleted."""
    # Skip damaged rows, because a damaged timestamp could lie in the far future.
    newest = _find_undamaged(damage, db, "ORDER BY seq DESC")
    return max(newest.at if newest is not None else 0, read_mark(db, "trimmed_stamp", 0))


def read_beginning(damage: Damage, db: sqlite3.Connection) -> TrimStep:
    """Return a `TrimStep` that describes all deletions so far: the seqs at which the kept messages and the kept records
    begin."""
    marks = read_marks(db)
    return TrimStep(marks.first_seq, marks.first_record_seq, is_last=False, stamp=read_stamp(damage, db))


# --- what may be dropped


def plan_trim(trim: Trim, damage: Damage, db: sqlite3.Connection) -> tuple[TrimStep | None, bool]:
    """Return the step to delete now, with at most ``trim.limit`` messages and as many records, or None if nothing may
    be deleted. Also return whether the pin keeps old rows."""
    marks = read_marks(db)
    messages = _first_kept(damage, db, trim.messages_before, trim.pinned, marks.first_seq)
    records = _first_kept(damage, db, trim.records_before, trim.pinned, marks.first_record_seq)
    is_pinned = any(_is_older(damage, db, trim.pinned, ms) for ms in (trim.messages_before, trim.records_before))
    if trim.max_bytes is not None:
        wanted = _first_within_size(db, trim.max_bytes, min(marks.first_seq, marks.first_record_seq))
        by_size = min(trim.pinned, wanted)  # the size limit never deletes rows that a reader still needs
        messages, records = max(messages, by_size), max(records, by_size)
        is_pinned = is_pinned or wanted > trim.pinned
    end = _limit_rows(db, _OTHER_ROWS, marks.first_seq, messages, trim.limit)
    records = _limit_rows(db, _RECORDS, marks.first_record_seq, records, trim.limit)
    step = TrimStep(end, records, end == messages, read_stamp(damage, db))
    is_due = (
        step.messages > marks.first_seq or step.records > marks.first_record_seq or marks.first_seq > marks.first_cold
    )
    return step if is_due else None, is_pinned


def _limit_rows(db: sqlite3.Connection, kind: str, start: int, end: int, limit: int) -> int:
    """Return ``end``, or an earlier seq if more than ``limit`` rows of a kind precede ``end``."""
    sql = f"SELECT seq FROM log WHERE {kind} AND seq >= ? AND seq < ? ORDER BY seq LIMIT 1 OFFSET ?"
    cells = db.execute(sql, (start, end, limit)).fetchone()
    return max(start, end) if cells is None else int(cells[0])


def _first_kept(damage: Damage, db: sqlite3.Connection, before_ms: int | None, pinned: int, low: int) -> int:
    """Return the first seq whose row is not older than ``before_ms``, or ``low`` if all rows are newer. Uses bisection,
    because timestamps never decrease with rising seqs."""
    if before_ms is None:
        return low
    high = max(low, pinned)
    while low < high:
        middle = (low + high) // 2
        row = _next_undamaged(damage, db, middle)
        if row is not None and row.seq < high and row.at < before_ms:
            low = row.seq + 1
        else:
            high = middle
    return low


def _is_older(damage: Damage, db: sqlite3.Connection, seq: int, before_ms: int | None) -> bool:
    """Return whether the first undamaged row at or after a seq is older than ``before_ms``."""
    if before_ms is None:
        return False
    row = _next_undamaged(damage, db, seq)
    return row is not None and row.at < before_ms


def _next_undamaged(damage: Damage, db: sqlite3.Connection, seq: int) -> Row | None:
    """Return the first undamaged row at or after a seq. Damaged rows are skipped, because a damaged timestamp could
    cause the deletion of rows that must be kept."""
    return _find_undamaged(damage, db, "WHERE seq >= ? ORDER BY seq", seq)


def _find_undamaged(damage: Damage, db: sqlite3.Connection, clause: str, *values: int) -> Row | None:
    def first_undamaged(rows: Iterator[Row]) -> Row | None:
        passed: set[int] = set()
        for row in rows:
            if not row.is_damaged:
                return row
            pass_once(passed, row.seq)
        return None

    return read_rows(damage, f"SELECT {ROW_COLUMNS} FROM log {clause}", values, first_undamaged, db)


def _first_within_size(db: sqlite3.Connection, max_bytes: int, low: int) -> int:
    """Return the seq below which rows must be deleted to reach the size limit.

    This is an estimate that assumes rows of equal size. The function adds one percent to the share of rows, because a
    page is free only when its last row is deleted, and to need fewer calls. The next call measures the result of this
    call.
    """
    used = read_used_bytes(db)
    lowest, highest = db.execute("SELECT min(seq), max(seq) FROM log WHERE seq >= ?", (low,)).fetchone()
    if used <= max_bytes or lowest is None:
        return low
    share = (used - max_bytes) / used + 0.01
    return int(lowest + math.ceil((highest - lowest + 1) * min(share, 1.0)))


def read_used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


# --- dropping

_RECORDS, _OTHER_ROWS = "type = 'record'", "type <> 'record'"
_DELETE_ROWS = "DELETE FROM log WHERE seq IN (SELECT value FROM json_each(?))"
_DELETE_KEYS = """
    DELETE FROM {} WHERE (hash, seq) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))"""
# Use one range per place. Other rows of the place within the range may have to be kept.
_DELETE_PLACES = """
    DELETE FROM place WHERE place = ?1 AND seq >= (?2 ->> 0) AND seq <= (?2 ->> '$[#-1]')
    AND seq IN (SELECT value FROM json_each(?2))"""
# After deleting a key, let another key with the same hash take its row in the table `key`: lookups search `key` first.
_PROMOTE_KEYS = (
    "INSERT OR IGNORE INTO key SELECT hash, min(seq) FROM key_more GROUP BY hash",
    "DELETE FROM key_more WHERE (hash, seq) IN (SELECT hash, seq FROM key)",
)


def apply_trim(step: TrimStep, damage: Damage, memtable: Memtable, db: sqlite3.Connection) -> TrimProgress:
    """Delete a step in one transaction, or a part of the step if its rows are large. The caller repeats the call until
    the step is done. Stored marks say where to continue, even after a kill."""
    db.execute("BEGIN IMMEDIATE")
    try:
        # Store the timestamp in this transaction. If no row is left, the next start must still not assign an older
        # timestamp.
        marks, stamp = read_marks(db), max(step.stamp, read_stamp(damage, db))
        dropped, first = _delete_rows(damage, db, _OTHER_ROWS, marks.first_seq, step.messages)
        dropped_records, first_record = _delete_rows(damage, db, _RECORDS, marks.first_record_seq, step.records)
        is_done = first >= step.messages and first_record >= step.records
        first_cold = marks.first_cold
        # Delete values only at the end of a trim, because the deletion scans whole tables. Until then, lookups still
        # find these values, which does no harm.
        if is_done and step.is_last and first > first_cold:
            _delete_values(db, first)
            first_cold = first
        now = {"first_seq": first, "first_record_seq": first_record, "first_cold": first_cold, "trimmed_stamp": stamp}
        # Write the marks in the same transaction as the deletions, so that marks and rows agree even after a kill.
        write_meta(db, {key: str(mark) for key, mark in now.items()})
        db.execute("COMMIT")
    except BaseException:
        # After some errors, such as a full disk, SQLite has already ended the transaction.
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    # Change the memtable only after the commit. If the deletion is rolled back, the rows must still be found.
    memtable.drop(dropped + dropped_records)
    return TrimProgress(len(dropped) + len(dropped_records), first, is_done)


def _delete_rows(damage: Damage, db: sqlite3.Connection, kind: str, start: int, end: int) -> tuple[list[int], int]:
    """Delete rows of a kind with ``start`` <= seq < ``end``. If the rows are large, delete only the first of them.
    Return the seqs of the deleted rows, and the seq at which the kept rows begin."""
    if end <= start:
        return [], start
    seqs: list[int] = []
    keys: list[tuple[int, int]] = []
    places: dict[str, list[int]] = {}
    damaged: list[int] = []

    def collect(rows: Iterator[Row]) -> bool:
        """Collect the rows to delete. Return whether rows are left for another transaction."""
        # Start with empty lists, because `read_rows` may call this function twice.
        for collected in (seqs, keys, places, damaged):
            collected.clear()
        size = 0
        for row in rows:  # hold only one row in memory, because the rows together may be large
            seqs.append(row.seq)
            size += len(row.data)
            if row.is_damaged:
                damaged.append(row.seq)
                continue
            if row.key:
                keys.append((hash_key(row.actor, row.key), row.seq))
            for place in list_places(row):
                places.setdefault(place, []).append(row.seq)
            if size > MAX_DROPPED_BYTES:
                return True
        return False

    sql = f"SELECT {ROW_COLUMNS} FROM log WHERE {kind} AND seq >= ? AND seq < ? ORDER BY seq"
    is_partial = read_rows(damage, sql, (start, end), collect, db)
    # Use one statement with a JSON list, because the thread releases the GIL at each statement.
    db.execute(_DELETE_ROWS, (json.dumps(seqs),))
    for table in ("key", "key_more"):
        db.execute(_DELETE_KEYS.format(table), (json.dumps(keys),))
    db.executemany(_DELETE_PLACES, [(place, json.dumps(gone)) for place, gone in places.items()])
    if damaged:  # the keys and places of damaged rows are unknown, so scan the index tables
        for table in ("key", "key_more", "place"):
            db.execute(f"DELETE FROM {table} WHERE seq IN (SELECT value FROM json_each(?))", (json.dumps(damaged),))
    for statement in _PROMOTE_KEYS:
        db.execute(statement)
    return seqs, seqs[-1] + 1 if is_partial else end


def _delete_values(db: sqlite3.Connection, first: int) -> None:
    """Delete the values that belong to messages below ``first``."""
    for table, field in RETENTION_FIELDS.items():
        db.execute(f"DELETE FROM state WHERE tbl = ? AND {integer_in(field)} < ?", (table, first))
    for table in KEYED_BY_SEQ:
        sql = "DELETE FROM state WHERE tbl = ? AND CAST(substr(key, instr(key, '/') + 1) AS INTEGER) < ?"
        db.execute(sql, (table, first))
