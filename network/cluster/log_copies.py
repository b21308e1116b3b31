"""Copies between a shared log and databases: whether an index is what its log says, a log that is filled from a
database, and a database made of a log, each with the same seqs and the same epoch.

A log that is being filled says so in its first record, and nobody leads before its last one says that it is whole; so a
filling that was interrupted goes on where it was. A database made of a log is an index of it until all of it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
from msgspec import Struct

from roundelay.network.clock import random_id, system_clock
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import (
    COLD_TABLES,
    VOLATILE_TABLES,
    Followed,
    Table,
    TableWrite,
    decode_value,
    encode_value,
)
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import KEPT_WITH, KEYED_BY_SEQ, Cut, seq_of
from roundelay.network.ledger.log_file import DatabaseLog, encode_row, open_database
from roundelay.network.ledger.sqlite import SQLiteLedger

from .replicated import LEADERLESS_S, PRESENT_S, ReplicatedLedger, find_beginning
from .shared_log import (
    HEADER_ROOM,
    Commit,
    Header,
    Heartbeat,
    LogRecord,
    LogTruncated,
    Reader,
    SharedLog,
    write_commit,
    write_record,
    write_records,
    write_trim,
)

TRIES = 3
"""So often a comparison begins again whose log has lost its oldest records meanwhile."""
PAGE_ROWS = 1000
ROW_ROOM = 2
"""A row takes at most about so many times its data in a record."""
PLACE = ("followed", "log")

Progress = Callable[[int, int], None]
"""Is told how many rows are done, and of how many; 0 where that is not known."""


class NodeSeen(Struct, frozen=True):
    """A node that was heard of: what it calls itself, how many records it is behind, whether it leads, and how far its
    clock is ahead of the one here (ms, about; 0: an older release)."""

    node: str
    behind: int
    leads: bool
    ahead_ms: int


class Copied(NamedTuple):
    """What was compared or copied, and the first difference, if there is one."""

    position: int
    rows: int
    values: int
    difference: str = ""


async def hear_nodes(shared: SharedLog) -> list[NodeSeen]:
    """The nodes that say now that they are there; an open log. Who is silent is not heard."""
    heard: dict[str, tuple[Heartbeat, int]] = {}
    try:
        async with asyncio.timeout(PRESENT_S + LEADERLESS_S / 2):
            while True:
                said = Heartbeat.read(await shared.listen())
                if said.node:
                    heard[said.node] = said, said.at - system_clock() if said.at else 0
    except TimeoutError:
        pass
    end = await shared.end()
    nodes = [NodeSeen(name, max(0, end - it.position), bool(it.leads), ahead) for name, (it, ahead) in heard.items()]
    return sorted(nodes, key=lambda it: (not it.leads, it.node))


async def refuse_nodes(shared: SharedLog) -> None:
    """Raises `LedgerError` where a node uses an open log."""
    nodes = await hear_nodes(shared)
    if nodes:
        who = ", ".join(it.node for it in nodes)
        raise LedgerError(
            f"Nodes use the log {shared.name} ({who}): stop them first, or what they store meanwhile is lost."
        )


async def _read(shared: SharedLog, reader: Reader, until: int) -> AsyncGenerator[Commit | Cut, None]:
    """What the records of an open log come to, up to a position."""
    if reader.end >= until:
        return
    async with aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(reader.end))) as records:
        async for stored in records:
            body = reader.take(stored)
            if body is not None:
                yield reader.check(body)
            if stored.position >= until:
                return


# --- is an index what its log says?


async def compare(shared: SharedLog, db: Path, progress: Progress = lambda done, of: None) -> Copied:
    """Whether a database holds what the log says up to where it has followed it; one that was made of a log, or from
    which a log was filled, what the whole log says; one with nothing in it has followed none of it yet. A node may be
    using it. Opens and closes the log. Raises `LedgerError`."""
    await shared.open(is_made=False)
    try:
        for left in range(TRIES, -1, -1):
            with open_database(db) as kept:
                try:
                    return await _compare(shared, kept, db, progress)
                except LogTruncated:  # it begins later by now: read it from there
                    if not left:
                        raise
        raise AssertionError
    finally:
        await shared.close()


async def _compare(shared: SharedLog, kept: DatabaseLog, db: Path, progress: Progress) -> Copied:
    values = {(table, key): value for table, key, value in kept.values()}
    place = values.pop(PLACE, None)
    followed = msgspec.json.decode(place, type=Followed) if place is not None else None
    end = await shared.end()
    if followed is not None and followed.position > end:
        return Copied(end, 0, 0, f"{db} has followed {followed.position} records, and the log has {end}")
    is_begun = bool(values) or next(kept.rows(), None) is not None
    until = followed.position if followed is not None else end if is_begun else 0
    dropped = Cut(kept.head.first_seq, kept.first_record_seq, is_last=False)
    reader, rows, known, said = await find_beginning(shared), 0, _Known(), Cut(1, 1, is_last=False)
    dropped_records = reader.end
    if followed is not None and 0 < followed.position <= dropped_records:
        return Copied(
            end, 0, 0, f"{db} has followed {followed.position} records, and the log begins at {dropped_records + 1}"
        )
    mine = (row for row in kept.rows() if row.seq > reader.begins_after)  # older ones the log has no more
    async for taken in _read(shared, reader, until):
        if isinstance(taken, Cut):
            said = taken
            known.drop(taken)
            continue
        for row in taken.rows:
            if _is_below(dropped, row):
                continue
            found = next(mine, None)
            if found is None or encode_row(found) != encode_row(row):
                what = "lacks" if found is None or found.seq > row.seq else "has another"
                return Copied(reader.position, rows, 0, f"{db} {what} row #{row.seq} of the log")
            rows += 1
            if rows % PAGE_ROWS == 0:
                progress(rows, 0)
        known.note(taken.puts)
    if dropped_records and until and reader.is_filling:
        raise LedgerError(f"{db} is where the log says its values anew: let its node go on, and compare again.")
    compared, digest = reader.position, reader.digest
    if followed is not None and followed.digest != digest:
        return Copied(compared, rows, 0, f"{db} was made from another log than {shared.name}")
    if (more := next(mine, None)) is not None:
        return Copied(compared, rows, 0, f"{db} has row #{more.seq}, and the log has none behind #{more.seq - 1}")
    begun = said  # a trim is in the log before a node does it: of the one that it may be doing a part may be done
    async for taken in _read(shared, reader, min(end, until + 1)):
        begun = taken if isinstance(taken, Cut) else said
    if not (said.messages <= dropped.messages <= begun.messages and said.records <= dropped.records <= begun.records):
        where = f"#{dropped.messages} (records at #{dropped.records})"
        return Copied(compared, rows, 0, f"{db} begins at {where}, by the log at #{said.messages} (#{said.records})")
    if begun is not said:
        known.forget({it for it in known.about_dropped(begun) if it not in values})
    return Copied(compared, rows, len(known.values), _find_other_value(db, known.values, values))


def _find_other_value(db: Path, known: dict[tuple[str, str], str], values: dict[tuple[str, str], str]) -> str:
    for table, key in sorted(known.keys() | values.keys()):
        one, other = known.get((table, key)), values.get((table, key))
        if one != _written_now(table, other):
            what = "lacks" if other is None else "has, and the log has not," if one is None else "has another value for"
            return f"{db} {what} {key!r} of the table {table}"
    return ""


def _is_below(cut: Cut, row: Row) -> bool:
    return row.seq < (cut.records if row.type == "record" else cut.messages)


class _Known:
    """What the tables hold by the log, encoded."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], str] = {}
        self._first = 1
        self._kept_until: list[tuple[int, tuple[str, str]]] = []
        """A heap: the seq of the message with which a value goes, as it was when it was noted."""

    def note(self, puts: list[TableWrite]) -> None:
        for put in puts:
            place = put.table, put.key
            if put.value is None:
                self.values.pop(place, None)
                continue
            self.values[place] = encode_value(put.value).decode()
            if put.table in (*KEPT_WITH, *KEYED_BY_SEQ):
                heappush(self._kept_until, (seq_of(put.table, put.key, put.value), place))

    def drop(self, cut: Cut) -> None:
        """As `upkeep.make_cut` does."""
        if cut.is_last and cut.messages > self._first:
            self._first = cut.messages
            self.forget(self.about_dropped(cut))

    def about_dropped(self, cut: Cut) -> set[tuple[str, str]]:
        """Which values are kept no longer than a message that the cut drops; each is told once."""
        found = set()
        while self._kept_until and self._kept_until[0][0] < cut.messages:
            _, (table, key) = heappop(self._kept_until)
            value, named = self.values.get((table, key)), cast(Table, table)
            if value is not None and seq_of(named, key, decode_value(named, value)) < cut.messages:
                found.add((table, key))
        return found

    def forget(self, places: set[tuple[str, str]]) -> None:
        for place in places:
            del self.values[place]


def _written_now(table: str, value: str | None) -> str | None:
    """A value as this release writes it: an earlier one may have written it before it had all fields."""
    if value is None:
        return None
    try:
        return encode_value(decode_value(cast(Table, table), value)).decode()
    except (msgspec.MsgspecError, KeyError):
        return value


# --- from a database into a log


async def fill(db: Path, shared: SharedLog, progress: Progress = lambda done, of: None) -> Copied:
    """Fill a new log from a database that no node uses, or go on with it; the database stays as it is. Opens and closes
    the log. Raises `LedgerError`."""
    with open_database(db) as kept:  # it is there, and is one
        first, first_record = kept.head.first_seq, kept.first_record_seq
    ledger = SQLiteLedger(db, new_epoch=random_id)
    try:
        meta, puts = await ledger.open()
        await shared.open()
        dropped = Cut(first, first_record, is_last=True, stamp=meta.stamp)
        filling = _Filling(shared)
        if await filling.go_on(ledger, meta.epoch, meta.name):
            await filling.add_rows(ledger, meta.head, dropped, progress)
            await filling.add_values([it async for it in _list_values(ledger, puts)])
            await filling.append(Header(kind="filled", writer=filling.writer, previous=filling.reader.last))
    finally:
        await shared.close()
        await ledger.close()
    return await compare(shared, db, progress)


async def _list_values(ledger: SQLiteLedger, loaded: list[TableWrite]) -> AsyncIterator[TableWrite]:
    for put in loaded:
        yield put
    for table in sorted(COLD_TABLES - VOLATILE_TABLES):
        after = ""
        while page := await ledger.cold(cast(Table, table), "", PAGE_ROWS, after=after):
            for key, value in page:
                yield TableWrite(cast(Table, table), key, value)
            after = page[-1][0]


class _Filling:
    """Writes into a log what it lacks."""

    def __init__(self, shared: SharedLog) -> None:
        self.writer = random_id()
        self.reader = Reader()
        self._shared = shared
        self._rows = 0
        """How many are in the log."""
        self._known = _Known()
        self._dropped = Cut(1, 1, is_last=True)

    async def append(self, header: Header) -> None:
        await self._append(write_record(header))

    async def _append(self, record: bytes) -> None:
        position = await self._shared.append(record, self.reader.end)
        self.reader.take(LogRecord(position, record))

    async def go_on(self, ledger: SQLiteLedger, epoch: str, name: str) -> bool:
        """Begin the log, or read what is in it; false where it is whole. Raises `LedgerError` for another's."""
        end, self.reader = await self._shared.end(), await find_beginning(self._shared)
        if end == 0:
            begin = Header(kind="begin", writer=self.writer, epoch=epoch, name=name, is_filled_later=True)
            await self.append(begin)
        async for taken in _read(self._shared, self.reader, end):
            if isinstance(taken, Cut):
                self._dropped = taken
                continue
            if self.reader.epoch == epoch:
                await self._refuse_others(ledger, taken.rows)
            self._known.note(taken.puts)
        if self.reader.epoch != epoch:
            raise LedgerError(
                f"The log {self._shared.name} holds another network ({self.reader.name}); name a stream that is new."
            )
        if self.reader.is_filling:
            await self.append(Header(kind="claim", writer=self.writer, previous=self.reader.last))
        return self.reader.is_filling

    async def _refuse_others(self, ledger: SQLiteLedger, rows: list[Row]) -> None:
        if not rows:
            return
        mine = await ledger.rows(rows[0].seq - 1, len(rows))
        if list(map(encode_row, mine)) != list(map(encode_row, rows)):
            raise LedgerError(
                f"The log {self._shared.name} has other rows from #{rows[0].seq} on than {ledger.path}; name a stream "
                "that is new."
            )
        self._rows = rows[-1].seq

    async def add_rows(self, ledger: SQLiteLedger, head: int, dropped: Cut, progress: Progress) -> None:
        """Add the rows that the log lacks, in their order, and say which ones retention has dropped before."""
        whole_from = max(dropped.messages, dropped.records)
        most = (self._shared.max_bytes - HEADER_ROOM) // ROW_ROOM
        while rows := await ledger.rows(self._rows, PAGE_ROWS, max_bytes=most):
            for row in rows:
                lacked = row.seq if row.is_damaged else max(self._rows + 1, whole_from)
                if row.is_damaged or lacked < row.seq:
                    raise LedgerError(
                        f"{ledger.path} has no whole row #{lacked}: a shared log holds all that was not dropped by "
                        "retention. Go on from a backup that has it."
                    )
                self._rows = row.seq
            await self._commit(rows, [])
            progress(self._rows, head)
        if self._rows != head:
            raise LedgerError(f"{ledger.path} lacks the rows from #{self._rows + 1} to #{head}: it is not whole.")
        begun = self._dropped.messages, self._dropped.records
        if (dropped.messages, dropped.records) not in (begun, (1, 1)):
            await self._append(write_trim(dropped, self.writer, self.reader.last))

    async def add_values(self, values: list[TableWrite]) -> None:
        """Let the tables be these."""
        wanted = {(it.table, it.key): it for it in values if it.table not in VOLATILE_TABLES}
        known = self._known.values
        news = [it for place, it in wanted.items() if known.get(place) != encode_value(it.value).decode()]
        news += [TableWrite(cast(Table, table), key, None) for table, key in known.keys() - wanted.keys()]
        for start in range(0, len(news), PAGE_ROWS):
            await self._commit([], news[start : start + PAGE_ROWS])

    async def _commit(self, rows: list[Row], puts: list[TableWrite]) -> None:
        body = write_commit(rows, puts)
        for record in write_records(body, self.writer, self.reader.last, self._shared.max_bytes):
            await self._append(record)


# --- from a log into a database


async def rebuild(shared: SharedLog, db: Path) -> Reader:
    """Bring an index up to the end of its log, or make it, without leading. Raises `LedgerError`."""
    index = SQLiteLedger(db, new_epoch=random_id, durability="normal", is_index=True)
    return await ReplicatedLedger(shared, index, new_id=random_id, name="").catch_up()


def _refuse_history(db: Path) -> None:
    """Raises `LedgerError` where a database holds what no log has brought."""
    if not db.exists():
        return
    with open_database(db) as kept:
        if kept.find_place() is None and next(kept.rows(), None) is not None:
            raise LedgerError(
                f"{db} is there, and has a history of its own: name a new file with --to. (`roundelay cluster verify` "
                "says whether it is what the log says.)"
            )


async def take_out(shared: SharedLog, db: Path, progress: Progress = lambda done, of: None) -> Copied:
    """Make a database of its own of a log that no node uses, or go on with it. Raises `LedgerError`."""
    await asyncio.to_thread(_refuse_history, db)
    await shared.open(is_made=False)
    try:
        await refuse_nodes(shared)
        first = await find_beginning(shared)
        async for _ in _read(shared, first, min(first.end + 1, await shared.end())):
            pass
    finally:
        await shared.close()
    if not first.epoch:
        raise LedgerError(f"The log {shared.name} is empty.")
    made = SQLiteLedger(db, new_epoch=lambda: first.epoch, name=first.name, durability="full", is_index=True)
    reader = await ReplicatedLedger(shared, made, new_id=random_id, name=first.name).catch_up()
    if reader.is_filling:
        raise LedgerError(f"The log {shared.name} is not whole: what fills it was interrupted. Let that go on first.")
    compared = await compare(shared, db, progress)
    if not compared.difference:
        made = SQLiteLedger(db, new_epoch=lambda: first.epoch, name=first.name, durability="full", is_index=True)
        await made.open()
        await made.append([], [TableWrite("followed", "log", None)])  # from here on it has a history of its own
        await made.close()
    return compared
