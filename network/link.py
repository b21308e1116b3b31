"""A client's link to its hub: joining, staying, coming back. The lower half of `NetworkClient`.

It owns the wire and the answers that are awaited. After a loss it joins again and sends once more, under the same ids, whatever
was not answered; a request that the connection does not survive is given up, so that it does not keep back all others. What arrives
beside answers goes to ``on_frame``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from .errors import (
    ConnectError,
    Forbidden,
    InternalError,
    InvalidArguments,
    RetryLater,
    RoundelayError,
    Superseded,
    TooLarge,
    error_from_wire,
)
from .frames import PROTOCOL_VERSION, ByeFrame, HelloFrame, ModInfo, ResumePoint, decode_json, encode
from .told import Cursor, Reconnected, Reconnecting, Welcome
from .transport import MAX_FRAME_BYTES, Closed, Transport, Wire

log = logging.getLogger(__name__)

FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
STEADY_S = 2.0
"""A session that lived so long is no sign of trouble: after it the first try comes soon again."""
BYE_TIMEOUT_S = 2.0
MAX_LOSSES = 3
"""A request is given up when so many connections ended with one of `BLAMING_CODES` while it was the oldest without an answer."""
BLAMING_CODES = (1002, 1003, 1007, 1011, 4400, 4413)
"""What a hub ends a connection with because of what came over it. A network that fails blames nobody: then requests wait."""
ANSWER_TOO_LARGE = 1009
"""This end closed, since a frame was larger than it takes (RFC 6455, 7.4.1)."""
MAX_UNANSWERED, MAX_UNANSWERED_BYTES = 4096, 16 * 1024 * 1024
"""What a client has under way at most, in requests and in bytes: what it sends again to a hub that comes back. Further ones wait for an
answer, in their order; one alone may be larger."""
COME_BACK_CODES = (1001, 1006, 1011, 4408, 4429, 4503)
"""Close codes before a welcome that another try may get past."""


class Joining(Struct, frozen=True, kw_only=True):
    """What every ``hello`` of a client says."""

    agent_id: str
    kind: Literal["agent", "human", "service"]
    token: str | None
    role: Literal["observer", "reactor"]
    card: bytes | None


class _Pending(Struct):
    frame: bytes
    answer: asyncio.Future[Any]
    losses: int = 0


class _Error(Struct):
    code: str
    message: str
    message_id: str | None = None
    call_id: str | None = None
    record_id: str | None = None
    retry_after_ms: int | None = None

    def exception(self) -> RoundelayError:
        return error_from_wire(self.code, self.message, self.retry_after_ms)


class Link:
    """One client's way to its hub. ``resume_at`` gives the cursor to resume from, or None to be served from the hub's floor.

    ``on_welcome`` hears of each session before its frames, ``on_frame`` gets frames that answer nothing, ``on_change`` hears of
    losses and returns, ``on_end`` is called once, with what ended the link for good. ``jitter`` gives numbers from 0 to 1.
    ``connect_timeout_s`` bounds the way to a welcome each time, the transport's own time included; None: only the transport's is bounded.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        reconnects: bool,
        resume_at: Callable[[], Cursor | None],
        on_welcome: Callable[[Welcome], None],
        on_frame: Callable[[dict[str, Any]], None],
        on_change: Callable[[Reconnecting | Reconnected], None],
        on_end: Callable[[RoundelayError], None],
        jitter: Callable[[], float],
        connect_timeout_s: float | None = None,
    ) -> None:
        self.welcome: Welcome | None = None
        self.failure: RoundelayError | None = None
        self.is_closing = False
        self._transport = transport
        self._reconnects = reconnects
        self._resume_at = resume_at
        self._on_welcome = on_welcome
        self._on_frame = on_frame
        self._on_change = on_change
        self._on_end = on_end
        self._jitter = jitter
        self._delay_s = FIRST_DELAY_S
        self._wire: Wire | None = None
        self._connect_timeout_s = connect_timeout_s
        self._pending: dict[str, _Pending] = {}
        """What is under way, in the order of sending."""
        self._pending_bytes = 0
        self._waiting: dict[str, _Pending] = {}
        """What was asked and waits for room among those."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._wire is not None

    # --- lifetime

    async def open(self, joining: Joining) -> None:
        """Join for the first time; from then on the link keeps itself up. Raises what the hub said, or `ConnectError`."""
        if self._task is not None:
            return
        while True:
            try:
                wire = await self._connect(joining)
                break
            except Closed as closed:
                raise ConnectError(f"The hub closed the connection before the welcome ({closed}).") from closed
            except RetryLater as later:  # more new ids than it takes a minute
                if not self._reconnects:
                    raise
                await asyncio.sleep(self._wait_s(later))
        self._task = asyncio.create_task(self._stay(wire, joining), name=f"link-{joining.agent_id}")

    async def close(self) -> None:
        """Say goodbye. What was not answered raises `ConnectError`. Idempotent."""
        if self.is_closing:
            return
        self.is_closing = True
        if self._wire is not None and self._task is not None and not self._task.done():
            self.push(encode(ByeFrame()))
            await asyncio.wait({self._task}, timeout=BYE_TIMEOUT_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._wire is not None:
            await self._wire.drop()
        self._end(ConnectError("The client was closed."))

    # --- asking

    def push(self, frame: bytes, *, may_drop: bool = False) -> None:
        """Send a frame that has no answer; it is gone if the link is down, or if the hub would not take it. ``may_drop``: also while
        the hub takes nothing and enough waits."""
        if self._wire is not None:
            if may_drop and self._wire.is_full:
                return
            too_large = self._too_large(frame)
            if too_large is not None:
                log.warning("a frame is dropped: %s", too_large)
                return
            try:
                self._wire.send(frame)
            except Closed:
                return  # the reader of this wire finds out, and what has an answer is sent again

    async def ask(self, key: str, frame: bytes) -> Any:
        """Send a frame until it is answered under ``key``; gives the answer. Waits for room first where too much is unanswered.
        Raises what the hub answered, or what ended the link.

        `TooLarge`: the hub would close the connection at such a frame. `InternalError`: the connection was lost with it again and again.
        """
        if self.failure is not None:
            raise self.failure
        if self._task is None:
            raise ConnectError("This client has not connected yet; use `async with` or await connect().")
        if key in self._pending or key in self._waiting:
            raise InvalidArguments(f"{key[2:]!r} is under way already; choose another id.")
        too_large = self._too_large(frame)
        if too_large is not None:
            raise too_large
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pending = _Pending(frame, answer)
        if self._waiting or not self._has_room(pending):
            self._waiting[key] = pending
        else:
            self._begin(key, pending)
        try:
            return await answer
        finally:
            if answer.cancelled():
                self._forget(key)

    def _has_room(self, pending: _Pending) -> bool:
        size = self._pending_bytes + len(pending.frame)
        return not self._pending or (len(self._pending) < MAX_UNANSWERED and size <= MAX_UNANSWERED_BYTES)

    def _begin(self, key: str, pending: _Pending) -> None:
        self._pending[key] = pending
        self._pending_bytes += len(pending.frame)
        self.push(pending.frame)

    def _forget(self, key: str) -> _Pending | None:
        """A request is over; those that wait for room may have it."""
        pending = self._pending.pop(key, None)
        if pending is None:
            return self._waiting.pop(key, None)
        self._pending_bytes -= len(pending.frame)
        while self._waiting and self.failure is None:
            next_key = next(iter(self._waiting))
            if not self._has_room(self._waiting[next_key]):
                break
            waited = self._waiting.pop(next_key)
            too_large = self._too_large(waited.frame)  # for a hub that came back meanwhile
            if too_large is None:
                self._begin(next_key, waited)
            else:
                _raise_in(waited, too_large)
        return pending

    def answer(self, key: str, value: object) -> None:
        """Resolve what is awaited under a key."""
        pending = self._forget(key)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(value)

    def _fail(self, key: str, error: RoundelayError) -> None:
        pending = self._forget(key)
        if pending is not None:
            _raise_in(pending, error)

    def _too_large(self, frame: bytes) -> TooLarge | None:
        most = self.welcome.limits.get("max_frame_bytes") if self.welcome is not None else None
        if most is None or len(frame) <= most:
            return None
        return TooLarge(
            f"The frame has {len(frame)} bytes, and this hub takes at most {most} (max_frame_bytes); send it in parts, or a reference to it."
        )

    def _refuse(self, error: _Error) -> None:
        for prefix, key in (("m:", error.message_id), ("c:", error.call_id), ("r:", error.record_id)):
            if key is not None:
                self._fail(prefix + key, error.exception())
                return
        log.warning("the hub refused a frame: %s", error.message, extra={"code": error.code})

    # --- staying

    async def _stay(self, wire: Wire, joining: Joining) -> None:
        """Read until the end; come back as long as that may help. Owns the wire."""
        try:
            loop = asyncio.get_running_loop()
            while True:
                joined_at = loop.time()
                closed = await self._read(wire)
                self._wire = None
                await wire.drop()
                if loop.time() - joined_at >= STEADY_S:
                    self._delay_s = FIRST_DELAY_S
                self._count_loss(closed)
                ending = self._ending(closed, joining.agent_id)
                if ending is not None:
                    self._end(ending)
                    return
                wire = await self._come_back(joining, str(closed))
        except RoundelayError as error:
            self._end(error)
        except Exception as error:
            log.exception("a client's link failed", extra={"agent_id": joining.agent_id})
            self._end(InternalError(f"The client failed on what the hub sent: {type(error).__name__}: {error}"))

    def _count_loss(self, closed: Closed) -> None:
        """Give up what would be repeated in vain: it would end the next session too, and nothing behind it would ever be answered."""
        if closed.code == ANSWER_TOO_LARGE:
            error = TooLarge(
                f"The hub's answer to one of the calls under way is larger than {MAX_FRAME_BYTES} bytes; ask for less at a time."
            )
            for key in [key for key in self._pending if key.startswith("c:")]:
                self._fail(key, error)
        elif closed.code in BLAMING_CODES and self._pending:
            key, oldest = next(iter(self._pending.items()))
            oldest.losses += 1
            if oldest.losses >= MAX_LOSSES:
                self._fail(
                    key,
                    InternalError(
                        f"The hub ended {MAX_LOSSES} connections while this request was the oldest without an answer ({closed}); "
                        "it is not repeated, and whether the hub took it is unknown."
                    ),
                )

    async def _come_back(self, joining: Joining, reason: str) -> Wire:
        """Try until the hub welcomes this client again. Raises the error for which no further try helps."""
        while True:
            # apart from each other, so that a restarted hub is not met by all its clients at once
            pause_s = self._delay_s * (0.5 + self._jitter() / 2)
            self._on_change(Reconnecting(reason, pause_s))
            await asyncio.sleep(pause_s)
            self._delay_s = min(self._delay_s * 2, MAX_DELAY_S)
            try:
                wire = await self._connect(joining)
            except ConnectError as error:
                reason = str(error)
            except RetryLater as later:
                reason = str(later)
                self._delay_s = min(max(self._delay_s, self._wait_s(later)), MAX_DELAY_S)
            except Closed as closed:
                reason = str(closed)
                if closed.code not in COME_BACK_CODES:
                    raise ConnectError(f"The hub ended the session: {closed}") from closed
            else:
                assert self.welcome is not None
                self._on_change(Reconnected(self.welcome))
                return wire

    def _wait_s(self, later: RetryLater) -> float:
        """How long to wait for a hub that says when: a little longer, so that those who wait do not all come at once."""
        return later.retry_after_ms / 1000 * (1 + self._jitter())

    def _ending(self, closed: Closed, agent_id: str) -> RoundelayError | None:
        """What a close means for good, or None if coming back may help."""
        if self.is_closing or not self._reconnects or closed.code == 1000:
            return ConnectError(f"The connection to the hub has ended ({closed}).")
        if closed.code == 4409:
            return _superseded(agent_id)
        if closed.code in (4400, 4401, 4403):
            return Forbidden(f"The hub ended the session: {closed.reason or closed.code}.")
        return None

    async def _connect(self, joining: Joining) -> Wire:
        """Connect and join. Raises `ConnectError`, what the hub said, or `Closed`; then nothing is left of the connection."""
        timeout_s = self._connect_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s if timeout_s is not None else None
        wire = await self._transport.connect()
        try:
            async with asyncio.timeout_at(deadline):
                await self._join(wire, joining)
        except TimeoutError as error:
            await wire.drop()
            raise ConnectError(
                f"The hub took the connection, but {joining.agent_id} was not welcomed within {timeout_s:g} s; it may be stopped, or its disk be "
                "slow: see roundelay status. More time: connect_timeout_s, or ROUNDELAY_CONNECT_TIMEOUT_S."
            ) from error
        except BaseException:
            await wire.drop()
            raise
        return wire

    async def _join(self, wire: Wire, joining: Joining) -> None:
        """Say hello and take the welcome. Raises what the hub said, or `Closed`."""
        last = self.welcome
        fence: int | UnsetType = last.fence if last is not None and last.fence is not None else UNSET
        cursor = self._resume_at()
        hello = HelloFrame(
            protocol=PROTOCOL_VERSION,
            agent_id=joining.agent_id,
            kind=joining.kind,
            token=UNSET if joining.token is None else joining.token,
            role=joining.role,
            fence=fence,
            resume=UNSET if cursor is None else ResumePoint(cursor.epoch, cursor.seq),
            card=UNSET if joining.card is None else Raw(joining.card),
            client="roundelay",
        )
        wire.send(encode(hello))
        frames = wire.frames()
        error: _Error | None = None
        try:
            frame = decode_json(await anext(frames))
            if frame["type"] == "welcome":
                self._take_welcome(wire, _read_welcome(frame))
                return
            error = msgspec.convert(frame, _Error)
            await anext(frames)
        except Closed as closed:
            if closed.code == 4409:
                raise _superseded(joining.agent_id) from closed
            if closed.code == 4413 and joining.card is not None:
                raise TooLarge(
                    f"The hub takes no hello this large: the card has {len(joining.card)} bytes; describe {joining.agent_id} more shortly."
                ) from closed
            if error is None:
                raise
            if closed.code == 4403 and fence is not UNSET:
                # a hub whose ledger was lost or replaced never gave this fence out; an overtaken one ends with 4409
                self.welcome = None
                raise Closed(4503, error.message) from closed
            raise error.exception() from closed
        raise Closed(1006, "the hub went on after an error")

    def _take_welcome(self, wire: Wire, welcome: Welcome) -> None:
        self.welcome = welcome
        self._wire = wire
        self._on_welcome(welcome)
        for key, pending in list(self._pending.items()):
            too_large = self._too_large(pending.frame)  # another hub's limits may be smaller
            if too_large is not None:
                self._fail(key, too_large)
            else:
                self.push(pending.frame)

    async def _read(self, wire: Wire) -> Closed:
        """Hand on what arrives until the connection closes; gives how it did."""
        try:
            async for data in wire.frames():
                frame = decode_json(data)
                match frame["type"]:
                    case "error":
                        self._refuse(msgspec.convert(frame, _Error))
                    case "result":
                        self.answer(f"c:{frame['call_id']}", frame["value"])
                    case _:
                        self._on_frame(frame)
        except Closed as closed:
            return closed
        return Closed(1006, "the connection ended")

    def _end(self, error: RoundelayError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        for key in [*self._pending, *self._waiting]:
            self._fail(key, error)
        self._on_end(error)


def _raise_in(pending: _Pending, error: RoundelayError) -> None:
    if not pending.answer.done():
        pending.answer.set_exception(error)
        pending.answer.exception()  # retrieved: nobody may be waiting any more


def _read_welcome(frame: dict[str, Any]) -> Welcome:
    welcome = msgspec.convert({**frame, "mods": []}, Welcome)
    return structs.replace(welcome, mods=_read_mods(json.dumps(frame.get("mods", []))))


@lru_cache(maxsize=16)
def _read_mods(mods: str) -> list[ModInfo]:
    """What a hub says of its mods is the same for each client of a process, and 15 KB: they share it."""
    return msgspec.convert(json.loads(mods), list[ModInfo])


def _superseded(agent_id: str) -> Superseded:
    return Superseded(f"A newer reactor of {agent_id} has taken over; this one must not react again.")
