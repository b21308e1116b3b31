"""`ReplicatedLedger`: a `Ledger` that is stored in a shared log. Each node also has a SQLite file, which is its index
of the log.

One node is the leader. It appends each commit to the log and to its own index (module `leader`). The other nodes apply
the log to their indexes, and wait in `open` until they become the leader (module `follower`). When there is no leader,
the first node that claims the log becomes the leader (module `election`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from roundelay.network.clock import Clock, system_clock
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.frames import Follows
from roundelay.network.ledger import LeadershipLost, Meta, Trim, Trimmed
from roundelay.network.ledger.sqlite import SQLiteLedger

from . import settings
from .durability import DurabilityCheck
from .election import Election
from .follower import Follower
from .indexed_log import IndexedLog
from .leader import Leader
from .read_replica import IndexReads, NoReadReplica, ReadReplica
from .shared_log import LogElectionPending, LogIncomplete, LogStatus, SharedLog, describe_wait
from .snapshots import shorten_log

log = logging.getLogger(__name__)


class ReplicatedLedger(IndexReads):
    """A `Ledger` that is stored in a shared log and indexed in a SQLite file. ``open`` returns when this node has
    become the leader. Before that, the node follows another leader.

    ``new_id`` creates fencing tokens, and the epoch of a new log. ``report`` receives messages for the operator. With
    ``requires_full``, the node acknowledges a message only if the engine's settings show that the message is on disk.
    ``replica`` serves reads while this node follows.
    """

    def __init__(
        self,
        shared: SharedLog,
        index: SQLiteLedger,
        *,
        new_id: Callable[[], str],
        name: str,
        report: Callable[[str], None] = lambda _: None,
        requires_full: bool = False,
        clock: Clock = system_clock,
        replica: ReadReplica | None = None,
    ) -> None:
        super().__init__(index)
        self.recall = index.recall
        self.lookup = index.lookup
        self.replica = NoReadReplica() if replica is None else replica
        self._log = IndexedLog(shared, index, clock=clock, report=report)
        self._durability = DurabilityCheck(shared, report, is_required=requires_full)
        self._follower = Follower(self._log, self.replica)
        self._election = Election(self._log, self._follower, self._durability, new_id=new_id, network=name)
        self._leader: Leader | None = None
        """Last term in which this node was the leader, or None before its first term. The term may have ended."""

    def set_identity(self, node: str, owner: str = "") -> None:
        """Set the name of this node (HOST:PORT) and a digest of its owner's token. Nodes compare these digests to
        detect that they have different owner tokens."""
        self._log.node_name, self._log.owner_digest = node, owner

    # --- status

    @property
    def leader_node(self) -> str:
        """Name of the leader, or an empty string if the leader is unknown."""
        return self._follower.leader_name

    @property
    def is_answering(self) -> bool:
        """Whether the log's engine has answered this node recently, or no answer is due."""
        return self._log.contact.is_answering

    @property
    def durability(self) -> str:
        """Durability level of acknowledged records: ``full`` if the engine's settings show that they are on disk,
        otherwise ``replicated``."""
        return self._durability.level

    def describe_leader(self) -> Follows:
        """Return the leader that this node follows, and the time up to which this node's index is complete, in ms."""
        return self._follower.describe_leader()

    @property
    def status(self) -> LogStatus:
        """Role of this node among the nodes that share the log."""
        leads = self._leader is not None and bool(self._leader.token)
        # The stored leader may be this node itself, from a term that has ended.
        leader = "" if leads or self.leader_node == self._log.node_name else self.leader_node
        behind = 0 if leads else self._follower.behind
        answered_s = self._log.contact.silent_s if self._log.contact.answered_at else None
        network, waits = self._log.shared.network, self._follower.wait.text
        return LogStatus(leads, leader, behind, answered_s, network, self.durability, waits)

    # --- lifetime

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        """Follow the log until this node becomes the leader, and return the content of the index."""
        try:
            self._leader = None
            await self._log.index.open()
            self._leader = await self._election.win(await self._open_log())
            # Start the heartbeats before opening the index. Opening a large index takes longer than followers wait for
            # a heartbeat.
            self._leader.start_heartbeats()
            await self._follower.feed.stop()  # stop the read replica first, so that the state is not in memory twice
            # Open the index again to load its tables, which were changed while this node followed.
            await self._log.index.close()
            meta, writes = await self._log.index.open()
        except BaseException as error:
            await self.close()
            if isinstance(error, LedgerError):
                self._follower.wait.text = describe_wait(error)
            raise
        reader = self._log.reader
        log.info("this node leads", extra={"log": self._log.name, "position": reader.position})
        self._log.report(f"This node leads: it serves the network of {self._log.name}, durability {self.durability}.")
        if self._follower.leader_check.clock_offset_ms:
            self._log.report(
                "Until it is restarted, this node deletes nothing because of its age: its clock differs from the "
                "previous leader's clock."
            )
        return msgspec.structs.replace(meta, epoch=reader.epoch, name=reader.name), writes

    async def _open_log(self) -> LedgerError | None:
        """Open the log. Return an error if a later attempt may succeed, and raise any other error."""
        loop = asyncio.get_running_loop()
        notice = f"The shared log {self._log.name} does not answer yet."
        timer = loop.call_later(settings.QUIET_START_S, self._log.report, notice)
        try:
            await self._log.open_shared()
        except (LogElectionPending, LogIncomplete) as error:
            # Do not catch other kinds of `LogUnavailable`. At the first start of a node, they usually mean that the
            # address is wrong.
            return self._election.judge(error)
        finally:
            timer.cancel()
        return None

    async def hand_over(self) -> str:
        """Give up leadership permanently. Return the name of the successor, or an empty string if no node claims the
        log within `SUCCESSOR_TIMEOUT_S`."""
        return "" if self._leader is None else await self._leader.hand_over()

    async def close(self) -> None:
        """Give up leadership, and close the log and the index."""
        if self._leader is not None:
            # Release leadership before closing the log. Followers then learn immediately that the term has ended,
            # instead of waiting until heartbeats are missing.
            await self._leader.release()
        self._follower.behind = None  # this node follows no leader until its next check
        # Stop the read replica. Otherwise, clients would read an index that is no longer updated.
        await self._follower.feed.stop()
        await self._log.shared.close()
        await self._log.index.close()

    # --- the leader's duties

    async def verify(self) -> None:
        await self._require_leader().verify()

    async def append(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        await self._require_leader().append(rows, writes)

    async def trim(self, trim: Trim) -> Trimmed:
        return await self._require_leader().trim(trim)

    async def expire_calls(self, before: int) -> None:
        await self._require_leader().expire_calls(before)

    async def forget_dropped(self) -> None:
        """Clean up the search index as `Ledger.forget_dropped` does. A leader also removes the oldest records from the
        log if they are no longer needed."""
        # Clean up the index first, because this works even if the engine does not answer.
        await self._log.index.forget_dropped()
        if self._leader is not None and self._leader.token:
            await shorten_log(self._leader)

    def _require_leader(self) -> Leader:
        if self._leader is None:
            raise LeadershipLost("This node is not the leader; reopen its ledger.")
        return self._leader
