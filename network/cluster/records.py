"""Format of the records of a shared log, and `LogReader`, which reads the records in order.

A record is a header (`Header`), which is one line of JSON, followed by a body. Each header contains the digest of the
previous record, so a follower detects a modified or replaced log. Only the leader should write records, but anyone with
write access to the log's engine can forge one. So the reader refuses every record that a leader cannot have written.
This module does no IO.
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
"""Number of bytes reserved for the header of a record."""
_NODE_NAME = re.compile("[!-~]{1,255}")
_UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""Errors that decoding raises for invalid JSON. JSON that is nested too deeply raises `RecursionError`."""
_UPGRADE = "A newer release may have written it: upgrade this node. Or the record is damaged: restore the log."
_RESTORE = "The leader did not write this record: restore the log."


RecordKind = Literal["begin", "claim", "release", "commit", "trim", "filled", "base", "values", "based"]


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Header of a record, which is the first line of the record. The body follows the header.

    The record kinds are:

    - ``begin``: the first record of a log. If ``is_filled_later`` is set, a database is being copied into the log. No
      node leads before the record ``filled``.
    - ``claim``: the node with the fencing token ``writer`` becomes the leader.
    - ``release``: the leader gives up leadership.
    - ``commit``: rows and table writes. A commit that is larger than a record spans several records. ``left`` is the
      number of records of this commit that still follow.
    - ``trim``: the rows that every node deletes (`TrimStep`). Only the leader decides, so all nodes delete the same
      rows.
    - ``base``, ``values``, ``based``: the begin, the chunks and the end of a snapshot. The chunks contain all values of
      all tables. The end contains the position of the begin. Commits may be written between these records. The log can
      begin at a snapshot after every row up to the snapshot's ``head`` was deleted. Nodes that have read the older
      records skip the chunks.
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
    """Return a node's name if it is safe in an HTTP header and on a terminal, and otherwise an empty string. Names must
    be checked, because anyone with write access to the log's engine can send one."""
    return node if _NODE_NAME.fullmatch(node) else ""


class Claim(Struct, frozen=True):
    """Body of a ``claim`` record. It contains the leader's name. Older releases ignore the body."""

    node: str = ""

    @classmethod
    def read(cls, body: bytes) -> Claim:
        """Decode the body of a claim. The name in the result is empty if the body is unreadable, for example because an
        older release wrote it."""
        try:
            return cls(_safe_name(msgspec.json.decode(body, type=cls).node))
        except _UNREADABLE:
            return cls()

    def write(self) -> bytes:
        return msgspec.json.encode(self)


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """Status that a node broadcasts: its name, its position in the log and, while the node leads, its fencing token.

    ``owner`` is a digest of the owner's token. ``at`` is the time of the node's clock in ms, or 0 for an older release,
    which does not send it.
    """

    node: str = ""
    position: int = 0
    leads: str = ""
    owner: str = ""
    at: int = 0

    @classmethod
    def read(cls, text: str) -> Heartbeat:
        """Decode a broadcast. If it is unreadable, return an empty heartbeat."""
        try:
            # Check the size before decoding, because anyone who may publish to the engine can send a broadcast.
            heartbeat = msgspec.json.decode(text, type=cls) if len(text) <= MAX_HEARTBEAT_CHARS else cls()
        except _UNREADABLE:
            return cls()
        return msgspec.structs.replace(heartbeat, node=_safe_name(heartbeat.node))

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


class Commit(NamedTuple):
    """Rows and table writes of one commit."""

    rows: list[Row]
    writes: list[TableWrite]


class _CommitBody(Struct, frozen=True):
    rows: list[Raw]
    puts: list[tuple[Table, str, Raw]]


def digest(record: bytes) -> str:
    """Return the digest of a record. The header of the next record must contain it."""
    return hashlib.sha256(record).hexdigest()[:32]


def write_record(header: Header, body: bytes = b"") -> bytes:
    return msgspec.json.encode(header) + b"\n" + body


@contextmanager
def naming_record(position: int) -> Iterator[None]:
    """Context manager that adds the position of a record to each `UnusableLog` error raised inside it."""
    try:
        yield
    except UnusableLog as error:
        raise UnusableLog(f"The record {position} of the shared log: {error}") from error


def read_record(record: bytes) -> tuple[Header, bytes]:
    """Split a record into its header and its body. Raises `UnusableLog` if the data is not a record, or if its format
    is unknown."""
    line, _, body = record.partition(b"\n")
    try:
        header = msgspec.json.decode(line, type=Header)
    except _UNREADABLE as error:
        raise UnusableLog(f"This is not a record of a Roundelay network: {error}.") from error
    # Refuse a record with an unknown format instead of skipping it, because the record may change the meaning of later
    # records.
    if header.format != FORMAT:
        raise UnusableLog(f"Its format is {header.format}. This Roundelay reads format {FORMAT}: upgrade it.")
    return header, body


def write_commit(rows: Sequence[Row], writes: Sequence[TableWrite]) -> bytes:
    """Encode rows and table writes as the body of a commit. Raises `Unstorable` if a value cannot be encoded."""
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
    """Decode the body of a commit. Raises `UnusableLog` if this release cannot have written it."""
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
    """Split the body of a commit, or of a chunk of a snapshot, into records of at most ``max_bytes`` each.

    ``previous`` is the digest of the record before the first one. Raises `LedgerError` if the engine's maximum is too
    small for a header.
    """
    if max_bytes <= 2 * HEADER_ROOM:
        raise LedgerError(
            f"The server of the shared log takes messages of at most {max_bytes} bytes, which is too small. Raise "
            "max_payload."
        )
    # Reserve a fixed size for the header, because the length of a header depends on the number of parts.
    room = max_bytes - HEADER_ROOM
    parts = [body[start : start + room] for start in range(0, len(body), room)] or [b""]
    records: list[bytes] = []
    # Create the records in order, because each header contains the digest of the previous record.
    for number, part in enumerate(parts, 1):
        header = Header(kind=kind, writer=writer, previous=previous, left=len(parts) - number)
        records.append(write_record(header, part))
        previous = digest(records[-1])
    return records


class LogReader:
    """Reads the records of a shared log in order. `read` joins the parts of a commit, and `decode` checks the content.

    ``position`` and ``digest`` belong to the last record that was read completely. A commit that spans several records
    counts only after its last part. ``head`` is the seq of the newest row up to this position, or None if the next rows
    may have any seq.
    """

    def __init__(self, position: int = 0, last_digest: str = "", head: int | None = None) -> None:
        self.position = position
        self.digest = last_digest
        self.head = head if position else 0
        self.epoch = self.name = ""
        self.leader_token = ""
        """Fencing token of the last claim, or an empty string after the leader has released leadership."""
        self.leader_name = ""
        """Name of the current leader, or an empty string if this reader has read no claim with a name."""
        self.is_filling = False
        """Whether the log begins with a database copy or a snapshot that is still incomplete."""
        self.snapshot = self.snapshot_head = 0
        """Log position of the newest complete snapshot, and the seq of the newest row before it. Both are 0 without a
        snapshot."""
        self.open_snapshot: int | None = None if position else 0
        self.open_snapshot_head = 0
        """Log position of the snapshot that the leader is writing (None if unknown), and the seq of the newest row
        before that snapshot."""
        self.missing_up_to = 0
        """Seq of the newest row that is missing because the log begins with a snapshot. Rows up to this seq are not in
        the log."""
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
        """Position of the last record that was read. It may be only one part of a longer commit."""
        return self._end[0]

    @property
    def end_digest(self) -> str:
        """Digest of the last record that was read. The header of the next record must contain it."""
        return self._end[1]

    def read(self, stored: LogRecord) -> bytes | TrimStep | None:
        """Read the next record. Return the body of a commit after its last part, the step of a trim, or None for other
        records.

        Raises `UnusableLog` if the record does not follow the previous record.
        """
        header, body = self._check_order(stored)
        self._end = stored.position, digest(stored.data)
        # Fencing: the log may still contain records that a deposed leader has appended, so ignore records with another
        # token.
        is_by_leader = header.writer == self.leader_token
        # The chunks of a snapshot repeat older records. Only a reader that has not read those records needs the chunks.
        is_applied = header.kind == "commit" or (header.kind == "values" and self.is_filling)
        if is_applied and is_by_leader:
            self._parts.append(body)
            # `position` stays before the commit until all parts are read. So a node that is killed here reads the
            # commit again.
            if header.left:
                return None
            self.position, self.digest = self._end
            whole = b"".join(self._parts)
            # Clear the parts, because the next commit begins with its own first part.
            self._parts.clear()
            return whole
        self._change_state(header, body, stored.position, is_by_leader=is_by_leader)
        if not is_applied:
            self._parts.clear()  # an incomplete commit has no effect, because its writer stopped before the last part
        self.position, self.digest = self._end
        with naming_record(stored.position):
            return _read_trim(body) if header.kind == "trim" and is_by_leader else None

    def _check_order(self, stored: LogRecord) -> tuple[Header, bytes]:
        position, last_digest = self._end
        if stored.position != position + 1:
            raise UnusableLog(
                f"The shared log continues at {stored.position} instead of {position + 1}: records are missing. "
                "Restore the log, or start with a new one."
            )
        with naming_record(position + 1):
            header, body = read_record(stored.data)
        if self._begins_at_snapshot and header.kind == "base":
            # The digest of the previous record cannot be checked, because that record was dropped. The snapshot repeats
            # the data of earlier records: the epoch, the name of the network, and the leader.
            self.epoch, self.name, self.leader_token = header.epoch, header.name, header.writer
            self.missing_up_to = self.head = header.head
        elif self._begins_at_snapshot:
            raise UnusableLog(
                f"The shared log begins at {stored.position}, and not with a snapshot: records are missing. Restore "
                "the log, or start with a new one."
            )
        elif (header.previous, header.kind == "begin") != (last_digest, stored.position == 1):
            raise UnusableLog(
                f"The record {stored.position} of the shared log does not follow from the record before it. Either "
                "this is not the log that this node knows, or it was changed."
            )
        self._begins_at_snapshot = False
        return header, body

    def _change_state(self, header: Header, body: bytes, position: int, *, is_by_leader: bool) -> None:
        """Update what a record changes in the reader's state: the leader, the newest snapshot, and whether the copy
        into the log is complete."""
        if header.kind == "begin":
            self.epoch, self.name, self.is_filling = header.epoch, header.name, header.is_filled_later
        if header.kind == "filled":
            self.is_filling = False
        if header.kind in ("claim", "release"):
            # A new leader does not continue the snapshot of the previous leader.
            self.open_snapshot = self.open_snapshot_head = 0
        if header.kind == "claim":
            self.leader_token, self.leader_name = header.writer, Claim.read(body).node
        elif header.kind in ("begin", "release", "filled"):
            self.leader_token = self.leader_name = ""
        elif header.kind == "base" and is_by_leader:
            self.open_snapshot, self.open_snapshot_head = position, header.head
        elif header.kind == "based" and is_by_leader:
            begun = self.open_snapshot, self.open_snapshot_head
            # Compare the end record with the begin record that this reader has read. Otherwise a forged end record
            # could make nodes drop records that they still need.
            if self.open_snapshot is not None and (header.base, header.head) != begun:
                raise UnusableLog(
                    f"The record {position} of the shared log ends a snapshot at {header.base} that its writer has not "
                    "begun, so it was not written by the leader. Restore the log."
                )
            self.snapshot, self.snapshot_head, self.is_filling = header.base, header.head, False

    def decode(self, content: bytes | TrimStep) -> Commit | TrimStep:
        """Decode the body of a commit, or check the step of a trim.

        Raises `UnusableLog` for content that no leader writes. Anyone with write access to the log's engine can write
        records in the leader's name, so the content must be checked.
        """
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
        """Refuse rows whose seqs do not directly follow the newest row. Such rows would overwrite or skip rows in every
        index."""
        first = seqs[0] if self.head is None else self.head + 1
        if self.is_filling:  # a copied database may lack deleted rows, so allow gaps here
            is_next = seqs[0] >= first and seqs == sorted(set(seqs))
        else:
            is_next = seqs == list(range(first, first + len(seqs)))
        if not is_next or seqs[-1] >= SEQ_LIMIT:
            raise UnusableLog(f"Its rows begin with #{seqs[0]} instead of #{first}. {_RESTORE}")
        self.head = seqs[-1]
