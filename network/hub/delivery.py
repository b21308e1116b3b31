"""The deliveries of each session and the handled messages of each participant: windows, bounded queues and ack cursors.

An `Outbox` belongs to one session. While the session is *live*, published messages are pushed into its outbox. When the
queue overflows, the session falls *behind*: the queue is dropped, and the hub reads pages from the ledger until the
session has caught up. A `Mailbox` belongs to one participant. It holds the ack cursor, the messages that were handled
above the cursor, and the messages that wait for another attempt. Works in memory; no IO, no clock.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from roundelay.network.core.ack_cursor import AckCursor

# The counters of one participant with one session. Seqs grow to the right. With two sessions there are two outboxes.
#
#                     open={4}          above={12}
#   Mailbox   handled | . 4 . . |       . . . 12 . . . . . . . . . . .   handled: up to `ack_cursor` without `open`,
#                       ack_cursor                                       and `above`
#
#   Outbox    cursor        delivered   _done            position   head
#               3 | handed over  9 | own  10 | in the queue  16 | 20       live: position is the head of the session
#                   `_unacked` is part of it   an overflow goes back       behind: pages bring what is above position
#                                              to _done
#
#   Session   joined_at: the head at its welcome; handled_at_join: what was handled or waited then, all below joined_at
#
# In each session cursor <= delivered <= _done <= position <= head. An acknowledgement is processed from right to left:
#
#   ack 9            Outbox.release_up_to: what was handed over up to 9 leaves the window, without later redeliveries.
#                    Mailbox.mark_handled_up_to: ack_cursor = 9. `open` below is emptied, without failed messages that
#                    were not delivered again.
#   ack 12, only     Outbox.release, Mailbox.mark_handled: 12 joins `above`, until `compact` moves the cursor past it.
#   nack 7           Mailbox.schedule_retry: 7 joins `awaiting_retry` and `failed`, below the cursor also `open`.
#                    `redelivery` repeats it.
#
# `ack_cursor` belongs to the participant. Any session moves it, by acknowledgements (never above its own `delivered`)
# or by `compact`. So the cursor may be above the position of a slow session. Nothing of that session may depend on the
# cursor. Two rules follow:
#
#   - A page leaves out only messages that were handled when the session joined. Such a message stays handled.
#   - An ack below the cursor only makes room in the window.
#
# A session gets the same messages whether it is live or behind.

MAX_OWN = 1 << 16
"""Maximum number of own messages that a session remembers while it is behind (512 KiB). Older own messages are
delivered to the session like messages from others."""
MAX_ABOVE = 4096
"""Maximum number of single acknowledgements that a mailbox stores above its ack cursor. Many accumulate only if the
cursor cannot advance, for example because the client sets its own cursor."""

Delivery: TypeAlias = tuple[int, bytes, bool]
"""A message in a queue: its seq, its frame, and whether the client must acknowledge it. Recipients of the same message
share one tuple."""

_NOTHING_QUEUED: deque[Delivery] = deque()
"""Empty queue shared by all sessions that have never received anything. Never modified. An empty deque takes 760 bytes,
so sharing one saves memory."""


class Outbox:
    """The deliveries of one session, in order. At most ``max_unacked`` messages are unacknowledged, and at most
    ``max_bytes`` are queued."""

    def __init__(self, max_unacked: int, max_bytes: int) -> None:
        self.is_behind = True
        self.is_silent = False
        """Whether no message is delivered to this session. A client that polls (``network.receive``) asks for a silent
        session."""
        self.is_paging = False
        self.position = 0
        """Seq up to which every message was handed over or is in the queue."""
        self.delivered = 0
        """The highest seq that was handed over to the connection."""
        self.queued_bytes = 0
        self._done = 0
        """Seq up to which every message was handed over or was sent by this session. If the queue overflows, delivery
        continues after this seq."""
        self._own = array("Q")
        """Seqs above ``_done`` of messages that the session itself sent, ascending. Pages must leave out these
        messages."""
        self.skipped: set[int] = set()
        """Seqs of messages that a page left out because they wait for another attempt. The session also receives the
        redeliveries of these messages."""
        self._max_unacked = max_unacked
        self._max_bytes = max_bytes
        self._unacked: dict[int, None] = {}
        self._queue = _NOTHING_QUEUED
        self._redeliveries: dict[int, int] = {}
        """Redelivered messages that are in the window or the queue. Maps the seq of each message to the highest seq
        that was handed over before its redelivery. Redeliveries do not arrive in the order of seqs."""

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def start(self, cursor: int) -> None:
        """Start delivery after ``cursor``. The outbox is behind until the first page has been read. A silent outbox
        stays behind forever."""
        if self.is_silent:
            return
        self.position = self.delivered = self._done = cursor

    def push(self, delivery: Delivery) -> bool:
        """Queue a published message. If the queue overflows, drop it, mark the outbox as behind and return False."""
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.append(delivery)
        self.queued_bytes += len(delivery[1])
        self.position = delivery[0]
        # Queue a message even if it is larger than the limit, if the queue contains no other message. Otherwise the
        # session would fall behind at this message again and again.
        if self.queued_bytes <= self._max_bytes or len(self._queue) == 1:
            return True
        # Keep redeliveries up to `_done`: later pages start above `_done` and do not contain them.
        self._queue = deque(item for item in self._queue if item[0] <= self._done)
        self._redeliveries = {seq: before for seq, before in self._redeliveries.items() if seq <= self._done}
        self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self.position = self._done
        self.is_behind = True
        return False

    def skip_own(self, seq: int) -> None:
        """Skip a message that the session itself sent."""
        if self.is_silent:
            return
        if not self.is_behind:
            self.position = seq
            # With an empty queue, an overflow drops nothing. So advance `_done` instead of remembering the seq of the
            # own message.
            if not self._queue:
                self._done = seq
                return
        self._own.append(seq)  # delivery may restart from a lower seq after an overflow, so remember this one
        if len(self._own) > MAX_OWN:
            del self._own[: MAX_OWN // 2]

    def is_own(self, seq: int) -> bool:
        """Return whether the session sent this message itself."""
        own = self._own
        at = bisect_left(own, seq)
        return at < len(own) and own[at] == seq

    def push_redelivery(self, seq: int, frame: bytes) -> None:
        """Queue a redelivery before all other messages, or in the order of seqs if this session never received the
        message."""
        self._redeliveries[seq] = self.delivered
        # A message that is new to this session must not overtake messages with lower seqs. The client acknowledges up
        # to a seq, so an ack of the new message would also cover those undelivered messages.
        is_new = seq > self.delivered
        at = sum(queued < seq for queued, _, _ in self._queue) if is_new else 0
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.insert(at, (seq, frame, True))
        self.queued_bytes += len(frame)

    def take_frames(self, max_bytes: int) -> list[bytes]:
        """Hand over as many frames as the window and ``max_bytes`` allow. Hand over at least one frame if the window
        allows it."""
        frames: list[bytes] = []
        size = newest = 0
        queue, unacked, redeliveries = self._queue, self._unacked, self._redeliveries
        while queue and size < max_bytes:
            seq, frame, needs_ack = queue[0]
            # Count only messages that the client must acknowledge. Messages of the client's own participant are handed
            # over even if the window is full.
            if needs_ack:
                if len(unacked) >= self._max_unacked:
                    break
                unacked[seq] = None
            queue.popleft()
            size += len(frame)
            frames.append(frame)
            if redeliveries and seq in redeliveries:
                # Record the newest seq now, at the hand-over, and not at the push. An ack that the client sent between
                # push and hand-over cannot refer to this redelivery.
                redeliveries[seq] = max(self.delivered, newest)
            if seq > newest:
                newest = seq
        self.delivered = max(self.delivered, newest)
        self._done = max(self._done, newest)
        self.queued_bytes -= size
        if self._own and not queue and not self.is_behind:
            # The queue is empty, so an overflow would not repeat any own message.
            self._done = self.position
            del self._own[:]
        return frames

    def has_work(self) -> bool:
        """Return whether `take_frames` would return anything."""
        return bool(self._queue) and (len(self._unacked) < self._max_unacked or not self._queue[0][2])

    def wants_page(self) -> bool:
        """Return whether the outbox is behind and has room for another page."""
        if self.is_silent or not self.is_behind or self.is_paging:
            return False
        # If the window is full, the messages of a page would only fill memory. Read the page after the client has
        # acknowledged something.
        return not self._queue and len(self._unacked) < self._max_unacked

    def is_unacked(self, seq: int) -> bool:
        """Return whether this message was handed over and is neither acknowledged nor refused."""
        return seq in self._unacked

    def has(self, seq: int) -> bool:
        """Return whether this message is in the window or the queue."""
        return seq in self._unacked or seq in self._redeliveries or any(queued == seq for queued, _, _ in self._queue)

    def has_or_will_get(self, seq: int) -> bool:
        """Return whether this message is in the window, in the queue, or will be in a later page."""
        return not self.is_silent and (seq > self.position or self.has(seq))

    def release(self, seq: int) -> None:
        """Remove a message from the window, because it is handled or will be delivered again."""
        if seq in self._redeliveries and seq not in self._unacked:  # its redelivery is still in the queue
            self._queue = deque(item for item in self._queue if item[0] != seq)
            self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self._unacked.pop(seq, None)
        self._redeliveries.pop(seq, None)

    def covers(self, acked: int, seq: int) -> bool:
        """Return whether an acknowledgement of all messages up to ``acked`` includes the message ``seq``.

        A redelivery that was handed over after ``acked`` is not included, because the client may have sent the
        acknowledgement before the redelivery arrived.
        """
        return seq in self._unacked and seq <= acked and (seq == acked or acked > self._redeliveries.get(seq, -1))

    def release_up_to(self, seq: int) -> None:
        """Remove the messages from the window that an acknowledgement up to ``seq`` `covers`."""
        unacked = self._unacked
        if self._redeliveries:
            for redelivered in [other for other in self._redeliveries if self.covers(seq, other)]:
                self.release(redelivered)
        elif seq >= self.delivered:  # true for almost every ack: no message above `seq` was handed over
            unacked.clear()
            return
        # All messages in the window except redeliveries are in ascending order, so the search ends at the first larger
        # seq.
        for acked in list(itertools.takewhile(lambda other: other <= seq, unacked)):
            if acked not in self._redeliveries:
                del unacked[acked]

    def first_undelivered(self) -> int | None:
        """Return the lowest seq that may have to be read from the ledger. Return None if the session is up to date."""
        # Count queued messages too: if the queue overflows, the hub reads them from the ledger again.
        queued = next((seq for seq, _, _ in self._queue if seq > self.delivered), None)
        if queued is not None:
            return queued
        return self.position + 1 if self.is_behind and not self.is_silent else None

    def list_unacked(self, top: int) -> list[int]:
        """Return the unacknowledged messages up to ``top``, and redeliveries that are still in the queue."""
        return [seq for seq in itertools.chain(self._unacked, self._redeliveries) if seq <= top]


class Mailbox:
    """The messages that one participant has handled. All sessions of the participant share one mailbox.

    The participant has handled all messages up to ``ack_cursor`` except those in ``open``, and also the messages in
    ``above``. ``failed`` holds messages whose failures are stored in the ledger. If such a message is also in
    ``awaiting_retry``, a timer will deliver it again; otherwise an attempt is in progress. ``handled_failures`` holds
    messages that failed first and were handled later. All mailboxes share the dict ``changed``. A mailbox is in this
    dict from its first change until its next snapshot.
    """

    def __init__(self, cursor: AckCursor, agent_id: str = "", changed: dict[str, Mailbox] | None = None) -> None:
        self.agent_id = agent_id
        self.ack_cursor = cursor.seq
        self.open: set[int] = set(cursor.open)
        self.above: set[int] = set(cursor.above)
        self.awaiting_retry: set[int] = set()
        self.failed: set[int] = set()
        self.handled_failures: list[int] = []
        self.delivered = 0
        """The highest seq that was handed over to an ended session or to a client that polled."""
        self._last_join_snapshot = cursor
        self._changed = changed if changed is not None else {}

    @property
    def is_dirty(self) -> bool:
        """Whether the mailbox changed since its last snapshot."""
        return self.agent_id in self._changed

    def mark_changed(self) -> None:
        """Mark the mailbox as changed, so the next flush stores it."""
        self._changed[self.agent_id] = self

    def is_handled(self, seq: int) -> bool:
        return seq in self.above or (seq <= self.ack_cursor and seq not in self.open)

    def delivery_start(self) -> int:
        """Return the seq just below the first message that is not handled. Delivery starts after this seq."""
        return min(self.open, default=self.ack_cursor + 1) - 1

    def schedule_retry(self, seq: int) -> None:
        """Record that a message will be delivered again, because it failed or an operator restored it."""
        self.failed.add(seq)
        self.awaiting_retry.add(seq)
        if seq in self.handled_failures:  # otherwise the next flush would delete the records of the new attempts
            self.handled_failures.remove(seq)
        # Never move the cursor back, because sessions have already seen it. Add the message to `open` instead.
        if seq <= self.ack_cursor:
            self.open.add(seq)
        self.above.discard(seq)

    def cancel_retry(self, seq: int) -> None:
        """Undo `schedule_retry` for a failure that turned out not to count."""
        self.awaiting_retry.discard(seq)
        self.failed.discard(seq)

    def mark_handled(self, seq: int) -> None:
        """Mark one message as handled."""
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
            # Forget the lower half to limit the memory. These messages may be delivered twice.
            self.above = set(sorted(self.above)[MAX_ABOVE // 2 :])

    def mark_handled_up_to(self, seq: int, outbox: Outbox) -> None:
        """Mark all messages up to ``seq`` as handled. Leave out a failed message if the session of ``outbox`` had not
        received its redelivery when the client acknowledged."""
        if not self.failed and not self.open:  # This is true in almost all cases.
            if seq > self.ack_cursor:
                self._raise_ack_cursor(seq)
            return
        # A client acknowledges everything up to a seq and may not know that a message below this seq waits for a retry.
        # The retry must still happen.
        exempt = {failed for failed in self.failed if failed <= seq and not outbox.covers(seq, failed)}
        for failed in [failed for failed in self.failed if failed <= seq and failed not in exempt]:
            self.mark_handled(failed)
        still_open = {other for other in self.open if other > seq} | exempt
        if seq <= self.ack_cursor and still_open == self.open:
            return
        self.open = still_open
        if seq > self.ack_cursor:
            self._raise_ack_cursor(seq)
        self.mark_changed()

    def _raise_ack_cursor(self, seq: int) -> None:
        self.ack_cursor = seq
        if self.above:
            self.above = {other for other in self.above if other > seq}
        self.mark_changed()

    def drop_before(self, first_seq: int) -> None:
        """Remove messages that retention has deleted from the open messages."""
        # Keep a message that waits for a retry: when its timer fires, the hub finds no row and marks the message as
        # handled.
        still_open = {seq for seq in self.open if seq >= first_seq or seq in self.awaiting_retry}
        if still_open != self.open:
            self.open = still_open
            self.mark_changed()

    def compact(self, outbox: Outbox) -> None:
        """Raise the ack cursor to the last message that was delivered to the session of ``outbox``. The session must
        have started at the cursor.

        Without this, ``above`` would grow without limit for a client that acknowledges messages one by one. The session
        received every unhandled message above the cursor. So each message was handled before the join, is in
        ``failed``, or was handed over and is not acknowledged (`Outbox.list_unacked`).
        """
        top = outbox.delivered
        if self.above and top > self.ack_cursor:
            self.compact_to(top, outbox.list_unacked(top))

    def compact_to(self, top: int, given: Iterable[int]) -> None:
        """Raise the ack cursor to ``top``. ``given`` lists the messages up to ``top`` that are neither handled nor
        failed."""
        if not self.above or top <= self.ack_cursor:
            return
        # Count failed messages as unhandled even if this session did not receive them, because another attempt follows.
        candidates = self.failed.union(given)
        self.open |= {seq for seq in candidates if self.ack_cursor < seq <= top and seq not in self.above}
        self.ack_cursor = top
        self.above = {seq for seq in self.above if seq > top}
        self.mark_changed()

    def snapshot_at_join(self) -> AckCursor:
        """Return the messages that are handled or wait for another attempt at the moment when a session joins.

        Sessions that join with equal snapshots share one object. A snapshot takes at most 32 KiB, because the size of
        ``above`` and the number of open messages per participant are limited.
        """
        above = self.above.union(seq for seq in self.awaiting_retry if seq > self.ack_cursor)
        snapshot = AckCursor(self.ack_cursor, tuple(sorted(above)), tuple(sorted(self.open - self.awaiting_retry)))
        # Share equal snapshots: thousands of sessions of one participant would otherwise take 32 KiB each.
        if snapshot != self._last_join_snapshot:
            self._last_join_snapshot = snapshot
        return self._last_join_snapshot

    def snapshot(self) -> AckCursor:
        """Return the ack cursor for storage in the ledger, and mark the mailbox as unchanged."""
        self._changed.pop(self.agent_id, None)
        # The caller has already turned the handled failures into table writes. If the list were kept, the next flush
        # would delete the records of a message that an operator restores in between.
        self.handled_failures = []
        return self.to_ack_cursor()

    def to_ack_cursor(self) -> AckCursor:
        return AckCursor(self.ack_cursor, tuple(sorted(self.above)), tuple(sorted(self.open)))
