"""The read budget limits the memory that unread results may take. It decides which reads may begin and which must wait.

A read in progress counts as twice ``max_result_bytes``: once for its rows, and once for the frame that is built from
them. A result counts with its own size until the connection has accepted it. Three limits apply at once: one for each
session, one for each participant with all its sessions, and one for the hub. A session without reads may always begin a
read, however small the limits are. Waiting reads take turns, first by participant, then by session. Works in memory on
the hub's loop, with the loop's timer as its only clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from roundelay.network.config import Limits

FULL_S = 2.0
"""Time for which the hub may stay at its limit, in seconds. After this time, the session with the most unread results
is closed (docs/protocol.md)."""
LARGE_BYTES = 1 << 19
REST_S_PER_BYTE = 1 / (1 << 30)
"""Pause before the next read after a large result, in seconds per byte of the result. The pause is about as long as the
loop needed to encode and write the result. The loop needs several turns to deliver other sessions' frames. Without the
pause, a read could create another large result in each of these turns."""


class ByteBudget:
    """Bytes in use under one limit. The same bytes also count under the limits of all parent budgets."""

    __slots__ = ("limit", "parent", "ready", "used")

    def __init__(self, limit: int, parent: ByteBudget | None = None) -> None:
        self.used = 0
        self.limit = limit
        self.parent = parent
        self.ready: dict[ByteBudget, None] = {}
        """Child budgets that have waiting reads, in the order of their turns. These reads may fit into the child's own
        limit."""

    def fits(self, size: int) -> bool:
        # A read that is larger than the limit may run alone. Otherwise it would wait forever.
        return not self.used or self.used + size <= self.limit

    def add(self, size: int) -> None:
        budget: ByteBudget | None = self
        while budget is not None:
            budget.used += size
            budget = budget.parent


class ParticipantBudget(ByteBudget):
    """The bytes of all sessions of one participant."""

    __slots__ = ("agent_id", "sessions")

    def __init__(self, agent_id: str, limit: int, parent: ByteBudget) -> None:
        super().__init__(limit, parent)
        self.agent_id = agent_id
        self.sessions: set[SessionReads] = set()


class SessionReads(ByteBudget):
    """The reads of one session since its first read: reads in progress, waiting reads, and results that are not yet
    written."""

    __slots__ = ("end", "in_progress", "participant", "request_bytes", "results", "unread", "waiting", "written")

    def __init__(self, limit: int, participant: ParticipantBudget, end: Callable[[], None]) -> None:
        super().__init__(limit, participant)
        self.participant = participant
        self.end = end
        """Function that ends the session. Called if the unread results of this session block all other reads."""
        self.waiting: list[asyncio.Future[None]] = []
        """Reads that wait for the budget, oldest first; at most ``max_reads``."""
        self.unread = 0
        """Bytes of results that the connection has not accepted."""
        self.in_progress = 0
        """Number of reads in progress, including waiting reads and signals to threads."""
        self.request_bytes = 0
        """Bytes of the frames that requested the reads in progress."""
        self.results: list[bytes] = []
        """Results that are not yet written. They are written one by one."""
        self.written = 0
        """Size in bytes of the result that was written last, or 0 if the connection has accepted it."""


class ReadBudget:
    """The read budget of the whole hub."""

    def __init__(self, limits: Limits) -> None:
        self.waiting = 0
        """Number of waiting reads."""
        self._limits = limits
        self._read_bytes = 2 * limits.max_result_bytes
        self._hub = ByteBudget(limits.hub_result_bytes)
        self._participants: dict[str, ParticipantBudget] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._holds = 0
        """Number of current reasons why no read may begin. Two events add a reason for a short time: a read begins, or
        a large result is encoded."""

    @property
    def used(self) -> int:
        """Bytes of all unread results and of all reads in progress."""
        return self._hub.used

    def open_session(self, agent_id: str, end: Callable[[], None]) -> SessionReads:
        """Add a session. `close_session` removes it."""
        participant = self._participants.get(agent_id)
        if participant is None:
            participant = ParticipantBudget(agent_id, self._limits.participant_result_bytes, self._hub)
            self._participants[agent_id] = participant
        reads = SessionReads(self._limits.session_result_bytes, participant, end)
        participant.sessions.add(reads)
        return reads

    async def acquire(self, reads: SessionReads) -> None:
        """Reserve the bytes of one read, and wait until the read fits. Raises `CancelledError` if the session has
        ended."""
        if reads not in reads.participant.sessions:  # the session ended while its read waited for something else
            raise asyncio.CancelledError
        # A read that fits must still wait behind other reads. Otherwise new reads could pass a waiting read forever.
        if not self._holds and not reads.waiting and not self._hub.ready and self._fits(reads):
            self._start(reads)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reads.waiting.append(turn)
        self.waiting += 1
        self._enqueue(reads)
        self._start_waiting()
        await turn

    def release(self, reads: SessionReads) -> None:
        """Free the bytes that `acquire` reserved."""
        self._free(reads, self._read_bytes)

    def add_result(self, reads: SessionReads, size: int) -> None:
        """Count a result that waits for its connection, of ``size`` bytes."""
        reads.unread += size
        reads.add(size)
        if size >= LARGE_BYTES:
            self._holds += 1
            asyncio.get_running_loop().call_later(size * REST_S_PER_BYTE, self._end_hold)

    def drop_result(self, reads: SessionReads, size: int) -> None:
        """Free the bytes of a result that the connection has accepted or that the hub has discarded."""
        reads.unread -= size
        self._free(reads, size)

    def close_session(self, reads: SessionReads) -> None:
        """Remove a session with its waiting reads and its results. Reads in progress continue, and free their bytes
        when they end."""
        for turn in reads.waiting:
            # The waiting tasks get a `CancelledError`. They free nothing, because they have reserved nothing yet.
            turn.cancel()
        self.waiting -= len(reads.waiting)
        reads.waiting.clear()
        reads.results.clear()
        participant = reads.participant
        participant.ready.pop(reads, None)
        participant.sessions.discard(reads)
        self.drop_result(reads, reads.unread)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _free(self, reads: SessionReads, size: int) -> None:
        reads.add(-size)
        # Keep the participant's budget while a read of an ended session is in progress: the bytes of this read are
        # still in use.
        if not reads.participant.used and not reads.participant.sessions:
            self._participants.pop(reads.participant.agent_id, None)
        if reads.waiting or reads.participant.ready:
            self._enqueue(reads)
        if self._hub.ready:
            self._start_waiting()

    def _fits(self, reads: SessionReads) -> bool:
        size = self._read_bytes
        return reads.fits(size) and reads.participant.fits(size) and self._hub.fits(size)

    def _enqueue(self, reads: SessionReads) -> None:
        participant = reads.participant
        if reads.waiting:
            participant.ready[reads] = None
        if participant.ready:
            self._hub.ready[participant] = None

    def _start_waiting(self) -> None:
        """Start every waiting read that fits. A participant or session at its own limit leaves the queue, and is queued
        again when it frees bytes."""
        hub, size = self._hub, self._read_bytes
        while hub.ready:
            participant = next(iter(hub.ready))
            reads = next(iter(participant.ready), None)
            if reads is None or not participant.fits(size):
                del hub.ready[participant]
                continue
            assert isinstance(reads, SessionReads)
            if not reads.waiting or not reads.fits(size):
                del participant.ready[reads]
                continue
            # Check the hold only here: readers at their own limit must leave the queue even if no read may start now.
            if self._holds:
                return
            if not hub.fits(size):
                if self._timer is None:
                    # The hub is full. Give readers this much time to accept their results before a session is evicted.
                    self._timer = asyncio.get_running_loop().call_later(FULL_S, self._evict_largest)
                return
            # Remove the session and the participant from the front of their queues. `_enqueue` adds both at the end, so
            # participants and sessions take turns.
            del participant.ready[reads], hub.ready[participant]
            turn = reads.waiting.pop(0)
            self.waiting -= 1
            self._enqueue(reads)
            # The waiting task may have been cancelled since it was queued.
            if not turn.done():
                # Wake this read before `_start` schedules the end of the hold. If the read encodes a large result at
                # once, that result extends the hold before the next read starts.
                turn.set_result(None)
                self._start(reads)

    def _start(self, reads: SessionReads) -> None:
        """Reserve the bytes of a read, and start no other read in this turn of the loop. Some reads take milliseconds,
        and frames of other sessions must be handled in between."""
        reads.add(self._read_bytes)
        self._holds += 1
        asyncio.get_running_loop().call_soon(self._end_hold)

    def _end_hold(self) -> None:
        self._holds -= 1
        self._start_waiting()

    def _evict_largest(self) -> None:
        """Choose the participant with the most unread results, and end the one of its sessions that has the most of
        them. Called when the hub has been at its limit for `FULL_S`."""
        self._timer = None
        if not self._hub.ready or self._hub.fits(self._read_bytes):
            return
        unread = {budget: sum(reads.unread for reads in budget.sessions) for budget in self._participants.values()}
        # Choose the participant first. Otherwise a participant could avoid eviction by spreading its results over many
        # sessions.
        participant = max(unread, key=lambda budget: unread[budget])
        if unread[participant]:
            max(participant.sessions, key=lambda reads: reads.unread).end()
        self._start_waiting()


class ReadSlot:
    """The share of the budget for one read. A read that waits for something releases its share and acquires it
    again."""

    def __init__(self, budget: ReadBudget, reads: SessionReads) -> None:
        self._budget = budget
        self._reads = reads
        self._is_acquired = False

    async def acquire(self) -> None:
        await self._budget.acquire(self._reads)
        self._is_acquired = True

    def release(self) -> None:
        """Release the share of the budget if it is acquired. Idempotent."""
        if self._is_acquired:
            self._is_acquired = False
            self._budget.release(self._reads)
