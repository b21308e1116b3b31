"""The content of the records of a shared log, and `LogReader`, which reads records in order.

A record is one line of JSON, the `Header`, and a body. Each header has the digest of the previous record, so a follower
detects a log that was changed or exchanged. Only the leader writes records. But anybody who may write to the engine can
forge one, so the reader refuses each record that a leader cannot have written. No IO.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import VOLATILE_TABLES, Table, TableWrite, decode_value, encode_value
from roundelay.network.errors import LedgerError
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.ledger import SeqBound, TrimStep, Unstorable
from roundelay.network.ledger.log_file import decode_row, encode_row
from roundelay.network.ledger.writes import UNENCODABLE

from .shared_log import LogRecord, UnusableLog

FORMAT = 1
MAX_HEARTBEAT_CHARS = 1024
HEADER_ROOM = 1024
"""Bytes reserved for the header of a record."""
_NODE_NAME = re.compile("[!-~]{1,255}")
_UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""Errors for invalid JSON of other writers. `RecursionError` is for endless nesting."""
_UPGRADE = "A newer release may have written it: upgrade this node. Or the record is damaged: restore the log."
_RESTORE = "The leader did not write this record: restore the log."


RecordKind = Literal["begin", "claim", "release", "commit", "trim", "filled", "base", "values", "based"]


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line of a record. The body follows it.

    - ``begin``: the first record of a log. With ``is_filled_later`` a database is copied into the log, and nobody leads
      before the record ``filled``.
    - ``claim``: ``writer`` leads from here on. It is the leader's fencing token. - ``release``: ``writer`` no longer
    leads. - ``commit``: rows and table writes. A commit that is larger than a record spans several; ``left`` of them
    follow. - ``trim``: what every node drops (a `TrimStep`). One node decides what is old, so that all drop the same. -
    ``base``, ``values``, ``based``: a snapshot: its begin, its chunks with all values of all tables, and its end, which
      names the position of its begin. Commits may come between. The log can begin at a snapshot once every row up to
      its ``head`` was dropped. A node that has read the older records skips the chunks.
    """

    format: int = FORMAT
    kind: RecordKind
    writer: str
    previous: str = ""
    epoch: str = ""
    name: str = ""
    left: int = 0
    is_filled_later: bool = False
    base: SeqBound = 0
    head: SeqBound = 0


def _safe_name(node: str) -> str:
    """Return a node's name if it is safe in an HTTP header and on a terminal. Otherwise return an empty string: anybody
    who may write to the engine can send a name."""
    return node if _NODE_NAME.fullmatch(node) else ""


class Claim(Struct, frozen=True):
    """The body of a ``claim``: the leader's name. Older releases ignore it."""

    node: str = ""

    @classmethod
    def read(cls, body: bytes) -> Claim:
        """Read a body. An unreadable body, such as that of an older release, gives no name."""
        try:
            return cls(_safe_name(msgspec.json.decode(body, type=cls).node))
        except _UNREADABLE:
            return cls()

    def write(self) -> bytes:
        return msgspec.json.encode(self)


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """A broadcast of a node: its name, its position in the log, and its fencing token while it leads. ``owner`` is a
    digest of the owner's token. ``at`` is the node's clock in ms (0: an older release)."""

    node: str = ""
    position: int = 0
    leads: str = ""
    owner: str = ""
    at: int = 0

    @classmethod
    def read(cls, text: str) -> Heartbeat:
        """Read a broadcast. An unreadable broadcast gives an empty heartbeat."""
        try:
            # Anybody who may publish can send a broadcast, so check its size before decoding it.
            heartbeat = msgspec.json.decode(text, type=cls) if len(text) <= MAX_HEARTBEAT_CHARS else cls()
        except _UNREADABLE:
            return cls()
        return msgspec.structs.replace(heartbeat, node=_safe_name(heartbeat.node))

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


class Commit(NamedTuple):
    """The rows and table writes of one commit."""

    rows: list[Row]
    writes: list[TableWrite]


class _CommitBody(Struct, frozen=True):
    rows: list[Raw]
    puts: list[tuple[Table, str, Raw]]


def digest(record: bytes) -> str:
    """Return the digest that the next record must name."""
    return hashlib.sha256(record).hexdigest()[:32]


def write_record(header: Header, body: bytes = b"") -> bytes:
    return msgspec.json.encode(header) + b"\n" + body


@contextmanager
def naming_record(position: int) -> Iterator[None]:
    """Add the position of the record to errors about it."""
    try:
        yield
    except UnusableLog as error:
        raise UnusableLog(f"The record {position} of the shared log: {error}") from error


def read_record(record: bytes) -> tuple[Header, bytes]:
    """Return header and body. Raises `UnusableLog` for other data, and for a newer format."""
    line, _, body = record.partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=Header)
    except _UNREADABLE as error:
        raise UnusableLog(f"This is no record of a Roundelay network: {error}.") from error
    # Refused, not skipped: a record that this release does not understand may change the meaning of later records.
    if header.format != FORMAT:
        raise UnusableLog(f"Its format is {header.format}. This Roundelay reads {FORMAT}: upgrade it.")
    return header, body


def write_commit(rows: Sequence[Row], writes: Sequence[TableWrite]) -> bytes:
    """Return the body of a commit. Raises `Unstorable`."""
    try:
        encoded = [
            (write.table, write.key, Raw(b"null" if write.value is None else encode_value(write.value)))
            for write in writes
            if write.table not in VOLATILE_TABLES
        ]
        return msgspec.json.encode(_CommitBody([Raw(encode_row(row)) for row in rows], encoded))
    except UNENCODABLE as error:
        raise Unstorable from error


def read_commit(body: bytes) -> Commit:
    """Read the body of a commit. Raises `UnusableLog` for a body that this release cannot have written."""
    try:
        decoded = msgspec.json.decode(body, type=_CommitBody)
        writes = [
            TableWrite(table, key, None if bytes(value) == b"null" else decode_value(table, bytes(value).decode()))
            for table, key, value in decoded.puts
        ]
        return Commit([decode_row(bytes(row)) for row in decoded.rows], writes)
    except (*_UNREADABLE, ValueError, KeyError) as error:
        raise UnusableLog(f"This version of Roundelay cannot read the commit ({error}). {_UPGRADE}") from error


def write_trim(step: TrimStep, writer: str, previous: str) -> bytes:
    return write_record(Header(kind="trim", writer=writer, previous=previous), msgspec.json.encode(step))


def _read_trim(body: bytes) -> TrimStep:
    try:
        return msgspec.json.decode(body, type=TrimStep)
    except _UNREADABLE as error:
        raise UnusableLog(f"This version of Roundelay cannot read the trim ({error}). {_UPGRADE}") from error


def write_records(
    body: bytes, writer: str, previous: str, max_bytes: int, kind: Literal["commit", "values"] = "commit"
) -> list[bytes]:
    """Return the records of one commit, or of one chunk of a snapshot, each of at most ``max_bytes``.

    ``previous`` is the digest of the previous record. Raises `LedgerError` for an engine with a tiny maximum.
    """
    if max_bytes <= 2 * HEADER_ROOM:
        raise LedgerError(
            f"The server of the shared log takes messages of at most {max_bytes} bytes, which is too small. Raise "
            "max_payload."
        )
    # Reserve a fixed size, because the length of the header depends on the digest and the number of parts.
    room = max_bytes - HEADER_ROOM
    parts = [body[start : start + room] for start in range(0, len(body), room)] or [b""]
    records: list[bytes] = []
    # Each record names the digest of the previous one, so the parts are made one after the other.
    for number, part in enumerate(parts, 1):
        header = Header(kind=kind, writer=writer, previous=previous, left=len(parts) - number)
        records.append(write_record(header, part))
        previous = digest(records[-1])
    return records


class LogReader:
    """Reads records one after the other. `read` joins a commit's parts, and `decode` checks their content.

    ``position`` and ``digest`` name the last whole commit or other record. ``head`` is the newest row up to that
    record. If ``head`` is None, the next rows are accepted with any seq.
    """

    def __init__(self, position: int = 0, last_digest: str = "", head: int | None = None) -> None:
        self.position = position
        self.digest = last_digest
        self.head = head if position else 0
        self.epoch = self.name = ""
        self.leader_token = ""
        """Fencing token of the last claim, until its release."""
        self.leader_name = ""
        """Name of that leader, if this reader has read the claim and the claim has a name."""
        self.is_filling = False
        """Whether the log begins with a copied database or a snapshot that is not complete yet."""
        self.snapshot = self.snapshot_head = 0
        """Position and head of the newest complete snapshot."""
        self.open_snapshot: int | None = None if position else 0
        self.open_snapshot_head = 0
        """Position and head of the snapshot that the leader has begun. None if unknown."""
        self.missing_up_to = 0
        """Head of the snapshot with which the log begins. Rows up to this seq are not in the log."""
        self._parts: list[bytes] = []
        self._end = position, last_digest
        self._begins_at_snapshot = False

    @classmethod
    def at_first(cls, first: int) -> LogReader:
        """Return a reader for a log whose oldest record is at ``first``."""
        reader = cls(first - 1)
        reader._begins_at_snapshot = reader.is_filling = first > 1
        return reader

    @property
    def end(self) -> int:
        """Position of the last record that was read, which may be inside a commit."""
        return self._end[0]

    @property
    def end_digest(self) -> str:
        """Digest of that record. The next record must name it."""
        return self._end[1]

    def read(self, stored: LogRecord) -> bytes | TrimStep | None:
        """Read the next record. Return the body of a commit once it is complete, or the step of a trim.

        Raises `UnusableLog` if the record does not follow from the records that were read.
        """
        header, body = self._check_order(stored)
        self._end = stored.position, digest(stored.data)
        # The fence for readers: a deposed leader's record may still be in the log, but is ignored.
        is_by_leader = header.writer == self.leader_token
        # chunks of a snapshot repeat older records: only a reader without those records needs the chunks
        is_applied = header.kind == "commit" or (header.kind == "values" and self.is_filling)
        if is_applied and is_by_leader:
            self._parts.append(body)
            # `position` stays before the commit, so that a node that is killed here reads all parts again.
            if header.left:
                return None
            self.position, self.digest = self._end
            whole = b"".join(self._parts)
            # Cleared after joining: the next commit begins with its own first part.
            self._parts.clear()
            return whole
        self._change_state(header, body, stored.position, is_by_leader=is_by_leader)
        if not is_applied:
            self._parts.clear()  # a commit whose writer stopped before its last part has no effect
        self.position, self.digest = self._end
        with naming_record(stored.position):
            return _read_trim(body) if header.kind == "trim" and is_by_leader else None

    def _check_order(self, stored: LogRecord) -> tuple[Header, bytes]:
        position, last_digest = self._end
        if stored.position != position + 1:
            raise UnusableLog(
                f"The shared log goes on at {stored.position} instead of {position + 1}: records are missing. Restore "
                "the log, or begin with a new one."
            )
        with naming_record(position + 1):
            header, body = read_record(stored.data)
        if self._begins_at_snapshot and header.kind == "base":
            # The previous record was dropped, so its digest cannot be compared. A snapshot repeats the content of the
            # dropped records: the history, its name, and the leader.
            self.epoch, self.name, self.leader_token = header.epoch, header.name, header.writer
            self.missing_up_to = self.head = header.head
        elif self._begins_at_snapshot:
            raise UnusableLog(
                f"The shared log begins at {stored.position}, and not with a snapshot: records are missing. Restore the "
                "log, or begin with a new one."
            )
        elif (header.previous, header.kind == "begin") != (last_digest, stored.position == 1):
            raise UnusableLog(
                f"The record {stored.position} of the shared log does not follow from the one before it: this is not "
                "the log that this node knows, or it was changed."
            )
        self._begins_at_snapshot = False
        return header, body

    def _change_state(self, header: Header, body: bytes, position: int, *, is_by_leader: bool) -> None:
        """Record who leads, which snapshot is complete, and whether the log is filled."""
        if header.kind == "begin":
            self.epoch, self.name, self.is_filling = header.epoch, header.name, header.is_filled_later
        if header.kind == "filled":
            self.is_filling = False
        if header.kind in ("claim", "release"):
            self.open_snapshot = self.open_snapshot_head = 0  # a new leader does not continue a snapshot
        if header.kind == "claim":
            self.leader_token, self.leader_name = header.writer, Claim.read(body).node
        elif header.kind in ("begin", "release", "filled"):
            self.leader_token = self.leader_name = ""
        elif header.kind == "base" and is_by_leader:
            self.open_snapshot, self.open_snapshot_head = position, header.head
        elif header.kind == "based" and is_by_leader:
            begun = self.open_snapshot, self.open_snapshot_head
            # Checked against the records that this reader has seen. A forged end could make nodes drop records that are
            # still needed.
            if self.open_snapshot is not None and (header.base, header.head) != begun:
                raise UnusableLog(
                    f"The record {position} of the shared log ends a snapshot at {header.base} that its writer has not "
                    "begun: somebody else has written it. Restore the log."
                )
            self.snapshot, self.snapshot_head, self.is_filling = header.base, header.head, False

    def decode(self, content: bytes | TrimStep) -> Commit | TrimStep:
        """Decode the body of a commit, or check the step of a trim. Raises `UnusableLog` for content that no leader
        writes. Such content can be forged: anybody with write access to the engine can write in the leader's name."""
        with naming_record(self.position):
            if isinstance(content, TrimStep):
                if self.head is not None and max(content.messages, content.records) > self.head + 1:
                    raise UnusableLog(f"It drops rows beyond the newest, #{self.head}. {_RESTORE}")
                return content
            commit = read_commit(content)
            if commit.rows:
                self._check_seqs([row.seq for row in commit.rows])
            return commit

    def _check_seqs(self, seqs: list[int]) -> None:
        """Refuse rows that do not follow the newest row, because each would overwrite or skip a row in every index."""
        first = seqs[0] if self.head is None else self.head + 1
        if self.is_filling:  # copied from a database, which may lack deleted rows
            is_next = seqs[0] >= first and seqs == sorted(set(seqs))
        else:
            is_next = seqs == list(range(first, first + len(seqs)))
        if not is_next or seqs[-1] >= SEQ_LIMIT:
            raise UnusableLog(f"Its rows begin with #{seqs[0]} instead of #{first}. {_RESTORE}")
        self.head = seqs[-1]
