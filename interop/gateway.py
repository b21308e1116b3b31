"""The gateway: one process beside a node that lets other protocols in, on a port of its own.

Puts together what is asked for and serves it until it is stopped. Of its own it keeps the registrations of webhooks
and push notifications, and nothing else: what is asked for twice is settled by the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import h11
import uvicorn
from mcp.server.mcpserver import Context
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from roundelay.network.client import NetworkClient
from roundelay.network.config import Served
from roundelay.network.errors import ConnectError, Forbidden, InvalidFrame, RoundelayError

from .a2a_push import TaskPushes
from .a2a_server import make_a2a_app
from .callers import Callers, read_authorization
from .http_api import ENDPOINTS, make_routes, read_body, refuse, serve_while_there
from .mcp_server import make_mcp_server
from .openai_api import make_openai_routes
from .webhooks import WebhookPace, Webhooks
from .webhooks_api import make_webhook_endpoints

HEAD_TIMEOUT_S = 10.0
"""How long a connection may be open without a whole head of a request."""
KEYS_PATH = "/.well-known/jwks.json"
"""What proves push notifications of A2A; everybody may see it."""
MAX_CONNECTIONS = 1000
"""Beyond that an answer is 503, until others have gone."""
STOP_S = 5
"""How long requests that are under way may go on when it stops: those that wait for a message are cut."""
_SINGLE = ("authorization", "host", "idempotency-key", "origin", "sec-fetch-site")


class PlainRequestsOnly:
    """Refuses what may be read in two ways, by a proxy before this and here, and what another site's page makes a
    browser ask: with a name and a password (`Basic`) that somebody gave it once, the browser proves itself to whoever
    makes it send a form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (name := _find_doubt(headers)) is not None:
            answer = refuse(InvalidFrame(f"The request says in two ways what its {name} is."))
            answer.headers["connection"] = "close"  # where it ends may be in doubt too
            await answer(scope, receive, send)
            return
        if _asks_elsewhere(headers):
            await refuse(Forbidden("A page of another site may not call; programs that are no page may."))(
                scope, receive, send
            )
            return
        await self._app(scope, receive, send)


def _find_doubt(headers: Headers) -> str | None:
    """What a request says more than once, though there is one of it."""
    if "transfer-encoding" in headers and "content-length" in headers:
        return "length"  # RFC 9112, 6.1
    return next((name for name in _SINGLE if len(headers.getlist(name)) > 1), None)


def _asks_elsewhere(headers: Headers) -> bool:
    """Whether a browser says that the page of another site asks."""
    origin, said = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    return said not in ("none", "same-origin")


class HeadInTime(H11Protocol):
    """HTTP of which the head has to come in time, each request's anew: who holds a connection open without asking is
    cut."""

    _due: asyncio.TimerHandle | None = None

    # uvicorn narrows the argument in the same way, and is not typed as a subclass of what asyncio declares
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(HEAD_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_partial = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not is_partial:
            self._cancel_due()
        elif self._due is None:
            self._due = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_due()
        super().connection_lost(exc)

    def _cancel_due(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class WithToken:
    """Lets requests through to another protocol's application once the hub has taken their token."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._callers.session(read_authorization(Headers(scope=scope).get("authorization"))):
                pass
        except RoundelayError as error:
            await refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class WhileThere:
    """Gives another protocol's application the whole body of a request, as `http_api` takes one, and ends what it does
    for who has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        except RoundelayError as error:
            await refuse(error)(scope, receive, send)
            return
        await serve_while_there(self._app, scope, receive, send, body)


def make_app(
    callers: Callers,
    host: str = "127.0.0.1",
    served: Collection[Served] = get_args(Served),
    webhooks: Webhooks | None = None,
    pushes: TaskPushes | None = None,
) -> Starlette:
    """The application of a gateway to one node, which listens on ``host``."""

    def find_session(context: Context[Any, Any]) -> AbstractAsyncContextManager[NetworkClient]:
        return callers.session(read_authorization((context.headers or {}).get("authorization")))

    mcp_server = make_mcp_server(find_session)
    [mcp_route] = mcp_server.streamable_http_app(stateless_http=True, json_response=True, host=host).routes
    assert isinstance(mcp_route, Route)

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        async with mcp_server.session_manager.run():
            yield

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def show_keys(_: Request) -> Response:
        assert pushes is not None
        return JSONResponse(pushes.list_keys(), headers={"Cache-Control": "public, max-age=300"})

    async def refuse_path(request: Request, error: Exception) -> Response:
        status: int = getattr(error, "status_code", 404)
        told = f"There is no {request.method} {request.url.path[:80]} here; see /openapi.json."
        told += " OpenAI's API is below /v1." if "openai" in served else ""
        problem = {"code": "unknown_operation", "message": told}
        return JSONResponse({"error": problem}, status, getattr(error, "headers", None))

    async def refuse_call(_: Request, error: Exception) -> Response:
        assert isinstance(error, RoundelayError)
        return refuse(error)

    endpoints = ENDPOINTS if "http" in served else ()
    if webhooks is not None:
        endpoints += make_webhook_endpoints(webhooks)
    a2a_app = WithToken(make_a2a_app(callers, pushes), callers)
    return Starlette(
        routes=[
            Route("/healthz", health, methods=["GET"]),
            *make_routes(callers, endpoints),
            *(make_openai_routes(callers) if "openai" in served else ()),
            *((Route("/mcp", WithToken(WhileThere(mcp_route.app), callers)),) if "mcp" in served else ()),
            *((Mount("/a2a/{agent_id}", a2a_app),) if "a2a" in served else ()),
            *((Route(KEYS_PATH, show_keys, methods=["GET"]),) if pushes is not None else ()),
        ],
        lifespan=live,
        middleware=[Middleware(PlainRequestsOnly)],
        exception_handlers={404: refuse_path, 405: refuse_path, RoundelayError: refuse_call},
    )


@asynccontextmanager
async def serve_gateway(
    node_url: str,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    served: Collection[Served] = get_args(Served),
    webhooks_file: Path | None = None,
    webhook_hosts: Collection[str] = (),
    pace: WebhookPace | None = None,
) -> AsyncIterator[str]:
    """Run a gateway to a node for the length of an ``async with``; gives its URL. Webhooks, and push notifications of
    A2A, need a file. Raises
    `ConnectError` where the address cannot be bound, `ConfigError` where the file is no good."""
    try:
        listening = _bind(host, port)
    except OSError as error:
        raise ConnectError(
            f"The gateway cannot listen on {host}:{port}: {error.strerror or error}. Choose another port for it "
            "(--port; of roundelay up, --interop-port or port under interop in its file), or end what listens there."
        ) from error
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        callers = await stack.enter_async_context(Callers(node_url))
        webhooks, pushes = None, None
        if webhooks_file is not None and "webhooks" in served:
            allowed = frozenset(it.lower() for it in webhook_hosts)
            webhooks = await stack.enter_async_context(Webhooks(node_url, webhooks_file, allowed, pace))
            if "a2a" in served:
                kept = TaskPushes(node_url, Path(f"{webhooks_file}.a2a"), allowed, pace)
                pushes = await stack.enter_async_context(kept)
        config = uvicorn.Config(
            make_app(callers, host, served, webhooks, pushes),
            http=HeadInTime,
            limit_concurrency=MAX_CONNECTIONS,
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=STOP_S,
        )
        server = uvicorn.Server(config)
        # signals are the owner's of this process; uvicorn has no setting that leaves them alone
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="gateway")
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # who comes from now on waits until it is served
    except OSError:
        sock.close()
        raise
    return sock
