"""The log in a ledger's file, for offline commands. They read the log from an export or from a database, even while a
node uses the database.

An export is the complete log as lines of JSON, one line per row. Its first line describes the ledger. `roundelay
export` writes an export, ``network.rows`` returns lines in the same format, and `replay` reads an export. `open_log`
returns a `Log`, which reads rows only on request, in order or by seq. A `Log` never changes the file.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
from msgspec import Raw, Struct

from roundelay.network.core.rows import MessageHead, Row, RowType
from roundelay.network.core.tables import IndexPosition
from roundelay.network.errors import LedgerError

from .locked_files import is_locked_here
from .queries import load_meta
from .row_reader import FAILURES, Damage, find_row, walk_log
from .schema import CHECKED_FROM, CHECKSUMS_SINCE, COPIED_EPOCH, LOG_COLUMNS, ROW_COLUMNS, open_to_read, refuse_schema
from .storage_errors import explain

FORMAT = 1


class LogHead(Struct, frozen=True, kw_only=True):
    """The first line of an export: the ledger's epoch and name, and the first seq in the export. ``is_excerpt`` says
    whether some rows were left out."""

    roundelay_log: int = FORMAT
    epoch: str
    name: str
    first_seq: int = 1
    is_excerpt: bool = False


class _RowLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of an export, without its empty fields. ``data_text`` replaces ``data`` if the JSON spans several lines."""

    seq: int
    at: int
    type: RowType
    actor: str
    key: str = ""
    target: str = ""
    stream: str = ""
    label: str = ""
    excluded: tuple[str, ...] = ()
    digest: str = ""
    head: MessageHead | None = None
    data: Raw = Raw(b"{}")
    data_text: str = ""


def encode_row(row: Row) -> bytes:
    """Return a row as one line of JSON, without the line break."""
    fields = {name: getattr(row, name) for name in _SAME_FIELDS}
    # Each row must be a single line of the export, so JSON with line breaks is stored as a string.
    if b"\n" in row.data or b"\r" in row.data:
        return msgspec.json.encode(_RowLine(**fields, data_text=row.data.decode()))
    return msgspec.json.encode(_RowLine(**fields, data=Raw(row.data)))


def decode_row(line: bytes | str) -> Row:
    """Return the row in a line of an export. Raises `msgspec.MsgspecError`."""
    row_line = _decoder.decode(line)
    data = row_line.data_text.encode() if row_line.data_text else bytes(row_line.data)
    return Row(**{name: getattr(row_line, name) for name in _SAME_FIELDS}, data=data)


_SAME_FIELDS = tuple(name for name in Row.__struct_fields__ if name != "data")
_decoder = msgspec.json.Decoder(_RowLine)


def encode_head(head: LogHead) -> bytes:
    return msgspec.json.encode(head)


def read_lines(lines: Iterable[str], name: str) -> tuple[LogHead, Iterator[Row]]:
    """Read an export. Return its first line and an iterator over its rows. Raises `LedgerError` with the number of the
    first invalid line."""
    numbered = enumerate(lines, 1)
    try:
        head = msgspec.json.decode(next(numbered)[1], type=LogHead, strict=True)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise LedgerError(
            f"{name} is not an export of a ledger. `roundelay export --format jsonl` creates one."
        ) from error
    if head.roundelay_log != FORMAT:
        raise LedgerError(
            f"{name} has export format {head.roundelay_log}; this Roundelay reads format {FORMAT}. Upgrade Roundelay."
        )

    def read() -> Iterator[Row]:
        for number, line in numbered:
            if line.strip():
                try:
                    yield decode_row(line)
                except msgspec.MsgspecError as error:
                    if line.startswith('{"roundelay_log"'):
                        raise LedgerError(
                            f"{name}:{number}: a second log begins here. Use a file that contains only one log."
                        ) from error
                    raise LedgerError(f"{name}:{number} is not a row of a log: {error}.") from error

    return head, read()


_SQLITE = b"SQLite format 3\x00"


class Log(Protocol):
    """The log of an open file. Each method raises `LedgerError` if a row cannot be read. The error names this row."""

    head: LogHead
    damaged: list[int]
    """Seqs of the damaged rows that were found so far. Results do not contain damaged rows."""

    def rows(self) -> Iterator[Row]:
        """Yield every undamaged row, ascending by seq."""
        ...

    def row(self, seq: int) -> Row | None:
        """Return the row with a seq, or None if the row is missing or damaged."""
        ...


@contextmanager
def open_database(path: Path) -> Iterator[DatabaseLog]:
    """Open a node's database, even while the node writes. Raises `LedgerError` for any other file."""
    if not path.exists():
        raise LedgerError(f"There is no database {path}. Name the database of a node.")
    if not is_database(path):
        raise LedgerError(f"{path} is not the database of a node. Name another file.")
    with ExitStack() as stack:
        yield DatabaseLog(path, stack)


@contextmanager
def open_log(path: Path) -> Iterator[Log]:
    """Open a node's database, or an export of a ledger. Raises `LedgerError` for any other file."""
    with ExitStack() as stack:
        log_type = DatabaseLog if is_database(path) else _Export
        with _explaining(path):
            log = log_type(path, stack)
        yield log


def is_database(path: Path) -> bool:
    """Return whether a file is a SQLite database, either of a node or of another program. Raises `LedgerError`."""
    with _explaining(path):
        # Do not open a locked file: closing it here would drop the locks of the node in this process.
        if is_locked_here(path):
            return True
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE


def read_log(path: Path) -> tuple[LogHead, list[Row]]:
    """Return the first line and all rows of a log (`open_log`). Raises `LedgerError` if a row is damaged."""
    with open_log(path) as log:
        # Read all rows before the check: damaged rows are found only when they are read.
        rows = list(log.rows())
        if log.damaged:
            shown = ", ".join(f"#{seq}" for seq in log.damaged[:5])
            raise LedgerError(f"Rows of {path} are damaged ({shown}), and a replay needs all rows. Use a backup.")
        return log.head, rows


def in_order(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the same rows. Raises `LedgerError` if a seq is not above the previous seq."""
    last = 0
    for row in rows:
        # Otherwise the export was cut, or two exports were joined. A replay would silently reach a wrong state.
        if row.seq <= last:
            raise LedgerError(f"This log is not complete: seq {row.seq} comes after {last}. Export it again.")
        last = row.seq
        yield row


class _Export:
    """The log in an export. The offset of each row is known after all rows have been read once."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._file = stack.enter_context(path.open("rb"))
        self._seqs, self._offsets = array("q"), array("q")
        self._is_read = False
        self.damaged: list[int] = []
        self.head, _ = read_lines((line.decode() for line in self._file), str(path))

    def rows(self) -> Iterator[Row]:
        # Build new arrays in each pass and store them only at its end. An unfinished pass would leave only half of an
        # index.
        seqs, offsets, offset = array("q"), array("q"), 0

        def read(file: BinaryIO) -> Iterator[str]:
            nonlocal offset
            next_offset = 0
            for line in file:
                offset, next_offset = next_offset, next_offset + len(line)
                yield line.decode()

        with _explaining(self._path), self._path.open("rb") as file:
            for row in in_order(read_lines(read(file), str(self._path))[1]):
                seqs.append(row.seq)
                offsets.append(offset)
                yield row
        self._seqs, self._offsets, self._is_read = seqs, offsets, True

    def row(self, seq: int) -> Row | None:
        if not self._is_read:
            for _ in self.rows():
                pass
        index = bisect_left(self._seqs, seq)
        if index == len(self._seqs) or self._seqs[index] != seq:
            return None
        with _explaining(self._path):
            self._file.seek(self._offsets[index])
            return decode_row(self._file.readline())


class DatabaseLog:
    """The log in a node's database, as it was when the database was opened. All reads share one read transaction."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        with _explaining_database(path):
            self._db = stack.enter_context(open_to_read(path))
            # Use one read transaction for all reads. A node may be writing, and the rows must match the retention marks
            # in ``meta``.
            self._db.execute("BEGIN")
            # Read a file of an earlier schema unchanged: only a node migrates the file, when it starts.
            has_checksums = refuse_schema(self._db) >= CHECKSUMS_SINCE
            meta = load_meta(self._db) if has_checksums else dict(self._db.execute("SELECT key, value FROM meta"))
            first, first_record = (int(meta.get(key, "1")) for key in ("first_seq", "first_record_seq"))
        self._columns = ROW_COLUMNS if has_checksums else f"{LOG_COLUMNS}, NULL"
        self.damaged: list[int] = []
        # A file without checksums has no way to detect damage, so accept every row.
        self._damage = Damage(self._note_damaged, int(meta[CHECKED_FROM]) if has_checksums else 2**63)
        epoch = meta.get("epoch") or meta.get(COPIED_EPOCH, "")
        self.head = LogHead(epoch=epoch, name=meta.get("name", "roundelay"), first_seq=first)
        self.first_record_seq = first_record
        """Lowest seq of a record that retention has kept. `head.first_seq` is the corresponding seq for messages."""

    def rows(self) -> Iterator[Row]:
        with _explaining_database(self._path):
            yield from (row for row in walk_log(self._damage, self._db, self._columns) if not row.is_damaged)

    def row(self, seq: int) -> Row | None:
        with _explaining_database(self._path):
            row = find_row(self._damage, seq, self._db, self._columns)
            return row if row is not None and not row.is_damaged else None

    def find_cursor(self) -> IndexPosition | None:
        """Return the position up to which this index has followed its shared log. Return None if the database is not an
        index."""
        with _explaining_database(self._path):
            cells = self._db.execute("SELECT value FROM state WHERE tbl = 'followed'").fetchone()
        return None if cells is None else msgspec.json.decode(cells[0], type=IndexPosition)

    def values(self) -> Iterator[tuple[str, str, str]]:
        """Yield every value of the state tables as ``(table, key, JSON)``."""
        with _explaining_database(self._path):
            yield from self._db.execute("SELECT tbl, key, value FROM state")

    def _note_damaged(self, row: int | str) -> None:
        if isinstance(row, int):
            self.damaged.append(row)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path} is neither a node's database nor an export of one. Name another file.") from error
    except OSError as error:
        raise explain(error, path, "read") from error


@contextmanager
def _explaining_database(path: Path) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise explain(error, path, "read") from error
