"""The reads of the SQLite ledger, as functions of a plain connection. They run on the threads of the connections.

Readers find rows up to ``flushed_to`` in the index tables, and later rows in the memtable. So the queries about places
have two parameters: ``:flushed_to``, and ``:newest`` with the seqs that were found in the memtable.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import Any

from roundelay.network.core.rows import Span, damaged_row
from roundelay.network.core.tables import COLD_TABLES, Facts, LookupRequest, Table, TableWrite, decode_value
from roundelay.network.errors import LedgerError

from . import HeadAt
from .memtable import Memtable, MemtableRows, Range
from .row_encoding import hash_key, make_head
from .row_reader import UNREADABLE, Damage, find_row, is_damaged_cell, pass_once, reading_any_text
from .schema import CHECKED_FROM, ROW_COLUMNS, checksum

BY_SEQ = f"SELECT {ROW_COLUMNS} FROM log WHERE seq IN (SELECT value FROM json_each(?))"
NEWEST_BY_SEQ = f"{BY_SEQ} ORDER BY seq DESC"
KEYS = "SELECT hash, seq FROM key UNION ALL SELECT hash, seq FROM key_more"
"""SQL that selects all keys. The table ``key`` has the first key of each hash, and ``key_more`` has further keys with
the same hash."""

# --- lookups of a batch


def answer_lookup(request: LookupRequest, damage: Damage, memtable: Memtable, db: sqlite3.Connection) -> Facts:
    facts = Facts(damaged=set())
    if request.keys:
        _find_keys(facts, list(request.keys), damage, memtable, db)
    for seq in request.seqs:
        row = find_row(damage, seq, db)
        if row is not None and row.head is not None:
            facts.heads[seq] = row.head
            _add_cold(facts, damage, "root", str(row.head.root), db)
    for table, key in request.cold:
        _add_cold(facts, damage, table, key, db)
    return facts


def _find_keys(
    facts: Facts, keys: list[tuple[str, str]], damage: Damage, memtable: Memtable, db: sqlite3.Connection
) -> None:
    hashes = [hash_key(*key) for key in keys]
    # CROSS JOIN fixes the order of the tables: SQLite first reads the few requested keys, then the index.
    sql = " UNION ALL ".join(
        f"SELECT w.key, k.seq FROM json_each(?1) AS w CROSS JOIN {table} AS k ON k.hash = w.value"
        for table in ("key", "key_more")
    )
    pairs = set(db.execute(sql, (json.dumps(hashes),)).fetchall())
    pairs.update((index, seq) for index, key_hash in enumerate(hashes) for seq in memtable.seqs_of(key_hash))
    for index, seq in sorted(pairs):
        row = find_row(damage, seq, db)
        if row is None or hash_key(row.actor, row.key) != hashes[index]:
            # The index lists this row for the hash, so the row's key must have changed after it was stored. Treat the
            # key as taken, because a message that is sent again must not be stored twice.
            damage.add(seq)
            row = damaged_row(seq)
        if row.is_damaged or (row.actor, row.key) == keys[index]:
            facts.stored[keys[index]] = row


def _add_cold(facts: Facts, damage: Damage, table: Table, key: str, db: sqlite3.Connection) -> None:
    cells = _find_value(db, table, key)
    if cells is None:
        return
    value = _read_value(damage, table, *cells)
    if value is None:
        facts.damaged.add((table, key))
    else:
        facts.cold[table, key] = value


# --- tables


def _find_value(db: sqlite3.Connection, table: Table, key: str) -> tuple[str, str, int | None] | None:
    """Return key, value and checksum of a row of a state table."""
    with reading_any_text(db):
        cells = db.execute("SELECT key, value, crc FROM state WHERE tbl = ? AND key = ?", (table, key)).fetchone()
    return (key, cells[1], cells[2]) if cells is not None else None


def find_cold(damage: Damage, table: Table, key: str, db: sqlite3.Connection) -> Any:
    """Answer `Ledger.lookup_cold`."""
    cells = _find_value(db, table, key)
    return _read_value(damage, table, *cells) if cells is not None else None


def list_cold(
    damage: Damage, table: Table, prefix: str, limit: int, after: str, db: sqlite3.Connection
) -> list[tuple[str, Any]]:
    """Answer `Ledger.cold`."""
    sql = "SELECT key, value, crc FROM state WHERE tbl = ? AND key >= ? AND key < ? AND key > ? ORDER BY key"
    with reading_any_text(db), closing(db.execute(sql, (table, prefix, f"{prefix}\U0010ffff", after))) as cursor:
        # Read the rows lazily, without LIMIT in SQL. Damaged values are left out, and a page that is shorter because of
        # them would look like the last page.
        values = ((key, _read_value(damage, table, key, value, crc)) for key, value, crc in cursor)
        return list(islice(((key, value) for key, value in values if value is not None), limit))


def list_calls(after: str, limit: int, db: sqlite3.Connection) -> list[tuple[str, int | None]]:
    """Return keys of calls above a key, with the times of their results in ms. The time of a damaged call is None."""
    with reading_any_text(db):
        sql = f"SELECT key, {_CALL_AT} FROM state WHERE tbl = 'call' AND key > ? ORDER BY key LIMIT ?"
        return db.execute(sql, (after, limit)).fetchall()


def drop_calls(keys: list[str], before: int, db: sqlite3.Connection) -> None:
    """Delete those of the given calls whose results are older than ``before`` (ms)."""
    sql = f"DELETE FROM state WHERE tbl = 'call' AND key IN (SELECT value FROM json_each(?)) AND {_CALL_AT} < ?"
    db.execute(sql, (json.dumps(keys), before))


def integer_in(path: str) -> str:
    """Return SQL for an integer field of a row's value. For a damaged value, this SQL returns NULL, while the operator
    `->>` would fail."""
    number = f"CASE json_type(value, '$.{path}') WHEN 'integer' THEN value ->> '{path}' END"
    return f"CASE WHEN json_valid(value) THEN {number} END"


_CALL_AT = integer_in("at")


def _read_value(damage: Damage, table: Table, key: str, value: str, crc: int | None) -> Any:
    """Return the value of a row of a state table, or None if the row is damaged."""
    if crc == checksum((table, key, value)):
        return decode_value(table, value)
    damage.add(f"{table}/{key}")
    return None


def load_meta(db: sqlite3.Connection, required: Sequence[str] = (CHECKED_FROM,)) -> dict[str, str]:
    """Load the identity and the marks of a file whose schema has checksums. Before the first start, only the
    ``required`` keys exist. Raises `LedgerError` if a required key is missing or a row is damaged."""
    with reading_any_text(db):
        cells = db.execute("SELECT key, value, crc FROM meta").fetchall()
    for key, value, crc in cells:
        if crc != checksum((key, value)):
            raise _damaged_error("meta", key)
    meta = {key: value for key, value, _ in cells}
    for key in required:
        if key not in meta:
            raise _damaged_error("meta", key)
    return meta


_DISPENSABLE_TABLES = frozenset({"attempt", "mark", "question", "dismissed"})


def load_state(damage: Damage, db: sqlite3.Connection) -> list[TableWrite]:
    """Load every row of the state tables that are kept in memory.

    Raises `LedgerError` for most damaged rows. Without such a row, a participant might read another participant's
    messages, join with a revoked token, react twice or exceed a budget. Only failed attempts and people's private
    settings may be lost, so damaged rows of their tables are skipped.
    """
    writes = []
    # Scan all rows instead of the range of each table. A damaged table name would end its range and hide the rows that
    # follow.
    marks = ",".join("?" * len(COLD_TABLES))
    sql = f"SELECT tbl, key, value, crc FROM state WHERE +tbl NOT IN ({marks})"
    with reading_any_text(db):
        cells = db.execute(sql, tuple(COLD_TABLES)).fetchall()
    for table, key, value, crc in cells:
        if crc == checksum((table, key, value)):
            writes.append(TableWrite(table, key, decode_value(table, value)))
        elif table in _DISPENSABLE_TABLES:
            damage.add(f"{table}/{key}")
        else:
            raise _damaged_error(str(table), str(key))
    return writes


def _damaged_error(table: str, key: str) -> LedgerError:
    return LedgerError(
        f"The row {key!r} of the table {table!r} is damaged, and the hub cannot run without it. Stop the node and "
        "restore a backup. `roundelay export --db` can still read the undamaged messages."
    )


# --- rows at places


def select_at_place(
    place: str,
    after: int,
    before: int,
    newest: MemtableRows,
    limit: int,
    *,
    columns: str = ROW_COLUMNS,
    order: str = "ASC",
    where: tuple[str, str] | None = None,
) -> tuple[str, dict[str, object]]:
    """Return an SQL query and its parameters, for the rows at a place (`row_encoding.list_places`) with ``after`` < seq
    < ``before``. ``where`` is a column and the value that it must have."""
    condition = "" if where is None else f"AND {where[0]} = :more"
    sql = f"""
        SELECT {columns} FROM place CROSS JOIN log USING (seq)
        WHERE place = :place AND seq > :after AND seq < :end {condition}"""
    # Add the second SELECT only if the memtable has found rows, because the SELECT costs a scan of the JSON each time.
    if newest.seqs:
        sql += f" UNION ALL SELECT {columns} FROM log WHERE seq IN (SELECT value FROM json_each(:newest)) {condition}"
    values = {
        "place": place, "after": after, "end": min(before, newest.flushed_to + 1), "newest": json.dumps(newest.seqs),
        "limit": limit, "more": None if where is None else where[1],
    }  # fmt: skip
    return f"{sql} ORDER BY seq {order} LIMIT :limit", values


# Query for the seqs of an inbox. Each span has one indexed range that is limited to the size of a page, so the cost per
# span depends only on the page size. The spans are passed as JSON, because SQLite accepts at most 500 SELECTs joined by
# UNION. An agent that joins and leaves a channel repeatedly has more spans.
INBOX_SEQS = """
    SELECT l.seq FROM json_each(:spans) AS span CROSS JOIN log AS l ON l.seq IN (
        SELECT seq FROM place
        WHERE place = 'to/' || (span.value ->> 0) AND seq > span.value ->> 1
        AND seq < min(span.value ->> 2, :flushed_to + 1)
        ORDER BY seq {order} LIMIT :limit)
    UNION ALL SELECT * FROM (
        SELECT seq FROM place WHERE place = 'by/' || :sender AND seq > :after AND seq <= min(:until, :flushed_to)
        ORDER BY seq {order} LIMIT :limit)
    UNION ALL SELECT value FROM json_each(:newest)"""
INBOX = f"SELECT {{columns}} FROM log WHERE seq IN ({INBOX_SEQS}) ORDER BY seq {{order}} LIMIT :limit"
# Condition for a readable reply: the first message of its thread is in the same span, or the span that contains the
# reply has open threads (`visibility.may_read`). The reader's own messages are always readable.
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


def inbox_ranges(spans: Sequence[Span], sender: str, after: int, until: int) -> list[Range]:
    """Return the ranges of the memtable that contain the rows of an inbox."""
    ends = cut_spans(spans, after, until)
    return [*((f"to/{target}", start, end) for target, start, end, _ in ends), (f"by/{sender}", after, until + 1)]


def inbox_values(
    spans: Sequence[Span], sender: str, after: int, until: int, limit: int, memtable: Memtable, *, newest: bool = False
) -> dict[str, object]:
    """Return the parameters of `INBOX_SEQS`."""
    rows = memtable.find(inbox_ranges(spans, sender, after, until), limit, newest=newest)
    return {
        "spans": json.dumps(cut_spans(spans, after, until)), "sender": sender, "after": after, "until": until, "limit": limit,
        "flushed_to": rows.flushed_to, "newest": json.dumps(rows.seqs),
    }  # fmt: skip


# Query for a few threads. Each thread is looked up by its own place, because readers of many messages often ask for a
# single thread.
THREADS_AMONG = f"""
    WITH messages (seq) AS (
        SELECT p.seq FROM json_each(:threads) AS thread
        CROSS JOIN place AS p ON p.place = 'in/' || thread.value AND p.seq <= :flushed_to
        UNION ALL SELECT value FROM json_each(:newest))
    SELECT l.stream, max(l.seq), count(*) FROM messages CROSS JOIN log AS l ON l.seq = messages.seq
    WHERE ((l.actor = :sender AND (l.target GLOB 'agent:*' OR l.target GLOB 'mod:*')) OR EXISTS (
        SELECT 1 FROM json_each(:spans) AS span
        WHERE l.target = span.value ->> 0 AND l.seq > span.value ->> 1 AND l.seq < span.value ->> 2))
    AND {READABLE}
    GROUP BY l.stream HAVING max(l.seq) < :end ORDER BY max(l.seq) DESC LIMIT :most"""
ALL_THREADS = """
    SELECT substr(place, 4), max(last), sum(messages) FROM (
        SELECT place, max(seq) AS last, count(*) AS messages FROM place WHERE {which} AND seq <= :flushed_to GROUP BY place
        UNION ALL SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(:newest))
    GROUP BY place HAVING max(last) < :end ORDER BY max(last) DESC LIMIT :most"""


def list_newest_heads(
    after: Mapping[str, tuple[int, MemtableRows]], before: int, limit: int, db: sqlite3.Connection
) -> dict[str, list[HeadAt]]:
    """Answer `Ledger.newest_heads`. ``after`` maps each thread to a seq and to the thread's rows in the memtable."""
    heads: dict[str, list[HeadAt]] = {}
    for stream, (seq, newest) in after.items():
        sql, values = select_at_place(f"in/{stream}", seq, before, newest, limit, columns=HEAD_COLUMNS, order="DESC")
        heads[stream] = read_heads(sql, values, db)
    return heads


def list_first_seqs(threads: Mapping[str, MemtableRows], db: sqlite3.Connection) -> dict[str, int]:
    """Answer `Ledger.first_seqs`. ``threads`` maps each thread to its rows in the memtable."""
    seqs: dict[str, int] = {}
    for stream, newest in threads.items():
        first = db.execute(*select_at_place(f"in/{stream}", 0, 2**62, newest, 1, columns="seq")).fetchone()
        if first is not None:
            seqs[stream] = first[0]
    return seqs


def read_heads(sql: str, values: Mapping[str, object], db: sqlite3.Connection) -> list[HeadAt]:
    """Return the heads of a query that selects `HEAD_COLUMNS`. A head is None if its columns are damaged.

    Heads are not compared with the rows' checksums, because the comparison would require reading the rows' contents.
    """
    with reading_any_text(db):
        try:
            return [_read_head(columns) for columns in db.execute(sql, values)]
        except sqlite3.DatabaseError as error:
            if not is_damaged_cell(error):
                raise
        # One damaged row must not hide the others (see `row_reader.read_rows`).
        passed: set[int] = set()
        seqs = [pass_once(passed, seq) for (seq,) in db.execute(sql.replace(HEAD_COLUMNS, "seq"), values)]
        return [_find_head(seq, db) for seq in seqs]


def _find_head(seq: int, db: sqlite3.Connection) -> HeadAt:
    with suppress(sqlite3.DatabaseError):
        columns = db.execute(f"SELECT {HEAD_COLUMNS} FROM log WHERE seq = ?", (seq,)).fetchone()
        if columns is not None:
            return _read_head(columns)
    return seq, None


def _read_head(columns: Sequence[Any]) -> HeadAt:
    try:
        return columns[0], make_head(*columns)
    except UNREADABLE:
        return columns[0], None


HEAD_COLUMNS = "seq, actor, target, stream, label, excluded, head"


def cut_spans(spans: Sequence[Span], after: int, until: int) -> list[tuple[str, int, int, bool]]:
    """Cut spans to a range of seqs, and return those that are not empty. Each result has a target, the two ends
    (exclusive), and whether the span has open threads."""
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
