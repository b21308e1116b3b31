"""Functions that read rows of the log and compare each row with its checksum.

`Damage` collects the rows that do not match their checksums. A damaged row is replaced by a placeholder
(`damaged_row`), so that it does not hide other rows. These functions run on the threads of the connections.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import msgspec

from roundelay.network.core.rows import Row, damaged_row

from . import MAX_PAGE_BYTES, Page, collect_page
from .row_encoding import make_row
from .schema import ROW_COLUMNS, checksum

MAX_REMEMBERED = 10_000
"""Maximum number of damaged rows that a ledger remembers and reports. Further damaged rows are not reported."""
UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, AttributeError)
"""Errors that can occur when a row whose columns contain arbitrary values is decoded."""
FAILURES = (sqlite3.Error, *UNREADABLE)
"""Errors that reading a row may raise, because the storage fails or because a damaged file contains values of any type."""
_DAMAGED_CELL = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG)
_WALK_PAGE = 500

T = TypeVar("T")


class Damage:
    """The damaged rows of one ledger's file. Rows of the log are identified by seq, and rows of the state tables by
    ``TABLE/KEY``. Several threads use one object.

    ``report`` is called once for each damaged row. Rows of the log have a checksum from the seq ``checked_from`` on.
    Older rows were stored before checksums existed.
    """

    def __init__(self, report: Callable[[int | str], None], checked_from: int = 1) -> None:
        self.checked_from = checked_from
        self.rows: set[int | str] = set()
        self._report = report

    def restart(self, checked_from: int) -> None:
        """Forget all damaged rows. The file that is opened now may be another file."""
        self.checked_from = checked_from
        self.rows.clear()

    def add(self, row: int | str) -> None:
        # Report each row only once: every reader of a thread would find the same damaged row again.
        if row not in self.rows and len(self.rows) < MAX_REMEMBERED:
            self.rows.add(row)
            self._report(row)

    def fits(self, columns: Sequence[object]) -> bool:
        """Return whether a row of the log is unchanged. Its last column is the checksum. An old row without a checksum
        is accepted."""
        if columns[-1] is None:
            return isinstance(columns[0], int) and columns[0] < self.checked_from
        return columns[-1] == checksum(columns[:-1])


def read_row(columns: Sequence[Any], damage: Damage) -> Row:
    """Return the row for the columns `ROW_COLUMNS`, or a placeholder if the row is damaged."""
    # Return a placeholder instead of raising an error: one damaged row must not hide a thread or stop a delivery.
    if damage.fits(columns):
        try:
            return make_row(*columns)
        except UNREADABLE:  # the row is damaged, although it matches: it is an old row without a checksum
            pass
    seq: int = columns[0]
    damage.add(seq)
    return damaged_row(seq)


def find_row(damage: Damage, seq: int, db: sqlite3.Connection, columns: str = ROW_COLUMNS) -> Row | None:
    """Return the row with a seq, or its placeholder if the row is damaged. Return None if the row does not exist."""
    try:
        cells = db.execute(f"SELECT {columns} FROM log WHERE seq = ?", (seq,)).fetchone()
    except sqlite3.DatabaseError as error:
        if not is_damaged_cell(error):
            raise
        damage.add(seq)
        return damaged_row(seq)
    return read_row(cells, damage) if cells is not None else None


def read_rows(
    damage: Damage, sql: str, values: Sequence[object] | Mapping[str, object], collect: Callable[[Iterator[Row]], T], db: sqlite3.Connection,
    columns: str = ROW_COLUMNS,
) -> T:  # fmt: skip
    """Pass the rows of a query to ``collect``, and return the result of ``collect``. The query selects ``columns``.
    Each row is read when ``collect`` asks for it.

    SQLite aborts a query at a row with wrong lengths or invalid UTF-8. In this case, each row is read with a separate
    query, and ``collect`` is called again from the start, so that one damaged row does not hide the others.
    """
    try:
        with closing(db.execute(sql, values)) as cursor:
            # Pass the rows one by one, so that a page of large messages is not in memory twice.
            return collect(read_row(cells, damage) for cells in cursor)
    except sqlite3.DatabaseError as error:
        if not is_damaged_cell(error):
            raise
    # Start from the beginning: `collect` may have stopped at any row, and its first result is lost.
    passed: set[int] = set()
    with closing(db.execute(sql.replace(columns, "seq"), values)) as cursor:
        seqs = (pass_once(passed, seq) for (seq,) in cursor)
        return collect(row for seq in seqs if (row := find_row(damage, seq, db, columns)) is not None)


def pass_once(passed: set[int], seq: int) -> int:
    """Return the seq. Raise `sqlite3.DatabaseError` if the seq was already in ``passed``. Damaged pages of a file may
    form a circle, and a reader that skips damaged rows would then run for hours."""
    if seq in passed:
        error = sqlite3.DatabaseError(f"pages of the log are mixed up: #{seq} is reached twice")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    passed.add(seq)
    return seq


def is_damaged_cell(error: sqlite3.DatabaseError) -> bool:
    """Return whether a single damaged row may have caused an error. Either SQLite reports such a row, or the `sqlite3`
    module could not decode text (an error without a code)."""
    code = getattr(error, "sqlite_errorcode", None)
    return code in _DAMAGED_CELL or (code is None and isinstance(error, sqlite3.OperationalError))


def walk_log(damage: Damage, db: sqlite3.Connection, columns: str = ROW_COLUMNS) -> Iterator[Row]:
    """Yield every row of the log, ascending by seq, with a placeholder for each damaged row. The rows are read in
    pages."""
    sql = f"SELECT {columns} FROM log WHERE seq > ? ORDER BY seq LIMIT {_WALK_PAGE + 1}"
    after, has_more = -(2**63), True

    def collect(rows: Iterator[Row]) -> Page:
        return collect_page(rows, _WALK_PAGE, MAX_PAGE_BYTES)

    while has_more:
        rows, has_more = read_rows(damage, sql, (after,), collect, db, columns)
        yield from rows
        after = rows[-1].seq if rows else after


@contextmanager
def reading_any_text(db: sqlite3.Connection) -> Iterator[None]:
    """Replace invalid UTF-8 in results instead of failing. A row with invalid UTF-8 does not match its checksum, so the
    row is still detected as damaged."""
    db.text_factory = lambda text: text.decode(errors="replace")
    try:
        yield
    finally:
        db.text_factory = str
