"""`Follower`: copies the shared log to this node's index until the log has no leader.

A follower learns about the leader from records and from heartbeats. Only records determine which node is the leader.
Heartbeats only show that this leader is alive. While the node follows, a read replica may serve the index.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.frames import Follows
from roundelay.network.ledger import TrimStep

from . import settings
from .indexed_log import IndexedLog
from .read_replica import ReadOnlyIndex, ReadReplica
from .records import Commit, Heartbeat, LogReader
from .shared_log import LogIncomplete, LogRecord, LogTruncated, LogUnavailable, describe_wait

log = logging.getLogger(__name__)


class SilenceClock:
    """Clock that measures the time without any sign of the leader. Between two checks, at most `MAX_SILENCE_STEP_S`
    count, because a paused node cannot receive anything."""

    def __init__(self, now_s: float) -> None:
        self._silent_s, self._looked_at = 0.0, now_s

    def advance(self, now_s: float) -> None:
        self._silent_s += min(now_s - self._looked_at, settings.MAX_SILENCE_STEP_S)
        self._looked_at = now_s

    def reset(self) -> None:
        self._silent_s = 0.0

    @property
    def has_timed_out(self) -> bool:
        return self._silent_s > settings.LEADER_TIMEOUT_S


class RecordApplier:
    """Applies records to the index. If more records are known to follow, several records share a transaction."""

    def __init__(self, indexed: IndexedLog, replica: ReadReplica) -> None:
        self._log = indexed
        self._replica = replica
        self._pending = Commit([], [])
        self._pending_bytes = 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending.rows or self._pending.writes)

    async def restore_cursor(self) -> None:
        """Continue at the index's cursor, so that records that were read but not applied are read again."""
        self._pending, self._pending_bytes = Commit([], []), 0
        await self._log.restore_cursor()

    async def apply(self, stored: LogRecord) -> None:
        """Read the next record. Apply the records read so far if no further record is known to be on its way, or if
        enough were read."""
        reader, cursor_before = self._log.reader, self._log.cursor_write()
        body = reader.read(stored)
        content = None if body is None else reader.decode(body)
        if isinstance(content, TrimStep):
            if self.has_pending:
                # The trim may delete pending rows, so store them first. The cursor stays before the trim: a node that
                # is killed in between reads the trim again.
                await self.flush(cursor_before)
            await self._log.drop(content)
            await self._replica.drop_before(self._log.index.first_seq)
            return
        if content is not None:
            self._pending.rows.extend(content.rows)
            self._pending.writes.extend(content.writes)
            self._pending_bytes += len(stored.data)
        # otherwise parts of the commit are still to come
        is_whole = reader.position == stored.position or self.has_pending
        is_enough = (
            len(self._pending.rows) + len(self._pending.writes) >= settings.APPLY_ROWS
            or self._pending_bytes >= settings.APPLY_BYTES
        )
        # The cursor names the last whole commit. A kill while parts of the next commit are read loses none of them.
        if is_whole and (is_enough or not stored.has_more):
            await self.flush(self._log.cursor_write())

    async def flush(self, cursor: TableWrite) -> None:
        """Store the records read so far, and the cursor, in one transaction."""
        # Clear the pending records before the await: records read during the await belong to the next transaction.
        pending, self._pending, self._pending_bytes = self._pending, Commit([], []), 0
        # several commits may have written the same key; the index stores each key once per transaction
        writes = _last_of_each(pending.writes)
        await self._log.apply(pending.rows, writes, cursor)
        # Update the replica only after the index has stored the rows, because the replica reads rows from the index.
        if pending.rows or writes:
            await self._replica.apply(pending.rows, writes)


def _last_of_each(writes: Sequence[TableWrite]) -> list[TableWrite]:
    return list({(write.table, write.key): write for write in writes}.values())


class ReplicaFeed:
    """Starts and stops the read replica, and records the time up to which the index is complete."""

    def __init__(self, replica: ReadReplica) -> None:
        self._replica = replica
        self._tried_at = -settings.REPLICA_RETRY_S
        self.polled_end, self.polled_at_ms = 0, 0
        """The last known end of the log, and the time just before the node requested it."""
        self.as_of_ms = 0
        """Time up to which the index is complete (ms)."""

    async def start_if_current(
        self, indexed: IndexedLog, *, has_pending: bool, describe_leader: Callable[[], Follows]
    ) -> None:
        """Start the replica when the index has reached the polled end of the log."""
        reader = indexed.reader
        if reader.end < self.polled_end or has_pending or reader.is_filling:
            return
        # Use the time before the poll. At that time, the log had no record beyond the polled end, but it may have one
        # now.
        self.as_of_ms = self.polled_at_ms
        now = asyncio.get_running_loop().time()
        # Wait before the next attempt. Otherwise a replica that fails at its start would load the whole state again and
        # again.
        if not self._replica.is_serving and now - self._tried_at >= settings.REPLICA_RETRY_S:
            self._tried_at = now
            await self._replica.start(
                ReadOnlyIndex(indexed.index, epoch=reader.epoch, name=reader.name, describe_leader=describe_leader)
            )

    async def stop(self) -> None:
        self._tried_at = -settings.REPLICA_RETRY_S
        await self._replica.stop()


class LeaderComparison:
    """Compares the leader's heartbeats with this node, and reports each contradiction once."""

    def __init__(self, indexed: IndexedLog) -> None:
        self._log = indexed
        self._reported: set[str] = set()
        self._differing_since: float | None = None
        self.clock_offset_ms = 0
        """How far this node's clock is ahead of the last leader's clock, in ms. 0 while the two agree."""

    def restart(self) -> None:
        self._differing_since = None

    def compare(self, heartbeat: Heartbeat) -> None:
        own = self._log
        if heartbeat.node and heartbeat.node == own.node_name:
            self._report_once(
                "name",
                f"The node that leads calls itself {heartbeat.node}, as this one does, so clients that come here are "
                "sent here again. Give each node its own host and port, by which clients reach it.",
            )
        if heartbeat.owner and own.owner_digest and heartbeat.owner != own.owner_digest:
            self._report_once(
                "owner",
                "The owner's token of this node is not that of the node that leads: it will be refused here. Copy the "
                f"other node's .owner file to {own.index.path}.owner, and start this node again.",
            )
        self._compare_clocks(heartbeat.at)

    def _report_once(self, topic: str, sentence: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            self._log.report(sentence)

    def _compare_clocks(self, leader_ms: int) -> None:
        """Record a difference that lasts. A node that was paused receives old heartbeats for a moment, which look like
        a difference."""
        offset_ms = self._log.now_ms() - leader_ms if leader_ms else 0
        now = asyncio.get_running_loop().time()
        if abs(offset_ms) <= settings.MAX_CLOCK_OFFSET_MS:
            self.clock_offset_ms, self._differing_since = 0, None
        elif self._differing_since is None:
            self._differing_since = now
        elif now - self._differing_since >= settings.CLOCK_OFFSET_S and not self.clock_offset_ms:
            self.clock_offset_ms = offset_ms
            side = "ahead of" if offset_ms > 0 else "behind"
            self._log.report(
                f"The clock of this node is {round(abs(offset_ms) / 1000):,} s {side} that of the node that leads. "
                "Correct the wrong one, and start this node again. Otherwise this node, once it leads, drops nothing "
                "for its age (`retain`)."
            )


class WaitReason:
    """Reason why this node is neither leader nor follower. Each new reason is logged and reported once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._logged = ""
        self.text = ""
        """The reason for clients, without the address of the log."""

    def note(self, error: LedgerError) -> None:
        self.text = describe_wait(error)
        if str(error) != self._logged:
            self._logged = str(error)
            log.warning("this node waits, and tries again: %s", error)
            if not isinstance(error, LogUnavailable) or isinstance(error, LogIncomplete):
                self._report(f"{error} This node waits, and tries again.")

    def clear(self) -> None:
        self.text = self._logged = ""


class Follower:
    """Follows a shared log that another node leads. One object serves all periods in which this node follows."""

    def __init__(self, indexed: IndexedLog, replica: ReadReplica) -> None:
        self.log = indexed
        self.applier = RecordApplier(indexed, replica)
        self.feed = ReplicaFeed(replica)
        self.leader_check = LeaderComparison(indexed)
        self.wait = WaitReason(indexed.report)
        self.behind: int | None = None
        """Number of records that the node had not read yet at the last check. None before the first check."""
        self.has_caught_up = False
        """Whether this node has ever reached the end of the log. If so, the node waits when the log fails
        temporarily."""
        self.leader_name = ""
        """Name of the leader. Empty if unknown."""
        self.own_token = ""
        """Fencing token of this node's last term as leader. Heartbeats of that term may still arrive."""
        self._silence = SilenceClock(0.0)
        self._polled_at = 0.0
        self._end = 0
        """The end of the log at the last poll in this run."""
        self._is_led = self._is_led_reported = False
        """Whether a heartbeat of the leader was received in this run, and whether this was reported."""

    def describe_leader(self) -> Follows:
        """Return the leader, and the time (ms) up to which this index is complete."""
        return Follows(self.leader_name, self.feed.as_of_ms)

    async def follow_until_leaderless(self) -> None:
        """Apply the log up to its end. Return when nobody leads, or the leader was silent for too long."""
        loop = asyncio.get_running_loop()
        # A new clock for each run: the time in which this node led is no silence of another leader.
        self._silence = SilenceClock(loop.time())
        self._polled_at, presence_at = -settings.POLL_END_S, -settings.PRESENCE_S
        self._end, self._is_led, self._is_led_reported = 0, False, False
        is_at_end = False
        self.leader_check.restart()
        # One read and one broadcast are always in progress. `asyncio.wait` leaves them running, so no record is lost.
        async with self.log.follow(self.log.reader.end) as records:
            next_record = asyncio.ensure_future(anext(records))
            next_broadcast = asyncio.ensure_future(self.log.shared.next_broadcast())
            try:
                while True:
                    self._silence.advance(loop.time())
                    if self._is_poll_due(loop.time()):
                        await self._poll_end()
                    self.behind = max(0, self._end - self.log.reader.end)
                    if next_broadcast.done():
                        self._hear(Heartbeat.read(next_broadcast.result()))
                        next_broadcast = asyncio.ensure_future(self.log.shared.next_broadcast())
                    # Another claim may follow between this record and the end. Only a node that has read every record
                    # may claim the log.
                    if self._is_leaderless and self._has_reached_end:
                        return
                    if self._has_reached_end and not is_at_end:
                        await self.log.check_beginning()
                        is_at_end = self.has_caught_up = True
                        log.info("following", extra={"log": self.log.name, "position": self.log.reader.position})
                    await self.serve_reads()
                    if is_at_end:
                        self._report_leader()
                    # A leader that stops waits for a successor only if it has received a heartbeat of a follower.
                    if loop.time() - presence_at >= settings.PRESENCE_S:
                        presence_at = loop.time()
                        await self.log.broadcast_heartbeat()
                    await asyncio.wait(
                        (next_record, next_broadcast),
                        timeout=settings.HEARTBEAT_S,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    while next_record.done():
                        await self._apply(next_record.result())
                        self._silence.reset()  # the writer of the record was alive
                        next_record = asyncio.ensure_future(anext(records))
                        await asyncio.sleep(
                            0
                        )  # let other tasks run: a follower that is far behind always has another record ready
            finally:
                await _cancel(next_record, next_broadcast)

    @property
    def _is_leaderless(self) -> bool:
        return not self.log.reader.leader_token or self._silence.has_timed_out

    @property
    def _has_reached_end(self) -> bool:
        return self.log.reader.end >= self._end

    def _is_poll_due(self, now_s: float) -> bool:
        """Polling costs the engine a request, so a follower polls rarely while it receives heartbeats of its leader.

        It polls once more just before an election, because the leader may have written records since the last poll. A
        node that lacks records must not become the leader.
        """
        is_before_election = self._is_leaderless and self._has_reached_end
        return is_before_election or now_s - self._polled_at >= settings.POLL_END_S

    async def _poll_end(self) -> None:
        asked_ms = self.log.now_ms()
        self._end = await self.log.fetch_end()
        self.log.check_end(self._end)
        self.feed.polled_end, self.feed.polled_at_ms = self._end, asked_ms
        self._polled_at = asyncio.get_running_loop().time()

    def _hear(self, heartbeat: Heartbeat) -> None:
        """Count a heartbeat of the leader that the log names. Heartbeats are not fenced, so all others are ignored:
        those of a deposed leader, this node's own from its last term, and forged ones."""
        reader = self.log.reader
        if not heartbeat.leads or heartbeat.leads != reader.leader_token or heartbeat.leads == self.own_token:
            return
        self._silence.reset()
        self._is_led = True
        # the claim in the log has priority: anybody may send a heartbeat with another address
        self.leader_name = reader.leader_name or heartbeat.node
        self.leader_check.compare(heartbeat)

    def _report_leader(self) -> None:
        """Report a leader whose heartbeat was received. A claim alone does not count, because its writer may be
        gone."""
        if self._is_led and not self._is_led_reported:
            self._is_led_reported = True
            self.wait.clear()
            self.log.report(f"Another node leads the network of {self.log.name}; this one follows, and waits.")

    async def _apply(self, stored: LogRecord) -> None:
        token = self.log.reader.leader_token
        try:
            await self.applier.apply(stored)
        finally:  # also if the index fails: the record was read, and names the leader
            if self.log.reader.leader_token != token:
                # empty for a claim of an older release, which has no name; a heartbeat sets the name later
                self.leader_name = self.log.reader.leader_name

    async def serve_reads(self) -> None:
        await self.feed.start_if_current(
            self.log, has_pending=self.applier.has_pending, describe_leader=self.describe_leader
        )


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended. Repeat, because a client library may ignore a cancellation."""
    # Wait until the tasks have ended, because a task that still reads would use the log after it was closed.
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)


async def catch_up(indexed: IndexedLog, replica: ReadReplica) -> LogReader:
    """Apply the current content of the log, without leading, and close both. Return the position of the index."""
    applier = RecordApplier(indexed, replica)
    try:
        await indexed.index.open()
        await indexed.shared.open(create=False)
        await applier.restore_cursor()
        end = await indexed.shared.end()
        if indexed.reader.end < end:
            async with indexed.follow(indexed.reader.end) as records:
                async for stored in records:
                    await applier.apply(stored)
                    # Stop at the end that the log had at the beginning, because a leader may still append records.
                    if stored.position >= end:
                        break
        # Store the remaining records even without a whole commit: the cursor moves past a commit whose writer has
        # stopped.
        await applier.flush(indexed.cursor_write())
        await indexed.check_beginning()
        return indexed.reader
    except LogTruncated as error:
        raise LedgerError(f"{error} Move {indexed.index.path} away, and begin again.") from error
    finally:
        await indexed.shared.close()
        await indexed.index.close()
