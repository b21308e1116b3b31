"""What the SQLite ledger asks of its file, as functions on a plain connection. They run on the connections' threads.

Each row that is read is compared with its checksum; `Damage` hears of those that do not fit.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import msgspec

from roundelay.network.core.rows import Row, Span, damaged_row
from roundelay.network.core.tables import (
    COLD_TABLES,
    VOLATILE_TABLES,
    Facts,
    LookupRequest,
    Table,
    TableWrite,
    decode_value,
    encode_value,
)
from roundelay.network.errors import LedgerError

from . import MAX_PAGE_BYTES, HeadAt, KeyTaken, Page, Unstorable, take_page
from .memtable import PLACED_TO, Newest, Portion, Unplaced
from .rows import hash_key, make_head, make_row, note_places, write_columns
from .schema import CHECKED_FROM, ROW_COLUMNS, checksum

MAX_KEPT = 10_000
"""How many damaged rows one ledger remembers: each of them is told once, those beyond are not told."""


class Damage:
    """What was found damaged in one ledger's file: seqs of the log, and ``TABLE/KEY`` of its tables. Used on several
    threads.

    ``tell`` hears of each once. Rows of the log from ``checked_from`` on have a checksum; older ones are from before
    there were any.
    """

    def __init__(self, tell: Callable[[int | str], None], checked_from: int = 1) -> None:
        self.checked_from = checked_from
        self.found: set[int | str] = set()
        self._tell = tell

    def begin(self, checked_from: int) -> None:
        """The file is opened: it may be another one than before."""
        self.checked_from = checked_from
        self.found.clear()

    def note(self, row: int | str) -> None:
        """A row is damaged."""
        if row not in self.found and len(self.found) < MAX_KEPT:
            self.found.add(row)
            self._tell(row)

    def fits(self, columns: Sequence[object]) -> bool:
        """Whether a row of the log, its checksum last, is what was stored. An old one without a checksum is taken as it
        is."""
        if columns[-1] is None:
            return isinstance(columns[0], int) and columns[0] < self.checked_from
        return columns[-1] == checksum(columns[:-1])


# Many rows a statement: a thread gives up the GIL once per statement. With `executemany` it does so for each row, and
# while the loop's thread is busy each row then waits for up to `sys.getswitchinterval()`: measured, a hundred times the
# transaction.
_MANY = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def _write_inserts(into: str, columns: str) -> tuple[int, list[tuple[int, str]]]:
    """How many columns a row has, and the statements for so many rows."""
    width = columns.count(",") + 1
    marks = f"({','.join('?' * width)})"
    return width, [(rows, f"{into} ({columns}) VALUES {','.join([marks] * rows)}") for rows in _MANY]


_INTO_LOG = _write_inserts("INSERT INTO log", ROW_COLUMNS)
_INTO_KEY = _write_inserts("INSERT OR IGNORE INTO key", "hash, seq")
_INTO_PLACE = _write_inserts("INSERT OR IGNORE INTO place", "place, seq")

UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, AttributeError)
"""What a row raises whose columns hold anything."""
FAILURES = (sqlite3.Error, *UNREADABLE)
"""What a storage that fails raises, and a damaged file, whose columns may hold values of any type."""
_BAD_CELL = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG)

T = TypeVar("T")
Values = tuple[object, ...]


# --- rows of the log


def read_row(columns: Sequence[Any], damage: Damage) -> Row:
    """The row of `ROW_COLUMNS`; its stand-in (`damaged_row`) where it is not what was stored."""
    if damage.fits(columns):
        try:
            return make_row(*columns)
        except UNREADABLE:  # an old one, which has no checksum
            pass
    seq: int = columns[0]
    damage.note(seq)
    return damaged_row(seq)


def find_row(damage: Damage, seq: int, db: sqlite3.Connection, columns: str = ROW_COLUMNS) -> Row | None:
    """The row of a seq, or its stand-in; None if there is none."""
    try:
        found = db.execute(f"SELECT {columns} FROM log WHERE seq = ?", (seq,)).fetchone()
    except sqlite3.DatabaseError as error:
        if not _is_bad_cell(error):
            raise
        damage.note(seq)
        return damaged_row(seq)
    return read_row(found, damage) if found is not None else None


def read_rows(
    damage: Damage, sql: str, values: Values | Sequence[object] | Mapping[str, object], take: Callable[[Iterator[Row]], T], db: sqlite3.Connection,
    columns: str = ROW_COLUMNS,
) -> T:  # fmt: skip
    """What ``take`` makes of a query's rows, which selects ``columns``; it takes none that it does not need.

    SQLite gives up at a row whose lengths are wrong, or whose text is no UTF-8. Then each row is read by itself, and
    ``take`` begins anew: damage to one hides none of the others.
    """
    try:
        with closing(db.execute(sql, values)) as cursor:
            return take(read_row(found, damage) for found in cursor)
    except sqlite3.DatabaseError as error:
        if not _is_bad_cell(error):
            raise
    passed: set[int] = set()
    with closing(db.execute(sql.replace(columns, "seq"), values)) as cursor:
        seqs = (pass_once(passed, seq) for (seq,) in cursor)
        return take(row for seq in seqs if (row := find_row(damage, seq, db, columns)) is not None)


def pass_once(passed: set[int], seq: int) -> int:
    """The seq, for who goes on over damaged rows. Raises `sqlite3.DatabaseError` at one that was passed already: then
    pages of the file name each other in a circle, and without that its rows would come again for hours."""
    if seq in passed:
        error = sqlite3.DatabaseError(f"pages of the log are mixed up: #{seq} is reached twice")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    passed.add(seq)
    return seq


def _is_bad_cell(error: sqlite3.DatabaseError) -> bool:
    """Whether one row may be at fault: SQLite says so, or the `sqlite3` module cannot decode its text (then there is no
    code)."""
    code = getattr(error, "sqlite_errorcode", None)
    return code in _BAD_CELL or (code is None and isinstance(error, sqlite3.OperationalError))


def walk_log(damage: Damage, db: sqlite3.Connection, columns: str = ROW_COLUMNS) -> Iterator[Row]:
    """Every row of the log, ascending, read in pages; a stand-in for each that is damaged."""
    sql = f"SELECT {columns} FROM log WHERE seq > ? ORDER BY seq LIMIT {_WALKED + 1}"
    after, has_more = -(2**63), True

    def take(rows: Iterator[Row]) -> Page:
        return take_page(rows, _WALKED, MAX_PAGE_BYTES)

    while has_more:
        rows, has_more = read_rows(damage, sql, (after,), take, db, columns)
        yield from rows
        after = rows[-1].seq if rows else after


_WALKED = 500
BY_SEQ = f"SELECT {ROW_COLUMNS} FROM log WHERE seq IN (SELECT value FROM json_each(?))"
NEWEST_BY_SEQ = f"{BY_SEQ} ORDER BY seq DESC"

# --- what is written

UNENCODABLE = (TypeError, ValueError, OverflowError, AttributeError, RecursionError, msgspec.MsgspecError)
"""What is raised where a value cannot be encoded, or not be given to SQLite; whatever SQLite itself raises is a
`sqlite3.Error`."""


class Writes(NamedTuple):
    """What one transaction writes, as SQLite takes it."""

    head: int
    """The newest seq, if there are rows."""
    log: list[object]
    """The columns of all rows of the log, one after the other."""
    keys: list[tuple[int, int]]
    """Hash and seq of each idempotency key."""
    places: Mapping[str, list[int]]
    """Where the rows are found: seqs, ascending."""
    saved: list[Values]
    """Rows of the tables."""
    dropped: list[Values]
    """Keys of the tables that go."""


def encode_batch(rows: Sequence[Row], puts: Sequence[TableWrite]) -> Writes:
    """What one transaction writes. Raises `Unstorable`."""
    log: list[object] = []
    keys: list[tuple[int, int]] = []
    places: defaultdict[str, list[int]] = defaultdict(list)
    scratch = bytearray()
    try:
        for row in rows:
            columns = write_columns(row)
            log += columns
            log.append(checksum(columns, scratch))
            if row.key:
                keys.append((hash_key(row.actor, row.key), row.seq))
            note_places(row, places)
        kept = [put for put in puts if put.table not in VOLATILE_TABLES]
        saved = [_sign(put.table, put.key, encode_value(put.value).decode()) for put in kept if put.value is not None]
        head = rows[-1].seq if rows else 0
        return Writes(head, log, keys, places, saved, [(put.table, put.key) for put in kept if put.value is None])
    except UNENCODABLE as error:
        raise Unstorable from error


def _sign(*columns: object) -> Values:
    return (*columns, checksum(columns))


def bind(batch: Writes) -> None:
    """Give each value to SQLite as a statement does, and store none. Raises `Unstorable`."""
    with closing(sqlite3.connect(":memory:")) as db:
        for value in chain(batch.log, *batch.saved, *batch.dropped):
            try:
                db.execute("SELECT ?", (value,))
            except (*UNENCODABLE, sqlite3.Error) as error:
                raise Unstorable from error


def store(batch: Writes, unplaced: Unplaced, before_commit: Callable[[], None], db: sqlite3.Connection) -> None:
    """Write a batch in one transaction, and with it a part of what is yet unplaced. Raises `KeyTaken`, `Unstorable` or
    what ``before_commit`` raises: then nothing is stored."""
    rows = len(batch.log) // _INTO_LOG[0]
    db.execute("BEGIN IMMEDIATE")
    try:
        _insert(db, _INTO_LOG, batch.log)
        _refuse_taken(db, batch.keys, unplaced)
        portion = unplaced.next_portion(rows)
        _place(db, portion)
        if batch.saved:
            db.executemany("INSERT OR REPLACE INTO state (tbl, key, value, crc) VALUES (?, ?, ?, ?)", batch.saved)
        if batch.dropped:
            db.executemany("DELETE FROM state WHERE tbl = ? AND key = ?", batch.dropped)
        before_commit()
        db.execute("COMMIT")
    except BaseException as error:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        if isinstance(error, UNENCODABLE):  # raised where a value is given to SQLite, not by SQLite
            raise Unstorable from error
        raise
    if rows:  # who looks before this sees what there was before
        unplaced.add(batch.keys, batch.places, batch.head, rows)
    unplaced.take(portion)


def _insert(db: sqlite3.Connection, into: tuple[int, list[tuple[int, str]]], values: Sequence[object]) -> int:
    """Insert so many values as there are; gives how many rows were new."""
    width, statements = into
    start = inserted = 0
    for rows, sql in statements:
        size = rows * width
        while len(values) - start >= size:
            inserted += db.execute(sql, values[start : start + size]).rowcount
            start += size
    return inserted


def _refuse_taken(db: sqlite3.Connection, keys: list[tuple[int, int]], unplaced: Unplaced) -> None:
    """Raises `KeyTaken` where the key of a row that was just written is another one's."""
    numbers = {number for number, _ in keys}
    doubtful = numbers & unplaced.keys.keys()
    doubtful.update(number for (number,) in db.execute(_AMONG_KEYS, (json.dumps([*numbers]),)))
    if not doubtful and len(numbers) == len(keys):
        return
    unchecked = Damage(lambda _: None, 2**62)
    seen: dict[int, list[int]] = {}
    for number, seq in keys:
        before = seen.setdefault(number, [])
        if before or number in doubtful:
            row = find_row(unchecked, seq, db)
            assert row is not None, "a key is looked at behind its row"
            for other_seq in (*_seqs_of(db, number, unplaced), *before):
                other = find_row(unchecked, other_seq, db)
                if other is not None and (other.is_damaged or (other.actor, other.key) == (row.actor, row.key)):
                    raise KeyTaken
        before.append(seq)


_AMONG_KEYS = "SELECT k.hash FROM json_each(?) AS w CROSS JOIN key AS k ON k.hash = w.value"


def _seqs_of(db: sqlite3.Connection, number: int, unplaced: Unplaced) -> set[int]:
    """The rows whose keys have this hash."""
    sql = "SELECT seq FROM key WHERE hash = ?1 UNION ALL SELECT seq FROM key_more WHERE hash = ?1"
    return {*unplaced.seqs_of(number), *(seq for (seq,) in db.execute(sql, (number,)))}


KEYED = "SELECT hash, seq FROM key UNION ALL SELECT hash, seq FROM key_more"
"""Where each key is: the first of a hash in one table, those that have the same in another."""


def _place(db: sqlite3.Connection, portion: Portion) -> None:
    """Write where rows are found, within the transaction of others."""
    if _insert(db, _INTO_KEY, portion.keys) < len(portion.keys) // 2:
        # some hashes were there: of the same rows, placed before a crash, or of other keys
        sql = "INSERT OR IGNORE INTO key_more SELECT ?1, ?2 WHERE (SELECT seq FROM key WHERE hash = ?1) <> ?2"
        db.executemany(sql, zip(portion.keys[::2], portion.keys[1::2], strict=True))
    _insert(db, _INTO_PLACE, portion.places)
    if portion.placed_to is not None:
        put_meta(db, {PLACED_TO: str(portion.placed_to)})


def place_all(unplaced: Unplaced, db: sqlite3.Connection) -> None:
    """Place whatever is yet unplaced."""
    for portion in unplaced.all_portions():
        db.execute("BEGIN IMMEDIATE")
        try:
            _place(db, portion)
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        unplaced.take(portion)


# --- what is looked up


def look_up(wanted: LookupRequest, damage: Damage, unplaced: Unplaced, db: sqlite3.Connection) -> Facts:
    facts = Facts(damaged=set())
    if wanted.keys:
        keys = list(wanted.keys)
        numbers = [hash_key(*key) for key in keys]
        sql = " UNION ALL ".join(
            f"SELECT w.key, k.seq FROM json_each(?1) AS w CROSS JOIN {table} AS k ON k.hash = w.value"
            for table in ("key", "key_more")
        )
        pairs = set(db.execute(sql, (json.dumps(numbers),)).fetchall())
        pairs.update((index, seq) for index, it in enumerate(numbers) for seq in unplaced.seqs_of(it))
        for index, seq in sorted(pairs):
            row = find_row(damage, seq, db)
            if row is None or hash_key(row.actor, row.key) != numbers[index]:
                damage.note(seq)  # it is not what this entry was written for
                row = damaged_row(seq)
            if row.is_damaged or (row.actor, row.key) == keys[index]:
                facts.stored[keys[index]] = row
    for seq in wanted.seqs:
        found = find_row(damage, seq, db)
        if found is not None and found.head is not None:
            facts.heads[seq] = found.head
            _add_cold(facts, damage, "root", str(found.head.root), db)
    for table, key in wanted.cold:
        _add_cold(facts, damage, table, key, db)
    return facts


def _add_cold(facts: Facts, damage: Damage, table: Table, key: str, db: sqlite3.Connection) -> None:
    found = _find_value(db, table, key)
    if found is None:
        return
    value = _read_value(damage, table, *found)
    if value is None:
        facts.damaged.add((table, key))
    else:
        facts.cold[table, key] = value


def _find_value(db: sqlite3.Connection, table: Table, key: str) -> tuple[str, str, int | None] | None:
    """Key, value and checksum of a row of a table."""
    with reading_any_text(db):
        found = db.execute("SELECT key, value, crc FROM state WHERE tbl = ? AND key = ?", (table, key)).fetchone()
    return (key, found[1], found[2]) if found is not None else None


# --- the other tables


@contextmanager
def reading_any_text(db: sqlite3.Connection) -> Iterator[None]:
    """Read what is no UTF-8 as something else, instead of not at all: then it does not fit its checksum."""
    db.text_factory = lambda text: text.decode(errors="replace")
    try:
        yield
    finally:
        db.text_factory = str


def put_meta(db: sqlite3.Connection, values: Mapping[str, str]) -> None:
    """Store what identifies a ledger, or where its parts begin."""
    sql = "INSERT OR REPLACE INTO meta (key, value, crc) VALUES (?, ?, ?)"
    db.executemany(sql, [_sign(*item) for item in values.items()])


def find_cold(damage: Damage, table: Table, key: str, db: sqlite3.Connection) -> Any:
    """`Ledger.lookup_cold` on a connection."""
    found = _find_value(db, table, key)
    return _read_value(damage, table, *found) if found is not None else None


def list_cold(
    damage: Damage, table: Table, prefix: str, limit: int, after: str, db: sqlite3.Connection
) -> list[tuple[str, Any]]:
    """`Ledger.cold` on a connection."""
    sql = "SELECT key, value, crc FROM state WHERE tbl = ? AND key >= ? AND key < ? AND key > ? ORDER BY key"
    with reading_any_text(db), closing(db.execute(sql, (table, prefix, f"{prefix}\U0010ffff", after))) as cursor:
        read = ((key, _read_value(damage, table, key, value, crc)) for key, value, crc in cursor)
        return list(islice(((key, value) for key, value in read if value is not None), limit))


def list_calls(after: str, limit: int, db: sqlite3.Connection) -> list[tuple[str, int | None]]:
    """Keys of calls above one, with the times of their results (ms; None where that is damaged)."""
    with reading_any_text(db):
        sql = f"SELECT key, {_CALL_AT} FROM state WHERE tbl = 'call' AND key > ? ORDER BY key LIMIT ?"
        return db.execute(sql, (after, limit)).fetchall()


def drop_calls(keys: list[str], before: int, db: sqlite3.Connection) -> None:
    """Drop those of these calls whose results are older than a time."""
    sql = f"DELETE FROM state WHERE tbl = 'call' AND key IN (SELECT value FROM json_each(?)) AND {_CALL_AT} < ?"
    db.execute(sql, (json.dumps(keys), before))


def integer_in(path: str) -> str:
    """SQL for an integer in a row's value; NULL where the value is damaged, of which `->>` would make an error."""
    found = f"CASE json_type(value, '$.{path}') WHEN 'integer' THEN value ->> '{path}' END"
    return f"CASE WHEN json_valid(value) THEN {found} END"


_CALL_AT = integer_in("at")


def _read_value(damage: Damage, table: Table, key: str, value: str, crc: int | None) -> Any:
    """The value of a row of a table; None if the row is damaged."""
    if crc == checksum((table, key, value)):
        return decode_value(table, value)
    damage.note(f"{table}/{key}")
    return None


def load_meta(db: sqlite3.Connection, expected: Sequence[str] = (CHECKED_FROM,)) -> dict[str, str]:
    """What identifies a ledger, of a file with checksums; empty before the first start but for what is ``expected``.
    Raises `LedgerError` if it is damaged."""
    with reading_any_text(db):
        found = db.execute("SELECT key, value, crc FROM meta").fetchall()
    for key, value, crc in found:
        if crc != checksum((key, value)):
            raise _damaged("meta", key)
    meta = {key: value for key, value, _ in found}
    for key in expected:
        if key not in meta:
            raise _damaged("meta", key)
    return meta


_DISPENSABLE = frozenset({"attempt", "mark", "question", "dismissed"})


def load_state(damage: Damage, db: sqlite3.Connection) -> list[TableWrite]:
    """Every row of the tables that are loaded at a start.

    Raises `LedgerError` for a damaged one: without it somebody might read what is not theirs, join with a revoked
    token, react again or spend more than they may. Failed attempts may be counted anew, and what somebody keeps for
    itself may be forgotten.
    """
    puts = []
    # All rows are passed over, and not those of each table: a damaged name of a table would end its range, and hide
    # what follows.
    marks = ",".join("?" * len(COLD_TABLES))
    sql = f"SELECT tbl, key, value, crc FROM state WHERE +tbl NOT IN ({marks})"
    with reading_any_text(db):
        found = db.execute(sql, tuple(COLD_TABLES)).fetchall()
    for table, key, value, crc in found:
        if crc == checksum((table, key, value)):
            puts.append(TableWrite(table, key, decode_value(table, value)))
        elif table in _DISPENSABLE:
            damage.note(f"{table}/{key}")
        else:
            raise _damaged(str(table), str(key))
    return puts


def _damaged(table: str, key: str) -> LedgerError:
    return LedgerError(
        f"The row {key!r} of the table {table!r} is damaged: it is not what was stored, and without it the hub cannot "
        "tell who may do what. Stop the node and restore a backup; `roundelay export --db` still reads the messages "
        "that are whole."
    )


# Each of these asks the tables for rows up to ``:placed_to``, and is told in ``:newest`` those behind it (`Unplaced`).


def at_place(
    place: str,
    after: int,
    before: int,
    newest: Newest,
    limit: int,
    *,
    columns: str = ROW_COLUMNS,
    order: str = "ASC",
    where: tuple[str, str] | None = None,
) -> tuple[str, dict[str, object]]:
    """The query for rows at a place (`rows.list_places`), after < seq < before, and its values. ``where``: a column,
    and what it has to hold."""
    more = "" if where is None else f"AND {where[0]} = :more"
    sql = f"""
        SELECT {columns} FROM place CROSS JOIN log USING (seq)
        WHERE place = :place AND seq > :after AND seq < :end {more}"""
    if newest.seqs:
        sql += f" UNION ALL SELECT {columns} FROM log WHERE seq IN (SELECT value FROM json_each(:newest)) {more}"
    values = {
        "place": place, "after": after, "end": min(before, newest.placed_to + 1), "newest": json.dumps(newest.seqs),
        "limit": limit, "more": None if where is None else where[1],
    }  # fmt: skip
    return f"{sql} ORDER BY seq {order} LIMIT :limit", values


# The seqs of an inbox: one indexed range per span, each cut to a page's size, so that a page costs its own size. The
# spans come as JSON: of SELECTs joined by UNION SQLite takes 500, and a channel that is joined and left again and again
# makes more spans.
INBOX_SEQS = """
    SELECT l.seq FROM json_each(:spans) AS span CROSS JOIN log AS l ON l.seq IN (
        SELECT seq FROM place
        WHERE place = 'to/' || (span.value ->> 0) AND seq > span.value ->> 1
        AND seq < min(span.value ->> 2, :placed_to + 1)
        ORDER BY seq {order} LIMIT :limit)
    UNION ALL SELECT * FROM (
        SELECT seq FROM place WHERE place = 'by/' || :sender AND seq > :after AND seq <= min(:until, :placed_to)
        ORDER BY seq {order} LIMIT :limit)
    UNION ALL SELECT value FROM json_each(:newest)"""
INBOX = f"SELECT {{columns}} FROM log WHERE seq IN ({INBOX_SEQS}) ORDER BY seq {{order}} LIMIT :limit"
# A reply may be read where the message that began its thread lies in the spans too, or where the reply's own span has
# open threads (`visibility.may_read`). One's own are read wherever they are.
READABLE = """
    (l.actor = :sender OR ((l.excluded IS NULL OR NOT EXISTS (SELECT 1 FROM json_each(l.excluded) WHERE value = :sender))
    AND (l.stream NOT GLOB 'thread:[1-9]*' OR EXISTS (
        SELECT 1 FROM json_each(:spans) AS span WHERE l.target = span.value ->> 0
        AND ((CAST(substr(l.stream, 8) AS INTEGER) > span.value ->> 1
        AND CAST(substr(l.stream, 8) AS INTEGER) < span.value ->> 2)
        OR (span.value ->> 3 AND l.seq > span.value ->> 1 AND l.seq < span.value ->> 2))))))"""
THREADS = f"""
    SELECT stream, max(seq), count(*) FROM log AS l WHERE seq IN ({INBOX_SEQS.replace("{order}", "ASC")})
    AND {READABLE}
    GROUP BY stream HAVING max(seq) < :end ORDER BY max(seq) DESC LIMIT :most"""


def inbox_values(
    spans: Sequence[Span], sender: str, after: int, until: int, limit: int, unplaced: Unplaced, *, newest: bool = False
) -> dict[str, object]:
    """The values of `INBOX_SEQS`."""
    ends = cut_spans(spans, after, until)
    asked = [(f"to/{target}", start, end) for target, start, end, _ in ends]
    found = unplaced.find([*asked, (f"by/{sender}", after, until + 1)], limit, newest=newest)
    return {
        "spans": json.dumps(ends), "sender": sender, "after": after, "until": until, "limit": limit,
        "placed_to": found.placed_to, "newest": json.dumps(found.seqs),
    }  # fmt: skip


# Of a few threads, by their own index: a reader of much asks for one of them again and again.
THREADS_AMONG = f"""
    WITH found (seq) AS (
        SELECT p.seq FROM json_each(:asked) AS asked
        CROSS JOIN place AS p ON p.place = 'in/' || asked.value AND p.seq <= :placed_to
        UNION ALL SELECT value FROM json_each(:newest))
    SELECT l.stream, max(l.seq), count(*) FROM found CROSS JOIN log AS l ON l.seq = found.seq
    WHERE ((l.actor = :sender AND (l.target GLOB 'agent:*' OR l.target GLOB 'mod:*')) OR EXISTS (
        SELECT 1 FROM json_each(:spans) AS span
        WHERE l.target = span.value ->> 0 AND l.seq > span.value ->> 1 AND l.seq < span.value ->> 2))
    AND {READABLE}
    GROUP BY l.stream HAVING max(l.seq) < :end ORDER BY max(l.seq) DESC LIMIT :most"""
ALL_THREADS = """
    SELECT substr(place, 4), max(last), sum(messages) FROM (
        SELECT place, max(seq) AS last, count(*) AS messages FROM place WHERE {which} AND seq <= :placed_to GROUP BY place
        UNION ALL SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(:newest))
    GROUP BY place HAVING max(last) < :end ORDER BY max(last) DESC LIMIT :most"""


def list_newest_heads(
    after: Mapping[str, tuple[int, Newest]], before: int, limit: int, db: sqlite3.Connection
) -> dict[str, list[HeadAt]]:
    """`Ledger.newest_heads` on a connection; with each seq what is found in memory."""
    found: dict[str, list[HeadAt]] = {}
    for stream, (seq, newest) in after.items():
        sql, values = at_place(f"in/{stream}", seq, before, newest, limit, columns=OF_HEADS, order="DESC")
        found[stream] = read_heads(sql, values, db)
    return found


def list_first_seqs(asked: Mapping[str, Newest], db: sqlite3.Connection) -> dict[str, int]:
    """Answer `Ledger.first_seqs` on a connection; with each thread come its rows that are found in memory."""
    found: dict[str, int] = {}
    for stream, newest in asked.items():
        first = db.execute(*at_place(f"in/{stream}", 0, 2**62, newest, 1, columns="seq")).fetchone()
        if first is not None:
            found[stream] = first[0]
    return found


def read_heads(sql: str, values: Mapping[str, object], db: sqlite3.Connection) -> list[HeadAt]:
    """The heads of a query's rows, which selects `OF_HEADS`; None where the columns are no head's.

    Rows are not compared with their checksums, and their contents are not read.
    """
    with reading_any_text(db):
        try:
            return [_read_head(columns) for columns in db.execute(sql, values)]
        except sqlite3.DatabaseError as error:
            if not _is_bad_cell(error):
                raise
        # one row hides none of the others (`read_rows`)
        passed: set[int] = set()
        seqs = [pass_once(passed, seq) for (seq,) in db.execute(sql.replace(OF_HEADS, "seq"), values)]
        return [_find_head(seq, db) for seq in seqs]


def _find_head(seq: int, db: sqlite3.Connection) -> HeadAt:
    with suppress(sqlite3.DatabaseError):
        found = db.execute(f"SELECT {OF_HEADS} FROM log WHERE seq = ?", (seq,)).fetchone()
        if found is not None:
            return _read_head(found)
    return seq, None


def _read_head(columns: Sequence[Any]) -> HeadAt:
    try:
        return columns[0], make_head(*columns)
    except UNREADABLE:
        return columns[0], None


OF_HEADS = "seq, actor, target, stream, label, excluded, head"


def cut_spans(spans: Sequence[Span], after: int, until: int) -> list[tuple[str, int, int, bool]]:
    """Those of the spans that are not empty within a range: target, both ends exclusive, and whether threads are
    open."""
    ends = [
        (
            span.target,
            max(after, span.after),
            until + 1 if span.before is None else min(span.before, until + 1),
            span.has_open_threads,
        )
        for span in spans
    ]
    return [end for end in ends if end[1] + 1 < end[2]]
