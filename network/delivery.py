"""What each session has been given and has yet to get: windows, bounded queues, floors. Decides in memory; no IO, no clock.

An `Outbox` belongs to one session. While it is *live*, published messages go straight into it. When its queue overflows it is
*behind*: the queue is dropped and pages are read from the ledger from where it stands, until it has caught up. A `Mailbox` belongs
to one participant: its floor, the messages handled above it, and those that wait for another attempt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from .state import Floor


MAX_OWN = 1 << 16
"""How many of its own sends a session that is behind remembers (512 KiB); the oldest beyond come to it like anybody's."""


class Outbox:
    """The deliveries of one session, in order, at most ``max_unacked`` of them unacknowledged, its queue at most ``max_bytes``."""

    def __init__(self, max_unacked: int, max_bytes: int) -> None:
        self.is_behind = True
        self.is_paging = False
        self.position = 0
        """Everything up to this seq was handed over or is in the queue."""
        self.delivered = 0
        """The highest seq handed over."""
        self.queued_bytes = 0
        self._done = 0
        """Everything up to this seq was handed over, or was the session's own: an overflow goes back to here."""
        self._own = array("Q")
        """Above ``_done``: what this session sent itself, ascending, which pages must leave out."""
        self._max_unacked = max_unacked
        self._max_bytes = max_bytes
        self._unacked: dict[int, None] = {}
        self._queue: deque[tuple[int, bytes, bool]] = deque()
        self._late: set[int] = set()
        """Redeliveries: in the window or the queue, and not in the order of the rest."""

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def start(self, cursor: int) -> None:
        """Begin after ``cursor``, behind until the first page says otherwise."""
        self.position = self.delivered = self._done = cursor

    def push(self, seq: int, frame: bytes, *, needs_ack: bool) -> bool:
        """Queue one published message. False when the queue overflowed: it is dropped, and this outbox is now behind."""
        self._queue.append((seq, frame, needs_ack))
        self.queued_bytes += len(frame)
        self.position = seq
        if self.queued_bytes <= self._max_bytes or len(self._queue) == 1:
            return True
        # redeliveries are not in the pages to come: they stay
        self._queue = deque(item for item in self._queue if item[0] <= self.delivered)
        self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self.position = self._done
        self.is_behind = True
        return False

    def pass_over(self, seq: int) -> None:
        """The session sent this message itself: it gets no delivery of it."""
        if self.is_behind or self._queue:
            self._own.append(seq)
            if len(self._own) > MAX_OWN:
                del self._own[: MAX_OWN // 2]
        else:
            self.position = self._done = seq

    def is_own(self, seq: int) -> bool:
        """Whether the session sent this message itself."""
        own = self._own
        at = bisect_left(own, seq)
        return at < len(own) and own[at] == seq

    def push_again(self, seq: int, frame: bytes) -> None:
        """Queue a redelivery, before everything else; the order of the rest is untouched."""
        self._late.add(seq)
        self._queue.appendleft((seq, frame, True))
        self.queued_bytes += len(frame)

    def take(self, max_bytes: int) -> list[bytes]:
        """Hand over what the window and ``max_bytes`` allow (one frame at least)."""
        frames: list[bytes] = []
        size = 0
        queue = self._queue
        while queue and size < max_bytes:
            seq, frame, needs_ack = queue[0]
            if needs_ack:
                if len(self._unacked) >= self._max_unacked:
                    break
                self._unacked[seq] = None
            queue.popleft()
            size += len(frame)
            frames.append(frame)
            if seq > self.delivered:
                self.delivered = self._done = seq
        self.queued_bytes -= size
        if self._own and not queue and not self.is_behind:
            self._done = self.position
            del self._own[:]
        return frames

    def has_work(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._queue) and (len(self._unacked) < self._max_unacked or not self._queue[0][2])

    def wants_page(self) -> bool:
        """Whether it is behind, with room for another page."""
        return self.is_behind and not self.is_paging and not self._queue and len(self._unacked) < self._max_unacked

    def holds(self, seq: int) -> bool:
        """Whether this message was handed over and is neither acknowledged nor refused."""
        return seq in self._unacked

    def has_or_will_get(self, seq: int) -> bool:
        """Whether this message is in the window, in the queue, or in a page to come."""
        return seq in self._unacked or seq in self._late or seq > self.position

    def settle(self, seq: int) -> None:
        """One message is handled, or will come again: it leaves the window."""
        self._unacked.pop(seq, None)
        self._late.discard(seq)

    def settle_up_to(self, seq: int) -> None:
        """Everything up to ``seq`` is handled."""
        unacked = self._unacked
        for late in [other for other in self._late if other <= seq]:
            self.settle(late)
        while unacked:
            first = next(iter(unacked))
            if first > seq:
                break
            del unacked[first]

    def first_owed(self) -> int | None:
        """The smallest seq that may yet have to be read from the ledger, or None when it is up to date."""
        queued = next((seq for seq, _, _ in self._queue if seq > self.delivered), None)  # an overflow drops them
        if queued is not None:
            return queued
        return self.position + 1 if self.is_behind else None

    def first_unacked(self) -> int | None:
        """The smallest seq in the window or the queue that needs an acknowledgement."""
        candidates = list(self._late)
        if self._unacked:
            candidates.append(next(iter(self._unacked)))
        candidates += next(([seq] for seq, _, needs_ack in self._queue if needs_ack), [])
        return min(candidates, default=None)


class Mailbox:
    """What one participant has handled, shared by its sessions.

    ``retrying`` holds the seqs that wait for another attempt, ``revived`` those handled once that an operator took back from the dead
    letters, ``tried`` those whose failures the ledger keeps, and ``settled`` those of them that are handled by now.
    """

    def __init__(self, floor: Floor) -> None:
        self.floor = floor.seq
        self.above: set[int] = set(floor.above)
        self.retrying: set[int] = set()
        self.revived: set[int] = set()
        self.tried: set[int] = set()
        self.settled: list[int] = []
        self.delivered = 0
        self.is_dirty = False

    def is_handled(self, seq: int) -> bool:
        return (seq <= self.floor or seq in self.above) and seq not in self.revived

    def wait(self, seq: int) -> None:
        """One message failed, or was revived: it is to come again."""
        self.tried.add(seq)
        if seq <= self.floor or seq in self.above:
            self.retrying.discard(seq)
            self.revived.add(seq)
        else:
            self.retrying.add(seq)

    def is_waiting(self, seq: int) -> bool:
        return seq in self.retrying or seq in self.revived

    def settle(self, seq: int) -> None:
        """One message is handled."""
        self.retrying.discard(seq)
        if seq in self.tried:
            self._settle_tried([seq])
        if seq > self.floor and seq not in self.above:
            self.above.add(seq)
            self.is_dirty = True

    def settle_up_to(self, seq: int) -> None:
        """Everything up to ``seq`` is handled."""
        if self.tried:
            self._settle_tried([tried for tried in self.tried if tried <= seq])
        if seq <= self.floor:
            return
        self.floor = seq
        if self.above:
            self.above = {other for other in self.above if other > seq}
        if self.retrying:
            self.retrying = {other for other in self.retrying if other > seq}
        self.is_dirty = True

    def _settle_tried(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            self.tried.discard(seq)
            self.revived.discard(seq)
            self.settled.append(seq)
            self.is_dirty = True

    def compact(self, outbox: Outbox) -> None:
        """Raise the floor to just below what is still open, from a session that was given everything above the floor.

        So that a client that acknowledges one by one leaves no endless list behind.
        """
        if not self.above:
            return
        open_seqs = [seq for seq in (outbox.first_unacked(), min(self.retrying, default=None)) if seq is not None]
        limit = min(open_seqs) - 1 if open_seqs else outbox.delivered
        self.settle_up_to(min(limit, outbox.delivered))

    def snapshot(self) -> Floor:
        """What the ledger keeps; the mailbox is clean afterwards."""
        self.is_dirty = False
        self.settled = []
        return Floor(self.floor, tuple(sorted(self.above)))
