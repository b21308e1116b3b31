"""Reads: operations that change nothing. They run beside the batches, on the committed state and the ledger.

`answer_read` performs one. `Room` decides who may begin to read and who waits, so that what is read and not yet taken
by a connection stays bounded; it decides in memory, on the hub's loop, and its only clock is the loop's timer.

A read that is under way counts as twice `max_result_bytes` (its rows, and the frame that is made of them), a result as
its own size until the connection has taken it. Three bounds hold at once: of a session, of a participant with all of
its sessions, of the hub. Whoever holds nothing may begin one read, however small a bound is. Those who wait take turns:
participants among each other, then the sessions of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import msgspec
from msgspec import UNSET, Raw, UnsetType

from roundelay.network.clock import NewId
from roundelay.network.config import Limits
from roundelay.network.core.entries import Origin, error_bytes
from roundelay.network.core.mod import Operation
from roundelay.network.errors import InternalError, LedgerError, RoundelayError
from roundelay.network.frames import ResultFrame, encode
from roundelay.network.operations.reading import HubView, Reading

from .repeated_errors import RepeatedErrorLog

FULL_S = 2.0
"""How long everybody waits for one that does not take its results, when the hub's bound is reached
(docs/protocol.md)."""
LARGE_BYTES = 1 << 19
REST_S_PER_BYTE = 1 / (1 << 30)
"""How long no read begins after a large result, for each of its bytes: about as long as it took the loop to make
and to write it. What others sent takes several turns of the loop until it is delivered, and each of them would
make another result."""


class ByteBudget:
    """Bytes under one bound, which count under the bounds above it too."""

    __slots__ = ("limit", "parent", "ready", "used")

    def __init__(self, limit: int, parent: ByteBudget | None = None) -> None:
        self.used = 0
        self.limit = limit
        self.parent = parent
        self.ready: dict[ByteBudget, None] = {}
        """Those below that wait and may have room of their own, in turn."""

    def fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self.limit

    def add(self, size: int) -> None:
        account: ByteBudget | None = self
        while account is not None:
            account.used += size
            account = account.parent


class ParticipantBudget(ByteBudget):
    """All sessions of one participant that have read anything."""

    __slots__ = ("agent_id", "sessions")

    def __init__(self, agent_id: str, limit: int, parent: ByteBudget) -> None:
        super().__init__(limit, parent)
        self.agent_id = agent_id
        self.sessions: set[SessionReads] = set()


class SessionReads(ByteBudget):
    """One session's part, from its first read on."""

    __slots__ = ("asking", "end", "participant", "unread")

    def __init__(self, limit: int, participant: ParticipantBudget, end: Callable[[], None]) -> None:
        super().__init__(limit, participant)
        self.participant = participant
        self.end = end
        """Ends the session, which holds results while everybody waits."""
        self.asking: list[asyncio.Future[None]] = []
        """Reads that wait, the oldest first: at most `max_reads`."""
        self.unread = 0
        """Bytes of results that its connection has not taken."""


class ReadBudget:
    """The hub's room."""

    def __init__(self, limits: Limits) -> None:
        self.waiting = 0
        """Reads that wait."""
        self._limits = limits
        self._read_bytes = 2 * limits.max_result_bytes
        self._hub = ByteBudget(limits.hub_result_bytes)
        self._participants: dict[str, ParticipantBudget] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._holds = 0
        """How many reasons there are why no read begins now: one has in this turn, or a large result was made."""

    @property
    def used(self) -> int:
        """Bytes that all sessions hold: results, and reads under way by what they may come to."""
        return self._hub.used

    def open_session(self, agent_id: str, end: Callable[[], None]) -> SessionReads:
        """A session's part; `close` comes with its end."""
        participant = self._participants.get(agent_id)
        if participant is None:
            participant = ParticipantBudget(agent_id, self._limits.participant_result_bytes, self._hub)
            self._participants[agent_id] = participant
        mine = SessionReads(self._limits.session_result_bytes, participant, end)
        participant.sessions.add(mine)
        return mine

    async def acquire(self, mine: SessionReads) -> None:
        """Take room for one read; wait for it if there is none. Raises `CancelledError` when the session is gone."""
        if mine not in mine.participant.sessions:  # it went while its read waited for something else
            raise asyncio.CancelledError
        if not self._holds and not mine.asking and not self._hub.ready and self._fits(mine):
            self._begin(mine)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.asking.append(turn)
        self.waiting += 1
        self._stand_in_line(mine)
        self._serve()
        await turn

    def release(self, mine: SessionReads) -> None:
        """A read is over: what `enter` took is free again."""
        self._give_back(mine, self._read_bytes)

    def add_result(self, mine: SessionReads, size: int) -> None:
        """A result was made, and waits for its connection."""
        mine.unread += size
        mine.add(size)
        if size >= LARGE_BYTES:
            self._holds += 1
            asyncio.get_running_loop().call_later(size * REST_S_PER_BYTE, self._end_hold)

    def drop_result(self, mine: SessionReads, size: int) -> None:
        """The connection has taken a result, or it is given up."""
        mine.unread -= size
        self._give_back(mine, size)

    def close_session(self, mine: SessionReads) -> None:
        """The session is gone, with what it waited for; reads that are under way end by themselves."""
        for turn in mine.asking:
            turn.cancel()
        self.waiting -= len(mine.asking)
        mine.asking.clear()
        participant = mine.participant
        participant.ready.pop(mine, None)
        participant.sessions.discard(mine)
        self.drop_result(mine, mine.unread)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _give_back(self, mine: SessionReads, size: int) -> None:
        mine.add(-size)
        if not mine.participant.used and not mine.participant.sessions:
            self._participants.pop(mine.participant.agent_id, None)
        if mine.asking or mine.participant.ready:
            self._stand_in_line(mine)
        if self._hub.ready:
            self._serve()

    def _fits(self, mine: SessionReads) -> bool:
        size = self._read_bytes
        return mine.fits(size) and mine.participant.fits(size) and self._hub.fits(size)

    def _stand_in_line(self, mine: SessionReads) -> None:
        participant = mine.participant
        if mine.asking:
            participant.ready[mine] = None
        if participant.ready:
            self._hub.ready[participant] = None

    def _serve(self) -> None:
        """Let begin who can. Whoever has no room of its own leaves the line, and is back in it when it gives something
        back."""
        hub, size = self._hub, self._read_bytes
        while hub.ready:
            participant = next(iter(hub.ready))
            mine = next(iter(participant.ready), None)
            if mine is None or not participant.fits(size):
                del hub.ready[participant]
                continue
            assert isinstance(mine, SessionReads)
            if not mine.asking or not mine.fits(size):
                del participant.ready[mine]
                continue
            if self._holds:
                return
            if not hub.fits(size):
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(FULL_S, self._make_room)
                return
            del participant.ready[mine], hub.ready[participant]
            turn = mine.asking.pop(0)
            self.waiting -= 1
            self._stand_in_line(mine)
            if not turn.done():
                turn.set_result(None)  # before the next one may begin: what it makes at once holds that up
                self._begin(mine)

    def _begin(self, mine: SessionReads) -> None:
        """One read begins in each turn of the loop: some take milliseconds at once, and what others sent comes in
        between."""
        mine.add(self._read_bytes)
        self._holds += 1
        asyncio.get_running_loop().call_soon(self._end_hold)

    def _end_hold(self) -> None:
        self._holds -= 1
        self._serve()

    def _make_room(self) -> None:
        """The hub's bound has been reached for a while: the session that holds the most of the participant that does
        goes."""
        self._timer = None
        if not self._hub.ready or self._hub.fits(self._read_bytes):
            return
        unread = {it: sum(mine.unread for mine in it.sessions) for it in self._participants.values()}
        participant = max(unread, key=lambda it: unread[it])
        if unread[participant]:
            max(participant.sessions, key=lambda mine: mine.unread).end()
        self._serve()


class ReadSlot:
    """The room of one read: taken, given back, and taken again after a wait."""

    def __init__(self, room: ReadBudget, mine: SessionReads) -> None:
        self._room = room
        self._mine = mine
        self._is_taken = False

    async def acquire(self) -> None:
        await self._room.acquire(self._mine)
        self._is_taken = True

    def release(self) -> None:
        """Idempotent."""
        if self._is_taken:
            self._is_taken = False
            self._room.release(self._mine)


log = logging.getLogger(__name__)


async def answer_read(
    hub: HubView,
    origin: Origin,
    operation: Operation,
    call_id: str,
    args: msgspec.Struct,
    new_id: NewId,
    outage: RepeatedErrorLog,
    place: ReadSlot | None = None,
    as_of: int | UnsetType = UNSET,
) -> bytes:
    """Perform one reading operation; gives the ``result`` or ``error`` frame, whatever happens. ``place`` is the room
    that it has for its result, ``as_of`` what a node that follows says of it."""
    who = f"{operation.op} of {origin.agent_id}"
    try:
        reading = Reading(origin, hub, operation.op.partition(".")[0], place)
        value = await operation.call(reading, args)
        if outage.is_failing:
            outage.record_success(who)
        return encode(
            ResultFrame(call_id=call_id, value=cast(Raw, value), as_of=as_of)
        )  # at once: a result has megabytes
    except LedgerError as error:
        quote = outage.record(error, who)
        internal = InternalError(f"The hub cannot read its ledger; call again, or quote {quote} to its operator.")
        return error_bytes(internal, {"call_id": call_id})
    except RoundelayError as error:
        return error_bytes(error, {"call_id": call_id})
    except Exception:  # a defect of one operation must not end the hub
        quote = new_id()
        log.exception("an operation failed", extra={"quote": quote, "op": operation.op})
        internal = InternalError(f"The hub failed on this call; quote {quote} to its operator.")
        return error_bytes(internal, {"call_id": call_id})
