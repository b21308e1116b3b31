"""What waits for the writer: every entry in the order in which it came and, where there is more than a batch takes, in a line for each owner.

An owner is a participant, with all its sessions, or a mod, or the hub itself. Batches are bounded, and taken from the lines in turns (deficit
round robin: Shreedhar and Varghese, SIGCOMM 1995), so that whoever has sent much waits for itself alone. Decides in memory; no IO, no clock.
"""

from __future__ import annotations

from collections import deque

from .entries import Entry, Handled, Join, ModEntry

ENTRY_BYTES = 1024
"""What a pending entry counts beside its frame: about what it takes in memory, whatever its frame's size."""
BATCH_COST = 1 << 19
"""What a batch takes: some 400 small messages. Everybody waits while it is applied and written; a larger one saves hardly any more fsyncs."""
TURN_COST = 1 << 14
"""What one owner may have of a batch before the next one's turn."""


class Pending:
    """Entries, each with its size in bytes and its cost; what the writer takes next is `take`'s."""

    def __init__(self) -> None:
        self.bytes = 0
        self._cost = 0
        # What came since the last batch. Three lists: a tuple for each message would be one more object to make and to collect.
        self._entries: list[Entry] = []
        self._sizes: list[int] = []
        self._costs: list[int] = []
        self._lines: dict[str, _Line] = {}
        """Those that a batch did not take, by owner."""
        self._turns: deque[_Line] = deque()
        self._waiting = 0
        """How many are in lines."""

    def __len__(self) -> int:
        return self._waiting + len(self._entries)

    def add(self, entry: Entry, size: int, work: int = 0) -> None:
        """One more. ``size`` is its frame's, ``work`` what it costs the hub beyond that, in bytes that would cost as much."""
        size += ENTRY_BYTES
        self._entries.append(entry)
        self._sizes.append(size)
        self._costs.append(size + work)
        self.bytes += size
        self._cost += size + work

    def take(self) -> list[Entry]:
        """The next batch: everything, in the order in which it came, if that is no more than a batch takes; else each owner's next, in turns."""
        if not self._waiting and self._cost <= BATCH_COST:
            batch = self._entries
            self.clear()
            return batch
        self._line_up()
        batch = []
        cost = 0
        while self._turns and cost < BATCH_COST:
            line = self._turns.popleft()
            line.credit += TURN_COST
            while line.entries and line.entries[0][2] <= line.credit:
                entry, size, its_cost = line.entries.popleft()
                batch.append(entry)
                line.credit -= its_cost
                line.bytes -= size
                self.bytes -= size
                cost += its_cost
            if line.entries:
                self._turns.append(line)
            else:
                del self._lines[line.owner]
        self._waiting -= len(batch)
        return batch

    def clear(self) -> None:
        """Forget everything."""
        self._entries, self._sizes, self._costs = [], [], []
        self._lines.clear()
        self._turns.clear()
        self.bytes = self._cost = self._waiting = 0

    def is_beyond_share(self, owner: str, most: int) -> bool:
        """Whether as much of this owner waits as would be its share of ``most`` bytes among those of whom anything waits."""
        self._line_up()
        line = self._lines.get(owner)
        return line is not None and line.bytes * len(self._lines) >= most

    def _line_up(self) -> None:
        """Put what has come into the lines."""
        for entry, size, cost in zip(self._entries, self._sizes, self._costs, strict=True):
            owner = owner_of(entry)
            line = self._lines.get(owner)
            if line is None:
                line = self._lines[owner] = _Line(owner)
                self._turns.append(line)
            line.entries.append((entry, size, cost))
            line.bytes += size
        self._waiting += len(self._entries)
        self._entries, self._sizes, self._costs = [], [], []
        self._cost = 0


class _Line:
    """What waits of one owner, in the order in which it came; ``credit`` is what it may have of the batch at hand."""

    __slots__ = ("bytes", "credit", "entries", "owner")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.entries: deque[tuple[Entry, int, int]] = deque()
        self.bytes = 0
        self.credit = 0


def owner_of(entry: Entry) -> str:
    """In whose line an entry waits. A `hello` waits in the line of whom it names, after what that one's sessions sent before."""
    match entry:
        case Join():
            return entry.hello.agent_id
        case Handled():
            return ""
        case ModEntry():
            return f"mod:{entry.mod}"
        case _:
            return entry.origin.agent_id
