"""`ReplicatedLedger`: a ledger whose truth is a shared log, and whose SQLite file is one node's index of it.

One node leads: it appends each commit to the log, and then to its index. The others follow the log into theirs and wait
in `open`, until nobody leads; then whoever claims the log first goes on, as after a restart. A leader that another one
has replaced learns it from its next append, which the log refuses, so it has acknowledged nothing since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import msgspec

from roundelay.network.core.tables import Followed, Put, Row, Wanted
from roundelay.network.errors import LedgerError

from . import KeyTaken, Meta
from .shared_log import (
    Commit,
    Header,
    LogMoved,
    LogRecord,
    Reader,
    SharedLog,
    digest,
    read_commit,
    split,
    write_commit,
    write_record,
)
from .sqlite import SQLiteLedger

ALIVE_S = 0.25
"""How often a leader says that it leads."""
LEADERLESS_S = 1.5
"""So long nothing is heard of a leader before another one claims its place."""
HEADER_ROOM = 1024
"""Bytes of a record that its header may take."""

log = logging.getLogger(__name__)


class ReplicatedLedger:
    """A `Ledger` over a shared log and an index. ``open`` returns when this node leads; until then it follows.

    ``new_id`` gives a name for each claim, and the epoch of a new log; ``say`` is told who leads, in a sentence. The index is a file of its own, and holds nothing that the log does not:
    one that is lost is made again by following.
    """

    def __init__(
        self,
        shared: SharedLog,
        index: SQLiteLedger,
        *,
        new_id: Callable[[], str],
        name: str,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._shared = shared
        self._index = index
        self._new_id = new_id
        self._name = name
        self._say = say
        self._reader = Reader()
        self._writer = ""
        """Our claim, while we lead."""
        self._telling: asyncio.Task[None] | None = None
        self.path = index.path
        # what is read is read from the index
        self.inbox = index.inbox
        self.thread = index.thread
        self.reaction = index.reaction
        self.newest_heads = index.newest_heads
        self.threads = index.threads
        self.search = index.search
        self.forget_dropped = index.forget_dropped
        self.all_threads = index.all_threads
        self.messages = index.messages
        self.heads = index.heads
        self.cold = index.cold
        self.lookup = index.lookup
        self.lookup_cold = index.lookup_cold
        self.expire_calls = index.expire_calls
        self.trim = index.trim
        self.records = index.records
        self.rows = index.rows
        self.check = index.check

    @property
    def damaged(self) -> int:
        return self._index.damaged

    # --- lifetime

    async def open(self) -> tuple[Meta, list[Put]]:
        """Follow the log until nobody leads, claim it, and give what the index then holds."""
        try:
            await self._index.open()
            await self._shared.open()
            self._reader = await self._find_place()
            await self._lead()
            await self._index.close()  # what the tables hold is read at its start
            meta, puts = await self._index.open()
        except BaseException:
            await self.close()
            raise
        self._telling = asyncio.create_task(self._tell(), name="ledger-leads")
        log.info("this node leads", extra={"log": self._shared.name, "position": self._reader.position})
        self._say(f"This node leads: it serves the network of {self._shared.name}.")
        return msgspec.structs.replace(meta, epoch=self._reader.epoch, name=self._reader.name), puts

    async def close(self) -> None:
        """Give the lead away, if this node has it, and close both."""
        if self._telling is not None:
            self._telling.cancel()
            with suppress(asyncio.CancelledError):
                await self._telling
            self._telling = None
        if self._writer:
            with suppress(LedgerError):  # then the others find out by hearing nothing
                await self._append(Header(kind="release", writer=self._writer, previous=self._reader.last), b"")
        self._writer = ""
        await self._shared.close()
        await self._index.close()

    async def verify(self) -> None:
        await self._index.verify()

    async def append(self, rows: Sequence[Row], puts: Sequence[Put]) -> None:
        if not self._writer:
            raise LedgerError("This node does not lead; it has to be opened again.")
        keys = {(row.actor, row.key) for row in rows if row.key}
        if keys and (await self._index.lookup(Wanted(keys, set(), set()))).known:
            raise KeyTaken  # asked before the log, which takes everything
        body = write_commit(rows, puts)
        parts = split(body, self._shared.max_bytes - HEADER_ROOM)
        try:
            for number, part in enumerate(parts, 1):
                left = len(parts) - number
                header = Header(kind="commit", writer=self._writer, previous=self._reader.last, left=left)
                await self._append(header, part)
        except LogMoved:
            self._writer = ""
            log.warning("another node leads now; this one follows", extra={"log": self._shared.name})
            raise
        await self._index.append(rows, [*puts, self._place()])

    # --- following

    async def _find_place(self) -> Reader:
        """Where the index is in the log. Raises `LedgerError` if it is not an index of this log."""
        known: Followed | None = await self._index.lookup_cold("followed", "log")
        if known is None:
            if await self._index.rows(0, 1):
                raise LedgerError(
                    f"{self.path} has a history of its own, which the log {self._shared.name} does not hold; name a new "
                    "file with --db."
                )
            return Reader()
        if await self._shared.end() < known.position:
            raise LedgerError(
                f"{self.path} was made from a log of at least {known.position} records, and {self._shared.name} has "
                "fewer: it is another log, or has lost some. Name a new file with --db to go on with what it has."
            )
        reader = Reader(known.position, known.digest)
        reader.epoch, reader.name = known.epoch, known.name
        async with self._follow(known.position - 1) as records:
            stored = await anext(records)
        if digest(stored.data) != known.digest:
            raise LedgerError(
                f"{self.path} was made from another log than {self._shared.name}; name a new file with --db, or that log."
            )
        reader.leader = known.leader
        return reader

    def _follow(self, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
        return aclosing(cast(AsyncGenerator[LogRecord, None], self._shared.follow(after)))

    async def _lead(self) -> None:
        """Follow until this node has claimed the log."""
        while True:
            try:
                if await self._shared.end() == 0:
                    writer = self._new_id()
                    await self._append(Header(kind="begin", writer=writer, epoch=self._new_id(), name=self._name), b"")
                    continue
                await self._follow_leader()
                writer = self._new_id()
                await self._append(Header(kind="claim", writer=writer, previous=self._reader.last), b"")
                self._writer = writer
                return
            except LogMoved:
                continue  # somebody else was faster: follow it

    async def _follow_leader(self) -> None:
        """Take in the log, up to its end and until nobody leads."""
        heard = asyncio.get_running_loop().time()
        is_told = False
        async with self._follow(self._reader.end) as records:
            upcoming = asyncio.ensure_future(anext(records))
            hearing = asyncio.ensure_future(self._shared.listen())
            try:
                while True:
                    end, now = await self._shared.end(), asyncio.get_running_loop().time()
                    if self._reader.end >= end and (not self._reader.leader or now - heard > LEADERLESS_S):
                        return
                    if self._reader.end >= end and not is_told:
                        is_told = True
                        log.info("following", extra={"log": self._shared.name, "position": self._reader.position})
                        self._say(
                            f"Another node leads the network of {self._shared.name}; this one follows, and waits."
                        )
                    await asyncio.wait((upcoming, hearing), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    if hearing.done():
                        hearing.result()
                        heard = asyncio.get_running_loop().time()
                        hearing = asyncio.ensure_future(self._shared.listen())
                    while upcoming.done():
                        await self._take(upcoming.result())
                        upcoming = asyncio.ensure_future(anext(records))
                        await asyncio.sleep(0)
            finally:
                await _end(upcoming, hearing)

    async def _take(self, stored: LogRecord) -> None:
        body = self._reader.take(stored)
        commit = read_commit(body) if body is not None else Commit([], [])
        if self._reader.position == stored.position:
            await self._index.append(commit.rows, [*commit.puts, self._place()])

    def _place(self) -> Put:
        """Where the index is, stored with what brought it there."""
        it = self._reader
        return Put("followed", "log", Followed(it.position, it.digest, it.leader, it.epoch, it.name))

    # --- leading

    async def _append(self, header: Header, body: bytes) -> None:
        record = write_record(header, body)
        position = await self._shared.append(record, self._reader.end)
        self._reader.take(LogRecord(position, record))

    async def _tell(self) -> None:
        """Say that this node leads, as long as it does."""
        while self._writer:
            with suppress(LedgerError):
                await self._shared.say(self._writer)
            await asyncio.sleep(ALIVE_S)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these until they have ended: what they wait in may take a cancellation for something else."""
    while waiting := [task for task in tasks if not task.done()]:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)
