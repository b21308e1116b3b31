"""Reads from a node's index of a shared log.

`IndexReads` has the methods of a `Ledger` that the index answers directly. `ReadOnlyIndex` is the whole `Ledger` of a
hub that serves reads while the node follows. `ReadReplica` is the interface to that hub.
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
    """The reads of a `Ledger`, answered by the index."""

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
    """A read-only `Ledger` over the open index of a follower. The follower writes and closes the index."""

    is_answering = True

    def __init__(self, index: SQLiteLedger, *, epoch: str, name: str, describe_leader: Callable[[], Follows]) -> None:
        super().__init__(index)
        self.describe_leader = describe_leader
        """Function that returns the leader, and the time (ms) up to which the index is complete."""
        self._epoch = epoch
        self._name = name

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        # Do not open the index a second time: the follower holds the file's lock.
        meta, writes = await self._index.reload()
        return msgspec.structs.replace(meta, epoch=self._epoch, name=self._name), writes

    async def close(self) -> None:
        """Do nothing: the follower still uses the index."""

    async def verify(self) -> None:
        """Do nothing: the follower detects problems of the log or the index."""

    def recall(self, _request: LookupRequest) -> Facts:
        """Return nothing: lookups are only for batches that will be stored."""
        return Facts()

    async def lookup(self, request: LookupRequest) -> Facts:
        return self.recall(request)

    async def append(self, _rows: Sequence[Row], _writes: Sequence[TableWrite]) -> None:
        raise LedgerError("This node follows, and stores nothing.")

    async def expire_calls(self, _before: int) -> None:
        """Do nothing: the leader decides which results expire."""

    async def forget_dropped(self) -> None:
        """Do nothing: the leader decides what is deleted."""

    async def trim(self, _trim: Trim) -> Trimmed:
        raise LedgerError("This node follows, and drops nothing.")


class ReadReplica(Protocol):
    """Serves reads from this node's index while the node follows. The methods raise no errors: a replica that fails
    stops serving, but the node continues to follow."""

    @property
    def is_serving(self) -> bool:
        """Whether clients may read from this node."""

    async def start(self, index: ReadOnlyIndex) -> None:
        """Start to serve reads from an index that has just reached the end of the log."""

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None:
        """Publish rows and table writes that the index has just stored."""

    async def drop_before(self, first_seq: int) -> None:
        """Forget messages below ``first_seq``, because the index has deleted them."""

    async def stop(self) -> None:
        """Stop serving, because the node no longer follows. Idempotent."""


class NoReadReplica:
    """A `ReadReplica` that never serves reads."""

    is_serving = False

    async def start(self, index: ReadOnlyIndex) -> None: ...

    async def apply(self, rows: Sequence[Row], writes: Sequence[TableWrite]) -> None: ...

    async def drop_before(self, first_seq: int) -> None: ...

    async def stop(self) -> None: ...
