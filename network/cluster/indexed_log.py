"""`IndexedLog`: the shared log, this node's index of it, and the position of the index.

Leader, follower and election of one node share this object. The log is authoritative. The index is a SQLite file
without data of its own, so a lost index is rebuilt by following. Its cursor (the row ``followed/log``) names the record
up to which the index is complete. The cursor is stored in the same transaction as the rows of that record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from roundelay.network.clock import Clock
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import IndexPosition, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import TrimStep
from roundelay.network.ledger.sqlite import SQLiteLedger

from . import settings
from .records import (
    Header,
    Heartbeat,
    LogReader,
    RecordKind,
    digest,
    naming_record,
    read_record,
    write_record,
    write_trim,
)
from .shared_log import LogIncomplete, LogRecord, SharedLog, UnusableLog, follow_records


class LogRoom(NamedTuple):
    """Room in the log, in bytes, as last known to this node."""

    free: int
    total: int

    @property
    def reserve(self) -> int:
        return min(settings.RESERVE_BYTES, self.total // 64)


class EngineContact:
    """Time of the engine's last answer."""

    def __init__(self) -> None:
        self.answered_at = 0.0
        """Loop time of the last answer. 0 before the first answer."""
        self._is_waiting = False

    def note_request(self) -> None:
        self._is_waiting = True

    def note_answer(self) -> None:
        self._is_waiting, self.answered_at = False, asyncio.get_running_loop().time()

    @property
    def silent_s(self) -> float:
        return asyncio.get_running_loop().time() - self.answered_at

    @property
    def is_answering(self) -> bool:
        return not (self._is_waiting and self.silent_s > settings.READY_TIMEOUT_S)


class IndexedLog:
    """The shared log and this node's index of it. ``report`` receives sentences for the operator."""

    def __init__(self, shared: SharedLog, index: SQLiteLedger, *, clock: Clock, report: Callable[[str], None]) -> None:
        self.shared = shared
        self.index = index
        self.report = report
        self.reader = LogReader()
        self.contact = EngineContact()
        self.room = LogRoom(0, 0)
        self.node_name = ""
        """Name of this node for other nodes and clients, as HOST:PORT."""
        self.owner_digest = ""
        """Digest of this node's owner token, which nodes compare to detect different tokens. The digest does not reveal
        the token."""
        self._clock = clock
        self._short_since: float | None = None
        """Time since which the log ends before the last record that this node has read, or None."""

    @property
    def name(self) -> str:
        return self.shared.name

    def now_ms(self) -> int:
        return self._clock()

    # --- the cursor

    async def open_shared(self) -> None:
        """Open the log. A node that knows the log never creates it: the new log would be a different history."""
        is_known = await self.index.lookup_cold("followed", "log") is not None
        await self.shared.open(create=not is_known)

    async def restore_cursor(self) -> None:
        """Continue at the index's cursor. Raises `LedgerError` for an index of another log."""
        cursor: IndexPosition | None = await self.index.lookup_cold("followed", "log")
        if cursor is None:
            # Following would mix two histories under the same seqs.
            if await self.index.rows(0, 1):
                raise UnusableLog(
                    f"{self.index.path} has a history of its own, which the log {self.name} does not hold. Name a new "
                    "file with --db."
                )
            self.reader = await find_beginning(self.shared)
            return
        # This may pass: a deposed server reports a stale end for a moment. The election waits before it gives up.
        if await self.shared.end() < cursor.position:
            raise LogIncomplete(
                f"{self.index.path} was made from a log of at least {cursor.position} records, and {self.name} has "
                "fewer: it is another log, or it has lost records. To go on with this log, name a new file with --db."
            )
        if cursor.position < await self.shared.first():
            beginning = await find_beginning(self.shared)
            raise UnusableLog(
                f"{self.index.path} has followed {self.name} up to record {cursor.position}, and that log begins at "
                f"{beginning.end + 1} by now: move {self.index.path} away (not {self.index.path}.owner), and start this "
                "node again."
            )
        # positions alone do not distinguish logs: compare the record at the index's position
        async with self.follow(cursor.position - 1) as records:
            stored = await anext(records)
        if digest(stored.data) != cursor.digest:
            raise UnusableLog(
                f"{self.index.path} was made from another log than {self.name}: name a new file with --db, or that log."
            )
        # The reader's whole state at this record. Without it, the log would have to be read from its start, which takes
        # hours.
        reader = LogReader(cursor.position, cursor.digest, self.index.head or None)
        reader.epoch, reader.name = cursor.epoch, cursor.name
        reader.snapshot, reader.snapshot_head = cursor.base, cursor.base_head
        reader.open_snapshot, reader.open_snapshot_head = cursor.begun, cursor.begun_head
        reader.leader_token, reader.is_filling = cursor.leader, cursor.is_filling
        self.reader = reader

    def cursor_write(self) -> TableWrite:
        """Return the table write that stores the reader's position."""
        reader = self.reader
        return self.cursor_write_at(reader.position, reader.digest, reader.leader_token)

    def cursor_write_at(self, position: int, last_digest: str, token: str) -> TableWrite:
        reader = self.reader
        cursor = IndexPosition(
            position, last_digest, token, reader.epoch, reader.name, reader.is_filling, reader.snapshot,
            reader.snapshot_head, reader.open_snapshot, reader.open_snapshot_head,
        )  # fmt: skip
        return TableWrite("followed", "log", cursor)

    # --- records

    def follow(self, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
        return follow_records(self.shared, after)

    async def append(self, kind: RecordKind, token: str, body: bytes = b"", **fields: Any) -> None:
        """Append a record of a kind, with further fields of its header."""
        header = Header(kind=kind, writer=token, previous=self.reader.end_digest, **fields)
        await self.append_record(write_record(header, body))

    async def append_trim(self, step: TrimStep, token: str) -> None:
        await self.append_record(write_trim(step, token, self.reader.end_digest))

    async def append_record(self, record: bytes) -> None:
        """Append after the last record that was read, and read the new record. Raises `LeadershipLost` if another node
        has already appended there."""
        self.contact.note_request()
        # The position fences this append: the engine refuses the record if another node has appended since.
        position = await self.shared.append(record, self.reader.end)
        self.reader.read(LogRecord(position, record))
        # Estimate the room until the next `refresh_room`, so that not every commit queries the engine.
        self.room = self.room._replace(free=self.room.free - len(record) - settings.RECORD_OVERHEAD_BYTES)
        self.contact.note_answer()

    async def drop(self, step: TrimStep) -> int:
        """Delete the rows of a trim that is in the log, and return their number. The cursor is stored afterwards. A
        node that is killed before that reads the trim again, and deletes the rest."""
        dropped = await self.index.drop(step)
        await self.index.append([], [self.cursor_write()])
        return dropped

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite], cursor: TableWrite) -> None:
        await self.index.append(rows, [*writes, cursor])

    # --- the engine

    async def fetch_end(self) -> int:
        self.contact.note_request()
        end = await self.shared.end()
        self.contact.note_answer()
        return end

    def check_end(self, end: int) -> None:
        """Raises `LogIncomplete` if the log keeps ending before the last record that this node has read.

        A server of the engine that was deposed, and does not know this yet, reports a stale end for a moment.
        """
        now = asyncio.get_running_loop().time()
        if end >= self.reader.end:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > settings.STALE_END_GRACE_S:
            self._short_since = None
            raise LogIncomplete(
                f"The shared log {self.name} ends at {end}, and this node has read its record {self.reader.end}: it "
                "has lost records. Restore it."
            )

    async def refresh_room(self) -> None:
        self.room = LogRoom(*await self.shared.room())

    async def check_first(self) -> None:
        """Raises `UnusableLog` if the log begins at a position where no new node could begin.

        Only a node that has read the whole log knows the newest snapshot, so other nodes skip this check.
        """
        first = await self.shared.first()
        if first > max(1, self.reader.snapshot) and await self.shared.end() == self.reader.end:
            raise UnusableLog(
                f"The shared log {self.name} begins at {first} by now, and not with a snapshot: records are missing, as "
                "somebody has deleted them. Restore the log, or go on with another one. `roundelay view` and `roundelay "
                "export` read what this node has."
            )

    async def first_kept(self) -> int:
        """Return the smaller of the first message and the first record that the index still has to contain."""
        marks = await self.index.read_marks()
        return min(marks.first_seq, marks.first_record_seq)

    async def check_beginning(self) -> None:
        """Raises `UnusableLog` if the log lacks rows that no trim has deleted."""
        if await self.first_kept() <= self.reader.missing_up_to:
            raise UnusableLog(
                f"The shared log {self.name} lacks rows from before its first snapshot: records are missing. Restore "
                "the log, or begin with a new one."
            )

    # --- other nodes

    async def broadcast_heartbeat(self, token: str = "") -> None:
        """Send a heartbeat to the other nodes. A leader's heartbeat contains its fencing token. A lost heartbeat does
        no harm."""
        owner = self.owner_digest if token else ""
        heartbeat = Heartbeat(self.node_name, self.reader.end, token, owner, self.now_ms())
        with suppress(LedgerError):
            await self.shared.broadcast(heartbeat.write())

    async def find_claim(self, timeout_s: float, *, is_expected: bool) -> str:
        """Return the name of the node that has claimed the log since this node's last read, or an empty text if no
        claim is found in time. With ``is_expected``, wait for a future claim. Otherwise, read up to the current end."""
        # Use a separate reader: the shared one must stay at the index's position.
        reader = LogReader(self.reader.end, self.reader.end_digest)
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(timeout_s), self.follow(reader.end) as records:
                end = None if is_expected else await self.shared.end()
                async for stored in records:
                    reader.read(stored)
                    if reader.leader_token if end is None else stored.position >= end:
                        break
        return reader.leader_name


async def find_beginning(shared: SharedLog) -> LogReader:
    """Return a reader at the first record from which the log can be read: its first record, or else its oldest
    snapshot.

    Skip older records before the snapshot, which a node that was killed while dropping records may have left. Raises
    `UnusableLog` if the log has no snapshot.
    """
    first, end = await shared.first(), await shared.end()
    if first == 1:
        return LogReader()
    if first <= end:
        async with follow_records(shared, first - 1) as records:
            async for stored in records:
                with naming_record(stored.position):
                    is_snapshot = read_record(stored.data)[0].kind == "base"
                if is_snapshot:
                    return LogReader.at_first(stored.position)
                if stored.position >= end:
                    break
    raise UnusableLog(
        f"The shared log {shared.name} begins at {first}, and not with a snapshot: records are missing. Restore the log, "
        "or begin with a new one."
    )
