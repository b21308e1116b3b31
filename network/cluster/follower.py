"""`Follower`: applies the shared log to this node's index as long as another node leads.

A follower learns about the leader from records and from heartbeats. Only records determine which node is the leader.
Heartbeats only show that the leader is running. While the node follows, a read replica may serve reads from the index.
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
    """Clock that measures how long the leader has been silent. Between two checks, it counts at most
    `MAX_SILENCE_STEP_S`, because a node that was paused could not receive heartbeats."""

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
    """Applies records of the log to the index. If more records are about to arrive, several records are stored in one
    transaction."""

    def __init__(self, indexed: IndexedLog, replica: ReadReplica) -> None:
        self._log = indexed
        self._replica = replica
        self._pending = Commit([], [])
        self._pending_bytes = 0

    @property
    def has_pending(self) -> bool:
        return bool(self._pending.rows or self._pending.writes)

    async def restore_cursor(self) -> None:
        """Set the reader back to the index's cursor, so that records that were read but not stored are read again."""
        self._pending, self._pending_bytes = Commit([], []), 0
        await self._log.restore_cursor()

    async def apply(self, stored: LogRecord) -> None:
        """Read the next record. Store the pending records if there are many of them or if no further record has been
        announced."""
        reader, cursor_before = self._log.reader, self._log.cursor_write()
        body = reader.read(stored)
        content = None if body is None else reader.decode(body)
        if isinstance(content, TrimStep):
            if self.has_pending:
                # Store pending rows before the trim, because the trim may delete some of them. The cursor stays before
                # the trim, so a node that is killed in between reads the trim again.
                await self.flush(cursor_before)
            await self._log.drop(content)
            await self._replica.drop_before(self._log.index.first_seq)
            return
        if content is not None:
            self._pending.rows.extend(content.rows)
            self._pending.writes.extend(content.writes)
            self._pending_bytes += len(stored.data)
        # `is_whole` is false while some parts of the commit were not read yet.
        is_whole = reader.position == stored.position or self.has_pending
        is_enough = (
            len(self._pending.rows) + len(self._pending.writes) >= settings.APPLY_ROWS
            or self._pending_bytes >= settings.APPLY_BYTES
        )
        # The cursor is the position of the last complete commit. If a node is killed after reading only some parts of
        # the next commit, it reads all parts of this commit again.
        if is_whole and (is_enough or not stored.has_more):
            await self.flush(self._log.cursor_write())

    async def flush(self, cursor: TableWrite) -> None:
        """Store the pending records and the cursor in one transaction."""
        # Clear the pending records before the await. Records that are read during the await belong to the next
        # transaction.
        pending, self._pending, self._pending_bytes = self._pending, Commit([], []), 0
        # Several commits may have written the same key, but one transaction of the index accepts each key only once.
        writes = _last_of_each(pending.writes)
        await self._log.apply(pending.rows, writes, cursor)
        # Update the replica after the index, because the replica reads the rows from the index.
        if pending.rows or writes:
            await self._replica.apply(pending.rows, writes)


def _last_of_each(writes: Sequence[TableWrite]) -> list[TableWrite]:
    return list({(write.table, write.key): write for write in writes}.values())


class ReplicaFeed:
    """Starts and stops the read replica, and records up to which time the index is complete."""

    def __init__(self, replica: ReadReplica) -> None:
        self._replica = replica
        self._tried_at = -settings.REPLICA_RETRY_S
        self.polled_end, self.polled_at_ms = 0, 0
        """The end of the log at the last query, and the time just before this query, in ms."""
        self.as_of_ms = 0
        """Time up to which the index is known to be complete, in ms."""

    async def start_if_current(
        self, indexed: IndexedLog, *, has_pending: bool, describe_leader: Callable[[], Follows]
    ) -> None:
        """Start the replica if the index has reached the last known end of the log."""
        reader = indexed.reader
        if reader.end < self.polled_end or has_pending or reader.is_filling:
            return
        # Use the time before the query. At that time, the log had no record beyond the reported end, but a record may
        # have been added since.
        self.as_of_ms = self.polled_at_ms
        now = asyncio.get_running_loop().time()
        # Pause between attempts. Otherwise a replica that fails at its start would load the whole state again and
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
    """Compares the clock and the owner token in the leader's heartbeats with this node's own. Each difference is
    reported once."""

    def __init__(self, indexed: IndexedLog) -> None:
        self._log = indexed
        self._reported: set[str] = set()
        self._differing_since: float | None = None
        self.clock_offset_ms = 0
        """Time by which this node's clock is ahead of the last leader's clock, in ms. 0 while the clocks agree."""

    def restart(self) -> None:
        self._differing_since = None

    def compare(self, heartbeat: Heartbeat) -> None:
        own = self._log
        if heartbeat.node and heartbeat.node == own.node_name:
            self._report_once(
                "name",
                f"The leader and this node have the same address, {heartbeat.node}, so clients of this node are "
                "directed back to it. Give each node its own host and port, at which clients can reach it.",
            )
        if heartbeat.owner and own.owner_digest and heartbeat.owner != own.owner_digest:
            self._report_once(
                "owner",
                "The owner's token of this node is not that of the node that leads, so the leader's token will be "
                f"refused here. Copy the leader's .owner file to {own.index.path}.owner, and restart this node.",
            )
        self._compare_clocks(heartbeat.at)

    def _report_once(self, topic: str, sentence: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            self._log.report(sentence)

    def _compare_clocks(self, leader_ms: int) -> None:
        """Record a clock difference if it lasts. A node that was paused receives old heartbeats for a moment, and they
        look like a clock difference."""
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
                f"This node's clock is {round(abs(offset_ms) / 1000):,} s {side} the leader's clock. Correct the wrong "
                "clock, and start this node again. Otherwise this node, if it becomes the leader, deletes nothing "
                "because of its age (`retain`)."
            )


class WaitReason:
    """Reason why this node is neither leader nor follower. Each new reason is logged, and most are reported to the
    operator."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._logged = ""
        self.text = ""
        """Reason why this node waits, as a text for clients. The text does not contain the address of the log."""

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
    """Follows a shared log while another node is the leader. One object is used for all times at which this node
    follows."""

    def __init__(self, indexed: IndexedLog, replica: ReadReplica) -> None:
        self.log = indexed
        self.applier = RecordApplier(indexed, replica)
        self.feed = ReplicaFeed(replica)
        self.leader_check = LeaderComparison(indexed)
        self.wait = WaitReason(indexed.report)
        self.behind: int | None = None
        """Number of records that the node had yet to read at the last check, or None before the first check."""
        self.has_caught_up = False
        """Whether this node has ever reached the end of the log. If so, the node waits after a temporary failure of the
        log, instead of stopping."""
        self.leader_name = ""
        """Name of the leader, or an empty string if the leader is unknown."""
        self.own_token = ""
        """Fencing token of this node's last term as leader. The node ignores late heartbeats with this token."""
        self._silence = SilenceClock(0.0)
        self._polled_at = 0.0
        self._end = 0
        """End of the log at the last query. 0 until the first query after `follow_until_leaderless` has started."""
        self._is_led = self._is_led_reported = False
        """Whether a heartbeat of the leader has arrived since this node began to follow, and whether this has been
        reported."""

    def describe_leader(self) -> Follows:
        """Return the leader, and the time up to which this node's index is complete, in ms."""
        return Follows(self.leader_name, self.feed.as_of_ms)

    async def follow_until_leaderless(self) -> None:
        """Apply the log to the index. Return when the log has no leader, or when the leader has been silent for too
        long."""
        loop = asyncio.get_running_loop()
        # Use a new clock each time. Otherwise the time of this node's own term would count as silence of another
        # leader.
        self._silence = SilenceClock(loop.time())
        self._polled_at, presence_at = -settings.POLL_END_S, -settings.PRESENCE_S
        self._end, self._is_led, self._is_led_reported = 0, False, False
        is_at_end = False
        self.leader_check.restart()
        # Keep one read and one wait for a broadcast in progress all the time. `asyncio.wait` does not cancel these
        # tasks, so no record is lost.
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
                    # Continue to the end of the log, because another claim may follow. Only a node that has read every
                    # record may claim the log.
                    if self._is_leaderless and self._has_reached_end:
                        return
                    if self._has_reached_end and not is_at_end:
                        await self.log.check_beginning()
                        is_at_end = self.has_caught_up = True
                        log.info("following", extra={"log": self.log.name, "position": self.log.reader.position})
                    await self.serve_reads()
                    if is_at_end:
                        self._report_leader()
                    # Send heartbeats. A leader that stops waits for a successor only if it has received a heartbeat of
                    # a follower.
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
                        self._silence.reset()  # a new record shows that its writer is running
                        next_record = asyncio.ensure_future(anext(records))
                        # Let other tasks run. A follower that is far behind always has another record ready, so it
                        # would never yield.
                        await asyncio.sleep(0)
            finally:
                await _cancel(next_record, next_broadcast)

    @property
    def _is_leaderless(self) -> bool:
        return not self.log.reader.leader_token or self._silence.has_timed_out

    @property
    def _has_reached_end(self) -> bool:
        return self.log.reader.end >= self._end

    def _is_poll_due(self, now_s: float) -> bool:
        """Return whether it is time to query the end of the log. A query costs the engine a request, so a follower
        polls rarely while it receives its leader's heartbeats.

        The follower polls once more just before an election, because the leader may have written records since the last
        poll. A node that lacks records must not become the leader.
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
        """Process a heartbeat if it comes from the leader that the log names. Ignore all others. Heartbeats are not
        fenced, so they may come from a deposed leader, from this node's own last term, or from an attacker."""
        reader = self.log.reader
        if not heartbeat.leads or heartbeat.leads != reader.leader_token or heartbeat.leads == self.own_token:
            return
        self._silence.reset()
        self._is_led = True
        # Prefer the name in the claim, because anyone can send a heartbeat with a false name.
        self.leader_name = reader.leader_name or heartbeat.node
        self.leader_check.compare(heartbeat)

    def _report_leader(self) -> None:
        """Report the leader to the operator after its first heartbeat. A claim alone is not enough, because the node
        that wrote it may have stopped."""
        if self._is_led and not self._is_led_reported:
            self._is_led_reported = True
            self.wait.clear()
            self.log.report(f"Another node leads the network of {self.log.name}; this one follows, and waits.")

    async def _apply(self, stored: LogRecord) -> None:
        token = self.log.reader.leader_token
        try:
            await self.applier.apply(stored)
        finally:  # update the leader even if the index fails, because the record was read
            if self.log.reader.leader_token != token:
                # A claim of an older release contains no name. In this case, the leader's next heartbeat sets the name.
                self.leader_name = self.log.reader.leader_name

    async def serve_reads(self) -> None:
        await self.feed.start_if_current(
            self.log, has_pending=self.applier.has_pending, describe_leader=self.describe_leader
        )


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended. The cancellation is repeated, because a client library may ignore
    it."""
    # Otherwise a task that still reads would use the log after it was closed.
    while running := [task for task in tasks if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=0.05)
    await asyncio.gather(*tasks, return_exceptions=True)


async def catch_up(indexed: IndexedLog, replica: ReadReplica) -> LogReader:
    """Apply the current content of the log to the index, then close both. The node does not become the leader. Return
    the reader at the position that the index has reached."""
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
                    # Stop at the end that the log had at the start of this function, because a leader may still be
                    # appending records.
                    if stored.position >= end:
                        break
        # Store the remaining records even if the last commit is incomplete. The cursor moves past this commit, because
        # its writer has stopped.
        await applier.flush(indexed.cursor_write())
        await indexed.check_beginning()
        return indexed.reader
    except LogTruncated as error:
        raise LedgerError(f"{error} Move {indexed.index.path} away, and start again.") from error
    finally:
        await indexed.shared.close()
        await indexed.index.close()
