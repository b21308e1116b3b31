"""Connections to a hub: the protocols `Transport` and `Wire`, and their WebSocket implementation.

`link` opens a connection through this module and then owns it. This module chooses which of several addresses to
try."""

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
"""Number of unsent bytes above which a connection counts as full. The client then drops signals."""
PING_INTERVAL_S, PING_TIMEOUT_S = 20.0, 40.0
"""Time between pings, and time limit of a ping's answer, in seconds. If the hub stops responding, the connection is
closed after at most the sum of both times."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Maximum size of a frame that a client accepts, in bytes. A result of `network.history` has up to 500 messages."""
MAX_REDIRECTS = 3
"""Maximum number of leaders named by other nodes that one `connect` tries."""
REDIRECT_TIMEOUT_S = 3.0
"""Maximum time for an attempt to connect to a leader that another node named, in seconds. Such an address may not be
reachable from this machine."""
COME_BACK = 4503


class Crowded(ConnectError):
    """The server closed the connection without an answer. A hub with too many pending connections does this."""


class NotLeading(ConnectError):
    """The node is a read replica and refused the connection. ``leader`` is the address of the leader, as HOST:PORT."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


class Wire(Protocol):
    """One open connection that carries JSON text frames in both directions."""

    @property
    def is_full(self) -> bool:
        """Whether the hub reads too slowly, so that callers should drop frames that may be dropped."""

    def send(self, data: bytes) -> None:
        """Queue a frame for sending. Frames are sent in order. Raises `Closed` if the connection is closed."""

    def frames(self) -> AsyncIterator[bytes]:
        """Yield the frames that arrive. Raises `Closed` when the connection closes."""

    async def drop(self) -> None:
        """End the connection at once, without a close handshake. Idempotent."""


class Transport(Protocol):
    """Interface of objects that open connections to a hub."""

    async def connect(self) -> Wire:
        """Open a connection within the transport's own time limit. Raises `ConnectError`, or `Closed` with code 1000 if
        no later attempt can succeed."""


class WebSocketTransport:
    """Connections to the hub at ``url`` (``ws://`` or ``wss://``).

    ``url`` may list several URLs, separated by commas. The first URL that accepts a connection is used until it refuses
    a connection. A node that refuses or ends a session may name the leader. With ``goes_to_leader``, the leader is
    tried next, with the same encryption as the node that named it. A new leader may refuse connections for a short
    time. So the leader is tried again after the other URLs, until one of these URLs accepts a connection.

    ``timeout_s`` limits each attempt: TCP, TLS and the WebSocket handshake together.
    """

    def __init__(self, url: str, timeout_s: float = CONNECT_TIMEOUT_S, *, goes_to_leader: bool = True) -> None:
        self._urls = url.split(",")
        self._goes_to_leader = goes_to_leader
        self.url = self._urls[0]
        self._leader = ""
        """URL of the leader that a node named last, or an empty string."""
        self._previous_leader = ""
        """Value of ``_leader`` before one of the given URLs accepted a connection."""
        self._passed_over = set[str]()
        """URLs that belong to other networks. They are tried only after all other URLs."""
        self._timeout_s = timeout_s

    async def connect(self) -> WebSocketWire:
        tried = set[str]()
        while True:
            tried.add(self.url)
            try:
                wire = await self._connect()
                # Remember the named leader until a given URL accepts a connection, because the node that named the
                # leader may have stopped.
                is_given = self.url in self._urls
                self._previous_leader, self._leader = (self._leader, "") if is_given else ("", self.url)
                return wire
            except ConnectError as error:
                untried = [url for url in self._list_next(error) if url not in tried]
                # Limit the redirects, because during an election two nodes may name each other as the leader forever.
                if not untried or len(tried) >= len(self._urls) + MAX_REDIRECTS:
                    others = sorted(tried - {self.url})
                    self.url = self._list_next(None)[0]
                    if others and type(error) is ConnectError:
                        raise ConnectError(f"{error} (Tried before: {', '.join(others)}.)") from error
                    raise
                self.url = untried[0]

    def _list_next(self, error: ConnectError | None) -> list[str]:
        """Return the URLs to try after a refusal, the most promising first."""
        # Continue after the URL that refused. If every search began with the first URL, later URLs might never be
        # tried.
        start = self._urls.index(self.url) + 1 if self.url in self._urls else 0
        urls = [*self._urls[start:], *self._urls[:start]]
        if isinstance(error, NotLeading) and is_address(error.leader) and self._goes_to_leader:
            self._leader = _make_leader_url(error.leader, self.url)
            order = [self._leader, *urls]
        else:
            order = [*urls, self._leader] if self._leader else urls
        return sorted(order, key=lambda url: url in self._passed_over)

    def pass_over(self) -> None:
        """Switch to the next URL, because the current URL belongs to another network."""
        self._passed_over.add(self.url)
        # Restore the previous leader, which a node of this network named.
        self._leader = self._previous_leader
        self.url = self._list_next(None)[0]

    def _handle_close(self, url: str, closed: Closed) -> None:
        """Switch to the new leader if the node at ``url`` closed a session because it lost leadership."""
        if closed.code == COME_BACK and (leader := parse_leader(closed.reason)) and self._goes_to_leader:
            self.url = self._leader = _make_leader_url(leader, url)

    async def _connect(self) -> WebSocketWire:
        url, step = self.url, _Step.TCP
        timeout_s = self._timeout_s if url in self._urls else min(self._timeout_s, REDIRECT_TIMEOUT_S)

        def enter_step(next_step: _Step) -> None:
            nonlocal step
            step = next_step

        def create(protocol: ClientProtocol, **options: Any) -> _SteppingConnection:
            if url.startswith("wss:"):
                enter_step(_Step.TLS)
            return _SteppingConnection(protocol, lambda: enter_step(_Step.UPGRADE), **options)

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
            raise ConnectError(f"{url!r} is not a WebSocket URL. Write ws://HOST:PORT/ or wss://HOST:PORT/.") from error
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace").strip()
            reason = f"The hub at {url} refused the connection: {error.response.status_code} {body}"
            if leader := error.response.headers.get(LEADER):
                raise NotLeading(reason, leader) from error
            raise ConnectError(reason) from error
        except (InvalidHandshake, InvalidMessage) as error:
            hint = "" if url.startswith("wss:") else "; if the server uses TLS, write wss://"
            # A hub with too many pending connections closes a pending connection for each new one, without an answer.
            if isinstance(error.__cause__, EOFError):
                raise Crowded(
                    f"The server at {url} closed the connection without an answer. A hub does this when very many "
                    f"clients connect at once; try again{hint}."
                ) from error
            raise ConnectError(f"The server at {url} is not a Roundelay hub: {error}{hint}.") from error
        except TimeoutError as error:
            raise ConnectError(step.value.format(url=url, seconds=f"{timeout_s:g}")) from error
        except ConnectionResetError as error:
            # A reset during TCP or TLS comes from the network or a firewall. A hub with too many pending connections
            # resets a connection only after these steps.
            if step is not _Step.UPGRADE:
                raise ConnectError(explain_failure(url, error)) from error
            raise Crowded(explain_failure(url, error)) from error
        except OSError as error:
            raise ConnectError(explain_failure(url, error)) from error
        return WebSocketWire(connection, lambda closed: self._handle_close(url, closed))


def _make_leader_url(leader: str, url: str) -> str:
    """Return the URL of a leader, with the same encryption as the connection to the node that named it."""
    return f"{url.partition('://')[0]}://{leader}/"


class _Step(Enum):
    """Step of a connection attempt. The value is the error text for a timeout in this step."""

    TCP = "No answer from {url} within {seconds} s. Check the host, the port, and firewalls between."
    TLS = (
        "The TLS handshake with {url} did not finish within {seconds} s. Check host and port. If the server does not "
        "use TLS, write ws://."
    )
    UPGRADE = (
        "The server at {url} accepted the connection, but did not answer the request for a WebSocket within {seconds} "
        "s. Check that the server is a running hub (roundelay status). To wait longer, set connect_timeout_s or "
        "ROUNDELAY_CONNECT_TIMEOUT_S."
    )


class _SteppingConnection(ClientConnection):
    """A connection that calls ``on_open`` when TCP and TLS are done and the WebSocket handshake starts."""

    def __init__(self, protocol: ClientProtocol, on_open: Callable[[], None], **options: Any) -> None:
        super().__init__(protocol, **options)
        self._on_open = on_open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._on_open()
        super().connection_made(transport)


class WebSocketWire:
    """A `Wire` over a connection of the library websockets. A task sends the queued frames, so that `send` never
    blocks."""

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
                # Replace the queue before the first await. Frames that are queued during the await are sent in the next
                # round, so the order is kept.
                outgoing, self._outgoing = self._outgoing, []
                for data in outgoing:
                    await self._connection.send(data, text=True)
                    self._waiting_bytes -= len(data)
        except ConnectionClosed:
            return  # `frames` raises the error to the reader

    async def frames(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            # The hub's close frame contains the reason. Without a close frame, the connection was lost.
            code, reason = (error.rcvd.code, error.rcvd.reason) if error.rcvd is not None else (1006, "")
            if error.sent is not None and error.sent.code == CloseCode.MESSAGE_TOO_BIG and not error.rcvd_then_sent:
                # The client closed the connection because of a large frame. The hub's close frame only repeats the
                # code.
                code, reason = error.sent.code, error.sent.reason
            self._closed = Closed(code, reason)
            # Call `on_close` before raising the error, because the reader reconnects at once and needs the new address.
            self._on_close(self._closed)
            raise self._closed from error

    async def drop(self) -> None:
        self._closed = self._closed or Closed(1006, "")
        self._sender.cancel()
        # Abort instead of closing, because a close handshake would wait for a hub that may be gone.
        self._connection.transport.abort()
