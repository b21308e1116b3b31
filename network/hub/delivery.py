"""Deliveries of each session, and handled messages of each participant: windows, bounded queues, ack cursors.

An `Outbox` belongs to one session. While the session is *live*, published messages are pushed into its outbox. When the
queue overflows, the session is *behind*: the queue is dropped, and pages are read from the ledger until the session has
caught up. A `Mailbox` belongs to one participant: its ack cursor, the messages handled above the cursor, and those that
wait for another attempt. Decides in memory; no IO, no clock.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from typing import TypeAlias

from roundelay.network.core.ack_cursor import AckCursor

# The counters of one participant with one session; seqs grow to the right. With two sessions there are two outboxes.
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
# In each session cursor <= delivered <= _done <= position <= head. An acknowledgement moves through from right to left:
#
#   ack 9            Outbox.release_up_to: what was handed over up to 9 leaves the window, without later redeliveries.
#                    Mailbox.mark_handled_up_to: ack_cursor = 9. `open` below is emptied, without failed messages that
#                    were not delivered again.
#   ack 12, only     Outbox.release, Mailbox.mark_handled: 12 joins `above`, until `compact` moves the cursor past it.
#   nack 7           Mailbox.schedule_retry: 7 joins `awaiting_retry` and `failed`, below the cursor also `open`.
#                    `redelivery` repeats it.
#
# `ack_cursor` belongs to the participant. Any session moves it, by its acknowledgements (never above its own `delivered`)
# or by `compact`. So the cursor may be above a slow session's position, and nothing of that session may depend on it:
#
#   - What a page leaves out was handled when the session joined, and is handled still.
#   - An ack below the cursor only makes room in the window.
#
# A session is given the same messages whether it is live or behind.

MAX_OWN = 1 << 16
"""Own sends that a session remembers while it is behind (512 KiB). Older ones are delivered to it like anybody's."""
MAX_ABOVE = 4096
"""Single acknowledgements that are kept above an ack cursor that cannot follow, as with a client that names its cursor
itself."""

Delivery: TypeAlias = tuple[int, bytes, bool]
"""A message's seq, its frame, and whether it has to be acknowledged. Recipients of the same message share it."""

_NOTHING_QUEUED: deque[Delivery] = deque()
"""Queue of each session that was never given anything; never changed. An empty deque takes 760 bytes."""


class Outbox:
    """The deliveries of one session, in order: at most ``max_unacked`` unacknowledged, at most ``max_bytes`` queued."""

    def __init__(self, max_unacked: int, max_bytes: int) -> None:
        self.is_behind = True
        self.is_silent = False
        """Whether nothing is delivered here, since the client polls (``network.receive``)."""
        self.is_paging = False
        self.position = 0
        """Everything up to this seq was handed over or is in the queue."""
        self.delivered = 0
        """The highest seq handed over."""
        self.queued_bytes = 0
        self._done = 0
        """Everything up to this seq was handed over, or was the session's own. An overflow goes back to here."""
        self._own = array("Q")
        """Seqs above ``_done`` that the session sent itself, ascending. Pages must leave them out."""
        self.skipped: set[int] = set()
        """Seqs left out of a page because they wait for another attempt, which goes to this session too."""
        self._max_unacked = max_unacked
        self._max_bytes = max_bytes
        self._unacked: dict[int, None] = {}
        self._queue = _NOTHING_QUEUED
        self._redeliveries: dict[int, int] = {}
        """Redeliveries in the window or the queue, which are out of order. The value is the highest seq that had been
        handed over before."""

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def start(self, cursor: int) -> None:
        """Start after ``cursor``, behind until the first page has been read. A silent outbox stays behind forever."""
        if self.is_silent:
            return
        self.position = self.delivered = self._done = cursor

    def push(self, delivery: Delivery) -> bool:
        """Queue a published message. Return False if the queue overflowed: it is dropped, and the outbox is behind."""
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.append(delivery)
        self.queued_bytes += len(delivery[1])
        self.position = delivery[0]
        # A message larger than the bound is still queued alone. Otherwise the session would fall behind at it again and
        # again.
        if self.queued_bytes <= self._max_bytes or len(self._queue) == 1:
            return True
        # Keep redeliveries up to `_done`: the pages to come start above it and do not bring them.
        self._queue = deque(item for item in self._queue if item[0] <= self._done)
        self._redeliveries = {seq: before for seq, before in self._redeliveries.items() if seq <= self._done}
        self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self.position = self._done
        self.is_behind = True
        return False

    def skip_own(self, seq: int) -> None:
        """Pass over a message that the session sent itself."""
        if self.is_silent:
            return
        if not self.is_behind:
            self.position = seq
            # Nothing is queued that an overflow could drop, so `_done` moves on and the own seq need not be kept.
            if not self._queue:
                self._done = seq
                return
        self._own.append(seq)  # an overflow may go back below this seq
        if len(self._own) > MAX_OWN:
            del self._own[: MAX_OWN // 2]

    def is_own(self, seq: int) -> bool:
        """Return whether the session sent this message itself."""
        own = self._own
        at = bisect_left(own, seq)
        return at < len(own) and own[at] == seq

    def push_redelivery(self, seq: int, frame: bytes) -> None:
        """Queue a redelivery before everything else."""
        self._redeliveries[seq] = self.delivered
        # A message that this session has not had is queued in order: an ack of it must not cover what is below it.
        is_new = seq > self.delivered
        at = sum(queued < seq for queued, _, _ in self._queue) if is_new else 0
        if self._queue is _NOTHING_QUEUED:
            self._queue = deque()
        self._queue.insert(at, (seq, frame, True))
        self.queued_bytes += len(frame)

    def take_frames(self, max_bytes: int) -> list[bytes]:
        """Hand over what the window and ``max_bytes`` allow, at least one frame."""
        frames: list[bytes] = []
        size = newest = 0
        queue, unacked, redeliveries = self._queue, self._unacked, self._redeliveries
        while queue and size < max_bytes:
            seq, frame, needs_ack = queue[0]
            # The window counts only what the client has to acknowledge. Messages of its own participant pass a full
            # window.
            if needs_ack:
                if len(unacked) >= self._max_unacked:
                    break
                unacked[seq] = None
            queue.popleft()
            size += len(frame)
            frames.append(frame)
            if redeliveries and seq in redeliveries:
                # Remember the seq at the hand-over, not at the push: acks that were sent in between cannot mean this
                # redelivery.
                redeliveries[seq] = max(self.delivered, newest)
            if seq > newest:
                newest = seq
        self.delivered = max(self.delivered, newest)
        self._done = max(self._done, newest)
        self.queued_bytes -= size
        if self._own and not queue and not self.is_behind:
            self._done = self.position  # nothing is left that an overflow could go back to
            del self._own[:]
        return frames

    def has_work(self) -> bool:
        """Return whether `take_frames` would hand anything over."""
        return bool(self._queue) and (len(self._unacked) < self._max_unacked or not self._queue[0][2])

    def wants_page(self) -> bool:
        """Return whether the outbox is behind and has room for another page."""
        if self.is_silent or not self.is_behind or self.is_paging:
            return False
        # A page with a full window would only fill memory: read it when the client has acknowledged something.
        return not self._queue and len(self._unacked) < self._max_unacked

    def is_unacked(self, seq: int) -> bool:
        """Return whether this message was handed over and is neither acknowledged nor refused."""
        return seq in self._unacked

    def has(self, seq: int) -> bool:
        """Return whether this message is in the window or the queue."""
        return seq in self._unacked or seq in self._redeliveries or any(queued == seq for queued, _, _ in self._queue)

    def has_or_will_get(self, seq: int) -> bool:
        """Return whether this message is in the window, in the queue, or in a page to come."""
        return not self.is_silent and (seq > self.position or self.has(seq))

    def release(self, seq: int) -> None:
        """Remove a message from the window: it is handled, or will be delivered again."""
        if seq in self._redeliveries and seq not in self._unacked:  # its redelivery is still in the queue
            self._queue = deque(item for item in self._queue if item[0] != seq)
            self.queued_bytes = sum(len(item[1]) for item in self._queue)
        self._unacked.pop(seq, None)
        self._redeliveries.pop(seq, None)

    def covers(self, acked: int, seq: int) -> bool:
        """Return whether an acknowledgement of everything up to ``acked`` means this message too.

        A redelivery that was handed over after ``acked`` may have been on its way when the client acknowledged. The
        client cannot have meant it.
        """
        return seq in self._unacked and seq <= acked and (seq == acked or acked > self._redeliveries.get(seq, -1))

    def release_up_to(self, seq: int) -> None:
        """Remove everything up to ``seq`` that the acknowledgement `covers` from the window."""
        unacked = self._unacked
        if self._redeliveries:
            for redelivered in [other for other in self._redeliveries if self.covers(seq, other)]:
                self.release(redelivered)
        elif seq >= self.delivered:  # nearly always: nothing above it was handed over
            unacked.clear()
            return
        # Apart from redeliveries the window is in ascending order, so the first larger seq ends the search.
        for acked in list(itertools.takewhile(lambda other: other <= seq, unacked)):
            if acked not in self._redeliveries:
                del unacked[acked]

    def first_undelivered(self) -> int | None:
        """Return the smallest seq that may have to be read from the ledger, or None if the session is up to date."""
        # Queued messages count: an overflow drops them, and then they are read again.
        queued = next((seq for seq, _, _ in self._queue if seq > self.delivered), None)
        if queued is not None:
            return queued
        return self.position + 1 if self.is_behind and not self.is_silent else None

    def list_unacked(self, top: int) -> list[int]:
        """Return the unacknowledged messages up to ``top``, and redeliveries that are still in the queue."""
        return [seq for seq in itertools.chain(self._unacked, self._redeliveries) if seq <= top]


class Mailbox:
    """The messages that one participant has handled, shared by its sessions.

    Handled are all messages up to ``ack_cursor`` without ``open``, and the seqs in ``above``. ``failed`` are messages
    whose failures the ledger keeps; ``awaiting_retry`` those of them that a timer will deliver again, the others are on
    another attempt. ``handled_failures`` are messages that failed and are handled by now. A changed mailbox is in
    ``changed``, a dict that all mailboxes share, until its next snapshot.
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
        """The highest seq handed to a session that ended, or to a client that polled."""
        self._last_join_snapshot = cursor
        self._changed = changed if changed is not None else {}

    @property
    def is_dirty(self) -> bool:
        """Whether the mailbox changed since its last snapshot."""
        return self.agent_id in self._changed

    def mark_changed(self) -> None:
        """Have the mailbox stored at the next flush."""
        self._changed[self.agent_id] = self

    def is_handled(self, seq: int) -> bool:
        return seq in self.above or (seq <= self.ack_cursor and seq not in self.open)

    def delivery_start(self) -> int:
        """Return the cursor just below the first message that is not handled."""
        return min(self.open, default=self.ack_cursor + 1) - 1

    def schedule_retry(self, seq: int) -> None:
        """Record that a message failed, or was revived, and will be delivered again."""
        self.failed.add(seq)
        self.awaiting_retry.add(seq)
        if seq in self.handled_failures:  # otherwise its new attempts would be deleted with the old ones
            self.handled_failures.remove(seq)
        # The cursor never moves back, because sessions have been told of it. `open` takes the message out from below.
        if seq <= self.ack_cursor:
            self.open.add(seq)
        self.above.discard(seq)

    def cancel_retry(self, seq: int) -> None:
        """Undo `schedule_retry`: the failure does not count."""
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
            # Forget the lowest half: those messages may be delivered twice, and memory stays bounded.
            self.above = set(sorted(self.above)[MAX_ABOVE // 2 :])

    def mark_handled_up_to(self, seq: int, outbox: Outbox) -> None:
        """Mark everything up to ``seq`` as handled, except failed messages that the session of ``outbox`` had not been
        given again when it acknowledged."""
        if not self.failed and not self.open:  # nearly always
            if seq > self.ack_cursor:
                self._raise_ack_cursor(seq)
            return
        # A client acknowledges "up to" without knowing that a message below waits for its retry. Do not lose that
        # retry.
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
        """Forget open messages that retention dropped."""
        # A retry that waits keeps its seq: its timer reads the row, finds it missing, and marks it handled.
        still_open = {seq for seq in self.open if seq >= first_seq or seq in self.awaiting_retry}
        if still_open != self.open:
            self.open = still_open
            self.mark_changed()

    def compact(self, outbox: Outbox) -> None:
        """Raise the ack cursor to what a session that started at it was delivered.

        Without this, a client that acknowledges one by one would leave an endless list ``above``. The session was given
        every open message above the cursor. So each one was handled at the join, is in ``failed``, or was given and not
        acknowledged (`Outbox.list_unacked`).
        """
        top = outbox.delivered
        if self.above and top > self.ack_cursor:
            self.compact_to(top, outbox.list_unacked(top))

    def compact_to(self, top: int, given: Iterable[int]) -> None:
        """Raise the ack cursor to ``top``. ``given``: every message up to there that is not handled and has not
        failed."""
        if not self.above or top <= self.ack_cursor:
            return
        # Failed messages are not handled even if this session did not get them: another attempt is still to come.
        candidates = self.failed.union(given)
        self.open |= {seq for seq in candidates if self.ack_cursor < seq <= top and seq not in self.above}
        self.ack_cursor = top
        self.above = {seq for seq in self.above if seq > top}
        self.mark_changed()

    def snapshot_at_join(self) -> AckCursor:
        """Return what is handled now or waits for another attempt, for a session that joins.

        Sessions that join with an equal snapshot share it. ``above`` bounds its size (32 KiB), and so does the number of
        messages that a participant may leave open.
        """
        above = self.above.union(seq for seq in self.awaiting_retry if seq > self.ack_cursor)
        snapshot = AckCursor(self.ack_cursor, tuple(sorted(above)), tuple(sorted(self.open - self.awaiting_retry)))
        # Share equal snapshots: thousands of sessions of one participant would otherwise hold 32 KiB each.
        if snapshot != self._last_join_snapshot:
            self._last_join_snapshot = snapshot
        return self._last_join_snapshot

    def snapshot(self) -> AckCursor:
        """Return what the ledger stores. Afterwards the mailbox counts as unchanged."""
        self._changed.pop(self.agent_id, None)
        # The caller has turned them into table writes. Keeping them would delete the attempts of a later revival.
        self.handled_failures = []
        return self.to_ack_cursor()

    def to_ack_cursor(self) -> AckCursor:
        return AckCursor(self.ack_cursor, tuple(sorted(self.above)), tuple(sorted(self.open)))
