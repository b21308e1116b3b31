"""The client's side of a connection: what `NetworkClient` needs of a transport, and the WebSocket one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus, InvalidURI
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from .errors import ConnectError
from .frames import SUBPROTOCOL
from .tls import client_context, explain_failure

CONNECT_TIMEOUT_S = 10.0
PING_INTERVAL_S, PING_TIMEOUT_S = 20.0, 40.0
"""How soon a connection whose other end is gone without a word is given up: at most after both."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""What a client accepts from its hub: results of `network.history` hold up to 500 messages."""


class Closed(Exception):
    """The connection is closed, by this code (1006: without a goodbye)."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed with {code}: {reason}")
        self.code = code
        self.reason = reason


class Wire(Protocol):
    """One open connection: JSON text frames both ways."""

    def send(self, data: bytes) -> None:
        """Queue one frame; in order. Raises `Closed`."""

    def frames(self) -> AsyncIterator[bytes]:
        """The frames that arrive, until it raises `Closed`."""

    async def drop(self) -> None:
        """Cut the connection. Idempotent."""


class Transport(Protocol):
    """Opens connections to one hub."""

    async def connect(self) -> Wire:
        """Open one. Raises `ConnectError`, and `Closed` with 1000 when no later try can help."""


class WebSocketTransport:
    """Connections to the hub at ``url`` (``ws://`` or ``wss://``)."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def connect(self) -> WebSocketWire:
        try:
            connection = await connect(
                self.url,
                ssl=client_context(self.url),
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=256,
                open_timeout=CONNECT_TIMEOUT_S,
                close_timeout=2,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=PING_TIMEOUT_S,
                proxy=None,
            )
        except InvalidURI as error:
            raise ConnectError(f"{self.url!r} is no WebSocket URL; write ws://HOST:PORT/.") from error
        except InvalidStatus as error:
            body = (error.response.body or b"").decode(errors="replace").strip()
            raise ConnectError(
                f"The hub at {self.url} refused the connection: {error.response.status_code} {body}"
            ) from error
        except (InvalidHandshake, InvalidMessage) as error:
            hint = "" if self.url.startswith("wss:") else "; if it encrypts, write wss://"
            raise ConnectError(f"What listens at {self.url} is no Roundelay hub: {error}{hint}.") from error
        except OSError as error:  # TimeoutError is one
            raise ConnectError(explain_failure(self.url, error)) from error
        return WebSocketWire(connection)


class WebSocketWire:
    """A `Wire` over websockets' client. Frames that are sent while the loop is busy leave together."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._outgoing: list[bytes] = []
        self._wakeup = asyncio.Event()
        self._closed: Closed | None = None
        self._sender = asyncio.create_task(self._send_all(), name="wire-sender")

    def send(self, data: bytes) -> None:
        if self._closed is not None:
            raise self._closed
        self._outgoing.append(data)
        self._wakeup.set()

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wakeup.wait()
                self._wakeup.clear()
                outgoing, self._outgoing = self._outgoing, []
                for data in outgoing:
                    await self._connection.send(data, text=True)
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
            raise self._closed from error

    async def drop(self) -> None:
        self._closed = self._closed or Closed(1006, "")
        self._sender.cancel()
        self._connection.transport.abort()
