"""Copies between a shared log and databases. A copy keeps all seqs and the epoch.

`compare` compares a database with its log. `fill_log` copies a database into a new log. The first record of this log
marks the copy as incomplete, and the last record marks it as complete. No node can become the leader in between, so an
interrupted copy can be continued. `rebuild_index` and `export_database` create a database from a log. Until an export
is complete, its database is only an index of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
from msgspec import Struct

from roundelay.network.clock import random_id, system_clock
from roundelay.network.core.revisions import is_revised
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import (
    COLD_TABLES,
    VOLATILE_TABLES,
    IndexPosition,
    Table,
    TableWrite,
    decode_value,
    encode_value,
)
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import KEYED_BY_SEQ, RETENTION_FIELDS, TrimStep, retention_seq
from roundelay.network.ledger.log_file import DatabaseLog, encode_row, open_database
from roundelay.network.ledger.sqlite import SQLiteLedger

from . import settings
from .follower import catch_up
from .indexed_log import IndexedLog, find_beginning
from .read_replica import NoReadReplica
from .records import (
    HEADER_ROOM,
    Commit,
    Header,
    Heartbeat,
    LogReader,
    write_commit,
    write_record,
    write_records,
    write_trim,
)
from .shared_log import LogRecord, LogTruncated, SharedLog, follow_records

COMPARE_ATTEMPTS = 4
"""Maximum number of attempts to compare a database with a log. A comparison starts again if the leader drops records
before they are read."""
PAGE_ROWS = 1000
ROW_EXPANSION = 2
"""Maximum size of an encoded row, as a multiple of the size of its data."""
CURSOR = ("followed", "log")

Progress = Callable[[int, int], None]
"""Function that receives the progress of a copy: the number of finished rows, and the total number of rows (0 if
unknown)."""


def _no_progress(_done: int, _total: int) -> None:
    pass


class NodeSeen(Struct, frozen=True):
    """Node from which a heartbeat was received. ``ahead_ms`` is roughly how far the node's clock is ahead of the local
    clock. It is 0 for older releases, whose heartbeats contain no time."""

    node: str
    behind: int
    leads: bool
    ahead_ms: int


class CopyResult(NamedTuple):
    """Result of a comparison or a copy: the number of compared records, rows and values, and the first difference, if
    any."""

    position: int
    rows: int
    values: int
    difference: str = ""


async def list_nodes(shared: SharedLog) -> list[NodeSeen]:
    """Listen for heartbeats on an open log. Return the nodes that have sent one, with the leader first."""
    heard: dict[str, tuple[Heartbeat, int]] = {}
    try:
        async with asyncio.timeout(settings.PRESENCE_S + settings.LEADER_TIMEOUT_S / 2):
            while True:
                heartbeat = Heartbeat.read(await shared.next_broadcast())
                if heartbeat.node:
                    heard[heartbeat.node] = heartbeat, heartbeat.at - system_clock() if heartbeat.at else 0
    except TimeoutError:
        pass
    end = await shared.end()
    nodes = [
        NodeSeen(name, max(0, end - heartbeat.position), bool(heartbeat.leads), ahead_ms)
        for name, (heartbeat, ahead_ms) in heard.items()
    ]
    return sorted(nodes, key=lambda node: (not node.leads, node.node))


async def _refuse_nodes(shared: SharedLog) -> None:
    """Raise `LedgerError` if any node uses an open log."""
    if nodes := await list_nodes(shared):
        names = ", ".join(node.node for node in nodes)
        raise LedgerError(
            f"Nodes use the log {shared.name} ({names}). Stop them first: data that they store now would be lost."
        )


async def _read_contents(shared: SharedLog, reader: LogReader, until: int) -> AsyncGenerator[Commit | TrimStep, None]:
    """Yield the commits and trims of an open log, up to the position ``until``."""
    if reader.end >= until:
        return
    async with follow_records(shared, reader.end) as records:
        async for stored in records:
            body = reader.read(stored)
            if body is not None:
                yield reader.decode(body)
            if stored.position >= until:
                return


# --- comparing an index with its log


async def compare(shared: SharedLog, db: Path, progress: Progress = _no_progress) -> CopyResult:
    """Compare a database with its log, up to the last record that the database contains. A node may use the database
    during the comparison.

    A database with a cursor is compared up to the cursor. A database with rows but without a cursor was exported from
    the log or copied into it, so it is compared with the whole log. An empty database is compared with nothing. Opens
    and closes the log. Raises `LedgerError`.
    """
    await shared.open(create=False)
    try:
        # The leader may drop records before this function has read them. Then start again at the new beginning, but
        # only a few times.
        for attempts_left in range(COMPARE_ATTEMPTS - 1, -1, -1):
            with open_database(db) as database:
                try:
                    return await _compare(shared, database, db, progress)
                except LogTruncated:  # The log now begins at a later record. Compare again from this record.
                    if not attempts_left:
                        raise
        raise AssertionError
    finally:
        await shared.close()


async def _compare(shared: SharedLog, database: DatabaseLog, db: Path, progress: Progress) -> CopyResult:
    values = {(table, key): value for table, key, value in database.values()}
    # Leave the cursor out of the comparison, because only an index contains it.
    stored_cursor = values.pop(CURSOR, None)
    cursor = msgspec.json.decode(stored_cursor, type=IndexPosition) if stored_cursor is not None else None
    end = await shared.end()
    if cursor is not None and cursor.position > end:
        return CopyResult(end, 0, 0, f"{db} has followed {cursor.position} records, and the log has {end}")
    has_content = bool(values) or next(database.rows(), None) is not None
    until = cursor.position if cursor is not None else end if has_content else 0
    reader = await find_beginning(shared)
    dropped_records = reader.end
    if cursor is not None and 0 < cursor.position <= dropped_records:
        return CopyResult(
            end, 0, 0, f"{db} has followed {cursor.position} records, and the log begins at {dropped_records + 1}"
        )
    comparison = _Comparison(database, db, reader, progress)
    async for content in _read_contents(shared, reader, until):
        if difference := comparison.compare_next(content):
            return CopyResult(reader.position, comparison.rows, 0, difference)
    if dropped_records and until and reader.is_filling:
        raise LedgerError(f"{db} is in the middle of a snapshot of the log. Let its node continue, and compare again.")
    position, rows = reader.position, comparison.rows
    # Compare digests too. Equal positions prove nothing, because two different logs may have the same length.
    if cursor is not None and cursor.digest != reader.digest:
        return CopyResult(position, rows, 0, f"{db} was built from another log than {shared.name}")
    if (extra := comparison.next_row()) is not None:
        return CopyResult(
            position, rows, 0, f"{db} has row #{extra.seq}, but the log has no row after #{extra.seq - 1}"
        )  # fmt: skip
    # A trim is written to the log before the nodes apply it. A node that is applying the next trim may already have
    # deleted some of its rows.
    next_step = comparison.step
    async for content in _read_contents(shared, reader, min(end, until + 1)):
        next_step = content if isinstance(content, TrimStep) else comparison.step
    if difference := comparison.compare_beginning(next_step):
        return CopyResult(position, rows, 0, difference)
    difference = comparison.compare_values(next_step, values)
    return CopyResult(position, rows, len(comparison.tables.values), difference)


class _Comparison:
    """Compares the rows and tables of a database with the records of its log."""

    def __init__(self, database: DatabaseLog, db: Path, reader: LogReader, progress: Progress) -> None:
        self._db = db
        self._reader = reader
        self._progress = progress
        self._dropped = TrimStep(database.head.first_seq, database.first_record_seq, is_last=False)
        """The seqs below which the database has deleted rows."""
        # Skip older rows, because a log that begins with a snapshot does not contain them.
        self._own_rows = (row for row in database.rows() if row.seq > reader.missing_up_to)
        self.step = TrimStep(1, 1, is_last=False)
        """Last trim that was read from the log."""
        self.tables = _LoggedTables()
        self.rows = 0

    def next_row(self) -> Row | None:
        return next(self._own_rows, None)

    def compare_next(self, content: Commit | TrimStep) -> str:
        """Compare the rows of a commit with the database, and remember its table writes for `compare_values`. Return a
        description of the first difference, or an empty string."""
        if isinstance(content, TrimStep):
            self.step = content
            self.tables.drop(content)
            return ""
        for row in content.rows:
            # Skip a row that retention has deleted from the database. The log still contains it until the next
            # snapshot.
            if row.seq < (self._dropped.records if row.type == "record" else self._dropped.messages):
                continue
            own = self.next_row()
            if own is None or not _is_same(own, row):
                verb = "lacks" if own is None or own.seq > row.seq else "has another"
                return f"{self._db} {verb} row #{row.seq} of the log"
            self.rows += 1
            if self.rows % PAGE_ROWS == 0:
                self._progress(self.rows, 0)
        self.tables.apply(content.writes)
        return ""

    def compare_beginning(self, next_step: TrimStep) -> str:
        step, dropped = self.step, self._dropped
        if (
            step.messages <= dropped.messages <= next_step.messages and step.records <= dropped.records <= next_step.records
        ):  # fmt: skip
            return ""
        place = f"#{dropped.messages} (records at #{dropped.records})"
        return f"{self._db} begins at {place}, by the log at #{step.messages} (#{step.records})"

    def compare_values(self, next_step: TrimStep, values: dict[tuple[str, str], str]) -> str:
        if next_step is not self.step:
            self.tables.forget({place for place in self.tables.pop_dropped(next_step) if place not in values})
        logged = self.tables.values
        for table, key in sorted(logged.keys() | values.keys()):
            expected, actual = logged.get((table, key)), values.get((table, key))
            if expected != _encode_anew(table, actual):
                if actual is None:
                    verb = "lacks"
                else:
                    verb = "has, and the log has not," if expected is None else "has another value for"
                return f"{self._db} {verb} {key!r} of the table {table}"
        return ""


class _LoggedTables:
    """Encoded values of all tables, as the log defines them."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], str] = {}
        self._first = 1
        self._kept_until: list[tuple[int, tuple[str, str]]] = []
        """Heap of table keys, ordered by the seq of the message with which the value will be deleted."""

    def apply(self, writes: list[TableWrite]) -> None:
        for write in writes:
            place = write.table, write.key
            if write.value is None:
                self.values.pop(place, None)
                continue
            self.values[place] = encode_value(write.value).decode()
            if write.table in (*RETENTION_FIELDS, *KEYED_BY_SEQ):
                heappush(self._kept_until, (retention_seq(write.table, write.key, write.value), place))

    def drop(self, step: TrimStep) -> None:
        """Delete the values that `retention.apply_trim` deletes."""
        if step.is_last and step.messages > self._first:
            self._first = step.messages
            self.forget(self.pop_dropped(step))

    def pop_dropped(self, step: TrimStep) -> set[tuple[str, str]]:
        """Return the keys of the values that are deleted with the messages of a trim. Each key is returned once."""
        places = set()
        while self._kept_until and self._kept_until[0][0] < step.messages:
            _, (name, key) = heappop(self._kept_until)
            value, table = self.values.get((name, key)), cast(Table, name)
            # A later write may have assigned the value to a later message. The heap then has another entry for the
            # value.
            if value is not None and retention_seq(table, key, decode_value(table, value)) < step.messages:
                places.add((name, key))
        return places

    def forget(self, places: set[tuple[str, str]]) -> None:
        for place in places:
            del self.values[place]


def _encode_anew(table: str, value: str | None) -> str | None:
    """Encode a stored value again in the format of this release, because an earlier release may have written fewer
    fields."""
    if value is None:
        return None
    try:
        return encode_value(decode_value(cast(Table, table), value)).decode()
    except (msgspec.MsgspecError, KeyError):
        return value


# --- from a database into a log


async def fill_log(db: Path, shared: SharedLog, progress: Progress = _no_progress) -> CopyResult:
    """Copy a database into a new log, or continue an interrupted copy. No node may use the database. The database is
    not changed.

    Opens and closes the log. Raises `LedgerError`.
    """
    with open_database(db) as database:  # raises an error if the file is missing or is not a database
        first, first_record = database.head.first_seq, database.first_record_seq
    ledger = SQLiteLedger(db, new_epoch=random_id)
    try:
        meta, loaded = await ledger.open()
        await shared.open()
        dropped = TrimStep(first, first_record, is_last=True, stamp=meta.stamp)
        filler = _LogFiller(shared, ledger)
        # Append nothing to a log that is already complete. The comparison below checks it.
        if await filler.start(meta.epoch, meta.name):
            await filler.add_rows(meta.head, dropped, progress)
            await filler.add_values([write async for write in _list_values(ledger, loaded)])
            # Append the record ``filled`` last. Nodes do not lead before they have read this record, so no node can
            # serve an incomplete history.
            await filler.append(Header(kind="filled", writer=filler.token, previous=filler.reader.end_digest))
    finally:
        await shared.close()
        await ledger.close()
    # Compare the whole copy before success is reported.
    return await compare(shared, db, progress)


async def _list_values(ledger: SQLiteLedger, loaded: list[TableWrite]) -> AsyncIterator[TableWrite]:
    for write in loaded:
        yield write
    for name in sorted(COLD_TABLES - VOLATILE_TABLES):
        table, after = cast(Table, name), ""
        while page := await ledger.cold(table, "", PAGE_ROWS, after=after):
            for key, value in page:
                yield TableWrite(table, key, value)
            after = page[-1][0]


class _LogFiller:
    """Writes those rows and values of a database that are missing in a log."""

    def __init__(self, shared: SharedLog, ledger: SQLiteLedger) -> None:
        self.token = random_id()
        self.reader = LogReader()
        self._shared = shared
        self._ledger = ledger
        self._newest = 0
        """Seq of the newest row in the log."""
        self._tables = _LoggedTables()
        self._step = TrimStep(1, 1, is_last=True)

    async def append(self, header: Header) -> None:
        await self._append_record(write_record(header))

    async def _append_record(self, record: bytes) -> None:
        position = await self._shared.append(record, self.reader.end)
        self.reader.read(LogRecord(position, record))

    async def start(self, epoch: str, name: str) -> bool:
        """Begin a new log, or read the content of an existing log. Return whether the log is still incomplete.

        Raises `LedgerError` if the log belongs to another network.
        """
        end, self.reader = await self._shared.end(), await find_beginning(self._shared)
        if end == 0:
            await self.append(
                Header(kind="begin", writer=self.token, epoch=epoch, name=name, is_filled_later=True)
            )  # fmt: skip
        async for content in _read_contents(self._shared, self.reader, end):
            if isinstance(content, TrimStep):
                self._step = content
                continue
            if self.reader.epoch == epoch:
                await self._refuse_other_rows(content.rows)
            self._tables.apply(content.writes)
        if self.reader.epoch != epoch:
            raise LedgerError(
                f"The log {self._shared.name} holds another network ({self.reader.name}). Name a new stream."
            )
        if self.reader.is_filling:
            # Append a new claim in each attempt. Readers then ignore a commit that an interrupted attempt has left
            # incomplete.
            await self.append(Header(kind="claim", writer=self.token, previous=self.reader.end_digest))
        return self.reader.is_filling

    async def _refuse_other_rows(self, rows: list[Row]) -> None:
        if not rows:
            return
        own = await self._ledger.rows(rows[0].seq - 1, len(rows))
        if len(own) != len(rows) or not all(map(_is_same, own, rows)):
            raise LedgerError(
                f"From #{rows[0].seq} on, the rows in the log {self._shared.name} differ from {self._ledger.path}. "
                "Name a new stream."
            )
        self._newest = rows[-1].seq

    async def add_rows(self, head: int, dropped: TrimStep, progress: Progress) -> None:
        """Append the rows that the log lacks, in order. If retention has deleted rows from the database, also append a
        trim."""
        # Retention may have deleted rows below `dense_from`. From this seq on, every row must exist.
        dense_from = max(dropped.messages, dropped.records)
        max_bytes = (self._shared.max_bytes - HEADER_ROOM) // ROW_EXPANSION
        while rows := await self._ledger.rows(self._newest, PAGE_ROWS, max_bytes=max_bytes):
            for row in rows:
                lacking = row.seq if row.is_damaged else max(self._newest + 1, dense_from)
                if row.is_damaged or lacking < row.seq:
                    raise LedgerError(
                        f"In {self._ledger.path}, row #{lacking} is missing or damaged, but a shared log needs every "
                        "row that retention has not deleted. Use a backup that contains the row."
                    )
                self._newest = row.seq
            await self._append_commit(rows, [])
            progress(self._newest, head)
        if self._newest != head:
            raise LedgerError(
                f"{self._ledger.path} lacks the rows from #{self._newest + 1} to #{head}, so it is incomplete. Use a "
                "backup that contains them."
            )
        if (dropped.messages, dropped.records) not in ((self._step.messages, self._step.records), (1, 1)):
            await self._append_record(write_trim(dropped, self.token, self.reader.end_digest))

    async def add_values(self, values: list[TableWrite]) -> None:
        """Append the table writes that make the tables in the log equal to the tables of the database."""
        # Write only the differences, so that a continued copy does not append the same values again.
        wanted = {(write.table, write.key): write for write in values if write.table not in VOLATILE_TABLES}
        logged = self._tables.values
        changes = [
            write for place, write in wanted.items() if logged.get(place) != encode_value(write.value).decode()
        ]  # fmt: skip
        changes += [TableWrite(cast(Table, table), key, None) for table, key in logged.keys() - wanted.keys()]
        for start in range(0, len(changes), PAGE_ROWS):
            await self._append_commit([], changes[start : start + PAGE_ROWS])

    async def _append_commit(self, rows: list[Row], writes: list[TableWrite]) -> None:
        body = write_commit(rows, writes)
        for record in write_records(body, self.token, self.reader.end_digest, self._shared.max_bytes):
            await self._append_record(record)


# --- from a log into a database


async def rebuild_index(shared: SharedLog, db: Path) -> LogReader:
    """Create an index of a log, or update it to the end of the log. The node does not become the leader. Raises
    `LedgerError`."""
    index = SQLiteLedger(db, new_epoch=random_id, durability="normal", is_index=True)
    return await _catch_up(shared, index)


async def _catch_up(shared: SharedLog, index: SQLiteLedger) -> LogReader:
    return await catch_up(IndexedLog(shared, index, clock=system_clock, report=lambda _: None), NoReadReplica())


def _refuse_history(db: Path) -> None:
    """Raise `LedgerError` if a database contains rows that do not come from a shared log."""
    if not db.exists():
        return
    with open_database(db) as database:
        if database.find_cursor() is None and next(database.rows(), None) is not None:
            raise LedgerError(
                f"{db} exists and has a history of its own. Name a new file with --to. (`roundelay cluster verify` "
                "compares it with the log.)"
            )


async def export_database(shared: SharedLog, db: Path, progress: Progress = _no_progress) -> CopyResult:
    """Export a log to an independent database, or continue an interrupted export. No node may use the log. Raises
    `LedgerError`."""
    await asyncio.to_thread(_refuse_history, db)
    await shared.open(create=False)
    try:
        await _refuse_nodes(shared)
        first = await find_beginning(shared)
        # Read only the first record, which contains the epoch for the database.
        async for _ in _read_contents(shared, first, min(first.end + 1, await shared.end())):
            pass
    finally:
        await shared.close()
    if not first.epoch:
        raise LedgerError(f"The log {shared.name} is empty: there is nothing to export.")

    def make_index() -> SQLiteLedger:
        return SQLiteLedger(db, new_epoch=lambda: first.epoch, name=first.name, durability="full", is_index=True)

    reader = await _catch_up(shared, make_index())
    if reader.is_filling:
        raise LedgerError(
            f"The log {shared.name} is not complete: the copy into it was interrupted. Continue that copy first."
        )
    result = await compare(shared, db, progress)
    # If the export differs from the log, keep the cursor. Otherwise a node could use the wrong export as a database.
    if not result.difference:
        index = make_index()
        await index.open()
        # Without the cursor, the index is an independent database.
        await index.append([], [TableWrite("followed", "log", None)])
        await index.close()
    return result


def _is_same(own: Row, logged: Row) -> bool:
    """Return whether a row of a database equals the row in the log. If a message was edited or deleted, its text is not
    compared: edits change rows of a database, but never records of the log."""
    if is_revised(own):
        own, logged = (msgspec.structs.replace(row, data=b"{}", digest="") for row in (own, logged))
    return encode_row(own) == encode_row(logged)
