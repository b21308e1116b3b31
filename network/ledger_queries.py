"""What the SQLite ledger asks of its file, as functions on a plain connection. They run on aiosqlite's threads."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from .ledger import Row, Span, Unstorable, Wanted
from .tables import VOLATILE_TABLES, Facts, Known, MessageHead, Put, Table, decode_value, encode_value

ROW_COLUMNS = "seq, at, type, actor, key, target, stream, label, excluded, digest, head, data"
_INSERT = f"INSERT INTO log ({ROW_COLUMNS}) VALUES "
# Many rows a statement: a thread gives up the GIL once per statement. With `executemany` it does so for each row, and while the
# loop's thread is busy each row then waits for up to `sys.getswitchinterval()`: measured, a hundred times the transaction.
_INSERTS = tuple((rows, _INSERT + ",".join(["(?,?,?,?,?,?,?,?,?,?,?,?)"] * rows)) for rows in (256, 64, 16, 4, 1))

_json = msgspec.json.Decoder(msgspec.Raw)


def take_page(
    sql: str, values: Sequence[object], limit: int, max_bytes: int, db: sqlite3.Connection
) -> tuple[list[tuple[Any, ...]], bool]:
    """Rows as long as they fit; what does not is never read. Whether there was more."""
    found: list[tuple[Any, ...]] = []
    size = 0
    with closing(db.execute(sql, values)) as cursor:
        for columns in cursor:
            data = columns[-1]
            size += len(data) if data.isascii() else len(data.encode())
            if found and (len(found) == limit or size > max_bytes):
                return found, True
            found.append(columns)
    return found, False


Values = tuple[object, ...]

UNENCODABLE = (TypeError, ValueError, OverflowError, AttributeError, RecursionError, msgspec.MsgspecError)
"""What is raised where a value cannot be encoded, or not be given to SQLite; whatever SQLite itself raises is a `sqlite3.Error`."""


def encode_batch(rows: Sequence[Row], puts: Sequence[Put]) -> tuple[list[Values], list[Values], list[Values]]:
    """What one transaction writes: rows of the log, values of the tables, and keys that go. Raises `Unstorable`."""
    try:
        log: list[Values] = [
            (
                row.seq, row.at, row.type, row.actor, row.key or None, row.target or None, row.stream or None, row.label or None,
                json.dumps(row.excluded) if row.excluded else None, row.digest or None,
                msgspec.json.encode(row.head).decode() if row.head is not None else None, row.data.decode(),
            )
            for row in rows
        ]  # fmt: skip
        kept = [put for put in puts if put.table not in VOLATILE_TABLES]
        saved: list[Values] = [
            (put.table, put.key, encode_value(put.value).decode()) for put in kept if put.value is not None
        ]
        dropped: list[Values] = [(put.table, put.key) for put in kept if put.value is None]
    except UNENCODABLE as error:
        raise Unstorable from error
    return log, saved, dropped


def bind(values: Sequence[Values]) -> None:
    """Give these to SQLite as a statement does, one row at a time. Raises `Unstorable`."""
    with closing(sqlite3.connect(":memory:")) as db:
        for row in values:
            try:
                db.execute(f"SELECT {','.join('?' * len(row))}", row)
            except (*UNENCODABLE, sqlite3.Error) as error:
                raise Unstorable from error


def insert_rows(db: sqlite3.Connection, log: Sequence[tuple[object, ...]]) -> None:
    start = 0
    for rows, sql in _INSERTS:
        while len(log) - start >= rows:
            db.execute(sql, [value for row in log[start : start + rows] for value in row])
            start += rows


def make_private(path: Path) -> None:
    """Make a new database readable for its owner alone: it holds everybody's messages. SQLite gives its other files the same mode."""
    with suppress(OSError):  # SQLite says better what is wrong with the place
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def look_up(wanted: Wanted, db: sqlite3.Connection) -> Facts:
    facts = Facts()
    if wanted.keys:
        sql = (
            "SELECT l.actor, l.key, l.seq, ifnull(l.stream, ''), ifnull(l.digest, ''), l.data FROM json_each(?) AS w "
            "CROSS JOIN log AS l ON l.actor = w.value ->> 0 AND l.key = w.value ->> 1"
        )
        for actor, key, seq, stream, digest, data in db.execute(
            sql, (msgspec.json.encode(list(wanted.keys)).decode(),)
        ):
            facts.known[actor, key] = Known(seq, stream, digest, data.encode())
    for seq in wanted.seqs:
        found = db.execute("SELECT head FROM log WHERE seq = ? AND type = 'message'", (seq,)).fetchone()
        if found is not None:
            head = facts.heads[seq] = msgspec.json.decode(found[0], type=MessageHead)
            _find_cold(db, facts, "root", str(head.root))
    for table, key in wanted.cold:
        _find_cold(db, facts, table, key)
    return facts


def _find_cold(db: sqlite3.Connection, facts: Facts, table: Table, key: str) -> None:
    found = db.execute("SELECT value FROM state WHERE tbl = ? AND key = ?", (table, key)).fetchone()
    if found is not None:
        facts.cold[table, key] = decode_value(table, found[0])


# The seqs of an inbox: one indexed range per span, each cut to a page's size, so that a page costs its own size. The spans come as
# JSON: of SELECTs joined by UNION SQLite takes 500, and a channel that is joined and left again and again makes more spans.
INBOX_SEQS = """
    SELECT l.seq FROM json_each(?1) AS span CROSS JOIN log AS l ON l.seq IN (
        SELECT seq FROM log
        WHERE target = span.value ->> 0 AND seq > span.value ->> 1 AND seq < span.value ->> 2 ORDER BY seq {order} LIMIT ?5)
    UNION ALL SELECT * FROM (
        SELECT seq FROM log WHERE actor = ?2 AND is_private AND seq > ?3 AND seq <= ?4 ORDER BY seq {order} LIMIT ?5)"""
INBOX = f"SELECT {ROW_COLUMNS} FROM log WHERE seq IN ({INBOX_SEQS}) ORDER BY seq {{order}} LIMIT ?5"


def list_spans(spans: Sequence[Span], after: int, until: int) -> str:
    """Those of the spans that are not empty within a range, as JSON: target, and both ends exclusive."""
    ends = [
        (span.target, max(after, span.after), until + 1 if span.before is None else min(span.before, until + 1))
        for span in spans
    ]
    return json.dumps([end for end in ends if end[1] + 1 < end[2]])


def read_row(
    seq: int, at: int, type_: Any, actor: str, key: str | None, target: str | None, stream: str | None, label: str | None,
    excluded: str | None, digest: str | None, head: str | None, data: str,
) -> Row:  # fmt: skip
    raw = data.encode()
    _json.decode(raw)  # what a damaged file makes of it is found here, and not by every client that gets it
    return Row(
        seq=seq, at=at, type=type_, actor=actor, key=key or "", target=target or "", stream=stream or "", label=label or "",
        excluded=tuple(json.loads(excluded)) if excluded else (), digest=digest or "", data=raw,
        head=msgspec.json.decode(head, type=MessageHead) if head else None,
    )  # fmt: skip
