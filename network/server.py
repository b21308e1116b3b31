"""The listening socket, and what it answers over HTTP on the same port: health, metrics, and who is let in to a session."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from .config import Limits
from .connection import CLOSE_TIMEOUT_S, HubConnection
from .frames import SUBPROTOCOL
from .gate import Gate
from .hub import Hub
from .metrics import metrics_text


class WebSocketServer:
    """Listens for one hub. Health at ``/healthz`` and ``/readyz``, metrics at ``/metrics``, on the same port."""

    def __init__(self, hub: Hub, limits: Limits) -> None:
        self._hub = hub
        self._limits = limits
        self._gate = Gate(limits)
        self._server: Server | None = None

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> int:
        """Begin to accept connections; gives the port (another than asked for, if that was 0). Raises `OSError`."""

        def create_connection(protocol: ServerProtocol, server: Server, **options: Any) -> HubConnection:
            return HubConnection(protocol, server, hub=self._hub, limits=self._limits, gate=self._gate, **options)

        self._server = await serve(
            _run_connection,
            host,
            port,
            ssl=tls,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            process_request=self._process_request,
            process_response=_process_response,
            open_timeout=self._limits.hello_timeout_ms / 1000,
            ping_interval=None,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=self._limits.max_frame_bytes,
            server_header=None,
            create_connection=create_connection,  # type: ignore[arg-type]
            backlog=1024,
            # one that does not go on is no connection yet that the gate could count
            ssl_handshake_timeout=self._limits.hello_timeout_ms / 1000 if tls is not None else None,
        )
        return int(next(iter(self._server.sockets)).getsockname()[1])

    async def close(self) -> None:
        """Stop listening and wait for every connection's end. The hub's sessions are closed before."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def stop_listening(self) -> None:
        """Accept no more; connections stay."""
        if self._server is not None:
            self._server.server.close()

    def _process_request(
        self, connection: ServerConnection, request: Request
    ) -> Response | Awaitable[Response | None] | None:
        path = request.path.partition("?")[0]
        if path == "/":
            return self._admit(connection)
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "ok\n")
        if path == "/readyz":
            if self._hub.is_ready:
                return connection.respond(HTTPStatus.OK, "ready\n")
            reason = "the ledger does not answer" if self._hub.is_open else "recovering"
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, metrics_text(self._hub))
            del response.headers["Content-Type"]  # setting it would add another
            response.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
            return response
        return connection.respond(HTTPStatus.NOT_FOUND, "Here are /, /healthz, /readyz and /metrics.\n")

    def _admit(self, connection: ServerConnection) -> Response | None:
        assert isinstance(connection, HubConnection)
        if connection.is_head:  # no session comes of it
            response = connection.respond(HTTPStatus.UPGRADE_REQUIRED, "")
            response.headers["Upgrade"] = "websocket"
            return response
        if not connection.is_let_in:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "Too many connections wait; try again later.\n")
        sessions = self._hub.switchboard.sessions
        if len(sessions) >= self._limits.max_connections:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "max_connections is reached; try again later.\n")
        if not self._hub.is_ready:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "The hub is recovering; try again in a moment.\n")
        if self._hub.switchboard.opening >= self._limits.max_unauthenticated:
            return connection.respond(
                HTTPStatus.SERVICE_UNAVAILABLE, "max_unauthenticated is reached; try again later.\n"
            )
        return None


def _process_response(connection: ServerConnection, _request: Request, response: Response) -> None:
    assert isinstance(connection, HubConnection)
    if connection.is_head:
        response.body = b""  # its headers stay, the length among them


async def _run_connection(connection: ServerConnection) -> None:
    assert isinstance(connection, HubConnection)
    await connection.run()
