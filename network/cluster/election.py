"""`Election`: follow the log until it has no leader, and then claim leadership.

A claim is an ordinary record in the log. If several nodes append a claim after the same record, the engine accepts only
the first claim. The other nodes read this claim and follow its writer. After a temporary failure, the node waits and
tries again. Any other failure ends the node.
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
    """``new_id`` makes fencing tokens, and the epoch of a new log. ``network`` is the name of a new network."""

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
        """Time at which the log first seemed to lack records, or None."""

    async def win(self, failure: LedgerError | None) -> Leader:
        """Follow until this node has claimed the log. ``failure`` is an error of the log that was already judged.

        Raises `LedgerError` if waiting does not help.
        """
        has_cursor = False
        while True:
            try:
                if failure is not None:
                    await asyncio.sleep(settings.RETRY_S)
                    await self._reopen(failure)
                    # The index may have been closed and opened again. Read the cursor from the file, never from memory.
                    failure, has_cursor = None, False
                if not has_cursor:
                    await self._follower.applier.restore_cursor()
                    has_cursor, self._incomplete_since = True, None
                    await self._durability.run()  # readers of the status see the result before the claim
                # Write the first record before any claim, because the first record contains the epoch.
                if await self._log.shared.end() == 0:
                    await self._begin_log()  # two nodes may try: the engine accepts one, and the other node follows
                    continue
                await self._follower.follow_until_leaderless()
                self._follower.has_caught_up = True
                leader = await self._claim()
                self._follower.wait.clear()
                return leader
            except LeadershipLost:
                continue  # another node was faster: follow it
            except LogTruncated:
                has_cursor = False  # restoring the cursor shows what that means for this index
            except LedgerError as error:
                failure = self.judge(error)

    async def _begin_log(self) -> None:
        await self._log.append("begin", self._new_id(), epoch=self._new_id(), name=self._network)
        self._log.report(f"The log {self._log.name} was empty: a new network begins in it.")

    async def _claim(self) -> Leader:
        """Claim the log. Every check comes before the claim: a leader that cannot serve would keep other nodes from
        leading."""
        log, reader = self._log, self._log.reader
        if reader.is_filling:
            raise UnusableLog(
                f"The shared log {log.name} is being filled from a database, and is not complete: let `roundelay "
                "cluster migrate` go on with it, until it says that it is done."
            )
        # Drop an incomplete commit of the previous leader, and move the cursor past it.
        await self._follower.applier.flush(log.cursor_write())
        await log.check_beginning()
        await log.check_first()
        await self._durability.run()
        await drop_before_snapshot(log, await log.shared.first(), None)  # the log may be full of unneeded records
        await log.refresh_room()
        if log.room.free < log.room.reserve // 2:
            raise LogFull(
                f"The shared log {log.name} has room for {log.room.free:,} bytes: too few for somebody to lead. Give "
                "the log and its servers more."
            )
        token = self._new_id()
        # Append after the last record that was read. If any node has written since, the engine refuses, and this node
        # continues to follow.
        await log.append("claim", token, Claim(log.node_name).write())
        # this node receives its own heartbeats of this term, even after it: it must not follow them
        self._follower.own_token = token
        # One of the two clocks is wrong, and nobody knows which. Deleting rows cannot be undone, so delete none.
        keeps_old_rows = self._follower.leader_check.clock_offset_ms != 0
        return Leader(log, self._durability, token, keeps_old_rows=keeps_old_rows)

    def judge(self, error: LedgerError) -> LedgerError:
        """Return the error if a later attempt may succeed, and raise it otherwise.

        A node that has never followed its log gives up at once, unless the engine does not answer: its configuration
        may be wrong. A node that has followed waits, because its clients wait too.
        """
        if isinstance(error, LogIncomplete):
            now = asyncio.get_running_loop().time()
            # Measure over several attempts, because a single failed attempt proves nothing.
            self._incomplete_since = now if self._incomplete_since is None else self._incomplete_since
            if now - self._incomplete_since > settings.INCOMPLETE_LOG_GRACE_S:
                raise UnusableLog(str(error)) from error
        elif isinstance(error, UnusableLog) or not (isinstance(error, LogUnavailable) or self._follower.has_caught_up):
            raise error
        self._follower.wait.note(error)
        return error

    async def _reopen(self, failure: LedgerError) -> None:
        """Open the log again, and the index if the index failed. A full log stays open, so that readers are served."""
        # A full log answers reads. Closing it would end the read replica, and only trims of other nodes make room.
        if isinstance(failure, LogFull):
            await self._follower.serve_reads()
            return
        await self._log.shared.close()
        if not isinstance(failure, LogUnavailable):
            await self._follower.feed.stop()
            await self._log.index.close()
            await self._log.index.open()
        await self._log.open_shared()
