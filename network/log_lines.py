"""The log as lines of JSON, one for each row and nothing lost: what `roundelay export` writes, ``network.rows`` gives and `replay` reads.

The first line says what ledger it is. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw, Struct

from .errors import LedgerError
from .ledger import Row, RowType
from .tables import MessageHead

FORMAT = 1


class LogHead(Struct, frozen=True, kw_only=True):
    """The first line: the ledger's epoch and name, and the first seq that it still holds. ``is_excerpt``: rows were left out."""

    roundelay_log: int = FORMAT
    epoch: str
    name: str
    first_seq: int = 1
    is_excerpt: bool = False


class _Line(Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    is_broken = b"\n" in row.data or b"\r" in row.data
    line = _Line(
        seq=row.seq, at=row.at, type=row.type, actor=row.actor, key=row.key, target=row.target, stream=row.stream,
        label=row.label, excluded=row.excluded, digest=row.digest, head=row.head,
        data=Raw(b"{}") if is_broken else Raw(row.data), data_text=row.data.decode() if is_broken else "",
    )  # fmt: skip
    return msgspec.json.encode(line)


def decode_row(line: bytes | str) -> Row:
    """Give the row of a line. Raises `msgspec.MsgspecError`."""
    it = _decoder.decode(line)
    data = it.data_text.encode() if it.data_text else bytes(it.data)
    return Row(
        seq=it.seq, at=it.at, type=it.type, actor=it.actor, key=it.key, target=it.target, stream=it.stream, label=it.label,
        excluded=it.excluded, digest=it.digest, data=data, head=it.head,
    )  # fmt: skip


_decoder = msgspec.json.Decoder(_Line)


def encode_head(head: LogHead) -> bytes:
    return msgspec.json.encode(head)


def read_lines(lines: Iterable[str], name: str) -> tuple[LogHead, Iterator[Row]]:
    """Read an export: its first line, and the rows as they are asked for. Raises `LedgerError` with the line that is wrong."""
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
