"""A node's index of a shared log, as others read it: `IndexReads`, what a ledger asks of its index, and
`ReadOnlyIndex`, the `Ledger` of a hub that only reads while the node follows."""

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
    """The part of a `Ledger` that is read from the index as it is."""

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
    """A `Ledger` over an index that is open, and that somebody else writes to. It stores nothing, and closes
    nothing."""

    is_answering = True

    def __init__(self, index: SQLiteLedger, *, epoch: str, name: str, describe_leader: Callable[[], Follows]) -> None:
        super().__init__(index)
        self.describe_leader = describe_leader
        """Returns the leader and the time up to which this index holds what the leader stored."""
        self._epoch = epoch
        self._name = name

    async def open(self) -> tuple[Meta, list[TableWrite]]:
        meta, puts = await self._index.look_again()
        return msgspec.structs.replace(meta, epoch=self._epoch, name=self._name), puts

    async def close(self) -> None:
        """The index goes on."""

    async def verify(self) -> None:
        """Whoever follows the log finds out."""

    async def lookup(self, _wanted: LookupRequest) -> Facts:
        """Nothing: it is asked for what is to be stored."""
        return Facts()

    async def append(self, _rows: Sequence[Row], _puts: Sequence[TableWrite]) -> None:
        raise LedgerError("This node follows, and stores nothing.")

    async def expire_calls(self, _before: int) -> None:
        """The index is not written to here."""

    async def forget_dropped(self) -> None:
        """Nothing is dropped here."""

    async def trim(self, _trim: Trim) -> Trimmed:
        raise LedgerError("This node follows, and drops nothing.")


class ReadReplica(Protocol):
    """Serves reads of this node's index while the node follows. Its methods raise nothing: a replica that fails stops
    serving, and the node follows on."""

    @property
    def is_serving(self) -> bool:
        """Whether clients may read here."""

    async def start(self, index: ReadOnlyIndex) -> None:
        """Serve reads of an index that holds what the log held a moment ago."""

    async def apply(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        """Publish rows and table writes that the index has just stored."""

    async def drop_before(self, first_seq: int) -> None:
        """Forget messages below ``first_seq``: the index has dropped them."""

    async def stop(self) -> None:
        """Stop serving: the node no longer follows. Idempotent."""


class NoReadReplica:
    """A `ReadReplica` that serves nobody."""

    is_serving = False

    async def start(self, index: ReadOnlyIndex) -> None: ...

    async def apply(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None: ...

    async def drop_before(self, first_seq: int) -> None: ...

    async def stop(self) -> None: ...
