"""`WebSocketServer`: the listening socket of a hub, and the HTTP answers on its port: health, metrics, and the files of
a web page.

The server accepts connections, checks each handshake, and runs a `HubConnection` for each session. It does not
interpret frames.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable
from http import HTTPStatus
from typing import cast

import msgspec
from websockets.asyncio.server import Server, ServerConnection
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.http11 import Request, Response
from websockets.protocol import State as WireState

from roundelay.network.config import Limits
from roundelay.network.frames import LEADER, READ_ONLY_QUERY
from roundelay.network.readiness import Readiness, SharedLogReadiness

from .connection import CLOSE_TIMEOUT_S, HubConnection
from .hub import Hub
from .metrics import LogStatusSource, format_metrics
from .origin_policy import OriginPolicy, Site, accepts_gzip, asks_for_session
from .replica import ReplicaReaders

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_ACCEPTED_AT_ONCE = 4
"""Maximum number of connections that are accepted before existing connections are read again. With this limit, a flood
of new connections delays existing connections by about 2 ms per turn."""
MIN_TURNS = 16
"""Minimum number of turns of the loop in which a pending connection is read before new connections can evict it."""
ACCEPT_PAUSE_S = 1.0
"""Delay in seconds before the next attempt to accept connections after the file descriptors have run out."""
WARN_AGAIN_S = 60.0


class WebSocketServer:
    """The server that listens for one hub. It serves sessions at ``/``, health at ``/healthz`` and ``/readyz``, and
    metrics at ``/metrics``. With a ``site``, it also serves a page at ``/`` and the page's files under ``/web/``.

    The server accepts connections itself. The event loop would accept all waiting connections at once, so a flood of
    silent connections could stop all other work. The server also tracks connections that are in their TLS handshake,
    and can evict them when the file descriptors have run out.
    """

    def __init__(
        self,
        hub: Hub,
        limits: Limits,
        *,
        behind_proxy: bool = False,
        origin_policy: OriginPolicy | None = None,
        site: Site | None = None,
        shared_log: LogStatusSource | None = None,
        readers: ReplicaReaders | None = None,
    ) -> None:
        self._hub = hub
        self._origin_policy = origin_policy or OriginPolicy("", (), behind_proxy=behind_proxy)
        self._site = site
        self._behind_proxy = behind_proxy
        self._limits = limits
        self._handshakes = hub.handshakes
        self._accepted_at_once = min(MAX_ACCEPTED_AT_ONCE, max(1, limits.max_unauthenticated // MIN_TURNS))
        self._shared_log = shared_log
        self._readers = readers
        self.is_accepting_sessions = True
        """Whether sessions are accepted once the hub is ready. On a node that waits to become leader, this is False
        until the node is prepared."""
        self._tls: ssl.SSLContext | None = None
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned_at = -math.inf

    async def bind(self, host: str, port: int) -> int:
        """Bind the address and return the port. If ``port`` is 0, the system chooses the port. Clients can connect only
        after `listen` was called. Raises `OSError`."""
        self._sockets = await _bind(host, port)
        return int(self._sockets[0].getsockname()[1])

    def listen(self, *, tls: ssl.SSLContext | None = None) -> None:
        """Begin to accept connections. Raises `OSError` if another process has taken the address since `bind`."""
        self._tls = tls
        for listening in self._sockets:
            listening.listen(BACKLOG)
        # Listen on all addresses before accepting on any of them. If one address is taken, no client has been accepted
        # yet.
        for listening in self._sockets:
            self._start_accepting(listening)

    async def close(self) -> None:
        """Stop listening, and wait until every connection has ended. The caller has already closed the hub and its
        sessions."""
        self.stop_listening()
        self._handshakes.evict_all()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stop_listening(self) -> None:
        """Stop accepting connections. Existing connections stay open. Idempotent."""
        loop = asyncio.get_running_loop()
        listening, self._sockets = self._sockets, []
        for sock in listening:
            loop.remove_reader(sock)
            sock.close()

    def is_serving(self) -> bool:
        """Return whether the server accepts connections. The `websockets` library calls this method at each
        handshake."""
        return bool(self._sockets)

    @property
    def _is_ready(self) -> bool:
        return self.is_accepting_sessions and self._hub.is_ready

    # --- new connections

    def _start_accepting(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for number in range(self._accepted_at_once):
            try:
                accepted, address = listening.accept()
            # No connection waits, or the peer has given up. Both are normal.
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Only a failure of the first call proves that a connection waits. `accept` checks the file descriptors
                # before it looks for a connection.
                if number == 0:
                    self._handle_file_shortage(listening, error)
                return
            accepted.setblocking(False)
            connection = HubConnection(
                cast("Server", self),
                accepted=accepted,
                address=address,
                hub=self._hub,
                limits=self._limits,
                behind_proxy=self._behind_proxy,
            )
            # Start the hello timeout before the TLS handshake, so that connections in their TLS handshake are counted
            # and can be evicted.
            connection.start_handshake()
            task = asyncio.get_running_loop().create_task(self._run(connection, accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _handle_file_shortage(self, listening: socket.socket, error: OSError) -> None:
        """Evict a pending connection to free its file descriptor. If no connection is pending, stop accepting for a
        while."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._warned_at >= WARN_AGAIN_S:
            # Warn only once a minute: without free file descriptors, every new connection causes this error.
            self._warned_at = loop.time()
            log.warning(
                "no file descriptor is left for a new connection. New connections wait until one ends; raise the limit "
                "of open files",
                extra={"error": error.strerror},
            )
        # Stop polling the socket for a while, because the socket stays readable. Otherwise, the loop would call
        # `_accept` again and again.
        if not self._handshakes.evict_one():
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._start_accepting, listening)

    async def _run(self, connection: HubConnection, accepted: socket.socket) -> None:
        """Run one connection, from the accepted socket to its end."""
        timeout_s = self._limits.hello_timeout_ms / 1000
        is_tls = self._tls is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=timeout_s if is_tls else None,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S if is_tls else None,
            )
        except OSError as error:  # the TLS handshake failed, or the connection was cut
            log.debug("a connection failed before its request", extra={"error": str(error)})
            # `connection_made` was not called, so `connection_lost` is not called either.
            connection.close_session()
            accepted.close()
            return
        try:
            await connection.handshake(self._process_request, _process_response, None)
            if connection.protocol.state is WireState.OPEN:
                await connection.run()
        except (ConnectionClosed, InvalidHandshake, OSError):
            pass  # the connection ended, or the library has refused a request that was not a handshake
        except Exception:
            log.exception("a connection failed")
        finally:
            connection.cut()

    # --- requests

    def _process_request(
        self, connection: ServerConnection, request: Request
    ) -> Response | Awaitable[Response | None] | None:
        """Answer a request. Return None if the WebSocket handshake should continue."""
        assert isinstance(connection, HubConnection)
        connection.read_address(request.headers)
        path = request.path.partition("?")[0]
        if path == "/" and (self._site is None or asks_for_session(request.headers)):
            # Check the origin first. The answers show whether the hub is ready or full, and a hostile page must not
            # learn this.
            return self._check_origin(connection, request) or self._check_session(connection, request)
        if self._site is not None and (path == "/" or path.startswith("/web/")):
            return self._check_origin(connection, request) or self._serve_file(connection, request, self._site, path)
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "ok\n")
        if path == "/readyz":
            return self._answer_readiness(connection, request)
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, format_metrics(self._hub.view.list_metrics()))
            _set_header(response, "Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            return response
        return connection.respond(HTTPStatus.NOT_FOUND, "Here are /, /healthz, /readyz and /metrics.\n")

    def _answer_readiness(self, connection: ServerConnection, request: Request) -> Response:
        readiness = self._describe_readiness()
        status = HTTPStatus.OK if readiness.ready else HTTPStatus.SERVICE_UNAVAILABLE
        if not _accepts_json(request.headers):
            return connection.respond(status, f"{readiness.detail}\n")
        response = connection.respond(status, msgspec.json.encode(readiness).decode() + "\n")
        _set_header(response, "Content-Type", "application/json")
        return response

    def _describe_readiness(self) -> Readiness:
        status = self._shared_log.status if self._shared_log is not None else None
        log = None
        if status is not None:
            log = SharedLogReadiness(
                status.leads, status.leader, status.behind, status.log, status.durability, status.waits
            )
        if self._is_ready:
            return Readiness(True, "ready", f"ready, {status}" if status is not None else "ready", log)
        if self._hub.status.is_open:
            return Readiness(False, "stalled", "the ledger does not answer", log)
        if status is None:
            return Readiness(False, "recovering", "recovering")
        if status.leads:
            return Readiness(False, "recovering", str(status), log)
        if status.waits:
            return Readiness(False, "waiting", str(status), log)
        return Readiness(False, "starting" if status.behind is None else "following", str(status), log)

    def _check_origin(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return a refusal if the request comes from a page whose origin this node does not allow."""
        refusal = self._origin_policy.find_wrong_origin(
            request.headers, connection.local_address, is_encrypted=self._tls is not None
        )
        return None if refusal is None else _refuse_browser(connection, HTTPStatus.FORBIDDEN, refusal)

    def _serve_file(self, connection: ServerConnection, request: Request, site: Site, path: str) -> Response:
        refusal = self._origin_policy.find_wrong_host(request.headers, connection.local_address)
        if refusal is not None:
            return _refuse_browser(connection, HTTPStatus.MISDIRECTED_REQUEST, refusal)
        file = site.find(path, takes_gzip=accepts_gzip(request.headers))
        if file is None:
            sentence = "There is no such file here; open the page again, at /."
            return _refuse_browser(connection, HTTPStatus.NOT_FOUND, sentence)
        # `respond` accepts only text, and files are bytes, so set the body below.
        response = connection.respond(HTTPStatus.OK, "")
        for name, value in (*file.headers, ("Content-Length", str(len(file.body)))):
            _set_header(response, name, value)
        response.body = file.body
        return response

    def _check_session(self, connection: HubConnection, request: Request) -> Response | None:
        """Choose the hub that will serve a session, and return None. Return a response if the session is refused."""
        hub = self._hub
        if (
            not self._is_ready
            and READ_ONLY_QUERY in request.path.partition("?")[2].split("&")
            and self._readers is not None
        ):
            hub = self._readers.hub or hub
            connection.hub = hub
        if connection.is_head:  # a HEAD request opens no session
            response = connection.respond(HTTPStatus.UPGRADE_REQUIRED, "")
            response.headers["Upgrade"] = "websocket"
            return response
        # `Intake` checks this limit again at the hello. Checking it here avoids a handshake that would fail anyway.
        if hub.registry.admitted >= self._limits.max_connections:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "max_connections is reached; try again later.\n")
        if hub is self._hub and not self._is_ready:
            return self._refuse_not_ready(connection)
        return None

    def _refuse_not_ready(self, connection: ServerConnection) -> Response:
        """Refuse a session because the hub is not ready. If another node leads, name that node."""
        readiness = self._describe_readiness()
        status = readiness.detail.partition(", log ")[0]
        match readiness.state:
            case "following":
                sentence = (
                    f"This node does not serve: it is {status}, and another node leads. Connect to the leader. To read "
                    f"what this node has, connect with ?{READ_ONLY_QUERY}."
                )
            case "waiting":
                sentence = f"This node is {status}; try again in a moment."
            case _:
                sentence = "The hub is recovering; try again in a moment."
        response = connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{sentence}\n")
        if readiness.state == "following" and self._shared_log is not None and self._shared_log.leader_node:
            response.headers[LEADER] = self._shared_log.leader_node
        return response


def _set_header(response: Response, name: str, value: str) -> None:
    if name in response.headers:
        del response.headers[name]  # an assignment would add a second header
    response.headers[name] = value


def _accepts_json(headers: Headers) -> bool:
    return any("application/json" in line.lower() for line in headers.get_all("Accept"))


def _refuse_browser(connection: ServerConnection, status: HTTPStatus, sentence: str) -> Response:
    """Refuse a browser with plain text, and forbid the browser to guess another content type."""
    response = connection.respond(status, f"{sentence}\n")
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def _process_response(connection: ServerConnection, _request: Request, response: Response) -> None:
    assert isinstance(connection, HubConnection)
    if connection.is_head:
        response.body = b""  # keep the headers unchanged, including the length of the body


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Return bound sockets, one for each address of the host. On failure, close all sockets and raise `OSError`."""
    addresses = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setblocking(False)
            # Let a restarted node bind its port again while connections of the old process are in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # Each address family has its own socket. Without this option, the IPv6 socket would also take the port
                # for IPv4.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets
