"""A client's link to its hub: joining, staying, coming back. The lower half of `NetworkClient`, which is its `Owner`.

It owns the wire and the answers that are awaited. After a loss it joins again and sends once more, under the same ids,
whatever was not answered; a request that the connection does not survive is given up, so that it does not keep back all
others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from roundelay.network.backoff import Backoff
from roundelay.network.errors import (
    Closed,
    ConnectError,
    Forbidden,
    InternalError,
    InvalidArguments,
    NotAuthenticated,
    RetryLater,
    RoundelayError,
    Superseded,
    TooLarge,
    error_from_wire,
)
from roundelay.network.frames import ByeFrame, HelloFrame, ModInfo, decode_json, encode

from .transport import MAX_FRAME_BYTES, Crowded, Transport, Wire
from .values import Reconnected, Reconnecting, Stored, Welcome

log = logging.getLogger(__name__)

RECONNECT_BACKOFF = Backoff(0.1, 5.0)
STEADY_S = 2.0
"""A session that lived so long is no sign of trouble: after it the first try comes soon again."""
BYE_TIMEOUT_S = 2.0
MAX_LOSSES = 3
"""A request is given up when so many connections ended with one of `BLAMING_CODES` while it was the oldest without an
answer."""
BLAMING_CODES = (1002, 1003, 1007, 1011, 4400, 4413)
"""What a hub ends a connection with because of what came over it. A network that fails blames nobody: then requests
wait."""
ANSWER_TOO_LARGE = 1009
"""This end closed, since a frame was larger than it takes (RFC 6455, 7.4.1)."""
MAX_UNANSWERED, MAX_UNANSWERED_BYTES = 4096, 16 * 1024 * 1024
"""What a client has under way at most, in requests and in bytes: what it sends again to a hub that comes back. Further
ones wait for an answer, in their order; one alone may be larger."""
MADE_ROOM = 4408
CROWDED_BACKOFF = Backoff(0.1, 1.0)
COME_BACK_CODES = (1001, 1006, 1011, 4408, 4429, 4503)
"""Close codes before a welcome that another try may get past."""


class Owner(Protocol):
    """Who a link is kept for: says who it is, and takes what arrives beside answers."""

    agent_id: str

    def make_hello(self, fence: int | UnsetType) -> HelloFrame:
        """What to join with now. ``fence``: of the last session, if it had one."""

    def check_welcome(self, welcome: Welcome) -> None:
        """Raises `ConnectError` if this hub is not to be joined: nothing but the hello was sent to it."""

    def check_refusal(self, error: NotAuthenticated) -> None:
        """Raises `ConnectError` if another hub may let it in, and a later try so help."""

    def begin_session(self, welcome: Welcome, wire: Wire) -> None:
        """The hub has welcomed it; frames of this session follow."""

    def take_frame(self, frame: dict[str, Any]) -> None:
        """A frame has arrived that answers nothing."""

    def take_event(self, event: Reconnecting | Reconnected) -> None:
        """The connection was lost, or is there again."""

    def end(self) -> None:
        """The link is over; `Link.failure` says why. Comes once."""


class _Request(Struct):
    frame: bytes
    answer: asyncio.Future[Any]
    losses: int = 0

    def settle(self, outcome: object) -> None:
        """Give the answer, or the error that is raised in its place."""
        if self.answer.done():
            return
        if isinstance(outcome, RoundelayError):
            self.answer.set_exception(outcome)
            self.answer.exception()  # retrieved: nobody may be waiting any more
        else:
            self.answer.set_result(outcome)


class Link:
    """One client's way to its hub.

    ``jitter`` gives numbers from 0 to 1. ``connect_timeout_s`` bounds the way to a welcome each time, the transport's
    own time included; None: only the transport's is bounded."""

    def __init__(
        self,
        owner: Owner,
        transport: Transport,
        *,
        reconnects: bool,
        jitter: Callable[[], float],
        connect_timeout_s: float | None,
    ) -> None:
        self.welcome: Welcome | None = None
        self.as_of: int | None = None
        self.failure: RoundelayError | None = None
        self.is_closing = False
        self._owner = owner
        self._transport = transport
        self._reconnects = reconnects
        self._jitter = jitter
        self._failures = 0
        """Attempts to reconnect in a row, since the last session that lasted for `STEADY_S`."""
        self._is_unfenced = False
        """The next hello is one without the last session's fence, which a hub did not know."""
        self._wire: Wire | None = None
        self._connect_timeout_s = connect_timeout_s
        self._pending: dict[str, _Request] = {}
        """What is under way, in the order of sending."""
        self._pending_bytes = 0
        self._waiting: dict[str, _Request] = {}
        """What was asked and waits for room among those."""
        self._calls: set[str] = set()
        """The calls among both."""
        self._held: dict[str, _Request] = {}
        """Calls beyond the hub's ``max_reads``, which it would refuse; each waits until one before it is answered."""
        self._task: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which it was opened: all that it waits for belongs to that."""

    async def open(self) -> None:
        """Join for the first time; from then on the link keeps itself up. Raises what the hub said, or `ConnectError`.

        Where the hub made room for others it tries again, as long as its time lasts.
        """
        if self._task is not None:
            return
        self.loop = loop = asyncio.get_running_loop()
        deadline, failures = loop.time() + (self._connect_timeout_s or 0.0), 0
        while True:
            try:
                wire = await self._connect()
                break
            except (Closed, Crowded) as error:
                failures += 1
                pause_s = self._add_jitter(CROWDED_BACKOFF.delay_s(failures))
                is_crowded = error.code == MADE_ROOM if isinstance(error, Closed) else self._reconnects
                if is_crowded and loop.time() + pause_s < deadline:
                    await asyncio.sleep(pause_s)
                elif isinstance(error, Closed):
                    raise ConnectError(f"The hub closed the connection before the welcome ({error}).") from error
                else:
                    raise
            except RetryLater as later:  # more new ids than it takes a minute
                if not self._reconnects:
                    raise
                await asyncio.sleep(self._wait_s(later))
        self._task = asyncio.create_task(self._stay(wire), name=f"link-{self._owner.agent_id}")

    async def close(self) -> None:
        """Say goodbye. What was not answered raises `ConnectError`. Idempotent."""
        if self.is_closing:
            return
        if self.is_left_behind():
            self.is_closing, self._wire = True, None
            self.failure = self.failure or ConnectError("The client was closed.")
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

    def is_left_behind(self) -> bool:
        """Tell whether the event loop in which it was opened has ended: nothing of it can be waited for any more. Raise
        `ConnectError` if that loop still runs, in another thread."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return False
        if self.loop.is_running():
            raise ConnectError(
                f"The client of {self._owner.agent_id} is connected in the event loop of another thread. Use it there, "
                "or make another client."
            )
        return True

    def check_loop(self) -> None:
        """Raise `ConnectError` in another event loop than the one in which it was opened: what was waited for there
        would never come."""
        if self.is_left_behind():
            raise ConnectError(
                f"The client of {self._owner.agent_id} was connected in another event loop, which has ended. Await "
                "connect() in this one."
            )

    @property
    def is_connected(self) -> bool:
        """Whether it has a wire on which it was welcomed."""
        return self._wire is not None

    async def ask(self, key: str, frame: bytes) -> Any:
        """Send a frame until it is answered under ``key``; gives the answer. Waits for room first where too much is
        unanswered. Raises what the hub answered, or what ended the link.

        `TooLarge`: the hub would close the connection at such a frame. `InternalError`: the connection was lost with it
        again and again."""
        if self.failure is not None:
            raise self.failure
        if self._task is None:
            raise ConnectError("This client has not connected yet; use `async with` or await connect().")
        self.check_loop()
        if key in self._pending or key in self._waiting or key in self._held:
            raise InvalidArguments(f"{key[2:]!r} is under way already; choose another id.")
        too_large = self._too_large(frame)
        if too_large is not None:
            raise too_large
        request = _Request(frame, asyncio.get_running_loop().create_future())
        if key.startswith("c:") and (self._held or not self._may_call()):
            self._held[key] = request
        else:
            self._admit(key, request)
        try:
            return await request.answer
        finally:
            if request.answer.cancelled():
                self._drop(key)
                self._serve()

    def push(self, frame: bytes, *, may_drop: bool = False) -> None:
        """Send a frame; it is gone if the link is down, or if the hub would not take it. ``may_drop``: also while the
        hub takes nothing and enough waits."""
        if self._wire is None or (may_drop and self._wire.is_full):
            return
        too_large = self._too_large(frame)
        if too_large is not None:
            log.warning("a frame is dropped: %s", too_large)
            return
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        if self._wire is not None:
            try:
                self._wire.send(frame)
            except Closed:
                return  # the reader of this wire finds out, and what has an answer is sent again

    # --- joining

    async def _connect(self) -> Wire:
        """Connect and join. Raises `ConnectError`, what the hub said, or `Closed`; then nothing is left of the
        connection."""
        timeout_s = self._connect_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s if timeout_s is not None else None
        wire = await self._transport.connect()
        try:
            async with asyncio.timeout_at(deadline):
                await self._join(wire)
        except TimeoutError as error:
            await wire.drop()
            raise ConnectError(
                f"The hub took the connection, but {self._owner.agent_id} was not welcomed within {timeout_s:g} s; it "
                "may be stopped, or its "
                "disk be slow: see roundelay status. More time: connect_timeout_s, or ROUNDELAY_CONNECT_TIMEOUT_S."
            ) from error
        except BaseException:
            await wire.drop()
            raise
        return wire

    async def _join(self, wire: Wire) -> None:
        """Say hello and take the welcome. Raises what the hub said, or `Closed`."""
        last = None if self._is_unfenced else self.welcome
        self._is_unfenced = False
        fence: int | UnsetType = last.fence if last is not None and last.fence is not None else UNSET
        hello = self._owner.make_hello(fence)
        wire.send(encode(hello))
        frames = wire.frames()
        error: RoundelayError | None = None
        try:
            frame = decode_json(await anext(frames))
            if frame["type"] == "welcome":
                welcome = _read_welcome(frame)
                self._owner.check_welcome(welcome)
                self._take_welcome(wire, welcome)
                return
            error = _read_error(frame)
            await anext(frames)
        except Closed as closed:
            if closed.code == 4409:
                overtaken = self._superseded()
                overtaken.was_away = True
                raise overtaken from closed
            if closed.code == 4413 and hello.card is not UNSET:
                size = len(bytes(hello.card))
                raise TooLarge(
                    f"The hub takes no hello this large: the card has {size} bytes; describe {hello.agent_id} in "
                    "fewer words."
                ) from closed
            if error is None:
                raise
            if closed.code == 4403 and fence is not UNSET:
                # a hub whose ledger was lost or replaced never gave this fence out; an overtaken one ends with 4409
                self._is_unfenced = True
                raise Closed(4503, error.message) from closed
            if isinstance(error, NotAuthenticated):
                self._owner.check_refusal(error)
            raise error from closed
        raise Closed(1006, "the hub went on after an error")

    def _take_welcome(self, wire: Wire, welcome: Welcome) -> None:
        self.welcome = welcome
        self._wire = wire
        self._owner.begin_session(welcome, wire)
        for key, request in list(self._pending.items()):
            self._begin(key, request)
        self._serve()

    # --- staying

    async def _stay(self, wire: Wire) -> None:
        """Read until the end; come back as long as that may help. Owns the wire."""
        try:
            loop = asyncio.get_running_loop()
            while True:
                joined_at = loop.time()
                closed = await self._read(wire)
                self._wire = None
                await wire.drop()
                if loop.time() - joined_at >= STEADY_S:
                    self._failures = 0
                self._count_loss(closed)
                ending = self._ending(closed)
                if ending is not None:
                    self._end(ending)
                    return
                wire = await self._come_back(str(closed))
        except RoundelayError as error:
            self._end(error)
        except Exception as error:
            log.exception("a client's link failed", extra={"agent_id": self._owner.agent_id})
            self._wire = None
            await wire.drop()  # nothing reads it any more: what the hub would send on it is for the next session
            self._end(InternalError(f"The client failed on what the hub sent: {type(error).__name__}: {error}"))

    async def _read(self, wire: Wire) -> Closed:
        """Hand on what arrives until the connection closes; gives how it did."""
        try:
            async for data in wire.frames():
                frame = decode_json(data)
                match frame["type"]:
                    case "error":
                        self._refuse(frame)
                    case "result":
                        self.as_of = frame.get("as_of")
                        self._resolve(f"c:{frame['call_id']}", frame["value"])
                    case "stored" if "message_id" in frame:
                        self._store(f"m:{frame['message_id']}", frame)
                    case "stored":
                        self._store(f"r:{frame['record_id']}", frame)
                    case _:
                        self._owner.take_frame(frame)
        except Closed as closed:
            return closed
        return Closed(1006, "the connection ended")

    def _refuse(self, frame: dict[str, Any]) -> None:
        error = _read_error(frame)
        for prefix, name in (("m:", "message_id"), ("c:", "call_id"), ("r:", "record_id")):
            if name in frame:
                self._resolve(prefix + frame[name], error)
                return
        log.warning("the hub refused a frame: %s", error, extra={"code": frame["code"]})

    def _store(self, key: str, frame: dict[str, Any]) -> None:
        self._resolve(key, Stored(frame["seq"], key[2:], frame["duplicate"], frame.get("thread_id", "")))

    def _count_loss(self, closed: Closed) -> None:
        """Give up what would be repeated in vain: it would end the next session too, and nothing behind it would ever
        be answered."""
        if closed.code == ANSWER_TOO_LARGE:
            error = TooLarge(
                f"The hub's answer to one of the calls under way is larger than {MAX_FRAME_BYTES} bytes; ask for less "
                "at a time."
            )
            for key in [key for key in self._pending if key.startswith("c:")]:
                self._resolve(key, error)
        elif closed.code in BLAMING_CODES and self._pending:
            key, oldest = next(iter(self._pending.items()))
            oldest.losses += 1
            if oldest.losses >= MAX_LOSSES:
                self._resolve(
                    key,
                    InternalError(
                        f"The hub ended {MAX_LOSSES} connections while this request was the oldest without an answer "
                        f"({closed}); "
                        "it is not repeated, and whether the hub took it is unknown."
                    ),
                )

    def _ending(self, closed: Closed) -> RoundelayError | None:
        """What a close means for good, or None if coming back may help."""
        if self.is_closing or not self._reconnects or closed.code == 1000:
            return ConnectError(f"The connection to the hub has ended ({closed}).")
        if closed.code == 4409:
            return self._superseded()
        if closed.code in (4400, 4401, 4403):
            return Forbidden(f"The hub ended the session: {closed.reason or closed.code}.")
        return None

    def _end(self, error: RoundelayError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        for key in [*self._pending, *self._waiting, *self._held]:
            self._resolve(key, error)
        self._owner.end()

    # --- coming back

    async def _come_back(self, reason: str) -> Wire:
        """Try until the hub welcomes this client again. Raises the error for which no further try helps."""
        min_s = 0.0
        while True:
            self._failures += 1
            pause_s = self._add_jitter(max(RECONNECT_BACKOFF.delay_s(self._failures), min_s))
            self._owner.take_event(Reconnecting(reason, pause_s))
            await asyncio.sleep(pause_s)
            min_s = 0.0
            try:
                wire = await self._connect()
            except ConnectError as error:
                reason = str(error)
            except RetryLater as later:
                reason = str(later)
                min_s = min(self._wait_s(later), RECONNECT_BACKOFF.max_s)
            except Closed as closed:
                reason = str(closed)
                if closed.code not in COME_BACK_CODES:
                    raise ConnectError(f"The hub ended the session: {closed}") from closed
            else:
                assert self.welcome is not None
                self._owner.take_event(Reconnected(self.welcome))
                return wire

    def _add_jitter(self, delay_s: float) -> float:
        """Return half to all of a delay, so that the clients of a restarted hub do not all reconnect at once."""
        return delay_s * (0.5 + self._jitter() / 2)

    def _wait_s(self, later: RetryLater) -> float:
        """How long to wait for a hub that says when: a little longer, so that those who wait do not all come at
        once."""
        return later.retry_after_ms / 1000 * (1 + self._jitter())

    def _superseded(self) -> Superseded:
        return Superseded(f"A newer reactor of {self._owner.agent_id} has taken over; this one must not react again.")

    # --- requests: within what a client may have under way

    def _admit(self, key: str, request: _Request) -> None:
        """Send a request, or let it wait for room."""
        if key.startswith("c:"):
            self._calls.add(key)
        if self._waiting or not self._has_room(request):
            self._waiting[key] = request
        else:
            self._begin(key, request)

    def _begin(self, key: str, request: _Request) -> None:
        """Send a request, now or again. One that the hub no longer takes, which may have come back with other limits,
        has its answer."""
        self._pending_bytes += 0 if key in self._pending else len(request.frame)
        self._pending[key] = request
        too_large = self._too_large(request.frame)
        if too_large is not None:
            self._drop(key)
            request.settle(too_large)
        else:
            self._send(request.frame)

    def _resolve(self, key: str, outcome: object) -> None:
        """A request has its answer, or the error that is raised in its place."""
        request = self._drop(key)
        self._serve()
        if request is not None:
            request.settle(outcome)

    def _drop(self, key: str) -> _Request | None:
        """A request is over, wherever it stood."""
        self._calls.discard(key)
        request = self._pending.pop(key, None)
        if request is None:
            return self._waiting.pop(key, None) or self._held.pop(key, None)
        self._pending_bytes -= len(request.frame)
        return request

    def _serve(self) -> None:
        """Let go what waits for room, or for a call to end."""
        while self._waiting and self.failure is None and self._has_room(next(iter(self._waiting.values()))):
            key = next(iter(self._waiting))
            self._begin(key, self._waiting.pop(key))
        while self._held and self.failure is None and self._may_call():
            key = next(iter(self._held))
            self._admit(key, self._held.pop(key))

    def _may_call(self) -> bool:
        most = self._limit("max_reads")
        return most is None or len(self._calls) < most

    def _has_room(self, request: _Request) -> bool:
        size = self._pending_bytes + len(request.frame)
        return not self._pending or (len(self._pending) < MAX_UNANSWERED and size <= MAX_UNANSWERED_BYTES)

    def _too_large(self, frame: bytes) -> TooLarge | None:
        most = self._limit("max_frame_bytes")
        if most is None or len(frame) <= most:
            return None
        return TooLarge(
            f"The frame has {len(frame)} bytes, and this hub takes at most {most} (max_frame_bytes); send it in "
            "parts, or a reference to it."
        )

    def _limit(self, name: str) -> int | None:
        """One of the hub's limits, if it is known and holds for this participant."""
        return self.welcome.limits.get(name) if self.welcome is not None else None


def _read_error(frame: dict[str, Any]) -> RoundelayError:
    return error_from_wire(frame["code"], frame["message"], frame.get("retry_after_ms"))


def _read_welcome(frame: dict[str, Any]) -> Welcome:
    welcome = msgspec.convert({**frame, "mods": []}, Welcome)
    return structs.replace(welcome, mods=_read_mods(json.dumps(frame.get("mods", []))))


@lru_cache(maxsize=16)
def _read_mods(mods: str) -> list[ModInfo]:
    """What a hub says of its mods is the same for each client of a process, and 15 KB: they share it."""
    return msgspec.convert(json.loads(mods), list[ModInfo])
