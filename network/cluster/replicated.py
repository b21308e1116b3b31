"""`ReplicatedLedger`: a ledger whose truth is a shared log, and whose SQLite file is one node's index of it.

One node leads: it appends each commit to the log, and then to its index. The others follow the log into theirs and wait
in `open`, until nobody leads; then whoever claims the log first goes on, as after a restart. A leader that another one
has replaced learns it from its next append, which the log refuses, so it has acknowledged nothing since; one that
appends nothing asks (`verify`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple, cast

import msgspec

from roundelay.network.clock import Clock, system_clock
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import COLD_TABLES, LOADED_TABLES, VOLATILE_TABLES, Followed, Table, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.frames import Follows
from roundelay.network.ledger import Cut, KeyTaken, LeadershipLost, LogFull, Meta, Trim, Trimmed, Unstorable
from roundelay.network.ledger.sqlite import SQLiteLedger

from .read_replica import IndexReads, NoReadReplica, ReadOnlyIndex, ReadReplica
from .shared_log import (
    Claim,
    Commit,
    Header,
    Heartbeat,
    LogElectionPending,
    LogIncomplete,
    LogRecord,
    LogStatus,
    LogTruncated,
    LogUnavailable,
    Reader,
    SharedLog,
    UnusableLog,
    digest,
    placing,
    read_record,
    tell_wait,
    write_commit,
    write_record,
    write_records,
    write_trim,
)

ALIVE_S = 0.25
"""How often a leader says that it leads."""
PRESENT_S = 1.0
"""How often a node that follows says that it is there."""
LEADERLESS_S = 1.0
"""So long nothing is heard of a leader before another one claims its place."""
LISTENED_S = 2 * ALIVE_S
"""Of one look to the next so much counts as silence at most: who slept has not listened."""
ASK_S = 1.0
"""How often a node that follows asks where the log ends while nothing comes."""
AGAIN_S = 1.0
"""Between two tries to follow an engine that is away."""
RELEASE_S = 1.0
SYNC_S = 10.0
"""How often a leader asks whether what is acknowledged is on disks."""
UNREACHED_S = 5.0
"""So long a leader that nobody writes to goes on while its engine is away."""
SILENT_S = 1.0
"""Maximum time without an answer of the engine during which a leader counts as ready: another node may lead by then."""
HANDED_OVER_S = 1.0
"""So long a node that stops waits at most for the one that takes over, so as to name it."""
HEARD_S = 0.05
"""So long a node that led looks through what others have said meanwhile."""
NAMING_S = 0.5
"""So long a node that no longer leads asks the log at most who does, before it says so."""
SHORT_S = 2.0
"""So long a log may end before what was read of it, as servers say that do not know yet that they lead no more."""
PATIENT_S = 2.0
"""So long a node that starts says nothing while its log does not answer."""
OFF_MS = 60_000
"""Clocks of two nodes that are further apart are not both right."""
OFF_S = 2.0
DOUBT_S = 10.0
"""So long a node waits that finds the log gone, or shorter than it knows it: servers that choose anew may say so."""
RESERVE_BYTES = 8 * 1024 * 1024
"""So much room, or a 64th of what the log may hold, commits leave for who leads next and for what makes room: trims and
bases. Nobody claims a log with less than half of it."""
RECORD_MORE = 256
"""What a server keeps of a record beside it, at most."""
ROOM_S = 1.0
"""Between two looks whether a log that is full has room again."""
TRIM_EVERY_S = 600.0
"""Between two steps of a trim that drop fewer rows than one may."""
SHOW_AGAIN_S = 10.0
"""Between two tries to let others read at a node that follows."""
BASE_EVERY = 10_000
"""Records between the oldest one and a new base."""
BASE_LEAST, BASE_SHARE = 100, 8
"""A new base is due sooner, after so many records, where the log has come to one part in so many of what it may
hold."""
BASE_PAGE = 200
"""So many values of a base are in one record, or in several where they are large; nothing is committed meanwhile."""
TOGETHER, TOGETHER_BYTES = 256, 4 * 1024 * 1024
"""So many rows and values, or bytes of records, a follower that is behind takes into its index at once."""

log = logging.getLogger(__name__)


class Silence:
    """How long nothing was heard of a leader. Who slept has not listened: from one look to the next `LISTENED_S` count
    at most."""

    def __init__(self, now_s: float) -> None:
        self._quiet_s, self._looked_s = 0.0, now_s

    def look(self, now_s: float) -> None:
        self._quiet_s += min(now_s - self._looked_s, LISTENED_S)
        self._looked_s = now_s

    def hear(self) -> None:
        self._quiet_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has lasted so long that nobody leads."""
        return self._quiet_s > LEADERLESS_S


class LogRoom(NamedTuple):
    """How many bytes the log takes yet, as far as its leader knows, and how many it may hold."""

    free: int
    of: int

    @property
    def reserve(self) -> int:
        return min(RESERVE_BYTES, self.of // 64)


class ReplicatedLedger(IndexReads):
    """A `Ledger` over a shared log and an index. ``open`` returns when this node leads; until then it follows.

    ``new_id`` gives a name for each claim, and the epoch of a new log; ``say`` is told who leads, in a sentence. The
    index is a file of its own, and holds nothing that the log does not: one that is lost is made again by following.
    ``node`` is what this node calls itself to the others. With ``is_full`` nothing is acknowledged unless the engine
    shows that it is on disks.
    """

    def __init__(
        self,
        shared: SharedLog,
        index: SQLiteLedger,
        *,
        new_id: Callable[[], str],
        name: str,
        say: Callable[[str], None] = lambda _: None,
        is_full: bool = False,
        clock: Clock = system_clock,
        replica: ReadReplica | None = None,
    ) -> None:
        super().__init__(index)
        self._shared = shared
        self._clock = clock
        self._new_id = new_id
        self._name = name
        self._say = say
        self._is_full = is_full
        self._doubt: str | None = None
        """Why what is acknowledged may not be on disks; None before the engine was asked."""
        self._doubted_at = 0.0
        self._reader = Reader()
        self._writer = ""
        """Our claim, while we lead."""
        self._claimed = ""
        """Our last claim, whose heartbeats may still be on their way here."""
        self._telling: asyncio.Task[None] | None = None
        self._behind: int | None = None
        """How many records there were to follow when this node looked last."""
        self._appending = asyncio.Lock()
        """Held from the reading of the log's end to the record behind it, and while the index is not what the log
        is."""
        self._reached_at = 0.0
        """When the engine answered last whether this node leads, or where the log ends."""
        self._is_asking = False
        """Whether the engine was asked since, and has not answered."""
        self._unindexed = Commit([], [])
        """What was read of the log and is to come into the index together with what follows it."""
        self._unindexed_bytes = 0
        self._has_followed = False
        """Whether this node has followed to the log's end, ever: then it waits for what may come right again."""
        self._doubted_since: float | None = None
        """Since when what this node knows of the log is not to be found there."""
        self._short_since: float | None = None
        """Since when the log ends before what this node has read of it."""
        self._failed: LedgerError | None = None
        """What this node could not do though the log says it: it has to be opened again."""
        self.node = ""
        self.owner = ""
        """What tells the owner's token of this node from another one, and nothing else of it."""
        self._is_owner_doubted = self._is_name_taken = False
        self._off_ms = 0
        """How far this node's clock was ahead of that of the node that led, when that was heard last; 0: not far."""
        self._off_since: float | None = None
        self._waits = self._trouble = ""
        """Why this node neither follows nor leads, after it has; and what it has said of it."""
        self.leader_node = ""
        """What the leader calls itself, as far as it was heard."""
        self.lookup = index.lookup
        self.replica = NoReadReplica() if replica is None else replica
        """Who is shown what this node takes in while it follows."""
        self._shown_at = -SHOW_AGAIN_S
        self._trimmed_at = -TRIM_EVERY_S
        self._room = LogRoom(0, 0)
        self._looked_at_room = 0.0
        self._known_at = 0
        """What the log held at this time is in the index (`as_of`)."""
        self._asked = (0, 0)
        """The end of the log that was told last, and the time before it was asked for."""

    @property
    def is_answering(self) -> bool:
        """Whether the engine answers this node that leads."""
        silent_s = asyncio.get_running_loop().time() - self._reached_at
        return not (self._is_asking and silent_s > SILENT_S)

    @property
    def durability(self) -> str:
        """``full`` where the engine shows that what is acknowledged is on disks, else ``replicated``."""
        return "full" if self._doubt == "" else "replicated"

    def describe_leader(self) -> Follows:
        """Whom this node follows, and as of when: at that time (ms) the log held nothing that is not here by now."""
        return Follows(self.leader_node, self._known_at)

    @property
    def status(self) -> LogStatus:
        """What this node is to the log."""
        leads, at = bool(self._writer), self._reached_at
        leader = "" if leads or self.leader_node == self.node else self.leader_node  # of an own claim that is over
        behind = 0 if leads else self._behind
        answered_s = asyncio.get_running_loop().time() - at if at else None
        return LogStatus(leads, leader, behind, answered_s, self._shared.network, self.durability, self._waits)

    def set_identity(self, node: str, owner: str = "") -> None:
        """Set what this node calls itself, and what tells its owner's token from another one."""
        self.node, self.owner = node, owner

    async def catch_up(self) -> Reader:
        """Take in what the log holds now, leading nothing, and close. Gives how far that is."""
        try:
            await self._index.open()
            await self._shared.open(is_made=False)
            self._reader = await self._find_place()
            end = await self._shared.end()
            if self._reader.end < end:
                async with self._follow(self._reader.end) as records:
                    async for stored in records:
                        await self._take(stored)
                        if stored.position >= end:
                            break
            await self._take_into_index(self._place())
            await self._check_beginning()
            return self._reader
        except LogTruncated as error:
            raise LedgerError(f"{error} Move {self.path} away, and begin again.") from error
        finally:
            await self.close()

    # --- lifetime

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        """Follow the log until nobody leads, claim it, and give what the index then holds."""
        try:
            self._failed = None
            await self._index.open()
            trouble = None
            loop = asyncio.get_running_loop()
            patience = loop.call_later(PATIENT_S, self._say, f"The shared log {self._shared.name} does not answer yet.")
            try:
                await self._open_log()
            except (
                LogElectionPending,
                LogIncomplete,
            ) as error:  # one that was never there is a wrong address, and is told
                trouble = self._judge(error)
            finally:
                patience.cancel()
            await self._lead(trouble)
            self._telling = asyncio.create_task(self._tell(), name="ledger-leads")  # a large index takes long to open
            await self._stop_showing()  # before the state is loaded a second time
            await self._index.close()  # what the tables hold is read at its start
            meta, puts = await self._index.open()
        except BaseException as error:
            await self.close()
            if isinstance(error, LedgerError):
                self._waits = tell_wait(error)
            raise
        log.info("this node leads", extra={"log": self._shared.name, "position": self._reader.position})
        self._say(f"This node leads: it serves the network of {self._shared.name}, durability {self.durability}.")
        if self._off_ms:
            self._say(
                "Until it is started again this node drops nothing for its age: its clock is another one than that of "
                "the node that led before."
            )
        return msgspec.structs.replace(meta, epoch=self._reader.epoch, name=self._reader.name), puts

    async def hand_over(self) -> str:
        """Give the lead away for good, if this node has it; gives what the node calls itself that has taken it, where
        one follows and does so within a moment."""
        is_left = bool(self._writer) and await self._release()
        if is_left and await self._is_followed():
            reader = Reader(self._reader.end, self._reader.last)
            with suppress(LedgerError, TimeoutError):
                async with asyncio.timeout(HANDED_OVER_S), self._follow(reader.end) as records:
                    async for stored in records:
                        reader.take(stored)
                        if reader.leader:
                            return reader.leader_node
        return ""

    async def _is_followed(self) -> bool:
        """Whether another node was heard of lately: each says once a second that it follows."""
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while True:
                    said = Heartbeat.read(await self._shared.listen())
                    if said.node and said.node != self.node and not said.leads:
                        return True
        return False

    async def _release(self) -> bool:
        """Lead no longer; whether the log says so. Else the others find out by hearing nothing."""
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        writer, self._writer = self._writer, ""
        if writer:
            with suppress(LedgerError, TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await self._append(Header(kind="release", writer=writer, previous=self._reader.last), b"")
                    return True
        return False

    async def close(self) -> None:
        """Give the lead away, if this node has it, and close both."""
        await self._release()
        self._behind = None  # until it looks again it follows nobody
        await self._stop_showing()
        await self._shared.close()
        await self._index.close()

    async def verify(self) -> None:
        """Raises `LedgerError` also where another node leads now, or the engine cannot be asked whether: who commits
        nothing would not learn it otherwise. Also where the log lacks what this node has appended."""
        if self._failed is not None:
            raise self._failed
        await self._index.verify()
        now = asyncio.get_running_loop().time
        if now() - self._doubted_at >= SYNC_S:  # also of a leader that appends all the time
            with suppress(LogUnavailable):
                await self._look_at_disks()
                await self._check_first()
                await self._look_at_room()
        if self._appending.locked():  # which finds out whether this node leads
            return
        self._is_asking = True
        try:
            end = await self._shared.end()
        except LogUnavailable:
            if now() - self._reached_at < UNREACHED_S:
                return
            raise
        self._note_answer()
        if self._appending.locked():
            return
        self._note_end(end)
        if end > self._reader.end:
            raise await self._step_down(
                LeadershipLost(f"Somebody else has written to the shared log {self._shared.name}.")
            )

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        if self._failed is not None:
            raise self._failed
        if not self._writer:
            raise await self._step_down(LeadershipLost("This node does not lead; it has to be opened again."))
        try:
            async with self._appending:
                await self._append_commit(rows, puts)
        except LeadershipLost as error:
            await self._step_down(error)
            raise
        except (LedgerError, KeyTaken, Unstorable):
            raise
        except Exception as error:  # a defect: the log may hold what the index does not
            self._failed = LedgerError(f"Storing failed: {type(error).__name__}: {error}")
            raise self._failed from error

    async def _append_commit(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        records, place = self._write(rows, puts)
        await self._refuse_beyond(sum(map(len, records)) + RECORD_MORE * len(records))
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        logged: concurrent.futures.Future[None] = concurrent.futures.Future()

        def tell_ready() -> None:
            if not ready.done():
                ready.set_result(None)

        def wait_for_log() -> None:
            loop.call_soon_threadsafe(tell_ready)
            logged.result()

        # what the index refuses, a key that is taken above all, must not come into the log, which takes everything
        indexing = asyncio.ensure_future(self._index.append(rows, [*puts, place], before_commit=wait_for_log))
        try:
            await asyncio.wait((indexing, ready), return_when=asyncio.FIRST_COMPLETED)
            if not indexing.done():
                for number, record in enumerate(records):
                    try:
                        await self._append_record(record)
                    except LogFull as error:
                        if number:  # a part of it is there: only another claim makes that nothing
                            self._failed = LedgerError(str(error))
                            raise self._failed from error
                        raise
                logged.set_result(None)
        finally:
            if not logged.done():
                logged.set_exception(LedgerError("The shared log has not taken it."))
                await asyncio.gather(indexing, return_exceptions=True)
        await indexing

    async def _refuse_beyond(self, size: int) -> None:
        """Raises `LogFull` where so many bytes would take of the reserve."""
        now = asyncio.get_running_loop().time()
        if self._room.free - size < self._room.reserve and now - self._looked_at_room >= ROOM_S:
            await self._look_at_room()
        if self._room.free - size < self._room.reserve:
            raise LogFull(
                f"The shared log {self._shared.name} is full: {self._room.free:,} bytes are left, and kept for what "
                "makes room. Give the log and its servers more, or let retain drop more."
            )

    async def _look_at_room(self) -> None:
        self._looked_at_room = asyncio.get_running_loop().time()
        self._room = LogRoom(*await self._shared.room())

    async def trim(self, trim: Trim) -> Trimmed:
        """As `Ledger.trim`. The log says first what goes: each node drops the same, this one too where it is killed on
        the way."""
        if self._off_ms:
            trim = msgspec.structs.replace(trim, messages_before=None, records_before=None)
        cut, is_held = await self._index.find_cut(trim)
        now = asyncio.get_running_loop().time()
        is_small = cut is not None and cut.is_last  # each is a record that whoever makes a node anew does again
        if cut is None or (is_small and now - self._trimmed_at < TRIM_EVERY_S):
            return Trimmed(dropped=0, first_seq=self._index.first_seq, is_held=is_held)
        async with self._leading():
            await self._append_record(write_trim(cut, self._writer, self._reader.last))
            dropped = await self._drop(cut)
        self._trimmed_at = now if is_small else self._trimmed_at
        return Trimmed(dropped=dropped, first_seq=self._index.first_seq, is_held=is_held)

    @asynccontextmanager
    async def _leading(self) -> AsyncIterator[None]:
        """Write to the log beside the hub's commits. Whoever asks for that goes on where it fails; this node does not,
        before it was opened again and has done what the log says. Raises `LedgerError`."""
        try:
            async with self._appending:
                if not self._writer:
                    raise LeadershipLost("This node does not lead; it has to be opened again.")
                yield
        except LeadershipLost as error:
            await self._step_down(error)
            raise
        except LedgerError as error:
            self._failed = error
            raise

    async def expire_calls(self, before: int) -> None:
        """As `Ledger.expire_calls`. What goes is a commit, so that each node keeps the same; of a log that is full
        nothing goes."""
        after: str | None = ""
        while after is not None:
            old, then = await self._index.find_old_calls(before, after)
            if old:
                async with self._leading():
                    old, _ = await self._index.find_old_calls(before, after)  # one may have been done again since
                    with suppress(LogFull):
                        await self._append_commit([], [TableWrite("call", key, None) for key in old])
            after = then

    async def forget_dropped(self) -> None:
        """As `Ledger.forget_dropped`; and let the log begin later, where nothing before is needed any more."""
        await self._index.forget_dropped()
        if self._writer:
            await self._shorten()

    async def _shorten(self) -> None:
        first, (free, of) = await self._shared.first(), await self._shared.room()
        records = self._reader.end - first
        if self._reader.base > first:
            await self._begin_later(first)
            return
        is_due = records >= BASE_EVERY or (records >= BASE_LEAST and of - free >= of // BASE_SHARE)
        if is_due and not self._index.damaged:
            await self._write_base()

    async def _begin_later(self, first: int) -> None:
        """Drop what stands before the newest base, if there is one and nothing before it is needed. What is refused, or
        killed on the way, is tried at another time: the log is as good as before."""
        base, head = self._reader.base, self._reader.base_head
        if base <= first or await self._index.holds_up_to(head):
            return
        if min(await self._read_marks()) <= head:  # what was dropped last was not the last there was of its kind
            if not self._writer:
                return
            async with self._leading():
                begins = await self._index.read_beginning()
                seqs = max(begins.messages, head + 1), max(begins.records, head + 1)
                cut = Cut(*seqs, is_last=False, stamp=begins.stamp)
                await self._append_record(write_trim(cut, self._writer, self._reader.last))
                await self._drop(cut)
        is_done = False
        while not is_done:
            async with self._appending:
                try:
                    is_done = await self._shared.drop(base)
                except LedgerError as error:
                    log.warning("what the shared log no longer needs stays in it: %s", error)
                    return
        await self._look_at_room()
        log.info("the shared log begins later", extra={"log": self._shared.name, "position": base})

    async def _write_base(self) -> None:
        """Say everything again that is in tables; commits may come between, and what they say goes for what was said
        before."""
        it = self._reader
        async with self._leading():
            base, head = it.end + 1, self._index.head
            begins = await self._index.read_beginning()
            begin = Header(kind="base", writer=self._writer, previous=it.last, epoch=it.epoch, name=it.name, head=head)
            await self._append(begin, b"")
            await self._append_record(write_trim(begins, self._writer, it.last))
        for table in (*LOADED_TABLES, *sorted(COLD_TABLES - VOLATILE_TABLES - {"followed"})):
            await self._write_values(cast(Table, table))
        async with self._leading():
            done = Header(kind="based", writer=self._writer, previous=it.last, base=base, head=head)
            await self._append(done, b"")
            await self._index.append([], [self._place()])  # before this place is dropped from the log

    async def _write_values(self, table: Table) -> None:
        after, it = "", self._reader
        while True:
            async with self._leading():
                page = await self._index.cold(table, "", BASE_PAGE, after=after)
                if not page:
                    return
                body = write_commit([], [TableWrite(table, key, value) for key, value in page])
                for record in write_records(body, self._writer, it.last, self._shared.max_bytes, "values"):
                    await self._append_record(record)
            after = page[-1][0]

    async def _drop(self, cut: Cut) -> int:
        """Drop it from the index, which is after that record of the log then; gives how many rows that were."""
        dropped = await self._index.drop(cut)
        await self._index.append([], [self._place()])  # a kill before this does all of it again
        return dropped

    async def _step_down(self, error: LeadershipLost) -> LeadershipLost:
        """Lead no longer; gives the error, with who does."""
        self._writer = ""
        error.leader = await self._find_leader()
        if error.leader:
            log.warning(
                "another node leads now; this one follows", extra={"log": self._shared.name, "leader": error.leader}
            )
        else:
            log.warning("this node leads no longer, and looks who does: %s", error)
        return error

    async def _find_leader(self) -> str:
        """What the node calls itself that has claimed the log since this one read it; empty where the log does not say
        that within a moment."""
        reader = Reader(self._reader.end, self._reader.last)
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(NAMING_S), self._follow(reader.end) as records:
                end = await self._shared.end()
                async for stored in records:
                    reader.take(stored)
                    if stored.position >= end:
                        break
        return reader.leader_node if reader.leader_node != self.node else ""

    def _write(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> tuple[list[bytes], TableWrite]:
        """The records of a commit, and what the index then says of its place. Raises `Unstorable`."""
        it = self._reader
        records = write_records(write_commit(rows, puts), self._writer, it.last, self._shared.max_bytes)
        place = Followed(
            it.end + len(records), digest(records[-1]), self._writer, it.epoch, it.name, False, it.base, it.base_head,
            it.begun, it.begun_head,
        )  # fmt: skip
        return records, TableWrite("followed", "log", place)

    # --- following

    async def _find_place(self) -> Reader:
        """Where the index is in the log. Raises `LedgerError` if it is not an index of this log."""
        self._unindexed, self._unindexed_bytes = Commit([], []), 0
        known: Followed | None = await self._index.lookup_cold("followed", "log")
        if known is None:
            if await self._index.rows(0, 1):
                raise UnusableLog(
                    f"{self.path} has a history of its own, which the log {self._shared.name} does not hold; name a "
                    "new file with --db."
                )
            return await find_beginning(self._shared)
        if await self._shared.end() < known.position:
            raise LogIncomplete(
                f"{self.path} was made from a log of at least {known.position} records, and {self._shared.name} has "
                "fewer: it is another log, or has lost some. Name a new file with --db to go on with what it has."
            )
        if known.position < await self._shared.first():
            begins = await find_beginning(self._shared)
            raise UnusableLog(
                f"{self.path} has followed {self._shared.name} up to record {known.position}, and that begins at "
                f"{begins.end + 1} by now: move {self.path} away (not {self.path}.owner), and start this node again."
            )
        reader = Reader(known.position, known.digest, self._index.head or None)
        reader.epoch, reader.name = known.epoch, known.name
        reader.base, reader.base_head = known.base, known.base_head
        reader.begun, reader.begun_head = known.begun, known.begun_head
        async with self._follow(known.position - 1) as records:
            stored = await anext(records)
        if digest(stored.data) != known.digest:
            raise UnusableLog(
                f"{self.path} was made from another log than {self._shared.name}; name a new file with --db, or that "
                "log."
            )
        reader.leader, reader.is_filling = known.leader, known.is_filling
        return reader

    def _follow(self, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
        return following(self._shared, after)

    async def _open_log(self) -> None:
        """Open the log. Who knows of one makes none in its place: that would be another history."""
        is_known = await self._index.lookup_cold("followed", "log") is not None
        await self._shared.open(is_made=not is_known)

    async def _lead(self, trouble: LedgerError | None) -> None:
        """Follow until this node has claimed the log. An engine that goes away meanwhile is waited for, and so is, once
        the node has followed, whatever may come right again; ``trouble`` is what it begins with. Raises
        `LedgerError`."""
        is_placed = False
        while True:
            try:
                if trouble is not None:
                    await asyncio.sleep(AGAIN_S)
                    await self._open_again(trouble)
                    trouble, is_placed = None, False
                if not is_placed:
                    self._reader, is_placed = await self._find_place(), True
                    self._doubted_since = None
                    await self._look_at_disks()  # before it is this node's turn, for who reads what it says
                if await self._shared.end() == 0:
                    writer = self._new_id()
                    await self._append(Header(kind="begin", writer=writer, epoch=self._new_id(), name=self._name), b"")
                    self._say(f"The log {self._shared.name} was empty: a new network begins in it.")
                    continue
                await self._follow_leader()
                self._has_followed = True
                await self._claim()
                self._end_trouble()
                return
            except LeadershipLost:
                continue  # somebody else was faster: follow it
            except LogTruncated:
                is_placed = False  # then it is told what that means here
            except LedgerError as error:
                trouble = self._judge(error)

    async def _read_marks(self) -> tuple[int, int]:
        """Where messages begin, and records."""
        marks = await self._index.read_marks()
        return marks.first_seq, marks.first_record_seq

    async def _check_beginning(self) -> None:
        """Raises `UnusableLog` where the log lacks rows that nobody has dropped."""
        if min(await self._read_marks()) <= self._reader.begins_after:
            raise UnusableLog(
                f"The shared log {self._shared.name} lacks what stood before its first base: records are missing. "
                "Restore it, or begin with a new one."
            )

    async def _check_first(self) -> None:
        """Raises `UnusableLog` where the log begins with what nobody can begin with. Whoever has not read its end yet may
        not know of a base."""
        first = await self._shared.first()
        if first > max(1, self._reader.base) and await self._shared.end() == self._reader.end:
            raise UnusableLog(
                f"The shared log {self._shared.name} begins at {first} by now, and holds nothing to begin with there: "
                "records are missing, as somebody has deleted them. Restore it, or go on with another one: what this "
                "node has, `roundelay view` and `roundelay export` read."
            )

    async def _claim(self) -> None:
        if self._reader.is_filling:
            raise UnusableLog(
                f"The shared log {self._shared.name} is to be filled from a database, and is not whole yet: let "
                "`roundelay cluster migrate` go on with it, until it says that it is done."
            )
        await self._take_into_index(self._place())  # what was kept for what was to follow, and never came
        await self._check_beginning()
        await self._check_first()
        await self._look_at_disks()
        await self._begin_later(await self._shared.first())  # it may be full of what nobody needs
        free, of = await self._shared.room()
        self._room = LogRoom(free, of)
        if free < self._room.reserve // 2:
            raise LogFull(
                f"The shared log {self._shared.name} has room for {free:,} bytes: too few for somebody to lead. Give "
                "the log and its servers more."
            )
        writer = self._new_id()
        await self._append(Header(kind="claim", writer=writer, previous=self._reader.last), Claim(self.node).write())
        self._writer = self._claimed = writer

    def _judge(self, error: LedgerError) -> LedgerError:
        """Gives the error if what failed is to be tried again; says so once, until this node leads or follows a node
        that does. Raises it otherwise."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, LogIncomplete):
            self._doubted_since = now if self._doubted_since is None else self._doubted_since
            if now - self._doubted_since > DOUBT_S:
                raise UnusableLog(str(error)) from error
        elif isinstance(error, UnusableLog) or not (isinstance(error, LogUnavailable) or self._has_followed):
            raise error
        self._waits = tell_wait(error)
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.warning("this node waits, and tries again: %s", error)
            if not isinstance(error, LogUnavailable) or isinstance(error, LogIncomplete):
                self._say(f"{error} This node waits, and tries again.")
        return error

    def _end_trouble(self) -> None:
        self._waits = self._trouble = ""

    async def _open_again(self, trouble: LedgerError) -> None:
        """Have the log, and the index where that failed, opened anew; what is full lets others read meanwhile."""
        if isinstance(trouble, LogFull):
            await self._show()
            return
        await self._shared.close()
        if not isinstance(trouble, LogUnavailable):
            await self._stop_showing()
            await self._index.close()
            await self._index.open()
        await self._open_log()

    async def _look_at_disks(self) -> None:
        """Ask the engine whether what is acknowledged is on disks. Raises `LedgerError` where that was asked for and it
        does not show it."""
        before, self._doubt = self._doubt, await self._shared.find_doubt()
        self._doubted_at = asyncio.get_running_loop().time()
        if self._doubt and self._is_full:
            raise LedgerError(
                f"durability full is asked for, and {self._shared.name} does not show it: {self._doubt}. Or take "
                "`durability` out of this node's configuration: then it says `replicated`."
            )
        if before is not None and bool(before) is not bool(self._doubt):
            log.warning("the durability of the shared log is another one", extra={"durability": self.durability})
            self._say(f"What is acknowledged is now {self.durability}. {self._doubt}".strip())

    async def _follow_leader(self) -> None:
        """Take in the log, up to its end and until nobody leads."""
        loop = asyncio.get_running_loop()
        silence, said_at, asked_at = Silence(loop.time()), -PRESENT_S, -ASK_S
        self._off_since = None
        end, is_there, is_led, is_told = 0, False, False, False
        async with self._follow(self._reader.end) as records:
            upcoming = asyncio.ensure_future(anext(records))
            hearing = asyncio.ensure_future(self._shared.listen())
            try:
                while True:
                    silence.look(loop.time())
                    is_alone = not self._reader.leader or silence.is_over
                    is_asked = (is_alone and self._reader.end >= end) or loop.time() - asked_at >= ASK_S
                    if is_asked:
                        asked_ms = self._clock()
                        end = await self._shared.end()
                        self._note_end(end)
                        self._asked = end, asked_ms
                        self._note_answer()
                        asked_at = loop.time()
                    self._behind = max(0, end - self._reader.end)
                    if hearing.done():
                        said = Heartbeat.read(hearing.result())
                        if said.leads and said.leads == self._reader.leader != self._claimed:
                            silence.hear()
                            is_led = True
                            self.leader_node = self._reader.leader_node or said.node  # the claim's own word goes first
                            self._compare_names(said.node)
                            self._compare_owners(said.owner)
                            self._compare_clocks(said.at)
                        hearing = asyncio.ensure_future(self._shared.listen())
                    is_alone = not self._reader.leader or silence.is_over
                    # an end from before the silence says nothing of what was written since
                    if is_alone and self._reader.end >= end:
                        return
                    if self._reader.end >= end and not is_there:
                        await self._check_beginning()
                        is_there = self._has_followed = True
                        log.info("following", extra={"log": self._shared.name, "position": self._reader.position})
                    await self._show()
                    if is_there and is_led and not is_told:  # by one that was heard: a claim may be of one that is gone
                        is_told = True
                        self._end_trouble()
                        self._say(
                            f"Another node leads the network of {self._shared.name}; this one follows, and waits."
                        )
                    if loop.time() - said_at >= PRESENT_S:
                        said_at = loop.time()
                        with suppress(LedgerError):
                            await self._shared.say(self._beat().write())
                    await asyncio.wait((upcoming, hearing), timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                    while upcoming.done():
                        await self._take(upcoming.result())
                        silence.hear()  # whoever wrote it was there
                        upcoming = asyncio.ensure_future(anext(records))
                        await asyncio.sleep(0)
            finally:
                await _end(upcoming, hearing)

    def _compare_names(self, leaders: str) -> None:
        if leaders and leaders == self.node and not self._is_name_taken:
            self._is_name_taken = True
            self._say(
                f"The node that leads calls itself {leaders}, as this one does, so that clients who come here are sent "
                "here again: give each node a host and a port of its own, by which clients reach it."
            )

    def _compare_owners(self, leaders: str) -> None:
        if leaders and self.owner and leaders != self.owner and not self._is_owner_doubted:
            self._is_owner_doubted = True
            self._say(
                "The owner's token of this node is not that of the node that leads: whoever has that will be refused "
                f"here. Copy the other node's .owner file to {self.path}.owner, and start this node again."
            )

    def _beat(self) -> Heartbeat:
        owner = self.owner if self._writer else ""
        return Heartbeat(self.node, self._reader.end, self._writer, owner, self._clock())

    def _compare_clocks(self, leaders: int) -> None:
        """Note how far this node's clock is off that of the node that leads, and say so, where that lasts: a node that
        was paused hears for a moment what is old."""
        off_ms, now = self._clock() - leaders if leaders else 0, asyncio.get_running_loop().time()
        if abs(off_ms) <= OFF_MS:
            self._off_ms, self._off_since = 0, None
        elif self._off_since is None:
            self._off_since = now
        elif now - self._off_since >= OFF_S and not self._off_ms:
            self._off_ms = off_ms
            side = "ahead of" if off_ms > 0 else "behind"
            self._say(
                f"The clock of this node is {round(abs(off_ms) / 1000):,} s {side} that of the node that leads: put "
                "the wrong one right, and start this node again. Otherwise, once it leads, it drops nothing for its "
                "age (`retain`)."
            )

    def _note_end(self, end: int) -> None:
        """Raises `LogIncomplete` where the log goes on ending before what this node has read of it."""
        now = asyncio.get_running_loop().time()
        if end >= self._reader.end:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > SHORT_S:
            self._short_since = None
            raise LogIncomplete(
                f"The shared log {self._shared.name} ends at {end}, and this node has read its record "
                f"{self._reader.end}: it has lost some."
            )

    async def _take(self, stored: LogRecord) -> None:
        """Read a record; what was read comes into the index where no more is known to be on its way, or it is much."""
        led_by, place = self._reader.leader, self._place()
        body = self._reader.take(stored)
        if self._reader.leader != led_by:  # of an older release's claim the heartbeat tells it
            self.leader_node = self._reader.leader_node
        taken = None if body is None else self._reader.check(body)
        if isinstance(taken, Cut):
            if self._unindexed.rows or self._unindexed.puts:
                await self._take_into_index(place)  # of what came before it, it may drop some
            await self._drop(taken)
            await self.replica.drop_before(self._index.first_seq)
            return
        if taken is not None:
            self._unindexed.rows.extend(taken.rows)
            self._unindexed.puts.extend(taken.puts)
            self._unindexed_bytes += len(stored.data)
        held = self._unindexed
        is_new = self._reader.position == stored.position or bool(held.rows or held.puts)  # else the rest is to come
        is_much = len(held.rows) + len(held.puts) >= TOGETHER or self._unindexed_bytes >= TOGETHER_BYTES
        if is_new and (is_much or not stored.has_more):
            await self._take_into_index(self._place())

    async def _take_into_index(self, place: TableWrite) -> None:
        """Let the index have what was read, and be at that place."""
        taken, self._unindexed, self._unindexed_bytes = self._unindexed, Commit([], []), 0
        puts = _last_of_each(taken.puts)
        await self._index.append(taken.rows, [*puts, place])
        if taken.rows or puts:
            await self.replica.apply(taken.rows, puts)

    async def _show(self) -> None:
        """Where the index has reached the end that the log had when it was asked: note as of when it is, and let it be
        read from then on."""
        end, asked_ms = self._asked
        if self._reader.end < end or self._unindexed.rows or self._unindexed.puts or self._reader.is_filling:
            return
        self._known_at = asked_ms
        now = asyncio.get_running_loop().time()
        if not self.replica.is_serving and now - self._shown_at >= SHOW_AGAIN_S:
            self._shown_at = now
            await self.replica.start(
                ReadOnlyIndex(
                    self._index, epoch=self._reader.epoch, name=self._reader.name, describe_leader=self.describe_leader
                )
            )

    async def _stop_showing(self) -> None:
        self._shown_at = -SHOW_AGAIN_S
        await self.replica.stop()

    def _place(self) -> TableWrite:
        """Where the index is, stored with what brought it there."""
        it = self._reader
        return TableWrite(
            "followed",
            "log",
            Followed(
                it.position,
                it.digest,
                it.leader,
                it.epoch,
                it.name,
                it.is_filling,
                it.base,
                it.base_head,
                it.begun,
                it.begun_head,
            ),
        )

    # --- leading

    async def _append(self, header: Header, body: bytes) -> None:
        await self._append_record(write_record(header, body))

    async def _append_record(self, record: bytes) -> None:
        self._is_asking = True
        position = await self._shared.append(record, self._reader.end)
        self._reader.take(LogRecord(position, record))
        self._room = self._room._replace(free=self._room.free - len(record) - RECORD_MORE)
        self._note_answer()

    def _note_answer(self) -> None:
        self._is_asking, self._reached_at = False, asyncio.get_running_loop().time()

    async def _tell(self) -> None:
        """Say that this node leads, as long as it does."""
        while self._writer:
            with suppress(LedgerError):
                await self._shared.say(self._beat().write())
            await asyncio.sleep(ALIVE_S)


def following(shared: SharedLog, after: int) -> aclosing[AsyncGenerator[LogRecord, None]]:
    """The records above a position, for an ``async with``."""
    return aclosing(cast(AsyncGenerator[LogRecord, None], shared.follow(after)))


async def find_beginning(shared: SharedLog) -> Reader:
    """Reads the log from the first record on from which it can be read: its first, or where that was dropped the oldest
    base. Before that a drop that was killed may have left records. Raises `UnusableLog` where there is no base."""
    first, end = await shared.first(), await shared.end()
    if first == 1:
        return Reader()
    if first <= end:
        async with following(shared, first - 1) as records:
            async for stored in records:
                with placing(stored.position):
                    is_base = read_record(stored.data)[0].kind == "base"
                if is_base:
                    return Reader.at(stored.position)
                if stored.position >= end:
                    break
    raise UnusableLog(
        f"The shared log {shared.name} begins at {first}, and holds nothing to begin with there: records are missing. "
        "Restore it, or begin with a new one."
    )


def _last_of_each(puts: Sequence[TableWrite]) -> list[TableWrite]:
    return list({(put.table, put.key): put for put in puts}.values())


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel these until they have ended: what they wait in may take a cancellation for something else."""
    while waiting := [task for task in tasks if not task.done()]:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)
