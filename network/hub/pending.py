"""`PendingEntries`: entries that wait for the batch writer (step 4), and the fair choice of the next batch. Kept in
memory; no IO, no clock.

`intake` adds entries, and `batch_writer` takes batches. Owners take turns, so a participant that sends more than fits
into a batch delays only itself (docs/decisions/fair-batches.md).
"""

from __future__ import annotations

import asyncio
from collections import deque

from roundelay.network.addresses import mod_address
from roundelay.network.core.entries import (
    BindCredentials,
    EndTakeover,
    Entry,
    Join,
    ModEntry,
    ProcessEnded,
    ReachDueTime,
    SaveAckCursors,
    Send,
)

ENTRY_BYTES = 1024
"""Estimated memory that a pending entry needs in addition to its frame, in bytes."""
BATCH_COST = 1 << 19
"""Maximum cost of a batch, about 400 small messages. All participants wait while a batch is applied and written. A
larger batch would hardly reduce the number of fsyncs."""
TURN_COST = 1 << 14
"""Cost that one owner may add to a batch before the next owner's turn."""


class PendingEntries:
    """Entries that wait for the writer, each with its size in bytes and its cost.

    `PendingEntries` itself has no limit. `intake` refuses frames beyond ``max_pending_bytes``, and stops reading at
    twice this number.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.has_work = asyncio.Event()
        """Event that wakes the batch writer. The writer clears it."""
        # Entries since the last batch, in two parallel lists. A tuple for each message would be one more object to
        # allocate and to collect.
        self._entries: list[Entry] = []
        self._sizes: list[int] = []
        self._extra_costs: dict[int, int] = {}
        """Costs in addition to the size, by index in ``_entries``. Most entries have no additional cost."""
        self._queues: dict[str, _OwnerQueue] = {}
        """Queues of entries that did not fit into a batch, by owner."""
        self._turns: deque[_OwnerQueue] = deque()
        self._queued = 0
        """Number of entries in the owners' queues."""

    def __len__(self) -> int:
        return self._queued + len(self._entries)

    def add(self, entry: Entry, size: int = 0, extra_cost: int = 0) -> None:
        """Add an entry. ``size`` is the size of its frame. ``extra_cost`` is the cost of further work, expressed in
        bytes."""
        if not self.bytes:  # if entries are left, the writer is already awake
            self.has_work.set()
        # Add a fixed size, because tiny frames need memory too. Otherwise a million tiny frames would stay below the
        # limit.
        size += ENTRY_BYTES
        self._entries.append(entry)
        self._sizes.append(size)
        self.bytes += size
        if extra_cost:
            self._extra_costs[len(self._sizes) - 1] = extra_cost

    def take_batch(self) -> list[Entry]:
        """Remove and return the next batch. If all entries fit, the batch is in order of arrival. Otherwise owners take
        turns."""
        if not self._queued and self.bytes + sum(self._extra_costs.values()) <= BATCH_COST:
            batch = self._entries
            self.clear()
            return batch
        # Sort by owner only if the entries do not fit into one batch, because sorting would slow down the common case.
        self._sort_by_owner()
        batch = []
        batch_cost = 0
        while self._turns and batch_cost < BATCH_COST:
            queue = self._turns.popleft()
            # Use deficit round robin: unused credit stays, so an entry that costs more than one turn is taken in a
            # later turn.
            queue.credit += TURN_COST
            while queue.entries and queue.entries[0][2] <= queue.credit:
                entry, size, cost = queue.entries.popleft()
                batch.append(entry)
                queue.credit -= cost
                queue.bytes -= size
                self.bytes -= size
                batch_cost += cost
            # If entries remain, move the owner with its credit to the end of the line.
            if queue.entries:
                self._turns.append(queue)
            else:
                del self._queues[queue.owner]
        self._queued -= len(batch)
        return batch

    def clear(self) -> None:
        """Drop all entries."""
        self._entries, self._sizes, self._extra_costs = [], [], {}
        self._queues.clear()
        self._turns.clear()
        self.bytes = self._queued = 0

    def is_beyond_share(self, owner: str, max_bytes: int) -> bool:
        """Return whether the pending entries of an owner exceed its share. The share is ``max_bytes`` divided by the
        number of owners with pending entries."""
        self._sort_by_owner()
        queue = self._queues.get(owner)
        return queue is not None and queue.bytes * len(self._queues) >= max_bytes

    def _sort_by_owner(self) -> None:
        """Move new entries into their owners' queues."""
        extra_costs = self._extra_costs
        for index, (entry, size) in enumerate(zip(self._entries, self._sizes, strict=True)):
            owner = owner_of(entry)
            queue = self._queues.get(owner)
            if queue is None:
                queue = self._queues[owner] = _OwnerQueue(owner)
                self._turns.append(queue)
            queue.entries.append((entry, size, size + extra_costs.get(index, 0) if extra_costs else size))
            queue.bytes += size
        self._queued += len(self._entries)
        self._entries, self._sizes, self._extra_costs = [], [], {}


class _OwnerQueue:
    """Pending entries of one owner, oldest first, as ``(entry, size, cost)``. ``credit`` is the cost that the owner may
    still add to batches."""

    __slots__ = ("bytes", "credit", "entries", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.entries: deque[tuple[Entry, int, int]] = deque()
        self.bytes = 0
        self.credit = 0


def owner_of(entry: Entry) -> str:
    """Return the owner of an entry. The owner of a ``hello`` is the id that it names, so the ``hello`` stays behind the
    entries of earlier sessions of this id."""
    # Check this before the match, whose class patterns are slow: nearly every entry is a message.
    if isinstance(entry, Send):
        return entry.origin.agent_id
    match entry:
        case Join():
            return entry.hello.agent_id
        case SaveAckCursors() | BindCredentials() | ProcessEnded() | EndTakeover():
            return ""
        case ModEntry() | ReachDueTime():
            return mod_address(entry.mod)
        case _:
            return entry.origin.agent_id
