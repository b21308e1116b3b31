"""Reads from a node's index of a shared log.

`IndexReads` contains the methods of a `Ledger` that the index answers directly. `ReadOnlyIndex` is a complete `Ledger`
for a hub that serves reads while its node follows. The follower controls this hub through the interface `ReadReplica`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from roundelay.network.core.rows import Row
from roundelay.network.core.tables import Facts, LookupRequest, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.frames import Follows
from roundelay.network.ledger import Meta, Trim, Trimmed
from roundelay.network.ledger.sqlite import SQLiteLedger


class IndexReads:
    """The read methods of a `Ledger`, which the index answers directly."""

    def __init__(self, index: SQLiteLedger) -> None:
        self._index = index
        self.path = index.path
        self.inbox = index.inbox
        self.inbox_heads = index.inbox_heads
        self.thread = index.thread
        self.reaction = index.reaction
        self.newest_heads = index.newest_heads
        self.first_seqs = index.first_seqs
        self.threads = index.threads
        self.search = index.search
        self.search_seqs = index.search_seqs
        self.all_threads = index.all_threads
        self.messages = index.messages
        self.heads = index.heads
        self.cold = index.cold
        self.lookup_cold = index.lookup_cold
        self.records = index.records
        self.rows = index.rows
        self.check = index.check

    @property
    def damaged(self) -> int:
        return self._index.damaged


class ReadOnlyIndex(IndexReads):
    """Read-only `Ledger` on top of a follower's open index. Only the follower writes to the index and closes it."""

    is_answering = True

    def __init__(self, index: SQLiteLedger, *, epoch: str, name: str, describe_leader: Callable[[], Follows]) -> None:
        super().__init__(index)
        self.describe_leader = describe_leader
        """Function that returns the leader, and the time up to which the index is complete, in ms."""
        self._epoch = epoch
        self._name = name

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        # Reload the open index instead of opening the file again: the follower holds the database lock.
        meta, writes = await self._index.reload()
        return msgspec.structs.replace(meta, epoch=self._epoch, name=self._name), writes

    async def close(self) -> None:
        """Do nothing. The follower still uses the index."""

    async def verify(self) -> None:
        """Do nothing. The follower itself detects problems of the log and of the index."""

    def recall(self, _request: LookupRequest) -> Facts:
        """Return no facts. Lookups are only needed for batches that will be stored, and a replica stores nothing."""
        return Facts()

    async def lookup(self, request: LookupRequest) -> Facts:
        return self.recall(request)

    async def append(self, _rows: Sequence[Row], _writes: Sequence[TableWrite]) -> None:
        raise LedgerError("This node follows a leader and stores nothing.")

    async def expire_calls(self, _before: int) -> None:
        """Do nothing. The leader decides which results expire."""

    async def forget_dropped(self) -> None:
        """Do nothing. The leader decides which rows are deleted."""

    async def trim(self, _trim: Trim) -> Trimmed:
        raise LedgerError("This node follows a leader and deletes nothing.")


class ReadReplica(Protocol):
    """Interface of a hub that serves reads from this node's index while the node follows. The methods raise no errors:
    a replica that fails stops serving, and the node continues to follow."""

    @property
    def is_serving(self) -> bool:
        """Whether clients may currently read from this node."""

    async def start(self, index: ReadOnlyIndex) -> None:
        """Start serving reads from an index that has just reached the end of the log."""

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Publish rows and table writes to readers, after the index has stored them."""

    async def drop_before(self, first_seq: int) -> None:
        """Remove messages below ``first_seq`` from memory. The index has already deleted them."""

    async def stop(self) -> None:
        """Stop serving reads, because the node no longer follows. Idempotent."""


class NoReadReplica:
    """A `ReadReplica` that never serves reads, for nodes without a read replica."""

    is_serving = False

    async def start(self, index: ReadOnlyIndex) -> None: ...

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None: ...

    async def drop_before(self, first_seq: int) -> None: ...

    async def stop(self) -> None: ...
