"""`Link`, a client's connection to its hub: it connects, joins, and reconnects. `NetworkClient` uses a link, and
implements the protocol `Owner` for the link's callbacks.

The link owns the connection (`Wire`) and the task that reads it. It passes answers to the `RequestQueue`, and all other
frames to the owner. After a lost connection, the link joins again. The queue then sends unanswered requests again under
the same ids.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType, structs

from roundelay.network.backoff import Backoff
from roundelay.network.errors import (
    Closed,
    ConnectError,
    Forbidden,
    InternalError,
    NotAuthenticated,
    RetryLater,
    RoundelayError,
    Superseded,
    TooLarge,
    error_from_wire,
)
from roundelay.network.frames import ByeFrame, HelloFrame, ModInfo, decode_json, encode

from .requests import RequestQueue
from .transport import Crowded, Transport, Wire
from .values import Batched, Reconnected, Reconnecting, Stored, Welcome

log = logging.getLogger(__name__)

RECONNECT_BACKOFF = Backoff(0.1, 5.0)
CROWDED_BACKOFF = Backoff(0.1, 1.0)
STEADY_S = 2.0
"""Duration after which a session counts as healthy, in seconds. The next reconnect then starts with the shortest delay
again."""
BYE_TIMEOUT_S = 2.0
MADE_ROOM = 4408
"""Close code of a hub that closes a new connection to make room for others."""
COME_BACK_CODES = (1001, 1006, 1011, 4408, 4429, 4503)
"""Close codes that a hub may send before its welcome and after which another attempt may succeed."""


class Owner(Protocol):
    """The client that a link serves. It provides the ``hello`` and handles every frame that does not answer a
    request."""

    agent_id: str

    def make_hello(self, fence: int | UnsetType) -> HelloFrame:
        """Return the ``hello`` frame for a new session. ``fence`` is the fencing token of the last session."""

    def check_welcome(self, welcome: Welcome) -> None:
        """Raise `ConnectError` if the client must not join this hub. At this point, the client has sent only its
        hello."""

    def check_refusal(self, error: NotAuthenticated) -> None:
        """Raise `ConnectError` if another address may accept the token, so that a later attempt may succeed."""

    def begin_session(self, welcome: Welcome, wire: Wire) -> None:
        """Handle the start of a session. Called before any frame of the session is handled."""

    def take_frame(self, frame: dict[str, Any]) -> None:
        """Handle a frame that does not answer a request."""

    def take_event(self, event: Reconnecting | Reconnected) -> None:
        """Handle a lost or restored connection."""

    def end(self) -> None:
        """Handle the end of the link. Called once. `Link.failure` is the reason."""


class Link:
    """One client's connection to its hub, across sessions.

    ``jitter`` returns numbers from 0 to 1. ``connect_timeout_s`` limits the time of each attempt until the welcome,
    including the time that the transport needs. If ``connect_timeout_s`` is None, only the transport's own limit
    applies.
    """

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
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the link was opened in. The link's futures and tasks belong to this loop."""
        self._owner = owner
        self._transport = transport
        self._reconnects = reconnects
        self._jitter = jitter
        self._connect_timeout_s = connect_timeout_s
        self._requests = RequestQueue(self._send)
        self._failures = 0
        """Number of reconnect attempts since the last session that lasted for at least `STEADY_S`."""
        self._drops_fence = False
        """Whether to join without the last session's fencing token, because the hub did not know the token."""
        self._wire: Wire | None = None
        """The connection on which the hub has welcomed this client."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Join for the first time. After a lost connection, the link reconnects automatically. Raises the hub's
        refusal, or `ConnectError`.

        If the hub closes the connection because it has too many pending connections, try again until the timeout.
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
            except RetryLater as later:  # the hub limits new ids per minute
                if not self._reconnects:
                    raise
                await asyncio.sleep(self._delay_named_by_hub_s(later))
        self._task = asyncio.create_task(self._stay_connected(wire), name=f"link-{self._owner.agent_id}")

    async def close(self) -> None:
        """Send a goodbye to the hub and end the session. Unanswered requests raise `ConnectError`. Repeated calls
        change nothing."""
        if self.is_closing:
            return
        if self.is_left_behind():
            self.is_closing, self._wire = True, None
            self.failure = self.failure or ConnectError("The client was closed.")
            return
        self.is_closing = True
        if self._wire is not None and self._task is not None and not self._task.done():
            # The hub closes the connection after a goodbye, and then the reading task ends. Limit the wait, because the
            # hub may not respond.
            self.push(encode(ByeFrame()))
            await asyncio.wait({self._task}, timeout=BYE_TIMEOUT_S)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._wire is not None:
            await self._wire.drop()
        self._end(ConnectError("The client was closed."))

    def is_left_behind(self) -> bool:
        """Return whether the event loop of this link has ended, so that the link's tasks and futures can no longer be
        awaited. Raise `ConnectError` if that loop still runs in another thread."""
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return False
        if self.loop.is_running():
            raise ConnectError(
                f"The client of {self._owner.agent_id} is connected in the event loop of another thread. Use the client in "
                "that thread, or create another client."
            )
        return True

    def check_loop(self) -> None:
        """Raise `ConnectError` if the running event loop is not the link's own, because answers arrive only in that
        loop."""
        if self.is_left_behind():
            raise ConnectError(
                f"The client of {self._owner.agent_id} was connected in another event loop, which has ended. Await "
                "connect() in the current event loop."
            )

    @property
    def is_connected(self) -> bool:
        """Whether the hub has welcomed this client on the current connection."""
        return self._wire is not None

    async def ask(self, key: str, frame: bytes) -> Any:
        """Send a request and return the answer that arrives under ``key`` (see `RequestQueue.ask`). After a reconnect,
        an unanswered request is sent again.

        Raises the hub's error, or the failure that ended the link. Raises `InternalError` if this request has probably
        caused the hub to close the connection several times.
        """
        if self.failure is not None:
            raise self.failure
        if self._task is None:
            raise ConnectError("This client has not connected yet. Use `async with`, or await connect().")
        self.check_loop()
        return await self._requests.ask(key, frame)

    def push(self, frame: bytes, *, may_drop: bool = False) -> None:
        """Send a frame once, without waiting for an answer. The frame is dropped if there is no connection, or if it is
        larger than the hub allows. With ``may_drop``, it is also dropped while the hub reads too slowly."""
        if self._wire is None or (may_drop and self._wire.is_full):
            return
        try:
            self._requests.check_size(frame)
        except TooLarge as error:
            log.warning("A frame was dropped: %s", error)
            return
        self._send(frame)

    def _send(self, frame: bytes) -> None:
        if self._wire is not None:
            try:
                self._wire.send(frame)
            except Closed:
                # The task that reads this connection notices the failure. Requests are sent again after the reconnect.
                return

    # --- joining

    async def _connect(self) -> Wire:
        """Connect and join. Before raising an error, drop the connection. Raises `ConnectError`, the hub's refusal, or
        `Closed`."""
        timeout_s = self._connect_timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s if timeout_s is not None else None
        wire = await self._transport.connect()
        try:
            async with asyncio.timeout_at(deadline):
                await self._join(wire)
        except TimeoutError as error:
            await wire.drop()
            raise ConnectError(
                f"The hub accepted the connection, but {self._owner.agent_id} was not welcomed within {timeout_s:g} s. "
                "The hub may be stopped, or its disk slow: check with roundelay status. To wait longer, set "
                "connect_timeout_s or ROUNDELAY_CONNECT_TIMEOUT_S."
            ) from error
        except BaseException:
            await wire.drop()
            raise
        return wire

    async def _join(self, wire: Wire) -> None:
        """Send the hello and start the session. Raises the hub's refusal, or `Closed`."""
        last = None if self._drops_fence else self.welcome
        # Omit the fencing token for one attempt only. The next welcome contains a new token, which the join after it
        # must present.
        self._drops_fence = False
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
                self._start_session(wire, welcome)
                return
            # The hub sends an error and then closes the connection. Wait for the close code, which is needed to
            # interpret the error.
            error = _read_error(frame)
            await anext(frames)
        except Closed as closed:
            refusal = self._explain_refusal(hello, error, closed)
            if refusal is closed:
                raise
            raise refusal from closed
        raise Closed(1006, "the hub sent another frame after an error")

    def _explain_refusal(
        self, hello: HelloFrame, error: RoundelayError | None, closed: Closed
    ) -> RoundelayError | Closed:
        """Return the error for a connection that was closed before its welcome. ``error`` is the error that the hub has
        sent, if any. Raises `ConnectError` if an attempt at another address may succeed."""
        if closed.code == 4409:
            superseded = self._superseded()
            superseded.was_away = True
            return superseded
        if closed.code == 4413 and hello.card is not UNSET:
            return TooLarge(
                f"The hello is too large for this hub: the card of {hello.agent_id} has {len(bytes(hello.card))} bytes. "
                "Shorten its description."
            )
        if error is None:
            return closed
        if closed.code == 4403 and hello.fence is not UNSET:
            # The hub does not know this fencing token because its ledger was lost or replaced. Join again without the
            # token. If another reactor had taken over, the hub would have closed with 4409 instead.
            self._drops_fence = True
            return Closed(4503, error.message)
        if isinstance(error, NotAuthenticated):
            self._owner.check_refusal(error)
        return error

    def _start_session(self, wire: Wire, welcome: Welcome) -> None:
        self.welcome = welcome
        self._wire = wire
        # Notify the owner first, because it must reset its acknowledgements before the first answer arrives.
        self._owner.begin_session(welcome, wire)
        self._requests.resend(welcome.limits)

    # --- staying

    async def _stay_connected(self, wire: Wire) -> None:
        """Read frames until the connection ends, then reconnect, until an error ends the link permanently. This task
        owns the wire."""
        try:
            loop = asyncio.get_running_loop()
            while True:
                joined_at = loop.time()
                closed = await self._read(wire)
                self._wire = None  # from now on, requests wait instead of being sent to a dead connection
                await wire.drop()
                if loop.time() - joined_at >= STEADY_S:
                    self._failures = 0
                # Count the loss before reconnecting, because a request that ended this session would also end the next
                # session.
                self._requests.count_loss(closed)
                ending = self._find_ending(closed)
                if ending is not None:
                    self._end(ending)
                    return
                wire = await self._reconnect(str(closed))
        except RoundelayError as error:
            self._end(error)
        except Exception as error:
            log.exception("A client's link failed.", extra={"agent_id": self._owner.agent_id})
            self._wire = None
            # No task reads this connection any more. Close it, so that the hub does not deliver messages to it.
            await wire.drop()
            self._end(InternalError(f"The client failed on a frame of the hub: {type(error).__name__}: {error}"))

    async def _read(self, wire: Wire) -> Closed:
        """Dispatch frames until the connection closes. Return the close code and reason."""
        try:
            async for data in wire.frames():
                frame = decode_json(data)
                match frame["type"]:
                    case "error":
                        self._handle_error(frame)
                    case "result":
                        self.as_of = frame.get("as_of")
                        self._requests.answer(f"c:{frame['call_id']}", frame["value"])
                    case "stored" if "message_id" in frame:
                        self._handle_stored(f"m:{frame['message_id']}", frame)
                    case "stored":
                        self._handle_stored(f"r:{frame['record_id']}", frame)
                    case "batched":
                        self._requests.answer(f"b:{frame['batch_id']}", _read_batched(frame))
                    case _:
                        self._owner.take_frame(frame)
        except Closed as closed:
            return closed
        return Closed(1006, "the connection ended")

    def _handle_error(self, frame: dict[str, Any]) -> None:
        error = _read_error(frame)
        for prefix, name in (("m:", "message_id"), ("c:", "call_id"), ("r:", "record_id"), ("b:", "batch_id")):
            if name in frame:
                self._requests.answer(prefix + frame[name], error)
                return
        # An error without an id is about a frame that has no answer, such as a signal or an acknowledgement.
        log.warning("The hub refused a frame: %s", error, extra={"code": frame["code"]})

    def _handle_stored(self, key: str, frame: dict[str, Any]) -> None:
        self._requests.answer(key, _read_stored(frame))

    def _find_ending(self, closed: Closed) -> RoundelayError | None:
        """Return the error that ends the link permanently, or None if a reconnect may succeed."""
        # A hub closes with code 1000 if the client should not reconnect.
        if self.is_closing or not self._reconnects or closed.code == 1000:
            return ConnectError(f"The connection to the hub has ended ({closed}).")
        if closed.code == 4409:
            return self._superseded()
        if closed.code in (4400, 4401, 4403):
            return Forbidden(f"The hub ended the session: {(closed.reason or str(closed.code)).rstrip('.')}.")
        return None

    def _end(self, error: RoundelayError) -> None:
        # Keep the first failure, because later failures, such as a close, are only its consequences.
        if self.failure is None:
            self.failure = error
            self._requests.end(error)
            self._owner.end()

    # --- reconnecting

    async def _reconnect(self, reason: str) -> Wire:
        """Try to connect until the hub welcomes this client again. Raises an error if no further attempt can
        succeed."""
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
                # A program that was connected should be connected again soon, so limit the hub's delay to the longest
                # backoff.
                min_s = min(self._delay_named_by_hub_s(later), RECONNECT_BACKOFF.max_s)
            except Closed as closed:
                reason = str(closed)
                # Any other close code before a welcome is a refusal that the hub would repeat.
                if closed.code not in COME_BACK_CODES:
                    raise ConnectError(f"The hub ended the session: {closed}") from closed
            else:
                # Report this event after the join, so that the program can send requests when it handles the event.
                assert self.welcome is not None
                self._owner.take_event(Reconnected(self.welcome))
                return wire

    def _add_jitter(self, delay_s: float) -> float:
        """Return a random delay between half of ``delay_s`` and ``delay_s``, so that the clients of a restarted hub do
        not all reconnect at once."""
        return delay_s * (0.5 + self._jitter() / 2)

    def _delay_named_by_hub_s(self, later: RetryLater) -> float:
        """Return a random delay from the delay that the hub requested to twice this delay, in seconds. Random delays
        keep the waiting clients from all returning at once."""
        return later.retry_after_ms / 1000 * (1 + self._jitter())

    def _superseded(self) -> Superseded:
        return Superseded(
            f"A newer reactor of {self._owner.agent_id} has replaced this one, which must not react again."
        )


def _read_error(frame: dict[str, Any]) -> RoundelayError:
    return error_from_wire(frame["code"], frame["message"], frame.get("retry_after_ms"))


def _read_stored(frame: dict[str, Any]) -> Stored:
    frame_id = frame["message_id"] if "message_id" in frame else frame["record_id"]
    return Stored(frame["seq"], frame_id, frame["duplicate"], frame.get("thread_id", ""))


def _read_batched(frame: dict[str, Any]) -> Batched:
    error = frame.get("error")
    return Batched(tuple(map(_read_stored, frame["stored"])), None if error is None else _read_error(error))


def _read_welcome(frame: dict[str, Any]) -> Welcome:
    welcome = msgspec.convert({**frame, "mods": []}, Welcome)
    return structs.replace(welcome, mods=_read_mods(json.dumps(frame.get("mods", []))))


@lru_cache(maxsize=16)
def _read_mods(mods: str) -> list[ModInfo]:
    """Decode the mods of a welcome. The result is cached, because the mods are 15 KB of JSON and the same for every
    client of a process."""
    return msgspec.convert(json.loads(mods), list[ModInfo])
