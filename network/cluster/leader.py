"""`Leader`: one term in which this node is the leader and writes the shared log.

A term begins with a claim that the log's engine has accepted. The claim contains the fencing token of the term. Every
record contains its writer's token, and followers apply only records with the token of the last claim. The engine
accepts a record only directly after the last record that this node has read. So after another node has claimed the log,
the engine refuses the old leader's next append before the old leader can acknowledge it. A leader without writes checks
the end of the log instead (`verify`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import KeyTaken, LeadershipLost, LogFull, Trim, Trimmed, Unstorable

from . import settings
from .durability import DurabilityCheck
from .indexed_log import IndexedLog
from .records import Heartbeat, digest, write_commit, write_records
from .shared_log import LogUnavailable

log = logging.getLogger(__name__)


class Leader:
    """One term of leadership. With ``keeps_old_rows``, the leader deletes no rows because of their age. This option is
    for a leader whose clock differs from the previous leader's clock, because one of the two clocks is wrong."""

    def __init__(self, indexed: IndexedLog, durability: DurabilityCheck, token: str, *, keeps_old_rows: bool) -> None:
        self.log = indexed
        self.token = token
        """Fencing token of this term, or an empty string after leadership was lost or released."""
        self._durability = durability
        self._keeps_old_rows = keeps_old_rows
        self.lock = asyncio.Lock()
        """Lock for writing to the log. The leader holds it while it appends a record and until the index contains that
        record. Records must be written one at a time, because each record contains the digest of the previous one."""
        self._failure: LedgerError | None = None
        """Error that ends this term because the log may contain records that the index lacks, or None. After such an
        error, the ledger must be reopened."""
        self._heartbeats: asyncio.Task[None] | None = None
        self._trimmed_at = -settings.SMALL_TRIM_INTERVAL_S
        self._room_checked_at = 0.0

    # --- the term

    def start_heartbeats(self) -> None:
        # Send heartbeats in their own task, so that they continue during a long commit.
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="ledger-leads")

    async def _send_heartbeats(self) -> None:
        while self.token:
            await self.log.broadcast_heartbeat(self.token)
            await asyncio.sleep(settings.HEARTBEAT_S)

    async def release(self) -> bool:
        """Give up leadership. Return whether the release was written to the log. Without this record, followers notice
        the end of the term only when heartbeats stop."""
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            # Stop the heartbeats before the release. A heartbeat after the release would make followers wait for a
            # leader that no longer exists.
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
        # Clear the token, so that no further commit is appended. Followers would ignore a commit after the release.
        token, self.token = self.token, ""
        if token:
            with suppress(LedgerError, TimeoutError):
                async with asyncio.timeout(settings.RELEASE_TIMEOUT_S):
                    await self.log.append("release", token)
                    return True
        return False

    async def hand_over(self) -> str:
        """Give up leadership. Return the name of the successor, or an empty string if no other node claims the log in
        time."""
        # Without a follower, no other node will claim the log, so do not wait.
        if self.token and await self.release() and await self._has_follower():
            return await self.log.find_claim(settings.SUCCESSOR_TIMEOUT_S, is_expected=True)
        return ""

    async def _has_follower(self) -> bool:
        """Return whether an unread broadcast is a heartbeat of a follower. Each follower sends a heartbeat every
        second."""
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(settings.BACKLOG_S):
                while True:
                    heartbeat = Heartbeat.read(await self.log.shared.next_broadcast())
                    if heartbeat.node and heartbeat.node != self.log.node_name and not heartbeat.leads:
                        return True
        return False

    async def step_down(self, error: LeadershipLost) -> LeadershipLost:
        """End this term after another node has become the leader. Return the error, with the name of the new leader if
        the log contains it."""
        # Clear the token first. Otherwise a commit that waits for the lock would be appended with the old token.
        self.token = ""
        # Read only up to the current end of the log. The claim that deposed this node is already there.
        leader = await self.log.find_claim(settings.FIND_LEADER_TIMEOUT_S, is_expected=False)
        error.leader = leader if leader != self.log.node_name else ""
        if error.leader:
            log.warning("leadership lost; this node follows", extra={"log": self.log.name, "leader": error.leader})
        else:
            log.warning("leadership lost; this node looks for the leader: %s", error)
        return error

    async def verify(self) -> None:
        """Check that this node is still the leader and that the log, the index and the disks work. Otherwise raise
        `LedgerError`.

        If a leader has nothing to write, only this check shows that another node has become the leader, or that the log
        has lost records.
        """
        if self._failure is not None:
            raise self._failure
        # Check the index before the engine: a deleted database file must be reported even if the log does not answer.
        await self.log.index.verify()
        # Check durability before the test of the lock. Under load, a commit holds the lock nearly all the time, so the
        # check would never run.
        if self._durability.is_due:
            with suppress(LogUnavailable):
                await self._durability.run()
                await self.log.check_first()
                await self._refresh_room()
        if self.lock.locked():  # the commit in progress will show whether this node is still the leader
            return
        try:
            end = await self.log.fetch_end()
        except LogUnavailable:
            # Ignore a short silence: the engine's servers may be electing their leader. A leader with writes notices a
            # failure when it appends.
            if self.log.contact.silent_s < settings.UNREACHABLE_S:
                return
            raise
        if self.lock.locked():  # a commit that has started since may have changed the end of the log
            return
        self.log.check_end(end)
        if end > self.log.reader.end:
            raise await self.step_down(LeadershipLost(f"Another node has written to the shared log {self.log.name}."))

    # --- commits

    async def append(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Store a batch as `Ledger.append` does. Raises `LeadershipLost` if another node has become the leader."""
        if self._failure is not None:
            raise self._failure
        if not self.token:
            raise await self.step_down(LeadershipLost("This node is no longer the leader; reopen its ledger."))
        try:
            async with self.lock:
                await self._append_commit(rows, writes)
        except LeadershipLost as error:
            await self.step_down(error)
            raise
        except (LedgerError, KeyTaken, Unstorable):
            raise
        # Any other error is a bug. The log may now contain records that the index lacks.
        except Exception as error:
            self._failure = LedgerError(f"Storing failed: {type(error).__name__}: {error}")
            raise self._failure from error

    async def _append_commit(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Write the commit to the index, append it to the log, and then commit the index's transaction.

        The index checks keys and seqs, but the log accepts everything. A bad row in the log would make every node fail.
        So all rows are first written to the index, in a transaction that stays open while the records are appended. If
        the log refuses the records, the transaction is rolled back.
        """
        body = write_commit(rows, writes)
        records = write_records(body, self.token, self.log.reader.end_digest, self.log.shared.max_bytes)
        await self._refuse_without_room(sum(map(len, records)) + settings.RECORD_OVERHEAD_BYTES * len(records))
        # The cursor already contains the position of this commit's last record, although this record does not exist
        # yet. This is safe, because the engine accepts the record only at this position.
        cursor = self.log.cursor_write_at(self.log.reader.end + len(records), digest(records[-1]), self.token)
        loop = asyncio.get_running_loop()
        # Two futures coordinate the event loop and the index's thread. `is_written` is set when the index has all rows.
        # `logged` is set when the log has all records. The index's thread waits for `logged` inside its open
        # transaction. The event loop never blocks.
        is_written: asyncio.Future[None] = loop.create_future()
        logged: concurrent.futures.Future[None] = concurrent.futures.Future()

        def note_written() -> None:
            if not is_written.done():
                is_written.set_result(None)

        def wait_for_log() -> None:  # runs on the index's thread
            # Use `call_soon_threadsafe`, because other methods of the loop must not be called from another thread.
            loop.call_soon_threadsafe(note_written)
            logged.result()

        indexing = asyncio.ensure_future(self.log.index.append(rows, [*writes, cursor], before_commit=wait_for_log))
        try:
            # Wait for either future. If the index refuses the commit, for example because a key is taken, append
            # nothing to the log.
            await asyncio.wait((indexing, is_written), return_when=asyncio.FIRST_COMPLETED)
            if not indexing.done():
                await self._append_records(records)
                logged.set_result(None)
        finally:
            if not logged.done():
                # Always resolve this future. Otherwise the index's thread would wait forever in its open transaction.
                logged.set_exception(LedgerError("The shared log has not accepted the commit."))
                await asyncio.gather(indexing, return_exceptions=True)
        await indexing  # the index commits now, or raises an error if it refuses the batch

    async def _append_records(self, records: Sequence[bytes]) -> None:
        for number, record in enumerate(records):
            try:
                await self.log.append_record(record)
            except LogFull as error:
                if number:
                    # The log already contains the first parts of this commit. Readers discard an incomplete commit only
                    # after another claim, so end the term.
                    self._failure = LedgerError(str(error))
                    raise self._failure from error
                raise

    async def _refuse_without_room(self, size: int) -> None:
        """Raise `LogFull` if a commit of ``size`` bytes would use the reserve of the log. Without the reserve, the
        leader could not append the records that make room."""
        now = asyncio.get_running_loop().time()
        room = self.log.room
        if room.free - size < room.reserve and now - self._room_checked_at >= settings.ROOM_CHECK_S:
            await self._refresh_room()
        room = self.log.room
        if room.free - size < room.reserve:
            raise LogFull(
                f"The shared log {self.log.name} is full: its last {room.free:,} bytes are reserved for records that "
                "make room. Give the log and its servers more space, or let `retain` delete more."
            )

    async def _refresh_room(self) -> None:
        self._room_checked_at = asyncio.get_running_loop().time()
        await self.log.refresh_room()

    # --- retention

    async def trim(self, trim: Trim) -> Trimmed:
        """Delete old rows as `Ledger.trim` does. The trim is written to the log before any row is deleted. So every
        node deletes the same rows, and a node that was killed during the deletion deletes the remaining rows later."""
        if self._keeps_old_rows:
            trim = msgspec.structs.replace(trim, messages_before=None, records_before=None)
        index = self.log.index
        step, is_pinned = await index.plan_trim(trim)
        now = asyncio.get_running_loop().time()
        # Delay small trims, because every new node has to read all trims.
        is_small = step is not None and step.is_last
        if step is None or (is_small and now - self._trimmed_at < settings.SMALL_TRIM_INTERVAL_S):
            return Trimmed(dropped=0, first_seq=index.first_seq, is_pinned=is_pinned)
        async with self.exclusive():
            await self.log.append_trim(step, self.token)
            # Delete the rows after the record is written. If the node is killed here, it reads the record again and
            # deletes the remaining rows.
            dropped = await self.log.drop(step)
        if is_small:
            self._trimmed_at = now
        return Trimmed(dropped=dropped, first_seq=index.first_seq, is_pinned=is_pinned)

    async def expire_calls(self, before: int) -> None:
        """Delete results of calls as `Ledger.expire_calls` does. The deletions are written to the log as a commit, so
        that all nodes delete the same results. While the log is full, no results are deleted."""
        after: str | None = ""
        while after is not None:
            old, next_after = await self.log.index.find_old_calls(before, after)
            if old:
                async with self.exclusive():
                    # Check again under the lock, because a commit may have stored a new result for one of the keys.
                    old, _ = await self.log.index.find_old_calls(before, after)
                    with suppress(LogFull):
                        await self._append_commit([], [TableWrite("call", key, None) for key in old])
            after = next_after

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Context manager for all writes to the log except the hub's commits. Raises `LedgerError`.

        A failure inside the context ends this term, because the log may contain a record that the index has not
        applied. After that, every append fails until the ledger is reopened.
        """
        try:
            async with self.lock:
                if not self.token:
                    raise LeadershipLost("This node is no longer the leader; reopen its ledger.")
                yield
        except LeadershipLost as error:
            await self.step_down(error)
            raise
        except LedgerError as error:
            self._failure = error
            raise
