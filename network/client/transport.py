"""The client's side of a connection: what `NetworkClient` needs of a transport, and the WebSocket one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from roundelay.network.errors import Closed, ConnectError
from roundelay.network.frames import LEADER, SUBPROTOCOL, is_address, parse_leader
from roundelay.network.home import CONNECT_TIMEOUT_S
from roundelay.network.tls import client_context, explain_failure

SIGNAL_ROOM_BYTES = 256 * 1024
"""With more than this waiting to be sent, a wire is full: what may be dropped, is."""
PING_INTERVAL_S, PING_TIMEOUT_S = 20.0, 40.0
"""How soon a connection whose other end is gone without a word is given up: at most after both."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""What a client accepts from its hub: results of `network.history` hold up to 500 messages."""
MAX_LED = 3
"""So often in one connecting a node is believed that names another one."""
LED_TIMEOUT_S = 3.0
"""How long a node is tried at most that another one has named: from here it may not be reached by that name."""
COME_BACK = 4503


class Crowded(ConnectError):
    """The connection was closed without an answer, as a hub does that makes room for others."""


class Following(ConnectError):
    """A node that follows has refused; ``leader`` is where it says that another one leads, HOST:PORT."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class Wire(Protocol):
    """One open connection: JSON text frames both ways."""

    @property
    def is_full(self) -> bool:
        """The hub takes nothing for now, and enough waits for it: what may be dropped should be."""

    def send(self, data: bytes) -> None:
        """Queue one frame; in order. Raises `Closed`."""

    def frames(self) -> AsyncIterator[bytes]:
        """The frames that arrive, until it raises `Closed`."""

    async def drop(self) -> None:
        """Cut the connection. Idempotent."""


class Transport(Protocol):
    """Opens connections to one hub."""

    async def connect(self) -> Wire:
        """Open one, in a time that it bounds itself. Raises `ConnectError`, and `Closed` with 1000 when no later try
        can help."""


class WebSocketTransport:
    """Connections to the hub at ``url`` (``ws://`` or ``wss://``); of several, with commas between them, to the first
    that takes one, and from then on to that until it refuses. A node that names the one that leads, as it refuses or
    ends a session, is believed if this ``goes_to_leader``: that is tried next, encrypted as this one is, and again
    after the others, until one of those takes a connection: a node that takes over refuses for a moment, and the one
    that named it may be gone. ``timeout_s`` bounds each try: TCP, TLS and the opening handshake together."""

    def __init__(self, url: str, timeout_s: float = CONNECT_TIMEOUT_S, *, goes_to_leader: bool = True) -> None:
        self._urls = url.split(",")
        self._goes_to_leader = goes_to_leader
        self.url = self._urls[0]
        self._named = ""
        """The URL that was named last."""
        self._forgotten = ""
        """What ``_named`` was until one of the others took a connection."""
        self._passed_over = set[str]()
        """Tried after all others, so that they keep this from none of those."""
        self._timeout_s = timeout_s

    async def connect(self) -> WebSocketWire:
        tried = set[str]()
        while True:
            tried.add(self.url)
            try:
                wire = await self._connect()
                is_given = self.url in self._urls
                self._forgotten, self._named = (self._named, "") if is_given else ("", self.url)
                return wire
            except ConnectError as error:
                left = [it for it in self._list_next(error) if it not in tried]
                if not left or len(tried) >= len(self._urls) + MAX_LED:
                    others = sorted(tried - {self.url})
                    self.url = self._list_next(None)[0]
                    if others and type(error) is ConnectError:
                        raise ConnectError(f"{error} (Tried before: {', '.join(others)}.)") from error
                    raise
                self.url = left[0]

    def _list_next(self, error: ConnectError | None) -> list[str]:
        """Where to go after a refusal, the best first."""
        place = self._urls.index(self.url) + 1 if self.url in self._urls else 0
        given = [*self._urls[place:], *self._urls[:place]]
        if isinstance(error, Following) and is_address(error.leader) and self._goes_to_leader:
            self._named = _at(error.leader, self.url)
            order = [self._named, *given]
        else:
            order = [*given, self._named] if self._named else given
        return sorted(order, key=lambda it: it in self._passed_over)

    def pass_over(self) -> None:
        """Go on with the next address: what took the last connection holds another network."""
        self._passed_over.add(self.url)
        self._named = self._forgotten
        self.url = self._list_next(None)[0]

    def _hear_close(self, url: str, closed: Closed) -> None:
        """A session at this URL was closed; one by a node that leads no longer goes on where another one does."""
        if closed.code == COME_BACK and (leader := parse_leader(closed.reason)) and self._goes_to_leader:
            self.url = self._named = _at(leader, url)

    async def _connect(self) -> WebSocketWire:
        url, step = self.url, _Step.TCP
        timeout_s = self._timeout_s if url in self._urls else min(self._timeout_s, LED_TIMEOUT_S)

        def reach(next_step: _Step) -> None:
            nonlocal step
            step = next_step

        def create(protocol: ClientProtocol, **options: Any) -> _SteppingConnection:
            if url.startswith("wss:"):
                reach(_Step.TLS)
            return _SteppingConnection(protocol, lambda: reach(_Step.UPGRADE), **options)

        try:
            connection = await connect(
                url,
                ssl=client_context(url),
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=256,
                open_timeout=timeout_s,
                close_timeout=2,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=PING_TIMEOUT_S,
                proxy=None,
                create_connection=create,  # type: ignore[arg-type]
            )
        except InvalidURI as error:
            raise ConnectError(f"{url!r} is no WebSocket URL; write ws://HOST:PORT/.") from error
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace").strip()
            told = f"The hub at {url} refused the connection: {error.response.status_code} {body}"
            if leader := error.response.headers.get(LEADER):
                raise Following(told, leader) from error
            raise ConnectError(told) from error
        except (InvalidHandshake, InvalidMessage) as error:
            hint = "" if url.startswith("wss:") else "; if it encrypts, write wss://"
            if isinstance(
                error.__cause__, EOFError
            ):  # a hub that has more newcomers than places cuts one for each that comes
                raise Crowded(
                    f"What listens at {url} closed the connection without an answer, as a hub does when very "
                    "many connect "
                    f"at once; try again{hint}."
                ) from error
            raise ConnectError(f"What listens at {url} is no Roundelay hub: {error}{hint}.") from error
        except TimeoutError as error:
            raise ConnectError(step.value.format(url=url, seconds=f"{timeout_s:g}")) from error
        except ConnectionResetError as error:
            if step is not _Step.UPGRADE:
                raise ConnectError(explain_failure(url, error)) from error
            raise Crowded(explain_failure(url, error)) from error
        except OSError as error:
            raise ConnectError(explain_failure(url, error)) from error
        return WebSocketWire(connection, lambda closed: self._hear_close(url, closed))


def _at(leader: str, url: str) -> str:
    """The URL of a node that was named, encrypted as the connection was by which it was."""
    return f"{url.partition('://')[0]}://{leader}/"


class _Step(Enum):
    """What an attempt to connect waits for, and what is to be said when it does not come."""

    TCP = "Nothing answers at {url} within {seconds} s; check host and port, and whether a firewall is between."
    TLS = (
        "The TLS handshake with {url} did not come about within {seconds} s; check host and port, and if nothing is "
        "encrypted there, write ws://."
    )
    UPGRADE = (
        "What listens at {url} took the connection, but did not answer the request for a WebSocket within {seconds} "
        "s; check that "
        "it is a hub, and not stopped (roundelay status). More time: connect_timeout_s, or ROUNDELAY_CONNECT_TIMEOUT_S."
    )


class _SteppingConnection(ClientConnection):
    """Tells when it is open for the WebSocket's handshake: TLS, if there is any, has come about."""

    def __init__(self, protocol: ClientProtocol, on_open: Callable[[], None], **options: Any) -> None:
        super().__init__(protocol, **options)
        self._on_open = on_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_open()
        super().connection_made(transport)


class WebSocketWire:
    """A `Wire` over websockets' client. Frames that are sent while the loop is busy leave together."""

    def __init__(self, connection: ClientConnection, on_close: Callable[[Closed], None]) -> None:
        self._connection = connection
        self._on_close = on_close
        self._outgoing: list[bytes] = []
        self._waiting_bytes = 0
        self._wakeup = asyncio.Event()
        self._closed: Closed | None = None
        self._sender = asyncio.create_task(self._send_all(), name="wire-sender")

    @property
    def is_full(self) -> bool:
        return self._waiting_bytes > SIGNAL_ROOM_BYTES

    def send(self, data: bytes) -> None:
        if self._closed is not None:
            raise self._closed
        self._outgoing.append(data)
        self._waiting_bytes += len(data)
        self._wakeup.set()

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                outgoing, self._outgoing = self._outgoing, []
                for data in outgoing:
                    await self._connection.send(data, text=True)
                    self._waiting_bytes -= len(data)
        except ConnectionClosed:
            return  # `frames` tells

    async def frames(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            # the peer's code tells why; without its close frame the connection was cut
            code, reason = (error.rcvd.code, error.rcvd.reason) if error.rcvd is not None else (1006, "")
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG and not error.rcvd_then_sent:
                code, reason = error.sent.code, error.sent.reason  # this end closed; the peer only repeated it
            self._closed = Closed(code, reason)
            self._on_close(self._closed)
            raise self._closed from error

    async def drop(self) -> None:
        self._closed = self._closed or Closed(1006, "")
        self._sender.cancel()
        self._connection.transport.abort()
