"""The log of a ledger without a node, or beside one: what the offline commands read, from a database or from an export.

An export is the log as lines of JSON, one for each row and nothing lost; its first line says what ledger it is.
`roundelay export` writes it, ``network.rows`` gives its lines and `replay` reads it. `open_log` gives a `Log`, which
holds none of it: rows are read when they are asked for, one after the other or by their seq. Nothing in the file
changes.
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

from .database_lock import explain, is_held
from .queries import FAILURES, Damage, find_row, load_meta, walk_log
from .schema import CHECKED_FROM, CHECKSUMS_SINCE, COPIED_EPOCH, LOG_COLUMNS, ROW_COLUMNS, open_to_read, refuse_schema

FORMAT = 1


class LogHead(Struct, frozen=True, kw_only=True):
    """The first line: the ledger's epoch and name, and the first seq that it still holds. ``is_excerpt``: rows were
    left out."""

    roundelay_log: int = FORMAT
    epoch: str
    name: str
    first_seq: int = 1
    is_excerpt: bool = False


class _RowLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row; what is empty is left out. ``data_text`` instead of ``data``: JSON that spans lines, as it was sent."""

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
    """Give a row as one line of JSON, without its end."""
    fields = {name: getattr(row, name) for name in _SAME}
    if b"\n" in row.data or b"\r" in row.data:
        return msgspec.json.encode(_RowLine(**fields, data_text=row.data.decode()))
    return msgspec.json.encode(_RowLine(**fields, data=Raw(row.data)))


def decode_row(line: bytes | str) -> Row:
    """Give the row of a line. Raises `msgspec.MsgspecError`."""
    it = _decoder.decode(line)
    data = it.data_text.encode() if it.data_text else bytes(it.data)
    return Row(**{name: getattr(it, name) for name in _SAME}, data=data)


_SAME = tuple(name for name in Row.__struct_fields__ if name != "data")
_decoder = msgspec.json.Decoder(_RowLine)


def encode_head(head: LogHead) -> bytes:
    return msgspec.json.encode(head)


def read_lines(lines: Iterable[str], name: str) -> tuple[LogHead, Iterator[Row]]:
    """Read an export: its first line, and the rows as they are asked for. Raises `LedgerError` with the line that is
    wrong."""
    numbered = enumerate(lines, 1)
    try:
        head = msgspec.json.decode(next(numbered)[1], type=LogHead, strict=True)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise LedgerError(f"{name} is no export of a ledger; roundelay export --format jsonl makes one.") from error
    if head.roundelay_log != FORMAT:
        raise LedgerError(f"{name} is an export of format {head.roundelay_log}; this Roundelay reads {FORMAT}.")

    def read() -> Iterator[Row]:
        for number, line in numbered:
            if line.strip():
                try:
                    yield decode_row(line)
                except msgspec.MsgspecError as error:
                    if line.startswith('{"roundelay_log"'):
                        raise LedgerError(
                            f"{name}:{number}: a second log begins here; give a file that holds one."
                        ) from error
                    raise LedgerError(f"{name}:{number} is no row of a log: {error}.") from error

    return head, read()


_SQLITE = b"SQLite format 3\x00"


class Log(Protocol):
    """The log of an open file. Every method raises `LedgerError` with the row that cannot be read."""

    head: LogHead
    damaged: list[int]
    """Rows that were left out, as far as it was read: they are not what was stored."""

    def rows(self) -> Iterator[Row]:
        """Every row, ascending, but damaged ones."""
        ...

    def row(self, seq: int) -> Row | None:
        """The row of a seq, if there is one that is whole."""
        ...


@contextmanager
def open_database(path: Path) -> Iterator[DatabaseLog]:
    """Open a node's database, also while the node writes. Raises `LedgerError` for anything else."""
    if not path.exists():
        raise LedgerError(f"There is no database {path}.")
    if not is_database(path):
        raise LedgerError(f"{path} is no database of a node.")
    with ExitStack() as stack:
        yield DatabaseLog(path, stack)


@contextmanager
def open_log(path: Path) -> Iterator[Log]:
    """Open a node's database, or an export of one. Raises `LedgerError` for anything else."""
    with ExitStack() as stack:
        log_type = DatabaseLog if is_database(path) else _Export
        with _explaining(path):
            log = log_type(path, stack)
        yield log


def is_database(path: Path) -> bool:
    """Whether a file is a database, a node's or another program's. Raises `LedgerError`."""
    with _explaining(path):
        if is_held(path):  # by a node in this process, whose locks it would cost to look at the file
            return True
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE


def read_log(path: Path) -> tuple[LogHead, list[Row]]:
    """Give what a ledger is and every row of its log; see `open_log`. Raises `LedgerError` also where a row is
    damaged."""
    with open_log(path) as log:
        rows = list(log.rows())
        if log.damaged:
            shown = ", ".join(f"#{seq}" for seq in log.damaged[:5])
            raise LedgerError(
                f"Rows of {path} are damaged ({shown}), and what is to be run again must be whole; use a backup."
            )
        return log.head, rows


def in_order(rows: Iterable[Row]) -> Iterator[Row]:
    """The same rows. Raises `LedgerError` where one does not come after the one before it."""
    last = 0
    for row in rows:
        if row.seq <= last:
            raise LedgerError(f"This is no whole log: seq {row.seq} comes after {last}; export it anew.")
        last = row.seq
        yield row


class _Export:
    """An export: lines of JSON. Where each row begins is known once all have been read."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._file = stack.enter_context(path.open("rb"))
        self._seqs, self._places = array("q"), array("q")
        self._is_read = False
        self.damaged: list[int] = []
        self.head, _ = read_lines((line.decode() for line in self._file), str(path))

    def rows(self) -> Iterator[Row]:
        seqs, places, place = array("q"), array("q"), 0

        def read(file: BinaryIO) -> Iterator[str]:
            nonlocal place
            following = 0
            for line in file:
                place, following = following, following + len(line)
                yield line.decode()

        with _explaining(self._path), self._path.open("rb") as file:
            for row in in_order(read_lines(read(file), str(self._path))[1]):
                seqs.append(row.seq)
                places.append(place)
                yield row
        self._seqs, self._places, self._is_read = seqs, places, True

    def row(self, seq: int) -> Row | None:
        if not self._is_read:
            for _ in self.rows():
                pass
        number = bisect_left(self._seqs, seq)
        if number == len(self._seqs) or self._seqs[number] != seq:
            return None
        with _explaining(self._path):
            self._file.seek(self._places[number])
            return decode_row(self._file.readline())


class DatabaseLog:
    """A node's database, in one view of it, whatever a node writes meanwhile."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        with _explaining_database(path):
            self._db = stack.enter_context(open_to_read(path))
            self._db.execute("BEGIN")
            # a file of an earlier schema is read as it is: only a node's start brings it up
            has_checksums = refuse_schema(self._db) >= CHECKSUMS_SINCE
            meta = load_meta(self._db) if has_checksums else dict(self._db.execute("SELECT key, value FROM meta"))
            first, first_record = (int(meta.get(key, "1")) for key in ("first_seq", "first_record_seq"))
        self._columns = ROW_COLUMNS if has_checksums else f"{LOG_COLUMNS}, NULL"
        self.damaged: list[int] = []
        self._damage = Damage(self._tell, int(meta[CHECKED_FROM]) if has_checksums else 2**63)
        epoch = meta.get("epoch") or meta.get(COPIED_EPOCH, "")
        self.head = LogHead(epoch=epoch, name=meta.get("name", "roundelay"), first_seq=first)
        self.first_record_seq = first_record
        """As `head.first_seq` for messages: what is older was dropped."""

    def rows(self) -> Iterator[Row]:
        with _explaining_database(self._path):
            yield from (row for row in walk_log(self._damage, self._db, self._columns) if not row.is_damaged)

    def row(self, seq: int) -> Row | None:
        with _explaining_database(self._path):
            row = find_row(self._damage, seq, self._db, self._columns)
            return row if row is not None and not row.is_damaged else None

    def find_cursor(self) -> IndexPosition | None:
        """How far it has followed the shared log that it is an index of; None where it has a history of its own."""
        with _explaining_database(self._path):
            found = self._db.execute("SELECT value FROM state WHERE tbl = 'followed'").fetchone()
        return None if found is None else msgspec.json.decode(found[0], type=IndexPosition)

    def values(self) -> Iterator[tuple[str, str, str]]:
        """Every value of its tables, as JSON: table, key, value."""
        with _explaining_database(self._path):
            yield from self._db.execute("SELECT tbl, key, value FROM state")

    def _tell(self, row: int | str) -> None:
        if isinstance(row, int):
            self.damaged.append(row)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path} is neither a node's database nor an export of one.") from error
    except OSError as error:
        raise explain(error, path, "read") from error


@contextmanager
def _explaining_database(path: Path) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise explain(error, path, "read") from error
