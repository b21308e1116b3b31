"""`NetworkClient`: one participant's connection to a hub, for programs.

Sending methods return when the hub has stored the message. Deliveries arrive in order, and the client acknowledges the
deliveries that the program has handled. After a lost connection, the client reconnects and sends unanswered requests
again with the same ids, so that no message is lost or stored twice.

`link` owns the connection, and `acks` sends the acknowledgements. WebSocket and in-process transports (`transport`)
behave alike.
"""

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
    BatchFrame,
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
from .conversations import ConversationReads
from .delivery_queue import DeliveryQueue
from .link import Link
from .paging import Page, read_pages
from .stored_frames import make_record, make_send
from .transport import Transport, WebSocketTransport, Wire
from .values import AnyMessage, Batched, Cursor, Event, Notice, Presence, Signal, Stored, Welcome

log = logging.getLogger(__name__)

MAX_EVENTS = 1000
MAX_WAIT_S = 25.0
"""Maximum time that one `network.receive` call waits at the hub, in seconds."""
_LOOP_LEFT = (
    "The loop over messages ended without acknowledging message #%d. %s will receive this message again in its next "
    "session. To receive a single message, write: async with client.receive() as message"
)


class NetworkClient(ConversationReads):
    """A participant's connection, which reconnects automatically. Use it as ``async with NetworkClient("alice") as
    client``.

    **Address.** Without ``url``, the client finds the node on this machine. ``urls`` may contain the addresses of
    several nodes of one network, separated by commas or as ``roundelay://A,B/``. The client connects to one node at a
    time. If a node names the leader and ``goes_to_leader`` is true, the client connects to the leader. The client skips
    an address that belongs to another network. An invalid address raises `ConfigError`.

    **Identity.** Without ``token``, the client generates and saves a token for an agent. A person or a service joins
    with the owner's token of the node on this machine. If ``kind`` is None, ``token`` is required and determines the
    kind.

    **Deliveries.** With ``resume``, deliveries start at the client's own cursor. If ``deliver`` is false, the hub
    delivers no messages; use the operation ``network.receive`` or `follow` instead.

    **Waiting.** Sending methods raise the `RoundelayError` that the hub answers. While the connection is down, they
    wait, or raise `ConnectError` with ``reconnect=False``. ``connect_timeout_s`` limits each attempt up to the welcome
    (TCP, TLS, WebSocket and hello). Its default is ``ROUNDELAY_CONNECT_TIMEOUT_S``, or 20 s. A hub with too many
    connections may close a new connection; `connect` then tries again within this time. At most 4,096 requests and 16
    MiB may be unanswered at a time; further requests wait.

    ``new_id`` generates the ids that the caller does not supply. ``jitter`` (0 to 1) spreads reconnects over time.
    ``clock`` is the program's clock.
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
        self.clock = clock
        self._kind: Literal["agent", "human", "service"] | None = kind
        self._deliver = deliver
        if url is not None and urls is not None:
            raise ConfigError("Pass either url or urls to NetworkClient, not both.")
        if urls is not None and not urls:
            raise ConfigError(
                "NetworkClient got an empty urls. Name an address, or leave urls out to find the node of this machine."
            )
        named = ""
        if url or urls is not None or transport is None:
            named = ",".join(map(read_urls, urls if urls is not None else [url or find_url()]))
        self._named = named
        # Remove white space, because a token that was read from a file may end with a line break.
        self._token = None if token is None else clean_secret(token)
        self._saved: AgentToken | None = None
        self._role: Literal["observer", "reactor"] = role
        self._card = Raw(encode(dict(card))) if card is not None else UNSET
        self._instance: str | UnsetType = UNSET
        """Id of a reactor's process. It lets the hub distinguish a process that reconnects from another process that
        takes over."""
        self._resume = resume
        self._is_local = transport is not None
        self._new_id = new_id
        self._deliveries = DeliveryQueue()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._event_arrived = asyncio.Event()
        self._acks = Acks()
        self._epoch = ""
        self._joined_at = ""
        """URL of the last session."""
        # Set no timeout for in-process hubs, which may run on virtual time.
        if connect_timeout_s is None and transport is None:
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
        """The hub's URL. If the client has several URLs, this is the one that was tried last."""
        return self._transport.url if isinstance(self._transport, WebSocketTransport) else self._named

    @property
    def welcome(self) -> Welcome:
        """The last ``welcome`` frame of the hub. Raises `ConnectError` before the first connection."""
        if self._link.welcome is None:
            raise ConnectError("This client is not connected; use `async with` or await connect().")
        return self._link.welcome

    @property
    def kind(self) -> Literal["agent", "human", "service"]:
        """The participant's kind, from the constructor or from the token. Raises `ConnectError` while it is unknown."""
        return self._kind if self._kind is not None else self.welcome.kind

    @property
    def failure(self) -> RoundelayError | None:
        """The error that ended the connection permanently. None while the client is connected or reconnecting."""
        return self._link.failure

    @property
    def is_connected(self) -> bool:
        """Whether the client has a session now. Without a session, requests wait."""
        return self._link.is_connected

    @property
    def as_of(self) -> int | None:
        """Time up to which the last result from a read replica is complete, in ms by the replica's clock. None if the
        hub is the leader."""
        return self._link.as_of

    @property
    def cursor(self) -> Cursor:
        """Position up to which all deliveries are handled. Save this cursor to pass it as ``resume`` to a later
        client."""
        return Cursor(self._epoch, self._acks.prefix)

    async def connect(self) -> Welcome:
        """Join the network. This method may be called again after `close`, or in a new event loop after the previous
        event loop has ended. Raises `ConnectError`, `NotAuthenticated`, `Forbidden`, `Superseded`."""
        if self._link.is_closing or self._link.is_left_behind():
            # Queues, events and tasks belong to the event loop that first awaited them.
            self._deliveries, self._event_arrived, self._link = DeliveryQueue(), asyncio.Event(), self._make_link()
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
        """Send a goodbye to the hub and end the session. Unanswered requests raise `ConnectError`. Repeated calls
        change nothing."""
        if not self._link.is_left_behind():
            self._acks.send_due()
        await self._link.close()

    # --- called by the link (`link.Owner`)

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
        # If the hub at the same address has a different history, it has lost its ledger, and the client continues. A
        # different history at another address means another network, which must not receive this network's requests.
        if self._is_elsewhere() and welcome.network.epoch != self._epoch:
            raise ConnectError(
                self._pass_over(f"serves another network ({welcome.network.name}) than {self._joined_at}")
            )

    def check_refusal(self, error: NotAuthenticated) -> None:
        # All nodes of a network accept the same tokens, so a node at another address that refuses this token belongs to
        # another network.
        if self._is_elsewhere():
            reason = self._pass_over(f"serves another network than {self._joined_at}, which accepted {self.agent_id}")
            raise ConnectError(f"{reason} ({error})") from error

    def _is_elsewhere(self) -> bool:
        """Return whether the current address differs from the address of the last session."""
        return bool(self._epoch) and urlsplit(self.url).netloc != urlsplit(self._joined_at).netloc

    def _pass_over(self, why: str) -> str:
        """Switch to the next address. Return the reason as a sentence for an error text."""
        reason = f"{self.url} {why}. Check the addresses, or connect with a new client."
        if isinstance(self._transport, WebSocketTransport):
            self._transport.pass_over()
        return reason

    def begin_session(self, welcome: Welcome, wire: Wire) -> None:
        if welcome.network.epoch != self._epoch:
            self._acks.is_stale = True
            self._acks = Acks()  # in another history, the same seqs belong to other messages
        if self._saved is not None and self.url != self._joined_at:
            try:
                self._saved.save(self.url)
            except ConfigError as error:  # the token is still in the file that it was read from
                log.warning("The token could not be saved: %s", error, extra={"agent_id": self.agent_id})
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
                return  # ignore frame types of newer hubs

    def _take_delivery(self, frame: dict[str, Any]) -> None:
        message = message_from_wire(frame["message"])
        if not self._acks.receive(message.seq):
            return
        delivery = Delivery(self._acks, message, frame["attempt"])
        if message.sender_id != self.agent_id or message.to == agent_address(self.agent_id):
            self._deliveries.put(delivery)
            return
        content = frame["message"].get("content")
        size = len(content) if isinstance(content, str) else len(encode(content))
        displaced = self._deliveries.put_own(delivery, size)
        for dropped in displaced:  # dropped messages stay in the history of their threads
            self._acks.drop(dropped.message.seq)
        if displaced:
            log.info("dropped old unread messages of this participant", extra={"agent_id": self.agent_id})

    def _take_notice(self, notice: Notice) -> None:
        body = notice.body if isinstance(notice.body, dict) else {}
        if notice.kind == "dead_letter" and body.get("agent_id") == self.agent_id:
            self._acks.drop(int(body["seq"]))
        self.take_event(notice)

    def take_event(self, event: Event) -> None:
        if len(self._events) == MAX_EVENTS:
            # If possible, drop the oldest ordinary signal, because the hub does not repeat a notice, a reconnect or a
            # `cancel` (a person's request to stop).
            droppable = (
                index for index, old in enumerate(self._events) if isinstance(old, Signal) and old.kind != "cancel"
            )
            del self._events[next(droppable, 0)]
        self._events.append(event)
        self._event_arrived.set()

    def end(self) -> None:
        self._deliveries.end()
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
        """Send any JSON ``content`` to an address. Returns when the hub has stored the message durably.

        Sending again with the same ``message_id``, also from another process, stores no second message.
        ``conversation`` is an id that selects one of several threads with the same participant."""
        message_id = message_id if message_id is not None else self._new_id()
        frame = make_send(
            to,
            content,
            message_id=message_id,
            text_representation=text_representation,
            reply_to=reply_to,
            cause=cause,
            conversation=conversation,
            exclude_agent_ids=exclude_agent_ids,
            requires_response=requires_response,
            metadata=metadata,
        )
        stored: Stored = await self._link.ask(f"m:{plain_text(message_id)}", encode(frame))
        return stored

    async def send_text(self, agent_id: str, text: str, **options: Any) -> Stored:
        """Send text to one participant. The options are the same as for `send`."""
        return await self.send(agent_address(agent_id), text, **options)

    async def broadcast(self, text: str, **options: Any) -> Stored:
        """Send text to everyone. The options are the same as for `send`."""
        return await self.send("broadcast", text, **options)

    async def post(self, channel: str, text: str, **options: Any) -> Stored:
        """Send text to a channel that this participant is a member of. The options are the same as for `send`."""
        return await self.send(channel_address(channel), text, **options)

    async def join_channel(self, name: str) -> bool:
        """Join a channel. If the channel does not exist, create it and return True. Joining again changes nothing.

        Raises `Forbidden` if the channel needs an invitation, or `InvalidArguments` if the channel is hidden from this
        client.
        """
        try:
            await self.call("channels.join", {"name": name})
            return False
        except UnknownRecipient:
            pass
        try:
            await self.call("channels.create", {"name": name})  # the creator of a channel is its member
        except InvalidArguments as taken:
            try:
                # Another participant has created the channel after the first attempt to join.
                await self.call("channels.join", {"name": name})
            except UnknownRecipient:  # the channel is hidden from this client
                raise taken from None
            return False
        return True

    async def reply(self, message: AnyMessage, text: str, **options: Any) -> Stored:
        """Answer a message in its direct thread, its mod thread or its reply thread. The first reply starts the reply
        thread."""
        to = self.find_reply_address(message)
        return await self.send(to, text, **{"reply_to": message.seq, "cause": message.seq, **options})

    def find_reply_address(self, message: AnyMessage) -> str:
        """Return the address of a reply to a message."""
        if isinstance(message, DirectMessage):
            return agent_address(message.sender_id if message.sender_id != self.agent_id else name_of(message.to))
        if isinstance(message, ModMessage):
            return mod_address(thread_parties(message.thread_id)[0])
        return message.to

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        """Call an operation of the hub or of a mod, and return its value. A repeated call with the same ``call_id``
        makes its change only once."""
        call_id = call_id if call_id is not None else self._new_id()
        frame = CallFrame(call_id=call_id, op=op, args=Raw(encode(dict(args or {}))))
        return await self._link.ask(f"c:{plain_text(call_id)}", encode(frame))

    def pages(self, op: str, args: Mapping[str, Any] | None = None) -> AsyncIterator[Page]:
        """Yield the results of an operation that returns a list, page after page. ``args`` selects the first page and
        the page size.

        Raises `ValueError` for an operation without pages, and the errors of `call`.
        """
        return read_pages(self.call, op, args)

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Stored:
        """Store a turn record. Returns when the hub has stored the record durably."""
        frame = make_record(reaction, kind, body, record_id=record_id)
        stored: Stored = await self._link.ask(f"r:{plain_text(record_id)}", encode(frame))
        return stored

    async def store_batch(self, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        """Store messages and records in one commit, in order, up to the first refusal (`Batched.error`). The hub must
        announce the limit ``max_batch``."""
        batch_id = self._new_id()
        batched: Batched = await self._link.ask(
            f"b:{batch_id}", encode(BatchFrame(batch_id=batch_id, frames=[*frames]))
        )
        return batched

    async def signal(
        self,
        kind: Literal["typing", "viewing", "thinking", "delta", "tool"],
        body: Any,
        *,
        to: str | None = None,
        thread_id: str | None = None,
        trigger: int | None = None,
    ) -> None:
        """Send live activity to everyone who watches a thread. ``trigger`` is the seq of the message that the agent
        works on. If ``trigger`` is given, only participants who may know of this work receive the signal.

        Signals are never stored. A signal is dropped if there is no connection, if the hub reads too slowly, or if the
        client exceeds the hub's limit ``signals_per_s``.
        """
        frame = SignalFrame(
            kind=kind,
            body=Raw(encode(body)),
            to=UNSET if to is None else to,
            thread_id=UNSET if thread_id is None else thread_id,
            trigger=UNSET if trigger is None else trigger,
        )
        self._link.push(encode(frame), may_drop=True)

    # --- receiving

    async def deliveries(self) -> AsyncIterator[Delivery]:
        """Yield deliveries in order. The caller must acknowledge each delivery. The iteration ends when the client is
        closed. Raises the error that ended the connection permanently."""
        while (delivery := await self._next_delivery()) is not None:
            yield delivery

    @asynccontextmanager
    async def receive(self) -> AsyncIterator[AnyMessage]:
        """Receive the next message, for an ``async with`` block.

        The message is acknowledged when the block ends, and refused when the block raises (`Delivery.nack`). If the
        block is cancelled, the message stays open and is delivered again in a later session. Raises the error that
        ended the connection, or `ConnectError` if this client is closed."""
        delivery = await self._next_delivery()
        if delivery is None:
            raise ConnectError("This client is closed and receives no messages. Await connect() first.")
        async with delivery as message:
            yield message

    async def __aiter__(self) -> AsyncIterator[AnyMessage]:
        """Yield messages in order, without end. Requesting the next message acknowledges the previous message.

        A `break` leaves the current message unacknowledged, because this method cannot distinguish a `break` from an
        error in the loop's body. The hub then delivers the message again. To receive a single message, use `receive`.
        """
        async for delivery in self.deliveries():
            try:
                yield delivery.message
            except GeneratorExit:
                log.warning(_LOOP_LEFT, delivery.message.seq, self.agent_id, extra={"agent_id": self.agent_id})
                raise
            await delivery.ack()

    async def _next_delivery(self) -> Delivery | None:
        """Return the next delivery, or None if this client is closed. Raises the error that ended the connection
        permanently."""
        self._link.check_loop()
        delivery = await self._deliveries.get()
        if delivery is None and not self._link.is_closing:
            raise self._link.failure or ConnectError("The connection is closed.")
        return delivery

    async def follow(
        self, thread_id: str | None = None, *, after: int, timeout_s: float | None = None
    ) -> AsyncIterator[AnyMessage]:
        """Yield this participant's messages with a seq above ``after`` as they arrive, from one thread or from all
        threads.

        Followed messages are not deliveries and need no acknowledgement. The participant's own messages are left out.
        The iteration ends after ``timeout_s`` seconds (None: never), but reads at least once. If the hub is busy, the
        client waits for the delay that the hub requests and tries again. Raises the error that ends the connection.
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
        """Call a handler for each message, without end. A message is acknowledged when the handler returns, and refused
        (`Delivery.nack`) when the handler raises."""
        async for delivery in self.deliveries():
            try:
                async with delivery as message:
                    await handler(message)
            except Exception:
                log.exception("A handler failed.", extra={"agent_id": self.agent_id, "seq": delivery.message.seq})

    async def events(self) -> AsyncIterator[Event]:
        """Yield presence, signals, notices and reconnects as they arrive. If more than 1000 events are unread, the
        oldest events are dropped, signals first. The iteration ends when the connection ends permanently."""
        while True:
            while self._events:
                yield self._events.popleft()
            if self._link.failure is not None:
                return
            self._event_arrived.clear()
            await self._event_arrived.wait()

    async def ack(self, seq: int, *, only: bool = False) -> None:
        """Acknowledge every message up to ``seq``, or with ``only`` just the message ``seq``."""
        self._acks.handle(seq, only=only)

    async def nack(self, seq: int, reason: str, retry_after_ms: int | None = None) -> None:
        """Report a failed delivery (see `Delivery.nack`)."""
        self._acks.refuse(seq, reason, retry_after_ms)
