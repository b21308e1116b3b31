"""The listening socket, and what it answers over HTTP on the same port: health, metrics, who is let in to a session,
and the files of a page, if it is given one."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast

from websockets.asyncio.server import Server, ServerConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.http11 import Request, Response
from websockets.protocol import State as WireState

from roundelay.network.config import Limits
from roundelay.network.frames import LEADER, READ_ONLY_QUERY

from .connection import CLOSE_TIMEOUT_S, HubConnection
from .handshakes import HandshakeLimiter
from .hub import Hub
from .metrics import metrics_text
from .origin_policy import OriginPolicy, Site, accepts_gzip, asks_for_session
from .replica import ReplicaReaders

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTED_AT_ONCE = 4
"""How many connections are accepted at most before those that are there are heard: a flood of them holds these up by
some 2 ms each time."""
ROUNDS = 16
"""At the least so often a newcomer is heard before as many came after it as there are places."""
ACCEPT_PAUSE_S = 1.0
TOLD_AGAIN_S = 60.0


class WebSocketServer:
    """Listens for one hub. Health at ``/healthz`` and ``/readyz``, metrics at ``/metrics``, on the same port; with a
    ``site`` also a page at ``/``, and its files under ``/web/``. ``doors`` are the names by which browsers reach it.
    ``standing`` says what a node is among others that share its log, where there are.

    It accepts by itself, since the event loops accept as many at once as come: then the ones that say nothing would be
    the only ones that are dealt with. It also knows those that are in the TLS handshake, and what to do when files are
    short."""

    def __init__(
        self,
        hub: Hub,
        limits: Limits,
        *,
        behind_proxy: bool = False,
        doors: OriginPolicy | None = None,
        site: Site | None = None,
        standing: Callable[[], str] | None = None,
        leader: Callable[[], str] | None = None,
        readers: ReplicaReaders | None = None,
    ) -> None:
        self._hub = hub
        self._doors = doors or OriginPolicy("", (), behind_proxy=behind_proxy)
        self._site = site
        self._behind_proxy = behind_proxy
        self._limits = limits
        self._gate = HandshakeLimiter(limits.max_unauthenticated)
        self._at_once = min(ACCEPTED_AT_ONCE, max(1, limits.max_unauthenticated // ROUNDS))
        self._standing = standing
        self._leader = leader
        self._readers = readers
        self.is_accepting_sessions = True
        """Whether sessions are accepted once the hub is ready. One that waits for its turn to lead is not yet prepared
        for them."""
        self._tls: ssl.SSLContext | None = None
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_at = -math.inf
        hub.handshakes = self._gate

    async def bind(self, host: str, port: int) -> int:
        """Take the address; gives the port (another than asked for, if that was 0). Nobody can connect yet. Raises
        `OSError`."""
        self._sockets = await _bind(host, port)
        return int(self._sockets[0].getsockname()[1])

    def listen(self, *, tls: ssl.SSLContext | None = None) -> None:
        """Begin to accept connections. Raises `OSError`: another took the address meanwhile."""
        self._tls = tls
        for listening in self._sockets:
            listening.listen(BACKLOG)
        for listening in self._sockets:
            self._go_on_accepting(listening)

    async def close(self) -> None:
        """Stop listening and wait for every connection's end. The hub's sessions are closed before."""
        self.stop_listening()
        self._gate.evict_all()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def stop_listening(self) -> None:
        """Accept no more; connections stay. Idempotent."""
        loop = asyncio.get_running_loop()
        listening, self._sockets = self._sockets, []
        for sock in listening:
            loop.remove_reader(sock)
            sock.close()

    @property
    def _is_ready(self) -> bool:
        return self.is_accepting_sessions and self._hub.is_ready

    def is_serving(self) -> bool:
        """Whether connections may come; asked by the library at each handshake."""
        return bool(self._sockets)

    # --- connections come

    def _go_on_accepting(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for number in range(self._at_once):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if number == 0:  # else nobody may be waiting: files are short before it is looked who does
                    self._wait_for_room(listening, error)
                return
            accepted.setblocking(False)
            connection = HubConnection(
                cast("Server", self),
                accepted=accepted,
                address=address,
                hub=self._hub,
                limits=self._limits,
                gate=self._gate,
                behind_proxy=self._behind_proxy,
            )
            connection.arrive()
            task = asyncio.get_running_loop().create_task(self._run(connection, accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _wait_for_room(self, listening: socket.socket, error: OSError) -> None:
        """The system gives no further file: a newcomer that says nothing gives up its own, or those that come wait for
        one."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._told_at >= TOLD_AGAIN_S:
            self._told_at = loop.time()
            log.warning(
                "no further connection can be accepted; who comes waits until one ends (raise the limit of open files)",
                extra={"error": error.strerror},
            )
        if not self._gate.evict_one():
            loop.remove_reader(listening)
            loop.call_later(ACCEPT_PAUSE_S, self._go_on_accepting, listening)

    async def _run(self, connection: HubConnection, accepted: socket.socket) -> None:
        """One connection, from the socket to its end."""
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
        except OSError as error:  # TLS did not come about, or it was cut
            log.debug("a connection came to nothing", extra={"error": str(error)})
            connection.close_session()
            accepted.close()
            return
        try:
            await connection.handshake(self._process_request, _process_response, None)
            if connection.protocol.state is WireState.OPEN:
                await connection.run()
        except (ConnectionClosed, InvalidHandshake, OSError):
            pass  # it is over, or was no handshake; the library has answered it
        except Exception:
            log.exception("a connection failed")
        finally:
            connection.cut()

    def _process_request(
        self, connection: ServerConnection, request: Request
    ) -> Response | Awaitable[Response | None] | None:
        assert isinstance(connection, HubConnection)
        connection.read_address(request.headers)
        path = request.path.partition("?")[0]
        if path == "/" and (self._site is None or asks_for_session(request.headers)):
            return self._refuse_origin(connection, request) or self._admit(connection, request)
        if self._site is not None and (path == "/" or path.startswith("/web/")):
            return self._refuse_origin(connection, request) or self._show(connection, request, self._site, path)
        if path == "/healthz":
            return connection.respond(HTTPStatus.OK, "ok\n")
        if path == "/readyz":
            if self._is_ready:
                leading = f", {self._standing()}" if self._standing is not None else ""
                return connection.respond(HTTPStatus.OK, f"ready{leading}\n")
            standing = self._standing() if self._standing is not None and not self._hub.is_open else "recovering"
            reason = "the ledger does not answer" if self._hub.is_open else standing
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n")
        if path == "/metrics":
            response = connection.respond(HTTPStatus.OK, metrics_text(self._hub.list_figures()))
            del response.headers["Content-Type"]  # setting it would add another
            response.headers["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
            return response
        return connection.respond(HTTPStatus.NOT_FOUND, "Here are /, /healthz, /readyz and /metrics.\n")

    def _refuse_origin(self, connection: ServerConnection, request: Request) -> Response | None:
        fault = self._doors.find_wrong_origin(
            request.headers, connection.local_address, is_encrypted=self._tls is not None
        )
        return None if fault is None else _say(connection, HTTPStatus.FORBIDDEN, fault)

    def _show(self, connection: ServerConnection, request: Request, site: Site, path: str) -> Response:
        fault = self._doors.find_wrong_host(request.headers, connection.local_address)
        if fault is not None:
            return _say(connection, HTTPStatus.MISDIRECTED_REQUEST, fault)
        file = site.find(path, takes_gzip=accepts_gzip(request.headers))
        if file is None:
            return _say(connection, HTTPStatus.NOT_FOUND, "There is no such file here; open the page again, at /.")
        response = connection.respond(HTTPStatus.OK, "")
        for name, value in (*file.headers, ("Content-Length", str(len(file.body)))):
            if name in response.headers:
                del response.headers[name]  # setting it would add another
            response.headers[name] = value
        response.body = file.body
        return response

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        assert isinstance(connection, HubConnection)
        hub = self._hub
        if (
            not self._is_ready
            and READ_ONLY_QUERY in request.path.partition("?")[2].split("&")
            and self._readers is not None
        ):
            hub = self._readers.hub or hub
            connection.choose_hub(hub)
        if connection.is_head:  # no session comes of it
            response = connection.respond(HTTPStatus.UPGRADE_REQUIRED, "")
            response.headers["Upgrade"] = "websocket"
            return response
        if hub.registry.admitted >= self._limits.max_connections:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, "max_connections is reached; try again later.\n")
        if hub is self._hub and not self._is_ready:
            what = self._standing() if self._standing is not None and not self._hub.is_open else ""
            if what.startswith("following"):
                sentence = (
                    f"This node does not serve: it is {what.partition(', log ')[0]}, while another one leads. Connect "
                    f"to that one; to read what this one has, connect with ?{READ_ONLY_QUERY}."
                )
            elif what.startswith("waiting"):
                sentence = f"This node is {what.partition(', log ')[0]}; try again in a moment."
            else:
                sentence = "The hub is recovering; try again in a moment."
            response = connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{sentence}\n")
            if what.startswith("following") and self._leader is not None and (leader := self._leader()):
                response.headers[LEADER] = leader
            return response
        return None


def _say(connection: ServerConnection, status: HTTPStatus, sentence: str) -> Response:
    """An answer to a browser that is no page; it is to take it as the text that it is."""
    response = connection.respond(status, f"{sentence}\n")
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def _process_response(connection: ServerConnection, _request: Request, response: Response) -> None:
    assert isinstance(connection, HubConnection)
    if connection.is_head:
        response.body = b""  # its headers stay, the length among them


async def _bind(host: str, port: int) -> list[socket.socket]:
    """Sockets that are to listen, one for each address of the host. Raises `OSError`, and then none is left."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets
