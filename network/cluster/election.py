"""`Election`: follows the shared log until it has no leader, and then claims leadership.

A claim is an ordinary record in the log. If several nodes append a claim at the same position, the log's engine accepts
only the first claim. The other nodes read this claim and follow its writer. After a temporary failure, the node waits
and tries again. Any other failure stops the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LeadershipLost, LogFull

from . import settings
from .durability import DurabilityCheck
from .follower import Follower
from .indexed_log import IndexedLog
from .leader import Leader
from .records import Claim
from .shared_log import LogIncomplete, LogTruncated, LogUnavailable, UnusableLog
from .snapshots import drop_before_snapshot


class Election:
    """Follows the log until this node can claim leadership. ``new_id`` creates fencing tokens, and the epoch of a new
    log. ``network`` is the name of the network if this node begins a new log."""

    def __init__(
        self,
        indexed: IndexedLog,
        follower: Follower,
        durability: DurabilityCheck,
        *,
        new_id: Callable[[], str],
        network: str,
    ) -> None:
        self._log = indexed
        self._follower = follower
        self._durability = durability
        self._new_id = new_id
        self._network = network
        self._incomplete_since: float | None = None
        """Time at which the log was first found to be incomplete, or None if the log is complete."""

    async def win(self, failure: LedgerError | None) -> Leader:
        """Follow the log until this node has claimed leadership, and return the new term as leader. ``failure`` is an
        error of an earlier attempt. `judge` has decided that the node may try again after this error.

        Raises `LedgerError` if another attempt would not help.
        """
        has_cursor = False
        while True:
            try:
                if failure is not None:
                    await asyncio.sleep(settings.RETRY_S)
                    await self._reopen(failure)
                    # Read the cursor from the file again, because the index may have been closed and reopened.
                    failure, has_cursor = None, False
                if not has_cursor:
                    await self._follower.applier.restore_cursor()
                    has_cursor, self._incomplete_since = True, None
                    # Check durability before the claim, so that the node's status already shows the result.
                    await self._durability.run()
                # If the log is empty, write its first record before any claim. This record contains the epoch.
                if await self._log.shared.end() == 0:
                    # If two nodes begin the log at the same time, the engine accepts only one first record, and the
                    # other node follows.
                    await self._begin_log()
                    continue
                await self._follower.follow_until_leaderless()
                self._follower.has_caught_up = True
                leader = await self._claim()
                self._follower.wait.clear()
                return leader
            except LeadershipLost:
                continue  # another node has claimed the log first, so follow that node
            except LogTruncated:
                # Restore the cursor again, to find out whether the index lacks records that are no longer in the log.
                has_cursor = False
            except LedgerError as error:
                failure = self.judge(error)

    async def _begin_log(self) -> None:
        await self._log.append("begin", self._new_id(), epoch=self._new_id(), name=self._network)
        self._log.report(f"The log {self._log.name} was empty: a new network begins in it.")

    async def _claim(self) -> Leader:
        """Claim leadership and return the new term as leader. All checks precede the claim, because a leader that
        cannot serve would prevent other nodes from leading."""
        log, reader = self._log, self._log.reader
        if reader.is_filling:
            raise UnusableLog(
                f"The shared log {log.name} is still being filled from a database. Let `roundelay cluster migrate` "
                "continue until it reports that it is done."
            )
        # Discard an incomplete commit of the previous leader by moving the cursor past this commit.
        await self._follower.applier.flush(log.cursor_write())
        await log.check_beginning()
        await log.check_first()
        await self._durability.run()
        # Make room first, because the log may be full of records that are no longer needed.
        await drop_before_snapshot(log, await log.shared.first(), None)
        await log.refresh_room()
        if log.room.free < log.room.reserve // 2:
            raise LogFull(
                f"The shared log {log.name} has only {log.room.free:,} free bytes, too few for any node to lead. Give "
                "the log and its servers more space."
            )
        token = self._new_id()
        # Append the claim directly after the last record that this node has read. If another node has appended a record
        # since, the engine refuses the claim, and this node continues to follow.
        await log.append("claim", token, Claim(log.node_name).write())
        # Remember the token, because this node also receives its own heartbeats. Even after the term, this node must
        # not mistake such a heartbeat for a heartbeat of another leader.
        self._follower.own_token = token
        # If the clocks of this node and of the previous leader differ, one of the clocks is wrong, and it is unknown
        # which one. So delete no rows because of their age: a deletion cannot be undone.
        keeps_old_rows = self._follower.leader_check.clock_offset_ms != 0
        return Leader(log, self._durability, token, keeps_old_rows=keeps_old_rows)

    def judge(self, error: LedgerError) -> LedgerError:
        """Return an error if a later attempt may succeed, and raise the error otherwise.

        If a node has never followed its log, most errors are raised, because the node's configuration may be wrong.
        Such a node waits only if the engine does not answer. A node that has already followed the log waits after more
        kinds of errors, because its clients wait too.
        """
        if isinstance(error, LogIncomplete):
            now = asyncio.get_running_loop().time()
            # Measure the time over several attempts, because a single failed attempt proves nothing.
            self._incomplete_since = now if self._incomplete_since is None else self._incomplete_since
            if now - self._incomplete_since > settings.INCOMPLETE_LOG_GRACE_S:
                raise UnusableLog(str(error)) from error
        elif isinstance(error, UnusableLog) or not (isinstance(error, LogUnavailable) or self._follower.has_caught_up):
            raise error
        self._follower.wait.note(error)
        return error

    async def _reopen(self, failure: LedgerError) -> None:
        """Open the log again and, if the index has failed, also the index. A full log stays open, so that the read
        replica can continue to serve."""
        # Do not close a full log: it still answers reads, and closing it would stop the read replica. Only trims of
        # other nodes can make room.
        if isinstance(failure, LogFull):
            await self._follower.serve_reads()
            return
        await self._log.shared.close()
        if not isinstance(failure, LogUnavailable):
            await self._follower.feed.stop()
            await self._log.index.close()
            await self._log.index.open()
        await self._log.open_shared()
