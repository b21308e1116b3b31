"""The shared log: what several nodes of one network have in common, and one of them at a time writes.

An engine (`jetstream`, `postgres`) holds the records, in one order, and takes a record only behind the one that its
writer names. What a record says is written and read here, whichever engine it is: rows and puts of a commit, what is
dropped, who leads, and the digest of the record before it, so that a follower knows that it reads what was written. No
IO.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Raw, Struct

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import VOLATILE_TABLES, Table, TableWrite, decode_value, encode_value
from roundelay.network.errors import LedgerError
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.ledger import Cut, LogFull, SeqBound, Unstorable
from roundelay.network.ledger.log_file import decode_row, encode_row
from roundelay.network.ledger.queries import UNENCODABLE

FORMAT = 1
WAITING = re.compile(r"waiting, (?P<waits>.+), log (?P<log>\S+)")
STANDING = re.compile(
    r"(?:leading|following(?: (?P<leader>\S+))?, (?P<behind>\d+) records behind), log (?P<log>\S+), durability (?P<durability>\w+)"
)
NODE = re.compile("[!-~]{1,255}")
UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What reading raises at what somebody else has written: also at what is nested without an end."""
MAX_SAID = 1024
"""No heartbeat is longer."""
HEADER_ROOM = 1024
"""Bytes of a record that its header may take."""


class LogUnavailable(LedgerError):
    """The engine does not answer; it may in a while."""


class LogElectionPending(LogUnavailable):
    """The engine is there, and will answer when its servers have chosen who of them leads."""


class LogIncomplete(LogUnavailable):
    """The engine says what it would say if it had lost records. Just after its servers have chosen who of them leads it
    may be wrong; if it goes on saying so, it is true."""


def find_no_log(name: str) -> LogIncomplete:
    """What an engine says that was asked for a log that has to be there."""
    return LogIncomplete(
        f"There is no log {name}. Nobody makes it who knows of one already, for that would be another history: check "
        "the name, or restore it; a node with a new file for --db makes one."
    )


def tell_wait(error: LedgerError) -> str:
    """Why a node waits, for everybody: nothing of where the log is."""
    match error:
        case LogFull():
            return "the log has no room"
        case LogIncomplete():
            return "the log seems to lack records"
        case LogUnavailable():
            return "the log does not answer"
        case _:
            return "it has said why"


class LogTruncated(LedgerError):
    """What is to be read was dropped: the log begins later by now."""


class UnusableLog(LedgerError):
    """It is not the log that this node knows, or none that it can read: nothing is to be waited for."""


class LogRecord(NamedTuple):
    """One record as the engine holds it; positions ascend by one."""

    position: int
    data: bytes
    has_more: bool = False
    """Whether the engine has said that others follow, which are on their way."""


class SharedLog(Protocol):
    """What is asked of an engine. Every method raises `LedgerError` where it fails, in a sentence for an operator:
    `LogUnavailable` where it may work in a while."""

    name: str
    """What an operator calls it: its address without what is secret."""
    network: str
    """Its name alone, which says nothing of where it is."""

    async def open(self, *, is_made: bool = True) -> None:
        """Connect, and make the log where there is none, unless it has to be there (`LogIncomplete`)."""

    async def close(self) -> None:
        """Idempotent."""

    @property
    def max_bytes(self) -> int:
        """The size of the largest record that it takes."""

    async def end(self) -> int:
        """The position of the newest record; 0 for none."""

    async def first(self) -> int:
        """The position of the oldest record, or of the first that is to come."""

    async def drop(self, before: int) -> bool:
        """Drop the records below a position, or the oldest of them; whether none is left. Only whoever leads may."""

    async def room(self) -> tuple[int, int]:
        """How many bytes it still takes, and how many it may hold."""

    async def append(self, data: bytes, after: int) -> int:
        """Append behind the record at ``after``; gives the new position, once the engine keeps it. Raises `LeadershipLost` or
        `LogFull`; after any other error its outcome is unknown."""

    def follow(self, after: int) -> AsyncIterator[LogRecord]:
        """The records above a position, ascending without a gap, and those to come. Close the iterator."""

    async def say(self, text: str) -> None:
        """Tell all who listen now; it may be lost."""

    async def listen(self) -> str:
        """Wait for what somebody says, this one too."""

    async def find_doubt(self) -> str:
        """Why it is not certain that a record that was appended is on disks, in a sentence for an operator; empty where
        the engine itself shows that it is."""

    async def describe(self) -> dict[str, Any]:
        """What an operator wants to know of the engine, as JSON: how much is in it and may be, on which servers."""


class LogStatus(NamedTuple):
    """What a node is to the log that it shares with others. As a text it is what `/readyz` says."""

    leads: bool
    leader: str
    """Where the node that leads listens, if another one does and is known."""
    behind: int | None
    """How many records there were to follow when it looked last; None before that."""
    answered_s: float | None
    """So long ago the log last answered this node."""
    log: str
    durability: str
    waits: str = ""
    """Why it neither leads nor follows, though it has."""

    def __str__(self) -> str:
        if self.waits and not self.leads:
            return f"waiting, {self.waits}, log {self.log}"
        if self.behind is None and not self.leads:
            return "starting"
        whom = f" {self.leader}" if self.leader else ""
        what = "leading" if self.leads else f"following{whom}, {self.behind} records behind"
        return f"{what}, log {self.log}, durability {self.durability}"

    @classmethod
    def read(cls, text: str) -> LogStatus | None:
        """What such a text says; None for another one, as of a node on a file of its own."""
        waiting = WAITING.fullmatch(text.strip())
        if waiting is not None:
            return cls(False, "", None, None, waiting["log"], "", waiting["waits"])
        found = STANDING.fullmatch(text.strip().removeprefix("ready, "))
        if found is None:
            return None
        behind, leader, log, durability = found.group("behind", "leader", "log", "durability")
        return cls(behind is None, leader or "", int(behind or 0), None, log, durability)


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line of a record; what follows it is the body.

    ``begin`` is the first record of a log, ``claim`` says that ``writer`` leads from here on, ``release`` that it does
    no more, ``commit`` has rows and puts; one that is too large for a record comes as several, of which ``left`` are to
    come. ``trim`` says what each node drops of what came before it (a `Cut`), since what is old is for one to decide.
    From ``base`` on the log says everything again that is in tables, as ``values``, up to ``based`` (which names that
    ``base``), while commits go on; so a log of which older records were dropped begins with a ``base``, whose ``head``
    is the newest row that may stand before it. Who has read what was before passes over values.
    A log that begins with ``is_filled_later`` gets what a database holds; nobody leads before it is ``filled``.
    """

    format: int = FORMAT
    kind: Literal["begin", "claim", "release", "commit", "trim", "filled", "base", "values", "based"]
    writer: str
    previous: str = ""
    epoch: str = ""
    name: str = ""
    left: int = 0
    is_filled_later: bool = False
    base: SeqBound = 0
    head: SeqBound = 0


def read_name(node: str) -> str:
    """What a node calls itself, where that can stand in a header and on a terminal; else nothing. Whoever may write to
    the log's server says it."""
    return node if NODE.fullmatch(node) else ""


class Claim(Struct, frozen=True):
    """The body of a claim, which a release from before it passes over: what the node that leads calls itself."""

    node: str = ""

    @classmethod
    def read(cls, body: bytes) -> Claim:
        """What is nothing of the kind, as the body of an older release's, names nobody."""
        try:
            return cls(read_name(msgspec.json.decode(body, type=cls).node))
        except UNREADABLE:
            return cls()

    def write(self) -> bytes:
        return msgspec.json.encode(self)


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    """What a node tells the others now and then, `SharedLog.say`: what it calls itself, how far it is, and its claim if
    it leads, what tells its owner's token from another one, and the time by its clock (ms; 0: an older release)."""

    node: str = ""
    position: int = 0
    leads: str = ""
    owner: str = ""
    at: int = 0

    @classmethod
    def read(cls, text: str) -> Heartbeat:
        """What is nothing of the kind says nothing."""
        try:
            said = msgspec.json.decode(text, type=cls) if len(text) <= MAX_SAID else cls()
        except UNREADABLE:
            return cls()
        return cls(read_name(said.node), said.position, said.leads, said.owner, said.at)

    def write(self) -> str:
        return msgspec.json.encode(self).decode()


UPGRADE = "a newer one may have written it; then upgrade this node. Or it is damaged: restore the log."
RESTORE = "Somebody else has written it: restore the log."


class Commit(NamedTuple):
    """What the nodes do in their index for one commit."""

    rows: list[Row]
    puts: list[TableWrite]


class _Body(Struct, frozen=True):
    rows: list[Raw]
    puts: list[tuple[Table, str, Raw]]


def digest(record: bytes) -> str:
    """What the next record says of this one."""
    return hashlib.sha256(record).hexdigest()[:32]


def write_record(header: Header, body: bytes = b"") -> bytes:
    return msgspec.json.encode(header) + b"\n" + body


@contextmanager
def placing(position: int) -> Iterator[None]:
    """What is wrong with a record is said of that one."""
    try:
        yield
    except UnusableLog as error:
        raise UnusableLog(f"The record {position} of the shared log: {error}") from error


def read_record(record: bytes) -> tuple[Header, bytes]:
    """Raises `UnusableLog` for what is no record, or one of a newer format."""
    head, _, body = record.partition(b"\n")
    try:
        header = msgspec.json.decode(head, type=Header)
    except UNREADABLE as error:
        raise UnusableLog(f"This is no record of a Roundelay network: {error}.") from error
    if header.format != FORMAT:
        raise UnusableLog(f"Its format is {header.format}; this Roundelay reads {FORMAT}. Upgrade it.")
    return header, body


def write_commit(rows: Sequence[Row], puts: Sequence[TableWrite]) -> bytes:
    """The body of a commit. Raises `Unstorable`."""
    try:
        written = [
            (put.table, put.key, Raw(b"null" if put.value is None else encode_value(put.value)))
            for put in puts
            if put.table not in VOLATILE_TABLES
        ]
        return msgspec.json.encode(_Body([Raw(encode_row(row)) for row in rows], written))
    except UNENCODABLE as error:
        raise Unstorable from error


def read_commit(body: bytes) -> Commit:
    """Raises `UnusableLog`: the log holds what no writer of this release writes."""
    try:
        decoded = msgspec.json.decode(body, type=_Body)
        puts = [
            TableWrite(table, key, None if bytes(value) == b"null" else decode_value(table, bytes(value).decode()))
            for table, key, value in decoded.puts
        ]
        return Commit([decode_row(bytes(row)) for row in decoded.rows], puts)
    except (*UNREADABLE, ValueError, KeyError) as error:
        raise UnusableLog(f"This Roundelay cannot read that commit ({error}): {UPGRADE}") from error


def write_trim(cut: Cut, writer: str, previous: str) -> bytes:
    """The record of a trim."""
    return write_record(Header(kind="trim", writer=writer, previous=previous), msgspec.json.encode(cut))


def read_cut(body: bytes) -> Cut:
    """Raises `UnusableLog`, as `read_commit` does."""
    try:
        return msgspec.json.decode(body, type=Cut)
    except UNREADABLE as error:
        raise UnusableLog(f"This Roundelay cannot read that trim ({error}): {UPGRADE}") from error


def split(body: bytes, room: int) -> list[bytes]:
    """The parts of a body, each of at most ``room`` bytes; one at least."""
    return [body[start : start + room] for start in range(0, len(body), room)] or [b""]


def write_records(
    body: bytes, writer: str, previous: str, room: int, kind: Literal["commit", "values"] = "commit"
) -> list[bytes]:
    """The records of one commit, or of values of a base, each of at most ``room`` bytes; ``previous`` is the digest of
    the one before them. Raises `LedgerError` where a server takes next to nothing."""
    if room <= 2 * HEADER_ROOM:
        raise LedgerError(
            f"The server of the shared log takes messages of at most {room} bytes (max_payload): too few."
        )
    records, parts = list[bytes](), split(body, room - HEADER_ROOM)
    for number, part in enumerate(parts, 1):
        header = Header(kind=kind, writer=writer, previous=previous, left=len(parts) - number)
        records.append(write_record(header, part))
        previous = digest(records[-1])
    return records


class Reader:
    """Reads records one after the other, and says what each comes to. ``position`` and ``digest`` name the last whole
    commit or claim that was read, ``head`` the newest row up to there, if that is known: `check` compares."""

    def __init__(self, position: int = 0, last: str = "", head: int | None = None) -> None:
        self.position = position
        self.head = head if position else 0
        self.digest = last
        self.epoch = self.name = ""
        self.leader = ""
        """Who claimed the log last, and has not released it."""
        self.leader_node = ""
        """What that node calls itself, if it was read here that it claimed the log, and it says so."""
        self.is_filling = False
        """Whether it begins with what a database or a base holds, and not all of that is there."""
        self.base = self.base_head = 0
        """The newest base that is whole, and its head."""
        self.begun: int | None = None if position else 0
        self.begun_head = 0
        """The base that the node that leads has begun, and its head; None where that is not known."""
        self.begins_after = 0
        """The head of the base that was read first; rows up to it are not there."""
        self._parts: list[bytes] = []
        self._end = position, last
        """Of the last record, whole or not."""
        self._is_cut = False

    @classmethod
    def at(cls, first: int) -> Reader:
        """Reads a log whose oldest record is at ``first``."""
        reader = cls(first - 1)
        reader._is_cut = reader.is_filling = first > 1
        return reader

    @property
    def end(self) -> int:
        """The position of the last record that was read."""
        return self._end[0]

    @property
    def last(self) -> str:
        """The digest of that record: what the next one names."""
        return self._end[1]

    def take(self, stored: LogRecord) -> bytes | Cut | None:
        """Read the next record; gives the body of a commit once it is whole, or what is to be dropped. Raises
        `UnusableLog` where the log is not the one that was read so far."""
        position, last = self._end
        if stored.position != position + 1:
            raise UnusableLog(
                f"The shared log goes on at {stored.position} where {position + 1} was to come: records are missing. "
                "Restore it, or begin with a new one."
            )
        with placing(position + 1):
            header, body = read_record(stored.data)
        if self._is_cut and header.kind == "base":  # what it names as the one before it is gone
            self.epoch, self.name, self.leader = header.epoch, header.name, header.writer
            self.begins_after = self.head = header.head
        elif self._is_cut:
            raise UnusableLog(
                f"The shared log begins at {stored.position}, and not with what nodes leave there: records are "
                "missing. Restore it, or begin with a new one."
            )
        elif (header.previous, header.kind == "begin") != (last, stored.position == 1):
            raise UnusableLog(
                f"The record {stored.position} of the shared log does not follow from the one before it: this is not "
                "the log that this node knows, or it was changed."
            )
        self._end = stored.position, digest(stored.data)
        self._is_cut = False
        if header.kind == "begin":
            self.epoch, self.name, self.is_filling = header.epoch, header.name, header.is_filled_later
        if header.kind == "filled":
            self.is_filling = False
        is_leaders = header.writer == self.leader
        is_taken = header.kind == "commit" or (header.kind == "values" and self.is_filling)
        if is_taken and is_leaders:
            self._parts.append(body)
            if header.left:
                return None
            self.position, self.digest = self._end
            whole = b"".join(self._parts)
            self._parts.clear()
            return whole
        if header.kind in ("claim", "release"):
            self.begun = self.begun_head = 0
        if header.kind == "claim":
            self.leader, self.leader_node = header.writer, Claim.read(body).node
        elif header.kind in ("begin", "release", "filled"):
            self.leader = self.leader_node = ""
        elif header.kind == "base" and is_leaders:
            self.begun, self.begun_head = stored.position, header.head
        elif header.kind == "based" and is_leaders:
            if self.begun is not None and (header.base, header.head) != (self.begun, self.begun_head):
                raise UnusableLog(
                    f"The record {stored.position} of the shared log ends a base at {header.base} that its writer has "
                    "not begun: somebody else has written it. Restore the log."
                )
            self.base, self.base_head, self.is_filling = header.base, header.head, False
        if not is_taken:  # what a writer left half done is nothing
            self._parts.clear()
        self.position, self.digest = self._end
        with placing(stored.position):
            return read_cut(body) if header.kind == "trim" and is_leaders else None

    def check(self, taken: bytes | Cut) -> Commit | Cut:
        """Read the body of a commit, or compare what is to be dropped with what there is: whoever writes to the log's
        server may have written it. Raises `UnusableLog`."""
        with placing(self.position):
            if isinstance(taken, Cut):
                if self.head is not None and max(taken.messages, taken.records) > self.head + 1:
                    raise UnusableLog(f"It drops more than there is up to #{self.head}. {RESTORE}")
                return taken
            commit = read_commit(taken)
            if commit.rows:
                seqs = [it.seq for it in commit.rows]
                least = seqs[0] if self.head is None else self.head + 1
                if self.is_filling:  # from a database that may lack what it has dropped
                    is_next = seqs[0] >= least and seqs == sorted(set(seqs))
                else:
                    is_next = seqs == list(range(least, least + len(seqs)))
                if not is_next or seqs[-1] >= SEQ_LIMIT:
                    raise UnusableLog(f"Its rows begin with #{seqs[0]}, and #{least} was to come. {RESTORE}")
                self.head = seqs[-1]
            return commit
