"""Upkeep of the SQLite ledger's file: retention, backup, checks. Plain `sqlite3`; what runs in a node runs on its
writer's thread."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from msgspec import Struct

from roundelay.network.core.rows import Row
from roundelay.network.durable_files import publish_file, sync
from roundelay.network.errors import LedgerError
from roundelay.network.platforms import CLOSE_ON_EXEC

from . import KEPT_WITH, KEYED_BY_SEQ, Cut, Trim
from .database_lock import explain, find_errno
from .memtable import PLACED_TO, Unplaced
from .queries import KEYED, UNREADABLE, Damage, integer_in, pass_once, put_meta, read_rows, reading_any_text, walk_log
from .rows import hash_key, list_places
from .schema import (
    CHECKED_FROM,
    CHECKSUMS_SINCE,
    COPIED_EPOCH,
    MAX_READ_BYTES,
    PLACES_SINCE,
    ROW_COLUMNS,
    UNPLACED_SINCE,
    checksum,
    expected_schema,
    list_schema,
    open_to_read,
    refuse_schema,
)

log = logging.getLogger(__name__)


class LogSummary(Struct, frozen=True, kw_only=True):
    """What a ledger's file holds. Times are stamps (ms); ``held_by`` is the agent whose open reaction needs the oldest
    message, of ``held_at``, which retention keeps for it."""

    head: int
    used_bytes: int
    oldest_at: int | None
    held_by: str | None
    held_at: int | None
    unchecked: int | None
    """The newest row that is from before rows had checksums, if one is kept yet."""


class Marks(Struct, frozen=True):
    """Where what is kept begins: messages and what is no record, records, and what is known of messages."""

    first_seq: int
    first_record_seq: int
    first_cold: int


class CutMade(Struct, frozen=True):
    """What one transaction dropped of a `Cut`, and whether that was all of it."""

    dropped: int
    first_seq: int
    is_done: bool


def read_marks(db: sqlite3.Connection) -> Marks:
    return Marks(*(_read_mark(db, key) for key in Marks.__struct_fields__))


def find_cut(trim: Trim, damage: Damage, db: sqlite3.Connection) -> tuple[Cut | None, bool]:
    """What a trim comes to now: at most ``trim.limit`` rows of messages and as many of records, None where nothing may
    go; and whether more was to go but for the pin."""
    marks = read_marks(db)
    messages = _first_not_before(damage, db, trim.messages_before, trim.pinned, marks.first_seq)
    records = _first_not_before(damage, db, trim.records_before, trim.pinned, marks.first_record_seq)
    is_held = any(_is_older(damage, db, trim.pinned, ms) for ms in (trim.messages_before, trim.records_before))
    if trim.max_bytes is not None:
        wanted = _first_within(db, trim.max_bytes, min(marks.first_seq, marks.first_record_seq))
        by_size = min(trim.pinned, wanted)
        messages, records = max(messages, by_size), max(records, by_size)
        is_held = is_held or wanted > trim.pinned
    end = _cut_off(db, _NO_RECORDS, marks.first_seq, messages, trim.limit)
    records = _cut_off(db, _RECORDS, marks.first_record_seq, records, trim.limit)
    cut = Cut(end, records, end == messages, read_stamp(damage, db))
    is_due = (
        cut.messages > marks.first_seq or cut.records > marks.first_record_seq or marks.first_seq > marks.first_cold
    )
    return cut if is_due else None, is_held


def _cut_off(db: sqlite3.Connection, kind: str, start: int, end: int, limit: int) -> int:
    """``end``, or the seq before which there are ``limit`` rows of a kind."""
    sql = f"SELECT seq FROM log WHERE {kind} AND seq >= ? AND seq < ? ORDER BY seq LIMIT 1 OFFSET ?"
    found = db.execute(sql, (start, end, limit)).fetchone()
    return max(start, end) if found is None else int(found[0])


def make_cut(cut: Cut, damage: Damage, unplaced: Unplaced, db: sqlite3.Connection) -> CutMade:
    """Drop what a cut says, in one transaction, or a part of it where the rows are large; to be called until it is
    done. What was done before is not done again."""
    db.execute("BEGIN IMMEDIATE")
    try:
        marks, stamp = read_marks(db), max(cut.stamp, read_stamp(damage, db))
        dropped, first = _drop(damage, db, _NO_RECORDS, marks.first_seq, cut.messages)
        dropped_records, first_record = _drop(damage, db, _RECORDS, marks.first_record_seq, cut.records)
        is_done = first >= cut.messages and first_record >= cut.records
        first_cold = marks.first_cold
        if is_done and cut.is_last and first > first_cold:
            _drop_cold(db, first)
            first_cold = first
        now = {"first_seq": first, "first_record_seq": first_record, "first_cold": first_cold, "trimmed_stamp": stamp}
        put_meta(db, {key: str(mark) for key, mark in now.items()})
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has ended the transaction already
            db.execute("ROLLBACK")
        raise
    unplaced.drop(dropped + dropped_records)
    return CutMade(len(dropped) + len(dropped_records), first, is_done)


def _read_mark(db: sqlite3.Connection, key: str, otherwise: int = 1) -> int:
    found = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(found[0]) if found is not None else otherwise


def read_stamp(damage: Damage, db: sqlite3.Connection) -> int:
    """The newest time that was given out, also to rows that are gone."""
    return max(newest_stamp(damage, db), _read_mark(db, "trimmed_stamp", 0))


def read_beginning(damage: Damage, db: sqlite3.Connection) -> Cut:
    """What was dropped by now."""
    marks = read_marks(db)
    return Cut(marks.first_seq, marks.first_record_seq, is_last=False, stamp=read_stamp(damage, db))


def newest_stamp(damage: Damage, db: sqlite3.Connection) -> int:
    """The stamp of the newest row that is whole; 0 without any. A damaged one could lie in a far future, and nothing
    goes back from there."""
    newest = _find_whole(damage, db, "ORDER BY seq DESC")
    return newest.at if newest is not None else 0


def _next_whole(damage: Damage, db: sqlite3.Connection, seq: int) -> Row | None:
    """The first row from a seq on that is whole: by the time of a damaged one, rows would go that are to be kept."""
    return _find_whole(damage, db, "WHERE seq >= ? ORDER BY seq", seq)


def _find_whole(damage: Damage, db: sqlite3.Connection, clause: str, *values: int) -> Row | None:
    def take(rows: Iterator[Row]) -> Row | None:
        passed: set[int] = set()
        for row in rows:
            if not row.is_damaged:
                return row
            pass_once(passed, row.seq)
        return None

    return read_rows(damage, f"SELECT {ROW_COLUMNS} FROM log {clause}", values, take, db)


def _first_not_before(damage: Damage, db: sqlite3.Connection, before_ms: int | None, pinned: int, low: int) -> int:
    """The first seq not older than a time, by bisection: stamps never go back as seqs go up. ``low`` if nothing is to
    go."""
    if before_ms is None:
        return low
    high = max(low, pinned)
    while low < high:
        middle = (low + high) // 2
        found = _next_whole(damage, db, middle)
        if found is not None and found.seq < high and found.at < before_ms:
            low = found.seq + 1
        else:
            high = middle
    return low


def _is_older(damage: Damage, db: sqlite3.Connection, seq: int, before_ms: int | None) -> bool:
    """Whether what begins at a seq is older than a time."""
    if before_ms is None:
        return False
    found = _next_whole(damage, db, seq)
    return found is not None and found.at < before_ms


def _first_within(db: sqlite3.Connection, max_bytes: int, low: int) -> int:
    """The seq below which the oldest rows have to go for the size: their share of what is too much, and a little more.

    The share is taken of the seqs, as if every row were as large. More, because a page is free when its last row is
    gone, and so that the end is reached in some steps; the next call sees what this one came to.
    """
    used = _used_bytes(db)
    lowest, highest = db.execute("SELECT min(seq), max(seq) FROM log WHERE seq >= ?", (low,)).fetchone()
    if used <= max_bytes or lowest is None:
        return low
    share = (used - max_bytes) / used + 0.01
    return int(lowest + math.ceil((highest - lowest + 1) * min(share, 1.0)))


_RECORDS, _NO_RECORDS = "type = 'record'", "type <> 'record'"
_DROP_ROWS = "DELETE FROM log WHERE seq IN (SELECT value FROM json_each(?))"
_DROP_KEYS = """
    DELETE FROM {} WHERE (hash, seq) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))"""
# one range for each place, of which other rows may be kept
_DROP_PLACES = """
    DELETE FROM place WHERE place = ?1 AND seq >= (?2 ->> 0) AND seq <= (?2 ->> '$[#-1]')
    AND seq IN (SELECT value FROM json_each(?2))"""
# what has the hash of a key that is gone takes its place: there each key that comes is looked for first
_PROMOTE_KEYS = (
    "INSERT OR IGNORE INTO key SELECT hash, min(seq) FROM key_more GROUP BY hash",
    "DELETE FROM key_more WHERE (hash, seq) IN (SELECT hash, seq FROM key)",
)
DROPPED_BYTES = 16 * 1024 * 1024
"""Rows are read to be dropped: after so much a step ends."""


def _drop(damage: Damage, db: sqlite3.Connection, kind: str, start: int, end: int) -> tuple[list[int], int]:
    """Drop rows of a kind in start <= seq < end, or the first of them where they are large; gives which, and where the
    kept ones begin."""
    if end <= start:
        return [], start
    seqs: list[int] = []
    keys: list[tuple[int, int]] = []
    places: dict[str, list[int]] = {}
    damaged: list[int] = []

    def take(rows: Iterator[Row]) -> bool:
        for found in (seqs, keys, places, damaged):
            found.clear()
        size = 0
        for row in rows:  # one at a time: together they may be large
            seqs.append(row.seq)
            size += len(row.data)
            if row.is_damaged:
                damaged.append(row.seq)
                continue
            if row.key:
                keys.append((hash_key(row.actor, row.key), row.seq))
            for place in list_places(row):
                places.setdefault(place, []).append(row.seq)
            if size > DROPPED_BYTES:
                return True
        return False

    sql = f"SELECT {ROW_COLUMNS} FROM log WHERE {kind} AND seq >= ? AND seq < ? ORDER BY seq"
    is_cut = read_rows(damage, sql, (start, end), take, db)
    db.execute(_DROP_ROWS, (json.dumps(seqs),))
    for table in ("key", "key_more"):
        db.execute(_DROP_KEYS.format(table), (json.dumps(keys),))
    db.executemany(_DROP_PLACES, [(place, json.dumps(gone)) for place, gone in places.items()])
    if damaged:  # where these are found nobody can tell: both tables are looked through
        for table in ("key", "key_more", "place"):
            db.execute(f"DELETE FROM {table} WHERE seq IN (SELECT value FROM json_each(?))", (json.dumps(damaged),))
    for statement in _PROMOTE_KEYS:
        db.execute(statement)
    return seqs, seqs[-1] + 1 if is_cut else end


def _drop_cold(db: sqlite3.Connection, first: int) -> None:
    """Forget what is kept about dropped messages."""
    for table, field in KEPT_WITH.items():
        db.execute(f"DELETE FROM state WHERE tbl = ? AND {integer_in(field)} < ?", (table, first))
    for table in KEYED_BY_SEQ:
        sql = "DELETE FROM state WHERE tbl = ? AND CAST(substr(key, instr(key, '/') + 1) AS INTEGER) < ?"
        db.execute(sql, (table, first))


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def back_up(source: Path, target: Path) -> int:
    """Copy a ledger, also one that a node is writing, into a new file; gives its newest seq.
    Nothing is put beside a ledger that nobody has open.

    The copy is complete and checked before it has its name. Opened as a ledger it begins a new epoch: it is a fork, and
    clients must not take its seqs for those of the original. Raises `LedgerError`.
    """
    if target.exists():
        raise LedgerError(f"{target} exists; a backup never overwrites, choose another name.")
    try:
        source.stat()
    except OSError as error:
        raise explain(error, source, "read") from error
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        _make_private(draft)
        with closing(sqlite3.connect(draft)) as copy:
            copy.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_READ_BYTES)
            was_open = Path(f"{source}-wal").exists()
            version = _copy_pages(source, copy)
            if not was_open and Path(f"{source}-wal").exists():  # a node has opened it meanwhile
                version = _copy_pages(source, copy)
            problems = check(copy)
            if problems:
                raise LedgerError(
                    f"{source} is damaged: {problems[0]}; restore an earlier backup (docs/operations.md)."
                )
            copy.execute("PRAGMA journal_mode = DELETE")
            _set_epoch_aside(copy, version)
            copy.commit()
            head = read_head(copy)
        publish_file(draft, target)
    except OSError as error:
        raise explain(error, target) from error
    except sqlite3.Error as error:  # it does not say at which of the two files
        if find_errno(target, "write"):
            raise explain(error, target) from error
        raise explain(error, source, "read") from error
    finally:
        for leftover in (draft, Path(f"{draft}-journal")):
            leftover.unlink(missing_ok=True)
    return head


def _copy_pages(source: Path, copy: sqlite3.Connection) -> int:
    """Copy a file as it is at one moment; gives the version of its schema."""
    with open_to_read(source) as db:
        version = refuse_schema(db)
        # In one step, a single reading transaction: between steps SQLite begins anew whenever the node has written.
        db.backup(copy)
    return version


def _set_epoch_aside(copy: sqlite3.Connection, version: int) -> None:
    """A node that opens a copy begins an epoch of its own; who reads the copy needs the one that ids in it follow
    from."""
    found = copy.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
    copy.execute("DELETE FROM meta WHERE key IN ('epoch', 'state')")
    if found is not None and version >= CHECKSUMS_SINCE:
        put_meta(copy, {COPIED_EPOCH: found[0]})


def rescue(db: sqlite3.Connection, path: Path) -> bool:
    """Save what a connection to a deleted database still reaches as ``FILE.rescued``; gives whether that was done.
    Never raises: it is the last that can be done."""
    target = Path(f"{path}.rescued")
    # it has its name when it is whole: somebody waits to move it
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _make_private(draft)
        with closing(sqlite3.connect(draft)) as copy:
            db.backup(copy)
        sync(draft)
        target = _link_free(draft, target)
        sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        log.critical("the database was deleted under the node, and could not be saved to %s: %s", target, error)
        return False
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    way = "another file has its name now" if path.exists() else f"move that to {path}"
    log.critical("the database was deleted under the node; all that it held is in %s: %s", target, way)
    return True


def _link_free(draft: Path, target: Path) -> Path:
    """Give a file its name, or the next one with a number that is free: what an earlier deletion has left is nobody's
    to overwrite."""
    for number in itertools.count(1):
        name = target.with_name(f"{target.name}.{number}") if number > 1 else target
        try:
            os.link(draft, name)
        except FileExistsError:
            continue
        return name
    raise AssertionError("numbers do not end")


def _make_private(path: Path) -> None:
    """Make a new database that its owner alone may read: it holds everybody's messages. Raises `OSError`, also if there
    is one."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | CLOSE_ON_EXEC, 0o600))


def read_head(db: sqlite3.Connection) -> int:
    """The newest seq that was given out. Trimmed rows had theirs too."""
    newest = int(db.execute("SELECT ifnull(max(seq), 0) FROM log").fetchone()[0])
    return max(newest, _read_mark(db, "first_seq") - 1, _read_mark(db, "first_record_seq") - 1)


def summarise(path: Path) -> LogSummary:
    """What a ledger's file holds; a node may be using it. Raises `LedgerError`."""
    try:
        with open_to_read(path) as db:
            refuse_schema(db)
            oldest = db.execute("SELECT at FROM log ORDER BY seq LIMIT 1").fetchone()
            held = db.execute(
                "SELECT p.key, l.at FROM state AS r JOIN log AS l ON l.seq = r.value ->> 'oldest' "
                "JOIN state AS p ON p.tbl = 'participant' AND p.key = r.value ->> 'agent_id' "
                "WHERE r.tbl = 'reaction' AND p.value ->> 'removed_seq' IS NULL ORDER BY l.seq LIMIT 1"
            ).fetchone()
            has_checksums = db.execute("PRAGMA user_version").fetchone()[0] >= CHECKSUMS_SINCE
            below = _read_mark(db, CHECKED_FROM) if has_checksums else 2**62
            unchecked = db.execute("SELECT max(seq) FROM log WHERE seq < ?", (below,)).fetchone()[0]
            return LogSummary(
                unchecked=unchecked,
                head=read_head(db),
                used_bytes=_used_bytes(db),
                oldest_at=oldest[0] if oldest is not None else None,
                held_by=held[0] if held is not None else None,
                held_at=held[1] if held is not None else None,
            )
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error


def check(db: sqlite3.Connection) -> list[str]:
    """What is wrong with a ledger's file: SQLite's own integrity check, and rows that do not fit their checksums. Empty
    if nothing is.

    It reads the whole file. Raises `LedgerError` where this Roundelay is not made for its schema; an older one is not
    wrong.
    """
    version = refuse_schema(db)
    found_by_pages = "\n".join(
        text for (text,) in db.execute("PRAGMA integrity_check(10)")
    )  # some rows have several lines
    problems = [text for text in found_by_pages.splitlines() if text not in ("ok", "*** in database main ***")]
    if version < CHECKSUMS_SINCE:
        return problems
    try:
        db.execute("BEGIN")  # one view of the log and of what says where its rows are
        return [*_check_rows(db), *problems]
    except sqlite3.DataError:
        return [*problems, f"a row is larger than {MAX_READ_BYTES // 2**20} MiB, and is not read"]
    except (sqlite3.Error, *UNREADABLE) as error:  # pages that cannot be walked through
        return [*problems, str(error)]
    finally:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")


SHOWN = 5


def _check_rows(db: sqlite3.Connection) -> list[str]:
    """Which rows are not what was stored."""
    problems = []
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if list_schema(db) != expected_schema(version):
        problems.append("its tables or indexes are not declared as they were made")
    for table, sql in (
        ("meta", "SELECT key, value, crc FROM meta"),
        ("state", "SELECT tbl, key, value, crc FROM state"),
    ):
        with reading_any_text(db):
            bad = ["/".join(map(str, row[:-2])) for row in db.execute(sql) if row[-1] != checksum(row[:-1])]
        problems += _tell_rows(f"the table {table}", bad)
    damage = Damage(lambda _: None, _read_mark(db, CHECKED_FROM))
    found, damaged = _Found(_placed_to(db, version)), []
    for row in walk_log(damage, db):
        if row.is_damaged:
            damaged.append(f"#{row.seq}")
        else:
            found.take(row)
    if not damaged and version >= PLACES_SINCE:
        problems += found.compare(db)
    return [*_tell_rows("the log", damaged), *problems]


def _placed_to(db: sqlite3.Connection, version: int) -> int:
    """The newest row that is found by the tables: before there was a mark, each was."""
    return _read_mark(db, PLACED_TO) if version >= UNPLACED_SINCE else 2**62


class _Found:
    """Where all rows up to one are found, as a sum of numbers that nobody has to keep together."""

    def __init__(self, placed_to: int) -> None:
        self._placed_to = placed_to
        self._keys = self._places = 0

    def take(self, row: Row) -> None:
        if row.seq > self._placed_to:
            return
        if row.key:
            self._keys += row.seq * 2**64 + 1
        for place in list_places(row):
            self._places += _number(place, row.seq)

    def compare(self, db: sqlite3.Connection) -> list[str]:
        """What the tables say that is not so. Which of their rows that is does not matter: they are made anew of the
        log, as any index."""
        keys = places = 0
        for number, seq, actor, key in db.execute(
            f"SELECT k.hash, k.seq, l.actor, l.key FROM ({KEYED}) AS k LEFT JOIN log AS l USING (seq) WHERE k.seq <= ?",
            (self._placed_to,),
        ):
            if actor is not None and key is not None and number == hash_key(actor, key):
                keys += seq * 2**64 + 1
            else:
                keys -= 1
        for place, seq in db.execute("SELECT place, seq FROM place WHERE seq <= ?", (self._placed_to,)):
            places += _number(place, seq)
        same = {"key": keys == self._keys, "place": places == self._places}
        return [f"the table {name} does not say where the rows of the log are" for name, it in same.items() if not it]


def _number(place: str, seq: int) -> int:
    return zlib.crc32(f"{place}/{seq}".encode()) * 2**64 + seq * 2**32 + 1


def _tell_rows(table: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    shown = ", ".join(rows[:SHOWN]) + (f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")
    return [f"{len(rows)} row{'' if len(rows) == 1 else 's'} of {table} not as stored: {shown}"]


def check_file(path: Path) -> list[str]:
    """`check` on a file, which a node may be using. Raises `LedgerError` if it cannot be read at all."""
    try:
        with open_to_read(path) as db:
            return check(db)
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error
