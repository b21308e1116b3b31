"""Checks of a ledger's file, and a summary of its content. A node may be using the file at the same time."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from roundelay.network.core.rows import Row

from .memtable import FLUSHED_TO
from .queries import KEYS
from .retention import read_head, read_mark, read_used_bytes
from .row_encoding import hash_key, list_places
from .row_reader import UNREADABLE, Damage, reading_any_text, walk_log
from .schema import (
    CHECKED_FROM,
    CHECKSUMS_SINCE,
    MAX_READ_BYTES,
    MEMTABLE_SINCE,
    PLACES_SINCE,
    checksum,
    expected_schema,
    list_schema,
    open_to_read,
    refuse_schema,
)
from .storage_errors import explain

MAX_SHOWN = 5


class LogSummary(Struct, frozen=True, kw_only=True):
    """Summary of a ledger's file. Times are timestamps (ms). ``held_by`` is the agent whose open reaction keeps the
    oldest message from being deleted by retention. ``held_at`` is the time of that message."""

    head: int
    used_bytes: int
    oldest_at: int | None
    held_by: str | None
    held_at: int | None
    unchecked: int | None
    """Seq of the newest row without a checksum. Rows of older releases have no checksums."""


def summarize(path: Path) -> LogSummary:
    """Return the summary of a ledger's file. Raises `LedgerError`."""
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
            below = read_mark(db, CHECKED_FROM) if has_checksums else 2**62
            unchecked = db.execute("SELECT max(seq) FROM log WHERE seq < ?", (below,)).fetchone()[0]
            return LogSummary(
                unchecked=unchecked,
                head=read_head(db),
                used_bytes=read_used_bytes(db),
                oldest_at=oldest[0] if oldest is not None else None,
                held_by=held[0] if held is not None else None,
                held_at=held[1] if held is not None else None,
            )
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error


def check_file(path: Path) -> list[str]:
    """Return the problems that `check` finds in a file. Raises `LedgerError` if the file cannot be read at all."""
    try:
        with open_to_read(path) as db:
            return check(db)
    except sqlite3.Error as error:
        raise explain(error, path, "read") from error


def check(db: sqlite3.Connection) -> list[str]:
    """Return the problems of a ledger's file: the errors that SQLite's own check finds, and the rows that do not match
    their checksums.

    The whole file is read. An older schema is not a problem. Raises `LedgerError` for a newer schema, and for a
    database of another program.
    """
    version = refuse_schema(db)
    reports = "\n".join(text for (text,) in db.execute("PRAGMA integrity_check(10)"))  # some reports have several lines
    problems = [line for line in reports.splitlines() if line not in ("ok", "*** in database main ***")]
    # Without checksums, a changed row cannot be detected.
    if version < CHECKSUMS_SINCE:
        return problems
    try:
        db.execute("BEGIN")  # read the log and its index tables in the same state
        return [*_check_rows(db), *problems]
    except sqlite3.DataError:
        return [*problems, f"a row is larger than {MAX_READ_BYTES // 2**20} MiB, and is not read"]
    except (sqlite3.Error, *UNREADABLE) as error:  # the file has damaged pages
        return [*problems, str(error)]
    finally:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")


def _check_rows(db: sqlite3.Connection) -> list[str]:
    problems = []
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if list_schema(db) != expected_schema(version):
        problems.append("its tables or indexes are not declared as they were made")
    for table, sql in (
        ("meta", "SELECT key, value, crc FROM meta"),
        ("state", "SELECT tbl, key, value, crc FROM state"),
    ):
        # Damaged text must not end the check. The row with this text does not match its checksum, so the row is listed.
        with reading_any_text(db):
            bad = ["/".join(map(str, row[:-2])) for row in db.execute(sql) if row[-1] != checksum(row[:-1])]
        problems += _describe_rows(f"the table {table}", bad)
    damage = Damage(lambda _: None, read_mark(db, CHECKED_FROM))
    # Releases without a memtable wrote each row into the index tables at once.
    sums, damaged = _IndexSums(read_mark(db, FLUSHED_TO) if version >= MEMTABLE_SINCE else 2**62), []
    for row in walk_log(damage, db):
        if row.is_damaged:
            damaged.append(f"#{row.seq}")
        else:
            sums.add(row)
    # The places of a damaged row are unknown, so a comparison would report differences that may not exist.
    if not damaged and version >= PLACES_SINCE:
        problems += sums.compare(db)
    return [*_describe_rows("the log", damaged), *problems]


class _IndexSums:
    """Compares the index tables with the log. Comparing sums of numbers avoids holding the rows in memory."""

    def __init__(self, flushed_to: int) -> None:
        self._flushed_to = flushed_to
        self._keys = self._places = 0

    def add(self, row: Row) -> None:
        """Add the entries that the index tables should contain for a row. Rows above ``flushed_to`` are only in the
        memtable."""
        if row.seq > self._flushed_to:
            return
        if row.key:
            # A sum does not depend on the order, so the log and each table can be read once, in any order.
            self._keys += row.seq * 2**64 + 1
        for place in list_places(row):
            self._places += _place_number(place, row.seq)

    def compare(self, db: sqlite3.Connection) -> list[str]:
        """Return a problem for each index table that differs from the log. The differing rows need not be known,
        because an index can be rebuilt from the log."""
        keys = places = 0
        for key_hash, seq, actor, key in db.execute(
            f"SELECT k.hash, k.seq, l.actor, l.key FROM ({KEYS}) AS k LEFT JOIN log AS l USING (seq) WHERE k.seq <= ?",
            (self._flushed_to,),
        ):
            if actor is not None and key is not None and key_hash == hash_key(actor, key):
                keys += seq * 2**64 + 1
            else:
                # Subtract 1, so that a wrong entry changes the sum even if another entry is missing.
                keys -= 1
        for place, seq in db.execute("SELECT place, seq FROM place WHERE seq <= ?", (self._flushed_to,)):
            places += _place_number(place, seq)
        is_equal = {"key": keys == self._keys, "place": places == self._places}
        return [
            f"the table {name} does not match the rows of the log"
            for name, equal in is_equal.items()
            if not equal
        ]  # fmt: skip


def _place_number(place: str, seq: int) -> int:
    return zlib.crc32(f"{place}/{seq}".encode()) * 2**64 + seq * 2**32 + 1


def _describe_rows(table: str, rows: list[str]) -> list[str]:
    if not rows:
        return []
    shown = ", ".join(rows[:MAX_SHOWN]) + (f" and {len(rows) - MAX_SHOWN} more" if len(rows) > MAX_SHOWN else "")
    return [f"{len(rows)} damaged row{'' if len(rows) == 1 else 's'} in {table}: {shown}"]
