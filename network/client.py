"""`NetworkClient`: one participant's connection to a hub, for programs.

It sends and waits for durable answers, gives what is delivered in order, acknowledges what was handled, and reconnects: whatever
was not answered is sent again under the same id, so that nothing is lost and nothing doubled. It works the same over a WebSocket
and in-process (`transport`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from .clock import random_id
from .delivered import Acks
from .errors import (
    ConnectError,
    Forbidden,
    InvalidArguments,
    NotAuthenticated,
    RoundelayError,
    Superseded,
    error_from_wire,
)
from .frames import (
    PROTOCOL_VERSION,
    AckFrame,
    ByeFrame,
    CallFrame,
    HelloFrame,
    ModInfo,
    NackFrame,
    NetworkInfo,
    OpenReactionInfo,
    RecordFrame,
    ResumePoint,
    SendFrame,
    SignalFrame,
    encode,
)
from .home import agent_token, find_owner_token, find_url
from .messages import BroadcastMessage, ChannelMessage, DirectMessage, MessageThread, ModMessage, message_from_wire
from .transport import Closed, Transport, WebSocketTransport, Wire

log = logging.getLogger(__name__)

AnyMessage: TypeAlias = DirectMessage | BroadcastMessage | ChannelMessage | ModMessage
MAX_EVENTS = 1000
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
BYE_TIMEOUT_S = 2.0


class Cursor(Struct, frozen=True):
    """A client's own place in the log: resuming from it moves nothing on the hub."""

    epoch: str
    seq: int


class Welcome(Struct, frozen=True, kw_only=True):
    """What the hub said when this session joined; fields as in the ``welcome`` frame."""

    server: str
    network: NetworkInfo
    agent_id: str
    kind: str
    role: str
    session_id: str
    cursor: int
    head: int
    resume: str
    missing_before: int | None = None
    fence: int | None = None
    open_reactions: list[OpenReactionInfo] = []
    mods: list[ModInfo] = []
    limits: dict[str, int] = {}


class Stored(Struct, frozen=True):
    """A message or record is durable under ``seq``. ``duplicate``: it was before this send."""

    seq: int
    id: str
    duplicate: bool
    thread_id: str = ""


class Presence(Struct, frozen=True):
    agent_id: str
    state: Literal["online", "offline"]
    card: dict[str, Any] | None = None


class Signal(Struct, frozen=True):
    sender_id: str
    thread_id: str
    kind: str
    body: Any


class Notice(Struct, frozen=True):
    kind: str
    thread_id: str | None
    body: Any


class Reconnecting(Struct, frozen=True):
    """The connection was lost, or could not be made again; the next try comes after ``delay_s``."""

    reason: str
    delay_s: float


class Reconnected(Struct, frozen=True):
    welcome: Welcome


Event: TypeAlias = Presence | Signal | Notice | Reconnecting | Reconnected


class History(Struct, frozen=True):
    messages: list[AnyMessage]
    has_more: bool


class Window(Struct, frozen=True):
    threads: list[MessageThread]
    as_of: int


class _Pending(Struct):
    frame: bytes
    answer: asyncio.Future[Any]


class _Error(Struct):
    code: str
    message: str
    message_id: str | None = None
    call_id: str | None = None
    record_id: str | None = None
    retry_after_ms: int | None = None


class Delivery:
    """One message, to be acknowledged: by `ack`, by `nack`, or as ``async with delivery as message`` (ack on success, nack on error)."""

    def __init__(self, client: NetworkClient, message: AnyMessage, attempt: int) -> None:
        self.message = message
        self.attempt = attempt
        self._client = client

    async def ack(self) -> None:
        """It is handled, and will not be delivered again. Others may still be open: order does not matter."""
        self._client._acknowledge(self.message.seq)

    async def nack(self, reason: str, retry_after_ms: int | None = None) -> None:
        """It failed; it will be delivered again, at the fifth failure it becomes a dead letter."""
        await self._client.nack(self.message.seq, reason, retry_after_ms)

    async def __aenter__(self) -> AnyMessage:
        return self.message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await self.nack(f"{type(error).__name__}: {error}")


class NetworkClient:
    """One participant's session, kept alive. Use as ``async with NetworkClient("alice") as client``.

    Without ``url``, the node of this machine is found. Without ``token``, an agent's is made and saved, and a person or service
    joins with the owner's token of the node on this machine. ``resume`` starts delivery at the client's own cursor. Methods that
    send raise the `RoundelayError` that the hub answered; while the connection is down they wait.
    """

    def __init__(
        self,
        agent_id: str,
        url: str | None = None,
        *,
        kind: Literal["agent", "human", "service"] = "agent",
        token: str | None = None,
        role: Literal["observer", "reactor"] = "observer",
        card: Mapping[str, object] | None = None,
        resume: Cursor | None = None,
        reconnect: bool = True,
        transport: Transport | None = None,
    ) -> None:
        self.agent_id = agent_id
        self.kind: Literal["agent", "human", "service"] = kind
        self.url = url or (find_url() if transport is None else "")
        self._token = token
        self._role: Literal["observer", "reactor"] = role
        self._card = dict(card) if card is not None else None
        self._resume = resume
        self._reconnects = reconnect
        self._transport: Transport = transport or WebSocketTransport(self.url)
        self._is_local = transport is not None
        self._welcome: Welcome | None = None
        self._wire: Wire | None = None
        self._pending: dict[str, _Pending] = {}
        self._deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._event_arrived = asyncio.Event()
        self._acks = Acks()
        self._ack_is_due = False
        self._failure: RoundelayError | None = None
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._joined = asyncio.Event()

    # --- lifetime

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def welcome(self) -> Welcome:
        """What the hub said last. Raises `ConnectError` before the first connection."""
        if self._welcome is None:
            raise ConnectError("This client has not connected yet; use `async with` or await connect().")
        return self._welcome

    @property
    def cursor(self) -> Cursor:
        """Everything up to here was handled: to be saved, and given as ``resume`` later."""
        return Cursor(self.welcome.network.epoch, max(self._acks.prefix, self.welcome.cursor))

    async def connect(self) -> Welcome:
        """Join the network. Raises `ConnectError`, `NotAuthenticated`, `Forbidden`, `Superseded`."""
        if self._task is None:
            self._token = self._token or self._find_token()
            wire = await self._transport.connect()
            try:
                await self._join(wire)
            except BaseException:
                await wire.drop()
                raise
            self._task = asyncio.create_task(self._stay(wire), name=f"client-{self.agent_id}")
        return self.welcome

    async def close(self) -> None:
        """Say goodbye. What was sent and not answered raises `ConnectError`. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._flush_acks()
        if self._wire is not None and self._task is not None and not self._task.done():
            try:
                self._wire.send(encode(ByeFrame()))
                await asyncio.wait({self._task}, timeout=BYE_TIMEOUT_S)
            except Closed:
                pass
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._wire is not None:
            await self._wire.drop()
        self._fail(ConnectError("The client was closed."))

    def _find_token(self) -> str | None:
        if self._is_local:
            return None
        named = os.environ.get("ROUNDELAY_TOKEN")
        if named:
            return named
        return agent_token(self.url, self.agent_id) if self.kind == "agent" else find_owner_token(self.url)

    # --- the connection

    async def _stay(self, wire: Wire) -> None:
        """Read until the end; reconnect as long as that may help. Owns the wire."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                await self._read(wire)
            except Closed as closed:
                reason = str(closed)
                self._wire = None
                await wire.drop()
                ending = self._ending(closed)
                if ending is not None:
                    self._fail(ending)
                    return
            delay_s = FIRST_DELAY_S
            while True:
                pause_s = delay_s * (
                    0.5 + random.random() / 2
                )  # apart, so that a restarted hub is not hit by all at once
                self._emit(Reconnecting(reason, pause_s))
                await asyncio.sleep(pause_s)
                delay_s = min(delay_s * 2, MAX_DELAY_S)
                try:
                    wire = await self._transport.connect()
                    await self._join(wire)
                except ConnectError as error:
                    reason = str(error)
                except (NotAuthenticated, Forbidden, Superseded) as error:
                    self._fail(error)
                    return
                except Closed as closed:
                    reason = str(closed)
                    if closed.code not in (1006, 1011, 4503, 4408, 4429):
                        self._fail(ConnectError(f"The hub ended the session: {closed}"))
                        return
                else:
                    self._emit(Reconnected(self.welcome))
                    break

    def _ending(self, closed: Closed) -> RoundelayError | None:
        """Whether this close is for good."""
        if self._is_closing or not self._reconnects or closed.code == 1000:
            return ConnectError(f"The connection is closed ({closed}).")
        if closed.code == 4409:
            return Superseded(f"A newer reactor of {self.agent_id} has taken over; this one must not react again.")
        if closed.code in (4400, 4401, 4403):
            return Forbidden(f"The hub ended the session: {closed.reason or closed.code}.")
        return None

    async def _join(self, wire: Wire) -> None:
        last = self._welcome
        resume: ResumePoint | UnsetType = UNSET
        if self._resume is not None:
            cursor = self.cursor if last is not None else self._resume
            resume = ResumePoint(cursor.epoch, cursor.seq)
        hello = HelloFrame(
            protocol=PROTOCOL_VERSION,
            agent_id=self.agent_id,
            kind=self.kind,
            token=UNSET if self._token is None else self._token,
            role=self._role,
            fence=last.fence if last is not None and last.fence is not None else UNSET,
            resume=resume,
            card=UNSET if self._card is None else Raw(encode(self._card)),
            client="roundelay",
        )
        wire.send(encode(hello))
        frames = wire.frames()
        error: _Error | None = None
        try:
            frame = _decode(await anext(frames))
            if frame["type"] == "welcome":
                self._welcome = msgspec.convert(frame, Welcome)
                self._wire = wire
                self._acks.begin_session(self._welcome.cursor)
                for pending in self._pending.values():
                    wire.send(pending.frame)
                return
            error = msgspec.convert(frame, _Error)
            await anext(frames)
        except Closed as closed:
            if error is not None:
                raise error_from_wire(error.code, error.message, error.retry_after_ms) from closed
            if closed.code == 4409:
                raise Superseded(
                    f"A newer reactor of {self.agent_id} has taken over; this one must not react again."
                ) from closed
            if self._task is None:
                raise ConnectError(f"The hub closed the connection before the welcome ({closed}).") from closed
            raise

    async def _read(self, wire: Wire) -> None:
        async for data in wire.frames():
            frame = _decode(data)
            match frame["type"]:
                case "deliver":
                    self._take_delivery(frame)
                case "stored":
                    self._answer(frame)
                case "result":
                    self._resolve(f"c:{frame['call_id']}", frame["value"])
                case "error":
                    self._take_error(msgspec.convert(frame, _Error))
                case "signal":
                    self._emit(msgspec.convert(frame, Signal))
                case "presence":
                    self._emit(msgspec.convert(frame, Presence))
                case "notice":
                    self._take_notice(Notice(frame["kind"], frame.get("thread_id"), frame["body"]))
                case _:
                    continue  # a newer hub's frame

    def _take_delivery(self, frame: dict[str, Any]) -> None:
        message = message_from_wire(frame["message"])
        if self._acks.take(message.seq):
            self._deliveries.put_nowait(Delivery(self, message, frame["attempt"]))
        else:
            self._ack_soon()

    def _take_notice(self, notice: Notice) -> None:
        if (
            notice.kind == "dead_letter"
            and isinstance(notice.body, dict)
            and notice.body.get("agent_id") == self.agent_id
        ):
            self._acks.drop(int(notice.body["seq"]))
        self._emit(notice)

    def _answer(self, frame: dict[str, Any]) -> None:
        if "message_id" in frame:
            stored = Stored(frame["seq"], frame["message_id"], frame["duplicate"], frame.get("thread_id", ""))
            self._resolve(f"m:{stored.id}", stored)
        else:
            stored = Stored(frame["seq"], frame["record_id"], frame["duplicate"])
            self._resolve(f"r:{stored.id}", stored)

    def _take_error(self, error: _Error) -> None:
        for prefix, key in (("m:", error.message_id), ("c:", error.call_id), ("r:", error.record_id)):
            if key is not None:
                pending = self._pending.pop(prefix + key, None)
                if pending is not None and not pending.answer.done():
                    pending.answer.set_exception(error_from_wire(error.code, error.message, error.retry_after_ms))
                return
        log.warning("the hub refused a frame", extra={"agent_id": self.agent_id, "code": error.code})

    def _resolve(self, key: str, value: object) -> None:
        pending = self._pending.pop(key, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(value)

    def _fail(self, error: RoundelayError) -> None:
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(self._failure)
                pending.answer.exception()  # retrieved: nobody may be waiting any more
        self._pending.clear()
        self._deliveries.put_nowait(None)
        self._event_arrived.set()

    async def _ask(self, key: str, frame: bytes) -> Any:
        if self._failure is not None:
            raise self._failure
        if self._task is None:
            raise ConnectError("This client has not connected yet; use `async with` or await connect().")
        if key in self._pending:
            raise InvalidArguments(f"{key[2:]!r} is under way already; choose another id.")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[key] = _Pending(frame, answer)
        self._push(frame)
        try:
            return await answer
        finally:
            if answer.cancelled():
                self._pending.pop(key, None)

    def _push(self, frame: bytes) -> None:
        if self._wire is not None:
            try:
                self._wire.send(frame)
            except Closed:
                return  # sent again after the reconnect

    # --- sending

    async def send(
        self,
        to: str,
        content: Any,
        *,
        text_representation: str | None = None,
        reply_to: int | None = None,
        cause: int | None = None,
        exclude_agent_ids: Sequence[str] | None = None,
        requires_response: Literal[True] | Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message_id: str | None = None,
    ) -> Stored:
        """Send any JSON ``content`` to an address; returns when it is durable. ``message_id`` makes it idempotent across processes."""
        chosen = message_id if message_id is not None else random_id()
        frame = SendFrame(
            message_id=chosen,
            to=to,
            content=Raw(encode(content)),
            text_representation=UNSET if text_representation is None else text_representation,
            reply_to=UNSET if reply_to is None else reply_to,
            cause=UNSET if cause is None else cause,
            exclude_agent_ids=UNSET if exclude_agent_ids is None else list(exclude_agent_ids),
            requires_response=_requirement(requires_response),
            metadata=UNSET if metadata is None else Raw(encode(dict(metadata))),
        )
        stored: Stored = await self._ask(f"m:{chosen}", encode(frame))
        return stored

    async def send_text(self, agent_id: str, text: str, **options: Any) -> Stored:
        """Send text to one participant; options as in `send`."""
        return await self.send(f"agent:{agent_id}", text, **options)

    async def broadcast(self, text: str, **options: Any) -> Stored:
        """Send text to everyone; options as in `send`."""
        return await self.send("broadcast", text, **options)

    async def post(self, channel: str, text: str, **options: Any) -> Stored:
        """Send text to a channel that this participant is in; options as in `send`."""
        return await self.send(f"channel:{channel}", text, **options)

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> Stored:
        """Answer a message where it is: in its direct or mod thread, or in the reply thread that it is in or begins."""
        to = message.to
        if isinstance(message, DirectMessage):
            other = message.sender_id if message.sender_id != self.agent_id else message.to.partition(":")[2]
            to = f"agent:{other}"
        elif isinstance(message, ModMessage):
            to = f"mod:{message.thread_id.partition(':')[2].partition('~')[0]}"
        return await self.send(to, text, **{"reply_to": message.seq, "cause": message.seq, **options})

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        """Call an operation of the hub or of a mod; gives its value. ``call_id`` makes a change idempotent across processes."""
        chosen = call_id if call_id is not None else random_id()
        frame = CallFrame(call_id=chosen, op=op, args=Raw(encode(dict(args or {}))))
        return await self._ask(f"c:{chosen}", encode(frame))

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Stored:
        """Keep a turn record; returns when it is durable."""
        frame = RecordFrame(record_id=record_id, reaction=reaction, kind=kind, body=Raw(encode(dict(body))))
        stored: Stored = await self._ask(f"r:{record_id}", encode(frame))
        return stored

    async def signal(
        self,
        kind: Literal["typing", "thinking", "delta", "tool"],
        body: Any,
        *,
        to: str | None = None,
        thread_id: str | None = None,
    ) -> None:
        """Tell who watches a thread what goes on. Not stored; dropped while the connection is down."""
        place = UNSET if to is None else to
        self._push(
            encode(
                SignalFrame(
                    kind=kind, body=Raw(encode(body)), to=place, thread_id=UNSET if thread_id is None else thread_id
                )
            )
        )

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        """Messages of a thread, oldest first, the newest ``limit`` of those before ``before``."""
        args: dict[str, Any] = {"thread_id": thread_id, "limit": limit}
        if before is not None:
            args["before"] = before
        value = await self.call("network.history", args)
        return History([message_from_wire(message) for message in value["messages"]], value["has_more"])

    async def window(
        self, trigger: int, *, threads: int | list[str] | None = None, per_thread: int | None = None
    ) -> Window:
        """The conversation that may enter a prompt for the message ``trigger``; threads in a stable order."""
        args: dict[str, Any] = {"trigger": trigger}
        if threads is not None:
            args["threads"] = threads
        if per_thread is not None:
            args["per_thread"] = per_thread
        value = await self.call("network.window", args)
        found = [
            MessageThread(
                thread_id=thread["thread_id"], messages=[message_from_wire(message) for message in thread["messages"]]
            )
            for thread in value["threads"]
        ]
        return Window(found, value["as_of"])

    # --- receiving

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """What is delivered, in order, each to be acknowledged; ends by raising what ended the connection for good."""
        while True:
            delivery = await self._deliveries.get()
            if delivery is None:
                self._deliveries.put_nowait(None)  # for the other iterators
                if self._is_closing:
                    return
                raise self._failure or ConnectError("The connection is closed.")
            yield delivery

    async def __aiter__(self) -> AsyncIterator[AnyMessage]:
        """Messages in order; each is acknowledged when the next one is asked for."""
        async for delivery in self.deliveries():
            yield delivery.message
            await delivery.ack()

    async def handle(self, handler: Callable[[AnyMessage], Awaitable[None]]) -> None:
        """Call a handler for each message, for ever: ack when it returns, nack when it raises."""
        async for delivery in self.deliveries():
            try:
                async with delivery as message:
                    await handler(message)
            except Exception:
                log.exception("a handler failed", extra={"agent_id": self.agent_id, "seq": delivery.message.seq})

    async def events(self) -> AsyncIterator[Event]:
        """Presence, signals, notices, reconnects, as they come; the oldest are dropped beyond 1000. Ends with the connection."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._failure is not None:
                return
            self._event_arrived.clear()
            await self._event_arrived.wait()

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._event_arrived.set()

    async def ack(self, seq: int, *, only: bool = False) -> None:
        """Acknowledge everything up to ``seq``, or just that one."""
        if only:
            self._acknowledge(seq)
        else:
            self._acks.handle_up_to(seq)
            self._ack_soon()

    async def nack(self, seq: int, reason: str, retry_after_ms: int | None = None) -> None:
        """Give a delivery back; see `Delivery.nack`."""
        self._flush_acks()
        if self._acks.give_back(seq):
            delay = UNSET if retry_after_ms is None else retry_after_ms
            self._push(encode(NackFrame(seq=seq, reason=reason, retry_after_ms=delay)))

    def _acknowledge(self, seq: int) -> None:
        self._acks.handle(seq)
        self._ack_soon()

    def _ack_soon(self) -> None:
        """One frame for all that is handled in a tick."""
        if not self._ack_is_due:
            self._ack_is_due = True
            asyncio.get_running_loop().call_soon(self._flush_acks)

    def _flush_acks(self) -> None:
        self._ack_is_due = False
        if self._wire is None:
            return  # the next session delivers what was not acknowledged, and it is answered then
        prefix, single = self._acks.due()
        if prefix is not None:
            self._push(encode(AckFrame(seq=prefix)))
        for seq in single:
            self._push(encode(AckFrame(seq=seq, only=True)))


def _requirement(value: Literal[True] | Sequence[str] | None) -> bool | list[str] | UnsetType:
    if value is None:
        return UNSET
    return True if value is True else list(value)


def _decode(data: bytes) -> dict[str, Any]:
    """Decode a hub's frame. Numbers that do not fit are still JSON: they come as floats, never as a failure."""
    try:
        frame: dict[str, Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        frame = json.loads(data, parse_int=lambda digits: int(digits) if len(digits) < 4000 else float(digits))
    return frame
