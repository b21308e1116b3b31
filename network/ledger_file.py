"""Reads the log of a ledger's file without a node, and beside one: what the offline commands look at. Changes nothing in the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from .errors import LedgerError
from .ledger import Row
from .ledger_queries import ROW_COLUMNS, read_row
from .log_lines import LogHead, read_lines

_SQLITE = b"SQLite format 3\x00"


def read_log(path: Path) -> tuple[LogHead, list[Row]]:
    """Give what a ledger is and every row of its log, ascending: of a node's database, or of an export of one.

    Raises `LedgerError` for anything else.
    """
    try:
        with path.open("rb") as file:
            is_database = file.read(len(_SQLITE)) == _SQLITE
        if is_database:
            return _read_database(path)
        with path.open(encoding="utf-8") as lines:
            head, rows = read_lines(lines, str(path))
            return head, list(rows)
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path} is neither a node's database nor an export of one.") from error
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror or error}; check the path.") from error


def _read_database(path: Path) -> tuple[LogHead, list[Row]]:
    # Without a log beside it nobody has it open, and then SQLite need not put one there to read it.
    is_open = Path(f"{path}-wal").exists()
    mode = "mode=ro" if is_open else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as db:
            db.execute("BEGIN")  # one view of it, whatever a node writes meanwhile
            meta = dict(db.execute("SELECT key, value FROM meta"))
            rows = list(_read_rows(db))
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
        raise LedgerError(f"The database {path} cannot be read: {error}; `roundelay doctor` checks it.") from error
    if "epoch" not in meta:
        raise LedgerError(f"The database {path} is no ledger; give the --db of a node.")
    first = int(meta.get("first_seq", "1"))
    return LogHead(epoch=meta["epoch"], name=meta.get("name", "roundelay"), first_seq=first), rows


def _read_rows(db: sqlite3.Connection) -> Iterator[Row]:
    for columns in db.execute(f"SELECT {ROW_COLUMNS} FROM log ORDER BY seq"):
        yield read_row(*columns)
