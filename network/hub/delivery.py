"""What each session has been given and has yet to get: windows, bounded queues, floors. Decides in memory; no IO, no
clock.

An `Outbox` belongs to one session. While it is *live*, published messages go straight into it. When its queue overflows
it is *behind*: the queue is dropped and pages are read from the ledger from where it stands, until it has caught up. A
`Mailbox` belongs to one participant: its floor, the messages handled above it, and those that wait for another attempt.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from roundelay.network.core.tables import AckCursor

# The counters of one participant with one session; seqs grow to the right. With two sessions there are two rows of the
# second kind.
#
#                     open={4}          above={12}
#   Mailbox   handled | . 4 . . |       . . . 12 . . . . . . . . . . .   handled: up to `floor` but `open`, and `above`
#                             floor
#
#   Outbox    cursor        delivered   _done            position   head
#               3 | handed over  9 | own  10 | in the queue  16 | 20       live: position is the head of what is its own
#                   `_unacked` is part of it   an overflow goes back       behind: pages bring what is above position
#                                              to _done
#
#   Session   joined_at: the head at its welcome; settled_at_join: what was handled or waited then, all below joined_at
#
# cursor <= delivered <= _done <= position <= head holds in each session. An acknowledgement moves from right to left
# through it:
#
#   ack 9            Outbox.release_up_to: what was handed over up to 9 leaves the window (but a late redelivery)
#                    Mailbox.release_up_to: floor = 9, `open` below is emptied (but what failed and did not come again)
#   ack 12, only     Outbox.settle, Mailbox.settle: 12 joins `above`, until `compact` raises the floor past it
#   nack 7           Mailbox.wait: 7 joins `waiting` and `tried`, below the floor also `open`; `redelivery` repeats it
#
# `floor` is the participant's: any session moves it, by what it acknowledges (never above its own `delivered`) or by
# `compact`. So it may be above a slow session's position, and nothing of that session depends on it: what a page leaves
# out was settled at the join and is handled still, and an ack below the floor only makes room in the window. A session
# is given the same whether it is live or behind.

MAX_OWN = 1 << 16
"""How many of its own sends a session that is behind remembers (512 KiB); the oldest beyond come to it like
anybody's."""


MAX_ABOVE = 4096
"""How many acknowledgements one by one a floor keeps above it while it cannot follow: for a client that resumes from a
cursor of its own."""

Delivery: TypeAlias = tuple[int, bytes, bool]
"""A message's seq, its frame, and whether it is to be acknowledged. Those who are given the same share it."""


_NOTHING_QUEUED: deque[Delivery] = deque()
"""The queue of each session to which nothing was delivered yet, never changed: an empty deque takes 760 bytes."""


class Outbox:
    """The deliveries of one session, in order, at most ``max_unacked`` of them unacknowledged, its queue at most
    ``max_bytes``."""

    def __init__(self, max_unacked: int, max_bytes: int) -> None:
        self.is_behind = True
        self.is_silent = False
        """Nothing is delivered here: its client asks (``network.receive``)."""
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
        self.skipped: set[int] = set()
        """Left out of a page because they waited for their next attempt, which comes to this session too."""
        self._max_unacked = max_unacked
        self._max_bytes = max_bytes
        self._unacked: dict[int, None] = {}
        self._queue = _NOTHING_QUEUED
        self._redeliveries: dict[int, int] = {}
        """Redeliveries: in the window or the queue, and not in the order of the rest; with the highest seq handed over
        before each."""

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def start(self, cursor: int) -> None:
        """Begin after ``cursor``, behind until the first page says otherwise. A silent one stays behind for ever."""
        if self.is_silent:
            return
        self.position = self.delivered = self._done = cursor

    def push(self, delivery: Delivery) -> bool:
        """Queue one published message. False when the queue overflowed: it is dropped, and this outbox is now
        behind."""
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.append(delivery)
        self.queued_bytes += len(delivery[1])
        self.position = delivery[0]
        if self.queued_bytes <= self._max_bytes or len(self._queue) == 1:
            return True
        # redeliveries below that are not in the pages to come: they stay
        self._queue = deque(item for item in self._queue if item[0] <= self._done)
        self._redeliveries = {late: before for late, before in self._redeliveries.items() if late <= self._done}
        self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self.position = self._done
        self.is_behind = True
        return False

    def skip_own(self, seq: int) -> None:
        """The session sent this message itself: it gets no delivery of it."""
        if self.is_silent:
            return
        if not self.is_behind:
            self.position = seq
            if not self._queue:
                self._done = seq
                return
        self._own.append(seq)
        if len(self._own) > MAX_OWN:
            del self._own[: MAX_OWN // 2]

    def is_own(self, seq: int) -> bool:
        """Whether the session sent this message itself."""
        own = self._own
        at = bisect_left(own, seq)
        return at < len(own) and own[at] == seq

    def push_redelivery(self, seq: int, frame: bytes) -> None:
        """Queue a redelivery, before everything else; but one that this session has not had comes in its order."""
        self._redeliveries[seq] = self.delivered
        is_new = seq > self.delivered  # an ack of it must not cover what is queued below it
        at = sum(queued < seq for queued, _, _ in self._queue) if is_new else 0
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.insert(at, (seq, frame, True))
        self.queued_bytes += len(frame)

    def take_frames(self, max_bytes: int) -> list[bytes]:
        """Hand over what the window and ``max_bytes`` allow (one frame at least)."""
        frames: list[bytes] = []
        size = newest = 0
        queue, unacked, late = self._queue, self._unacked, self._redeliveries
        while queue and size < max_bytes:
            seq, frame, needs_ack = queue[0]
            if needs_ack:
                if len(unacked) >= self._max_unacked:
                    break
                unacked[seq] = None
            queue.popleft()
            size += len(frame)
            frames.append(frame)
            if late and seq in late:
                late[seq] = max(self.delivered, newest)
            if seq > newest:
                newest = seq
        self.delivered = max(self.delivered, newest)
        self._done = max(self._done, newest)
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
        if self.is_silent or not self.is_behind or self.is_paging:
            return False
        return not self._queue and len(self._unacked) < self._max_unacked

    def is_unacked(self, seq: int) -> bool:
        """Whether this message was handed over and is neither acknowledged nor refused."""
        return seq in self._unacked

    def has(self, seq: int) -> bool:
        """Whether this message is in the window or the queue."""
        return seq in self._unacked or seq in self._redeliveries or any(queued == seq for queued, _, _ in self._queue)

    def has_or_will_get(self, seq: int) -> bool:
        """Whether this message is in the window, in the queue, or in a page to come."""
        return not self.is_silent and (seq > self.position or self.has(seq))

    def release(self, seq: int) -> None:
        """One message is handled, or will come again: it leaves the window."""
        if seq in self._redeliveries and seq not in self._unacked:  # its redelivery is in the queue yet
            self._queue = deque(item for item in self._queue if item[0] != seq)
            self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self._unacked.pop(seq, None)
        self._redeliveries.pop(seq, None)

    def covers(self, acked: int, seq: int) -> bool:
        """Whether an acknowledgement of everything up to ``acked`` means this message too.

        A redelivery that was handed over after what is named may have been on its way when that was said: it is not
        meant."""
        return seq in self._unacked and seq <= acked and (seq == acked or acked > self._redeliveries.get(seq, -1))

    def release_up_to(self, seq: int) -> None:
        """Everything up to ``seq`` that was handed over, and that it `covers`, is handled."""
        unacked = self._unacked
        if self._redeliveries:
            for late in [other for other in self._redeliveries if self.covers(seq, other)]:
                self.release(late)
        elif seq >= self.delivered:  # nearly always: nothing above it was handed over
            unacked.clear()
            return
        for handled in list(itertools.takewhile(lambda other: other <= seq, unacked)):
            if handled not in self._redeliveries:
                del unacked[handled]

    def first_undelivered(self) -> int | None:
        """The smallest seq that may yet have to be read from the ledger, or None when it is up to date."""
        queued = next((seq for seq, _, _ in self._queue if seq > self.delivered), None)  # an overflow drops them
        if queued is not None:
            return queued
        return self.position + 1 if self.is_behind and not self.is_silent else None

    def list_unacked(self, top: int) -> list[int]:
        """What was handed over, up to ``top``, and is not acknowledged, and the redeliveries that are still in the
        queue."""
        return [seq for seq in itertools.chain(self._unacked, self._redeliveries) if seq <= top]


class Mailbox:
    """What one participant has handled, shared by its sessions: everything up to ``floor`` but ``open``, and ``above``
    it what is listed.

    ``waiting`` holds the seqs that a timer will bring again, and ``tried`` all whose failures the ledger keeps: those
    that wait, and those on another attempt. ``settled`` are those that were tried and are handled by now. A mailbox
    that changed stands in ``changed``, which many share, until its next snapshot."""

    def __init__(self, floor: AckCursor, agent_id: str = "", changed: dict[str, Mailbox] | None = None) -> None:
        self.agent_id = agent_id
        self.ack_cursor = floor.seq
        self.open: set[int] = set(floor.open)
        self.above: set[int] = set(floor.above)
        self.awaiting_retry: set[int] = set()
        self.failed: set[int] = set()
        self.handled_failures: list[int] = []
        self.delivered = 0
        self._last_join_snapshot = floor
        self._changed = changed if changed is not None else {}

    @property
    def is_dirty(self) -> bool:
        """Whether it changed since its last snapshot."""
        return self.agent_id in self._changed

    def mark_changed(self) -> None:
        """It changed: the ledger is to keep it."""
        self._changed[self.agent_id] = self

    def is_handled(self, seq: int) -> bool:
        return seq in self.above or (seq <= self.ack_cursor and seq not in self.open)

    def delivery_start(self) -> int:
        """Where delivery from the floor begins: just below the first message that is open."""
        return min(self.open, default=self.ack_cursor + 1) - 1

    def schedule_retry(self, seq: int) -> None:
        """One message failed, or was taken back from the dead letters: it is to come again."""
        self.failed.add(seq)
        self.awaiting_retry.add(seq)
        if seq in self.handled_failures:  # or its new attempts would be forgotten with the old ones
            self.handled_failures.remove(seq)
        if seq <= self.ack_cursor:
            self.open.add(seq)
        self.above.discard(seq)

    def cancel_retry(self, seq: int) -> None:
        """What was said of its failure does not count: the message is as it was before."""
        self.awaiting_retry.discard(seq)
        self.failed.discard(seq)

    def mark_handled(self, seq: int) -> None:
        """One message is handled."""
        self.awaiting_retry.discard(seq)
        if seq in self.failed:
            self.failed.discard(seq)
            self.handled_failures.append(seq)
            self.mark_changed()
        if self.is_handled(seq):
            return
        self.mark_changed()
        if seq <= self.ack_cursor:
            self.open.discard(seq)
            return
        self.above.add(seq)
        if len(self.above) > MAX_ABOVE:
            self.above = set(sorted(self.above)[MAX_ABOVE // 2 :])

    def mark_handled_up_to(self, seq: int, outbox: Outbox) -> None:
        """Everything up to ``seq`` is handled, but what failed and has not come again to the session of ``outbox``, as
        far as it knew."""
        if not self.failed and not self.open:  # nearly always
            if seq > self.ack_cursor:
                self._raise_ack_cursor(seq)
            return
        exempt = {tried for tried in self.failed if tried <= seq and not outbox.covers(seq, tried)}
        for tried in [tried for tried in self.failed if tried <= seq and tried not in exempt]:
            self.mark_handled(tried)
        kept = {other for other in self.open if other > seq} | exempt
        if seq <= self.ack_cursor and kept == self.open:
            return
        self.open = kept
        if seq > self.ack_cursor:
            self._raise_ack_cursor(seq)
        self.mark_changed()

    def _raise_ack_cursor(self, seq: int) -> None:
        self.ack_cursor = seq
        if self.above:
            self.above = {other for other in self.above if other > seq}
        self.mark_changed()

    def drop_before(self, first_seq: int) -> None:
        """What is older is no longer there to be delivered."""
        kept = {seq for seq in self.open if seq >= first_seq or seq in self.awaiting_retry}
        if kept != self.open:
            self.open = kept
            self.mark_changed()

    def compact(self, outbox: Outbox) -> None:
        """Raise the floor to what a session was delivered that was given everything open above it: one from the floor.

        So that a client that acknowledges one by one leaves no endless list behind. What that session left out was
        handled when it joined, or has failed (``tried``); what it was given and has not acknowledged,
        `Outbox.list_unacked` says."""
        top = outbox.delivered
        if self.above and top > self.ack_cursor:
            self.compact_to(top, outbox.list_unacked(top))

    def compact_to(self, top: int, given: Iterable[int]) -> None:
        """Raise the floor to ``top``: of what lies up to there and is not handled, ``given`` are all that did not
        fail."""
        if not self.above or top <= self.ack_cursor:
            return
        candidates = self.failed.union(given)
        self.open |= {seq for seq in candidates if self.ack_cursor < seq <= top and seq not in self.above}
        self.ack_cursor = top
        self.above = {seq for seq in self.above if seq > top}
        self.mark_changed()

    def snapshot_at_join(self) -> AckCursor:
        """What is handled at this moment or waits for another attempt, for a session that joins.

        Sessions that join with the same share it; ``above`` bounds it (32 KiB), and how much a participant holds open.
        """
        above = self.above.union(seq for seq in self.awaiting_retry if seq > self.ack_cursor)
        now = AckCursor(self.ack_cursor, tuple(sorted(above)), tuple(sorted(self.open - self.awaiting_retry)))
        if now != self._last_join_snapshot:
            self._last_join_snapshot = now
        return self._last_join_snapshot

    def snapshot(self) -> AckCursor:
        """What the ledger keeps; the mailbox is clean afterwards."""
        self._changed.pop(self.agent_id, None)
        self.handled_failures = []
        return self.to_ack_cursor()

    def to_ack_cursor(self) -> AckCursor:
        return AckCursor(self.ack_cursor, tuple(sorted(self.above)), tuple(sorted(self.open)))
