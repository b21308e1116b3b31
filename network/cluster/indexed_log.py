"""`IndexedLog`: the shared log together with this node's index of the log.

The leader, the follower and the election of one node share an `IndexedLog`. The log is authoritative. The index is a
SQLite file that contains only data from the log, so a node can rebuild a lost index from the log. The cursor of the
index (the row ``followed/log``) contains the position of the last record that is completely in the index. It is stored
in the same transaction as the rows of that record.
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
    """Free and total size of the log in bytes, as this node last knew them."""

    free: int
    total: int

    @property
    def reserve(self) -> int:
        return min(settings.RESERVE_BYTES, self.total // 64)


class EngineContact:
    """Time of the last answer from the engine that stores the shared log."""

    def __init__(self) -> None:
        self.answered_at = 0.0
        """Event-loop time of the engine's last answer, or 0 before the first answer."""
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
    """The shared log and this node's index of it. ``report`` receives messages for the operator."""

    def __init__(self, shared: SharedLog, index: SQLiteLedger, *, clock: Clock, report: Callable[[str], None]) -> None:
        self.shared = shared
        self.index = index
        self.report = report
        self.reader = LogReader()
        self.contact = EngineContact()
        self.room = LogRoom(0, 0)
        self.node_name = ""
        """Address of this node for other nodes and for clients, as HOST:PORT."""
        self.owner_digest = ""
        """Digest of this node's owner token. Nodes compare their digests to detect different tokens without revealing
        them."""
        self._clock = clock
        self._short_since: float | None = None
        """Time at which the log was first found to end before the last record that this node has read, or None if the
        log is long enough."""

    @property
    def name(self) -> str:
        return self.shared.name

    def now_ms(self) -> int:
        return self._clock()

    # --- the cursor

    async def open_shared(self) -> None:
        """Open the log. If this node already knows the log, a missing log is an error, because a new log would have a
        different history."""
        is_known = await self.index.lookup_cold("followed", "log") is not None
        await self.shared.open(create=not is_known)

    async def restore_cursor(self) -> None:
        """Set the reader to the position of the index's cursor. Raises `LedgerError` if the index belongs to another
        log."""
        cursor: IndexPosition | None = await self.index.lookup_cold("followed", "log")
        if cursor is None:
            # Refuse an index that has rows but no cursor. Following the log would mix two histories with the same seqs.
            if await self.index.rows(0, 1):
                raise UnusableLog(
                    f"{self.index.path} has a history of its own, which is not in the log {self.name}. Name a new file "
                    "with --db."
                )
            self.reader = await find_beginning(self.shared)
            return
        # The log may seem too short for a moment, because a deposed server may report an old end. So the election waits
        # for some time before it reports this error.
        if await self.shared.end() < cursor.position:
            raise LogIncomplete(
                f"{self.index.path} was built from a log with at least {cursor.position} records, but {self.name} has "
                "fewer. It is another log, or it has lost records. To use this log, name a new file with --db."
            )
        if cursor.position < await self.shared.first():
            beginning = await find_beginning(self.shared)
            raise UnusableLog(
                f"{self.index.path} contains {self.name} up to record {cursor.position}, but that log now begins at "
                f"record {beginning.end + 1}. Move {self.index.path} away, but not {self.index.path}.owner, and "
                "start this node again."
            )
        # Compare the record at the cursor's position, because two different logs may both have a record there.
        async with self.follow(cursor.position - 1) as records:
            stored = await anext(records)
        if digest(stored.data) != cursor.digest:
            raise UnusableLog(
                f"{self.index.path} was built from another log than {self.name}. Name a new file with --db, or name "
                "that log."
            )
        # Restore the reader's state at this record from the cursor. Otherwise the node would have to read the log from
        # its start, which may take hours.
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
        """Append a record of the given kind. ``fields`` are additional fields for the record's header."""
        header = Header(kind=kind, writer=token, previous=self.reader.end_digest, **fields)
        await self.append_record(write_record(header, body))

    async def append_trim(self, step: TrimStep, token: str) -> None:
        await self.append_record(write_trim(step, token, self.reader.end_digest))

    async def append_record(self, record: bytes) -> None:
        """Append a record after the last record that this node has read, and update the reader. Raises `LeadershipLost`
        if another node has already appended a record there."""
        self.contact.note_request()
        # Fencing: the engine refuses the record if another node has appended a record since this node read the log
        # last.
        position = await self.shared.append(record, self.reader.end)
        self.reader.read(LogRecord(position, record))
        # Estimate the free size until the next `refresh_room`, so that a commit does not need a query to the engine.
        self.room = self.room._replace(free=self.room.free - len(record) - settings.RECORD_OVERHEAD_BYTES)
        self.contact.note_answer()

    async def drop(self, step: TrimStep) -> int:
        """Delete the rows of a trim from the index, and return their number. The trim must already be in the log. The
        cursor is stored after the deletion. So if the node is killed in between, it reads the trim again and deletes
        the remaining rows."""
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
        """Raise `LogIncomplete` if the log ends before the last record that this node has read, and if this lasts
        longer than `STALE_END_GRACE_S`.

        A server of the engine that was deposed and does not know it yet also reports an old end, but only for a shorter
        time.
        """
        now = asyncio.get_running_loop().time()
        if end >= self.reader.end:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > settings.STALE_END_GRACE_S:
            self._short_since = None
            raise LogIncomplete(
                f"The shared log {self.name} ends at {end}, but this node has read its record {self.reader.end}: the "
                "log has lost records. Restore it."
            )

    async def refresh_room(self) -> None:
        self.room = LogRoom(*await self.shared.room())

    async def check_first(self) -> None:
        """Raise `UnusableLog` if a new node could not start to read at the beginning of the log.

        Nodes that have not read the whole log skip this check, because they do not know the newest snapshot.
        """
        first = await self.shared.first()
        if first > max(1, self.reader.snapshot) and await self.shared.end() == self.reader.end:
            raise UnusableLog(
                f"The shared log {self.name} now begins at record {first}, and not with a snapshot: records are "
                "missing, because someone has deleted them. Restore the log, or continue with another log. "
                "`roundelay view` and `roundelay export` can read the data of this node."
            )

    async def first_kept(self) -> int:
        """Return the lowest seq that the index must still contain: the first kept message or the first kept record,
        whichever is lower."""
        marks = await self.index.read_marks()
        return min(marks.first_seq, marks.first_record_seq)

    async def check_beginning(self) -> None:
        """Raise `UnusableLog` if the log lacks rows that no trim has deleted."""
        if await self.first_kept() <= self.reader.missing_up_to:
            raise UnusableLog(
                f"The shared log {self.name} lacks rows from before its first snapshot: records are missing. Restore "
                "the log, or start with a new one."
            )

    # --- other nodes

    async def broadcast_heartbeat(self, token: str = "") -> None:
        """Broadcast a heartbeat to the other nodes. A leader's heartbeat contains its fencing token. The loss of a
        heartbeat does no harm."""
        owner = self.owner_digest if token else ""
        heartbeat = Heartbeat(self.node_name, self.reader.end, token, owner, self.now_ms())
        with suppress(LedgerError):
            await self.shared.broadcast(heartbeat.write())

    async def find_claim(self, timeout_s: float, *, is_expected: bool) -> str:
        """Return the name of the node that has claimed the log since this node read it last. Return an empty string if
        no claim is found in time.

        With ``is_expected``, also wait for a future claim. Otherwise read only up to the current end of the log.
        """
        # Use a separate reader, because the node's main reader must stay at the position of the index.
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
    """Return a reader that starts at the first readable record: the first record of the log, or its oldest snapshot.

    Records before the oldest snapshot are skipped. Some of them may be left if a node was killed while it dropped old
    records. Raises `UnusableLog` if the log has neither a first record nor a snapshot.
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
        f"The shared log {shared.name} begins at {first}, and not with a snapshot: records are missing. Restore the "
        "log, or start with a new one."
    )
