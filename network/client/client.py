"""`NetworkClient`: one participant's connection to a hub, for programs.

It sends and waits for durable answers, gives what is delivered in order, acknowledges what was handled, and reconnects:
whatever was not answered is sent again under the same id, so that nothing is lost and nothing doubled. It works the
same over a WebSocket and in-process (`transport`). `link` keeps the connection, `acks` what was handled."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Raw, UnsetType

from roundelay.network.addresses import agent_address, channel_address, mod_address, name_of, thread_parties
from roundelay.network.clock import Clock, NewId, ordered_id, system_clock
from roundelay.network.credentials import clean_secret
from roundelay.network.errors import (
    ConfigError,
    ConnectError,
    InvalidArguments,
    NotAuthenticated,
    RetryLater,
    RoundelayError,
    UnknownRecipient,
)
from roundelay.network.frames import (
    PROTOCOL_VERSION,
    CallFrame,
    HelloFrame,
    RecordFrame,
    ResumePoint,
    SendFrame,
    SignalFrame,
    encode,
    plain_text,
)
from roundelay.network.home import (
    CONNECT_TIMEOUT_S,
    AgentToken,
    find_connect_timeout_s,
    find_token,
    find_url,
    read_urls,
)
from roundelay.network.messages import DirectMessage, ModMessage, message_from_wire

from .acks import Acks, Delivery
from .link import Link
from .paging import Page, read_pages
from .transport import Transport, WebSocketTransport, Wire
from .values import (
    AnyMessage,
    Cursor,
    Event,
    History,
    Notice,
    Presence,
    Signal,
    Stored,
    Welcome,
    Window,
)

log = logging.getLogger(__name__)

MAX_EVENTS = 1000
MAX_WAIT_S = 25.0
"""Maximum time that one `network.receive` waits at the hub, in seconds."""
MAX_OWN_WAITING, MAX_OWN_CHARS = 1000, 8 * 1024 * 1024
"""Bounds of the participant's own messages, sent by its other sessions, that wait here for a program that asks for none.
They need no acknowledgement, so that the hub's window does not bound them; beyond, the older half is dropped."""
_LEFT = (
    "The loop over messages was left at #%d, which is not acknowledged: %s gets it again in its next session. To take "
    "one message, write: async with client.receive() as message"
)


class NetworkClient:
    """One participant's session, kept alive. Use as ``async with NetworkClient("alice") as client``.

    Without ``url``, the node of this machine is found; several, as ``urls``, with commas between them or as
    ``roundelay://A,B/``, are nodes of one network, of which one serves at a time; where one says that another one
    leads, this ``goes_to_leader``, and one that turns out to be of another network is left. What is no address is a
    `ConfigError`. Without ``token``, an
    agent's is made and saved, and a person or service joins with the owner's token of the node on this machine.
    ``resume`` starts delivery at the client's own cursor. Methods that send raise the `RoundelayError` that the hub
    answered; while the connection is down they wait, or, with ``reconnect=False``, raise `ConnectError`. ``new_id``
    makes the ids that are not given, ``jitter`` (from 0 to 1) spreads the tries to come back, ``clock`` is what the
    program that uses this client goes by.
    ``kind`` None leaves it to the ``token``, which has to be given then. With ``deliver`` False nothing is delivered:
    ask by the operation ``network.receive``.
    ``connect_timeout_s`` bounds each way to a welcome (TCP, TLS, the WebSocket and `hello`); without it
    ``ROUNDELAY_CONNECT_TIMEOUT_S``, or 20 s. At most 4,096 requests and 16 MiB of them are under way at a time:
    further calls of what sends wait until others were answered, and so do operations beyond the hub's ``max_reads``.
    `connect` tries again within that time where the hub made room for others.
    """

    def __init__(
        self,
        agent_id: str,
        url: str | None = None,
        *,
        urls: Sequence[str] | None = None,
        kind: Literal["agent", "human", "service"] | None = "agent",
        token: str | None = None,
        role: Literal["observer", "reactor"] = "observer",
        card: Mapping[str, object] | None = None,
        resume: Cursor | None = None,
        deliver: bool = True,
        reconnect: bool = True,
        transport: Transport | None = None,
        new_id: NewId = ordered_id,
        jitter: Callable[[], float] = random.random,
        clock: Clock = system_clock,
        connect_timeout_s: float | None = None,
        goes_to_leader: bool = True,
    ) -> None:
        self.agent_id = plain_text(agent_id)
        self._kind: Literal["agent", "human", "service"] | None = kind
        self._deliver = deliver
        self.clock = clock
        if url is not None and urls is not None:
            raise ConfigError("Give NetworkClient a url or urls, not both.")
        if urls is not None and not urls:
            raise ConfigError("urls of NetworkClient names no address; without urls it finds the node of this machine.")
        named = ""
        if url or urls is not None or transport is None:
            named = ",".join(map(read_urls, urls if urls is not None else [url or find_url()]))
        self._named = named
        self._token = None if token is None else clean_secret(token)  # a file's line break is no part of it
        self._saved: AgentToken | None = None
        self._role: Literal["observer", "reactor"] = role
        self._card = Raw(encode(dict(card))) if card is not None else UNSET
        self._instance: str | UnsetType = UNSET
        """Of a reactor: by this the hub knows a process that comes back from one that takes its place."""
        self._resume = resume
        self._is_local = transport is not None
        self._new_id = new_id
        self._deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._own: deque[tuple[Delivery, int]] = deque()
        """Those of them that are the participant's own, with their size in characters."""
        self._own_chars = 0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._event_arrived = asyncio.Event()
        self._acks = Acks()
        self._epoch = ""
        self._joined_at = ""
        """The URL of the last session's hub."""
        if connect_timeout_s is None and transport is None:  # in a process, time may be another one
            connect_timeout_s = find_connect_timeout_s()
        self._transport = transport or WebSocketTransport(
            named, connect_timeout_s or CONNECT_TIMEOUT_S, goes_to_leader=goes_to_leader
        )
        self._make_link = partial(
            Link, self, self._transport, reconnects=reconnect, jitter=jitter, connect_timeout_s=connect_timeout_s
        )
        self._link = self._make_link()

    # --- lifetime

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """Where the hub is; of several addresses, the one that serves this client or was tried last."""
        return self._transport.url if isinstance(self._transport, WebSocketTransport) else self._named

    @property
    def welcome(self) -> Welcome:
        """What the hub said last. Raises `ConnectError` before the first connection."""
        if self._link.welcome is None:
            raise ConnectError("This client is not connected; use `async with` or await connect().")
        return self._link.welcome

    @property
    def kind(self) -> Literal["agent", "human", "service"]:
        """As what it joins: as it was told, or as its token says. Raises `ConnectError` where that is not known yet."""
        return self._kind if self._kind is not None else self.welcome.kind

    @property
    def failure(self) -> RoundelayError | None:
        """What ended the connection for good; None as long as it stays or comes back."""
        return self._link.failure

    @property
    def is_connected(self) -> bool:
        """Whether the hub is there now; while it is not, what is sent and asked waits."""
        return self._link.is_connected

    @property
    def as_of(self) -> int | None:
        """Of what was read last at a node that follows: all that the network had stored by then is in it (ms, by that
        node's clock). None where the node leads."""
        return self._link.as_of

    @property
    def cursor(self) -> Cursor:
        """Everything up to here was handled: to be saved, and given as ``resume`` later."""
        return Cursor(self._epoch, self._acks.prefix)

    async def connect(self) -> Welcome:
        """Join the network; again after `close`, or in another event loop once the first one has ended. Raises
        `ConnectError`, `NotAuthenticated`, `Forbidden`, `Superseded`."""
        if self._link.is_closing or self._link.is_left_behind():
            # Queues, events and tasks belong to the loop in which they are waited for.
            self._deliveries, self._event_arrived, self._link = asyncio.Queue(), asyncio.Event(), self._make_link()
            self._own, self._own_chars = deque(), 0
            self._acks.forget_open()
        if not self._token and not self._is_local:
            self._token = find_token(self._named, self.kind)
            if self._token is None and self.kind == "agent" and self._saved is None:
                self._saved = AgentToken(self._named, self.agent_id)
        if self._role == "reactor" and self._instance is UNSET:
            self._instance = self._new_id()
        try:
            await self._link.open()
        except NotAuthenticated as error:
            source = self._saved.discard() if self._saved is not None else ""
            if source:
                raise NotAuthenticated(f"{error} {source}") from error
            raise
        return self.welcome

    async def close(self) -> None:
        """Say goodbye. What was sent and not answered raises `ConnectError`. Idempotent."""
        if not self._link.is_left_behind():
            self._acks.send_due()
        await self._link.close()

    # --- what the link asks and says (`link.Owner`)

    def make_hello(self, fence: int | UnsetType) -> HelloFrame:
        resume = self.cursor if self._resume is not None and self._epoch else self._resume
        return HelloFrame(
            protocol=PROTOCOL_VERSION,
            agent_id=self.agent_id,
            kind=UNSET if self._kind is None else self._kind,
            token=self._saved.present(self.url)
            if self._saved is not None
            else UNSET
            if self._token is None
            else self._token,
            role=self._role,
            fence=fence,
            resume=UNSET if resume is None else ResumePoint(resume.epoch, resume.seq),
            card=self._card,
            client="roundelay",
            instance=self._instance,
            deliver=self._deliver,
        )

    def check_welcome(self, welcome: Welcome) -> None:
        # a hub that has lost its history is the same at the same address; elsewhere another history is another
        # network's, for which nothing here was meant
        if self._is_elsewhere() and welcome.network.epoch != self._epoch:
            raise ConnectError(
                self._pass_over(f"holds another network ({welcome.network.name}) than {self._joined_at}")
            )

    def check_refusal(self, error: NotAuthenticated) -> None:
        # a network knows at each address a token that it has let in at one
        if self._is_elsewhere():
            told = self._pass_over(f"holds another network than {self._joined_at}, which has let in {self.agent_id}")
            raise ConnectError(f"{told} ({error})") from error

    def _is_elsewhere(self) -> bool:
        """Whether this is at another address than its last session was."""
        return bool(self._epoch) and urlsplit(self.url).netloc != urlsplit(self._joined_at).netloc

    def _pass_over(self, why: str) -> str:
        """Go on with the next address; gives the sentence to be told."""
        told = f"{self.url} {why}: check the addresses, or connect anew."
        if isinstance(self._transport, WebSocketTransport):
            self._transport.pass_over()
        return told

    def begin_session(self, welcome: Welcome, wire: Wire) -> None:
        if welcome.network.epoch != self._epoch:
            self._acks.is_stale = True
            self._acks = Acks()  # another history: its seqs are others
        if self._saved is not None and self.url != self._joined_at:
            try:
                self._saved.save(self.url)
            except ConfigError as error:  # where it was read from it stays
                log.warning("a token is not saved: %s", error, extra={"agent_id": self.agent_id})
        self._epoch, self._joined_at = welcome.network.epoch, self.url
        self._acks.begin_session(wire, welcome.cursor)

    def take_frame(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "deliver":
                self._take_delivery(frame)
            case "signal":
                self.take_event(msgspec.convert(frame, Signal))
            case "presence":
                self.take_event(msgspec.convert(frame, Presence))
            case "notice":
                self._take_notice(Notice(frame["kind"], frame.get("thread_id"), frame["body"]))
            case _:
                return  # a newer hub's frame

    def _take_delivery(self, frame: dict[str, Any]) -> None:
        message = message_from_wire(frame["message"])
        if not self._acks.take(message.seq):
            return
        delivery = Delivery(self._acks, message, frame["attempt"])
        self._deliveries.put_nowait(delivery)
        if message.sender_id == self.agent_id and message.to != agent_address(self.agent_id):
            content = frame["message"].get("content")
            size = len(content) if isinstance(content, str) else len(encode(content))
            self._own.append((delivery, size))
            self._own_chars += size
            if len(self._own) > MAX_OWN_WAITING or self._own_chars > MAX_OWN_CHARS:
                self._drop_own()

    def _drop_own(self) -> None:
        """Drop the older half of the own messages that wait; they stay in their threads' history."""
        dropped = set()
        while len(self._own) > MAX_OWN_WAITING // 2 or self._own_chars > MAX_OWN_CHARS // 2:
            delivery, size = self._own.popleft()
            self._own_chars -= size
            self._acks.drop(delivery.message.seq)
            dropped.add(delivery)
        waiting = [self._deliveries.get_nowait() for _ in range(self._deliveries.qsize())]
        for it in waiting:
            if it not in dropped:
                self._deliveries.put_nowait(it)
        log.info("own messages that nobody asked for are dropped", extra={"agent_id": self.agent_id})

    def _take_notice(self, notice: Notice) -> None:
        body = notice.body if isinstance(notice.body, dict) else {}
        if notice.kind == "dead_letter" and body.get("agent_id") == self.agent_id:
            self._acks.drop(int(body["seq"]))
        self.take_event(notice)

    def take_event(self, event: Event) -> None:
        if len(self._events) == MAX_EVENTS:  # what may be lost goes first: not a person's stop, nor a reconnect
            loses = (place for place, it in enumerate(self._events) if isinstance(it, Signal) and it.kind != "cancel")
            del self._events[next(loses, 0)]
        self._events.append(event)
        self._event_arrived.set()

    def end(self) -> None:
        self._deliveries.put_nowait(None)
        self._event_arrived.set()

    # --- sending

    async def send(
        self,
        to: str,
        content: Any,
        *,
        text_representation: str | None = None,
        reply_to: int | None = None,
        cause: int | None = None,
        conversation: str | None = None,
        exclude_agent_ids: Sequence[str] | None = None,
        requires_response: Literal[True] | Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        message_id: str | None = None,
    ) -> Stored:
        """Send any JSON ``content`` to an address; returns when it is durable. ``message_id`` makes it idempotent
        across processes; ``conversation``, an id, names one of several threads with the same participant."""
        chosen = message_id if message_id is not None else self._new_id()
        frame = SendFrame(
            message_id=chosen,
            to=to,
            content=Raw(encode(content)),
            text_representation=UNSET if text_representation is None else text_representation,
            reply_to=UNSET if reply_to is None else reply_to,
            cause=UNSET if cause is None else cause,
            conversation=UNSET if conversation is None else conversation,
            exclude_agent_ids=UNSET if exclude_agent_ids is None else list(exclude_agent_ids),
            requires_response=_requirement(requires_response),
            metadata=UNSET if metadata is None else Raw(encode(dict(metadata))),
        )
        stored: Stored = await self._link.ask(f"m:{plain_text(chosen)}", encode(frame))
        return stored

    async def send_text(self, agent_id: str, text: str, **options: Any) -> Stored:
        """Send text to one participant; options as in `send`."""
        return await self.send(agent_address(agent_id), text, **options)

    async def broadcast(self, text: str, **options: Any) -> Stored:
        """Send text to everyone; options as in `send`."""
        return await self.send("broadcast", text, **options)

    async def post(self, channel: str, text: str, **options: Any) -> Stored:
        """Send text to a channel that this participant is in; options as in `send`."""
        return await self.send(channel_address(channel), text, **options)

    async def join_channel(self, name: str) -> bool:
        """Be a member of a channel, which is made if there is none: then True. Joining again changes nothing.

        Raises `Forbidden`, or `InvalidArguments` for a name that is taken by a channel closed to this client, if it
        needs an invitation.
        """
        try:
            await self.call("channels.join", {"name": name})
            return False
        except UnknownRecipient:
            pass
        try:
            await self.call("channels.create", {"name": name})  # which joins it
        except InvalidArguments as taken:
            try:
                await self.call("channels.join", {"name": name})  # somebody else was faster
            except UnknownRecipient:  # or it is closed to this one
                raise taken from None
            return False
        return True

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> Stored:
        """Answer a message where it is: in its direct or mod thread, or in the reply thread that it is in or begins."""
        to = self.find_reply_address(message)
        return await self.send(to, text, **{"reply_to": message.seq, "cause": message.seq, **options})

    def find_reply_address(self, message: AnyMessage) -> str:
        """Give the address of a reply to a message."""
        if isinstance(message, DirectMessage):
            return agent_address(message.sender_id if message.sender_id != self.agent_id else name_of(message.to))
        if isinstance(message, ModMessage):
            return mod_address(thread_parties(message.thread_id)[0])
        return message.to

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        """Call an operation of the hub or of a mod; gives its value. ``call_id`` makes a change idempotent across
        processes."""
        chosen = call_id if call_id is not None else self._new_id()
        frame = CallFrame(call_id=chosen, op=op, args=Raw(encode(dict(args or {}))))
        return await self._link.ask(f"c:{plain_text(chosen)}", encode(frame))

    def pages(self, op: str, args: Mapping[str, Any] | None = None) -> AsyncIterator[Page]:
        """Yield the values of a listing operation, page after page. ``args`` chooses the first page and the page size.

        Raises `ValueError` for an operation without pages, and what `call` raises.
        """
        return read_pages(self.call, op, args)

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Stored:
        """Keep a turn record; returns when it is durable."""
        frame = RecordFrame(record_id=record_id, reaction=reaction, kind=kind, body=Raw(encode(dict(body))))
        stored: Stored = await self._link.ask(f"r:{plain_text(record_id)}", encode(frame))
        return stored

    async def signal(
        self,
        kind: Literal["typing", "viewing", "thinking", "delta", "tool"],
        body: Any,
        *,
        to: str | None = None,
        thread_id: str | None = None,
        trigger: int | None = None,
    ) -> None:
        """Tell who watches a thread what goes on; with ``trigger``, the seq of the message of that thread that is
        worked on, only those who may know of that. Not stored; dropped while the connection is down, or the hub takes
        nothing, or beyond its ``signals_per_s``."""
        frame = SignalFrame(
            kind=kind,
            body=Raw(encode(body)),
            to=UNSET if to is None else to,
            thread_id=UNSET if thread_id is None else thread_id,
            trigger=UNSET if trigger is None else trigger,
        )
        self._link.push(encode(frame), may_drop=True)

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        """Messages of a thread, oldest first, the newest ``limit`` of those before ``before``."""
        args = _given(thread_id=thread_id, limit=limit, before=before)
        return History.read(await self.call("network.history", args))

    async def window(
        self,
        trigger: int,
        *,
        threads: int | list[str] | None = None,
        per_thread: int | None = None,
        visibility: str | None = None,
    ) -> Window:
        """The conversation that may enter a prompt for the message ``trigger``; threads in a stable order.

        ``visibility`` narrows what the participant's card and the network allow.
        """
        args = _given(trigger=trigger, threads=threads, per_thread=per_thread, visibility=visibility)
        return Window.read(await self.call("network.window", args))

    # --- receiving

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """What is delivered, in order, each to be acknowledged; ends by raising what ended the connection for good."""
        while (delivery := await self._next_delivery()) is not None:
            yield delivery

    @asynccontextmanager
    async def receive(self) -> AsyncIterator[AnyMessage]:
        """The next message, for an ``async with`` block: acknowledged when the block ends, given back when it raises
        (`Delivery.nack`), and left open when it is cancelled: then it comes again in a later session.

        Raises what ended the connection, `ConnectError` once this client is closed."""
        delivery = await self._next_delivery()
        if delivery is None:
            raise ConnectError("This client is closed, so no further message comes.")
        async with delivery as message:
            yield message

    async def __aiter__(self) -> AsyncIterator[AnyMessage]:
        """Messages in order, for ever; each is acknowledged when the next one is asked for.

        Who leaves the loop leaves its message open: a `break` cannot be told from an error in the loop's body, and what
        was not handled must come again. To take one message, or some, use `receive`."""
        async for delivery in self.deliveries():
            try:
                yield delivery.message
            except GeneratorExit:
                log.warning(_LEFT, delivery.message.seq, self.agent_id, extra={"agent_id": self.agent_id})
                raise
            await delivery.ack()

    async def _next_delivery(self) -> Delivery | None:
        """The next delivery; None once this client is closed. Raises what ended the connection for good."""
        self._link.check_loop()
        delivery = await self._deliveries.get()
        if self._own and delivery is self._own[0][0]:
            self._own_chars -= self._own.popleft()[1]
        if delivery is None:
            self._deliveries.put_nowait(None)  # for the others who wait
            if not self._link.is_closing:
                raise self._link.failure or ConnectError("The connection is closed.")
        return delivery

    async def follow(
        self, thread_id: str | None = None, *, after: int, timeout_s: float | None = None
    ) -> AsyncIterator[AnyMessage]:
        """Yield the messages to this participant above the seq ``after``, of one thread or of all, as they arrive.

        They are looked at only: none counts as delivered, and none has to be acknowledged. The participant's own
        messages are not among them. Ends after ``timeout_s`` seconds, having looked at least once; None: never.
        A busy hub is asked again after the delay that it names. Raises what ends the connection.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        is_due = True
        while is_due or until is None or until > loop.time():
            left_s = MAX_WAIT_S if until is None else max(until - loop.time(), 0.0)
            args = {"after": after, "limit": 500, "wait_ms": int(min(left_s, MAX_WAIT_S) * 1000), "peek": True}
            try:
                page = await self.call("network.receive", args)
            except RetryLater as error:
                await asyncio.sleep(error.retry_after_ms / 1000)
                continue
            after, is_due = page["next"], False
            for message in page["messages"]:
                if thread_id in (None, message["thread_id"]):
                    yield message_from_wire(message)

    async def handle(self, handler: Callable[[AnyMessage], Awaitable[None]]) -> None:
        """Call a handler for each message, for ever: ack when it returns, nack when it raises."""
        async for delivery in self.deliveries():
            try:
                async with delivery as message:
                    await handler(message)
            except Exception:
                log.exception("a handler failed", extra={"agent_id": self.agent_id, "seq": delivery.message.seq})

    async def events(self) -> AsyncIterator[Event]:
        """Presence, signals, notices, reconnects, as they come; beyond 1000 the oldest are dropped, signals first. Ends
        with the connection."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._link.failure is not None:
                return
            self._event_arrived.clear()
            await self._event_arrived.wait()

    async def ack(self, seq: int, *, only: bool = False) -> None:
        """Acknowledge everything up to ``seq``, or just that one."""
        self._acks.handle(seq, only=only)

    async def nack(self, seq: int, reason: str, retry_after_ms: int | None = None) -> None:
        """Give a delivery back; see `Delivery.nack`."""
        self._acks.refuse(seq, reason, retry_after_ms)


def _given(**args: object) -> dict[str, object]:
    """The arguments of a call that are not left out."""
    return {name: value for name, value in args.items() if value is not None}


def _requirement(value: Literal[True] | Sequence[str] | None) -> bool | list[str] | UnsetType:
    if value is None:
        return UNSET
    return True if value is True else list(value)
