"""Writes a batch into the ledger's file, in one transaction with a part of the memtable. Runs on the writer's
thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain
from typing import NamedTuple

import msgspec

from roundelay.network.core.revisions import REVISIONS, list_revised, revise
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import VOLATILE_TABLES, TableWrite, encode_value

from . import KeyTaken, Unstorable
from .memtable import FLUSHED_TO, Flush, Memtable
from .row_encoding import collect_places, hash_key, write_columns
from .row_reader import Damage, find_row
from .schema import ROW_COLUMNS, checksum

# Insert many rows per statement. A thread releases the GIL once per statement, and with `executemany` once per row.
# While the loop's thread is busy, each row would then wait for up to `sys.getswitchinterval()`. Measured: a hundred
# times slower.
_ROWS_PER_STATEMENT = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def _make_inserts(into: str, columns: str) -> tuple[int, list[tuple[int, str]]]:
    """Return the number of columns of a row, and an INSERT statement for each number of rows in
    `_ROWS_PER_STATEMENT`."""
    width = columns.count(",") + 1
    marks = f"({','.join('?' * width)})"
    return width, [(rows, f"{into} ({columns}) VALUES {','.join([marks] * rows)}") for rows in _ROWS_PER_STATEMENT]


_INTO_LOG = _make_inserts("INSERT INTO log", ROW_COLUMNS)
_INTO_KEY = _make_inserts("INSERT OR IGNORE INTO key", "hash, seq")
_INTO_PLACE = _make_inserts("INSERT OR IGNORE INTO place", "place, seq")

MAX_CHECKED_THREADS = 8
"""Maximum number of new threads in a batch that are checked for older messages. The check makes later reads of these
threads faster. With more new threads, it would delay the batch."""

UNENCODABLE = (TypeError, ValueError, OverflowError, AttributeError, RecursionError, msgspec.MsgspecError)
"""Errors for a value that cannot be encoded or passed to SQLite. These errors do not come from SQLite, which raises
`sqlite3.Error`."""

Values = tuple[object, ...]


class EncodedBatch(NamedTuple):
    """The content of one transaction, as values for SQLite."""

    head: int
    """The newest seq of the batch, or 0 if the batch has no rows."""
    log: list[object]
    """The columns of all rows of the log, as a flat list."""
    keys: list[tuple[int, int]]
    """Hash and seq of each idempotency key."""
    places: Mapping[str, list[int]]
    """Seqs by place, ascending."""
    saved: list[Values]
    """Rows that are written into the state tables."""
    deleted: list[Values]
    """Keys that are deleted from the state tables."""
    revisions: list[Row]
    """Edits and deletions in the batch. They rewrite older rows."""


def encode_batch(rows: Sequence[Row], writes: Sequence[TableWrite]) -> EncodedBatch:
    """Encode a batch for SQLite. Raises `Unstorable`."""
    log: list[object] = []
    keys: list[tuple[int, int]] = []
    places: defaultdict[str, list[int]] = defaultdict(list)
    # Share one buffer between all rows, because allocating a buffer per checksum takes a quarter more time.
    scratch = bytearray()
    try:
        for row in rows:
            columns = write_columns(row)
            log += columns
            log.append(checksum(columns, scratch))
            if row.key:
                keys.append((hash_key(row.actor, row.key), row.seq))
            collect_places(row, places)
        stored = [write for write in writes if write.table not in VOLATILE_TABLES]
        saved = [
            add_checksum(write.table, write.key, encode_value(write.value).decode())
            for write in stored
            if write.value is not None
        ]
        deleted: list[Values] = [(write.table, write.key) for write in stored if write.value is None]
        revisions = [row for row in rows if row.type in REVISIONS]
        return EncodedBatch(rows[-1].seq if rows else 0, log, keys, places, saved, deleted, revisions)
    except UNENCODABLE as error:
        raise Unstorable from error


def add_checksum(*columns: object) -> Values:
    return (*columns, checksum(columns))


def check_batch(batch: EncodedBatch) -> None:
    """Pass each value to SQLite as a statement would, but store nothing. Raises `Unstorable`."""
    with closing(sqlite3.connect(":memory:")) as db:
        for value in chain(batch.log, *batch.saved, *batch.deleted):
            try:
                db.execute("SELECT ?", (value,))
            except (*UNENCODABLE, sqlite3.Error) as error:
                raise Unstorable from error


def store_batch(
    batch: EncodedBatch, memtable: Memtable, before_commit: Callable[[], None], db: sqlite3.Connection
) -> list[Row]:  # fmt: skip
    """Write a batch and the next part of the memtable in one transaction. Return the older rows that the batch has
    rewritten.

    Raises `KeyTaken`, `Unstorable` or the error of ``before_commit``. In these cases, nothing is stored.
    """
    rows = len(batch.log) // _INTO_LOG[0]
    # IMMEDIATE takes the write lock now. A deferred transaction could fail with "busy" after half of the batch.
    db.execute("BEGIN IMMEDIATE")
    try:
        # Insert the rows first. Two rows of one batch may have the same key, and this order lets the check compare them
        # like stored rows.
        _insert(db, _INTO_LOG, batch.log)
        _refuse_taken_keys(db, batch.keys, memtable)
        revised = _rewrite(db, batch.revisions) if batch.revisions else []
        threads = _find_whole_threads(db, batch, memtable)
        flush = memtable.next_flush(rows)
        if any(flush):
            _write_flush(db, flush)
        if batch.saved:
            db.executemany("INSERT OR REPLACE INTO state (tbl, key, value, crc) VALUES (?, ?, ?, ?)", batch.saved)
        if batch.deleted:
            db.executemany("DELETE FROM state WHERE tbl = ? AND key = ?", batch.deleted)
        before_commit()  # all checks have passed; with a shared log, this appends the rows to the log
        db.execute("COMMIT")
    except BaseException as error:
        # After some errors, such as a full disk, SQLite has already ended the transaction.
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        if isinstance(error, UNENCODABLE):  # raised while a value was passed to SQLite
            raise Unstorable from error
        raise
    # Update the memtable only after the commit. Until then, readers see the previous state, both in the file and in
    # memory.
    if rows:
        memtable.add(batch.keys, batch.places, batch.head, rows, threads)
    memtable.complete_flush(flush)
    return revised


def _rewrite(db: sqlite3.Connection, changes: Sequence[Row]) -> list[Row]:
    """Rewrite the rows that these edits and deletions name. Return the rewritten rows."""
    # Overwrite the old bytes with zeros. Otherwise the deleted text would stay in unused parts of the file and in
    # backups.
    db.execute("PRAGMA secure_delete = ON")
    unchecked = Damage(lambda _: None, 2**62)
    revised: dict[int, Row] = {}
    for change in changes:
        for seq in list_revised(change):
            row = revised.get(seq) or find_row(unchecked, seq, db)
            # Retention may have deleted the row. A damaged row has no readable content, so leave it as it is.
            if row is None or row.is_damaged:
                continue
            revised[seq] = revise(row, change)
    for row in revised.values():
        columns = write_columns(row)
        db.execute(_REPLACE_ROW, (*columns, checksum(columns)))
    return list(revised.values())


_REPLACE_ROW = f"REPLACE INTO log ({ROW_COLUMNS}) VALUES ({','.join('?' * (ROW_COLUMNS.count(',') + 1))})"


def _find_whole_threads(db: sqlite3.Connection, batch: EncodedBatch, memtable: Memtable) -> list[str]:
    """Return the threads of a batch that have no older message. Only threads without a row in memory are looked up in
    the index tables."""
    places = memtable.list_new_places(place for place in batch.places if place.startswith("in/"))
    if not 0 < len(places) <= MAX_CHECKED_THREADS:
        return []
    return [place for (place,) in db.execute(_PLACES_WITHOUT_ROWS, (json.dumps(places),))]


_PLACES_WITHOUT_ROWS = """
    SELECT w.value FROM json_each(?) AS w WHERE NOT EXISTS (SELECT 1 FROM place WHERE place = w.value)"""


def _insert(db: sqlite3.Connection, into: tuple[int, list[tuple[int, str]]], values: Sequence[object]) -> int:
    """Insert rows, and return how many of them were new."""
    width, statements = into
    start = inserted = 0
    for rows, sql in statements:
        size = rows * width
        while len(values) - start >= size:
            inserted += db.execute(sql, values[start : start + size]).rowcount
            start += size
    return inserted


def _refuse_taken_keys(db: sqlite3.Connection, keys: list[tuple[int, int]], memtable: Memtable) -> None:
    """Raise `KeyTaken` if a row that was just written has the key of another row. Hashes are compared first. Rows are
    read only if two hashes are equal."""
    hashes = {key_hash for key_hash, _ in keys}
    suspects = hashes & memtable.keys.keys()
    suspects.update(key_hash for (key_hash,) in _find_known_hashes(db, hashes))
    # For almost every batch, no hash is known and no hash occurs twice. Then no row has to be read.
    if not suspects and len(hashes) == len(keys):
        return
    # Do not report damage here. The damaged row is reported when a reader needs it.
    unchecked = Damage(lambda _: None, 2**62)
    batch_seqs: dict[int, list[int]] = {}
    for key_hash, seq in keys:
        earlier = batch_seqs.setdefault(key_hash, [])
        if earlier or key_hash in suspects:
            row = find_row(unchecked, seq, db)
            assert row is not None, "rows are inserted before their keys are checked"
            for other_seq in (*_seqs_of_hash(db, key_hash, memtable), *earlier):
                other = find_row(unchecked, other_seq, db)
                # Treat a damaged row as having this key, because a message that is sent again must not be stored twice.
                if other is not None and (other.is_damaged or (other.actor, other.key) == (row.actor, row.key)):
                    raise KeyTaken
        earlier.append(seq)


def _find_known_hashes(db: sqlite3.Connection, hashes: Collection[int]) -> Iterable[tuple[int]]:
    """Return the hashes that are already in the index table."""
    if not hashes:
        return ()
    if len(hashes) == 1:  # nearly every batch of an agent; JSON would cost twice as much
        return db.execute("SELECT hash FROM key WHERE hash = ?", (*hashes,))
    return db.execute(_KNOWN_HASHES, (json.dumps([*hashes]),))


_KNOWN_HASHES = "SELECT k.hash FROM json_each(?) AS w CROSS JOIN key AS k ON k.hash = w.value"


def _seqs_of_hash(db: sqlite3.Connection, key_hash: int, memtable: Memtable) -> set[int]:
    """Return the seqs of the rows whose keys have this hash."""
    sql = "SELECT seq FROM key WHERE hash = ?1 UNION ALL SELECT seq FROM key_more WHERE hash = ?1"
    return {*memtable.seqs_of(key_hash), *(seq for (seq,) in db.execute(sql, (key_hash,)))}


def _write_flush(db: sqlite3.Connection, flush: Flush) -> None:
    """Write a part of the memtable into the index tables, within the current transaction."""
    if _insert(db, _INTO_KEY, flush.keys) < len(flush.keys) // 2:
        # Some hashes may exist already: the same rows were flushed before a crash, or other keys have the same hash.
        sql = "INSERT OR IGNORE INTO key_more SELECT ?1, ?2 WHERE (SELECT seq FROM key WHERE hash = ?1) <> ?2"
        db.executemany(sql, zip(flush.keys[::2], flush.keys[1::2], strict=True))
    _insert(db, _INTO_PLACE, flush.places)
    if flush.flushed_to is not None:
        write_meta(db, {FLUSHED_TO: str(flush.flushed_to)})


def flush_memtable(memtable: Memtable, db: sqlite3.Connection) -> None:
    """Write all rows of the memtable into the index tables."""
    for flush in memtable.remaining_flushes():
        db.execute("BEGIN IMMEDIATE")
        try:
            _write_flush(db, flush)
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        memtable.complete_flush(flush)


def write_meta(db: sqlite3.Connection, values: Mapping[str, str]) -> None:
    """Write values into ``meta``: the ledger's identity, or the marks of retention and memtable."""
    sql = "INSERT OR REPLACE INTO meta (key, value, crc) VALUES (?, ?, ?)"
    db.executemany(sql, [add_checksum(*item) for item in values.items()])
