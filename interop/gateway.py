"""The gateway: one process beside a node that lets other protocols in, on a port of its own.

Puts together what is asked for and serves it until it is stopped. Of its own it keeps the registrations of webhooks
and push notifications, and nothing else: what is asked for twice is settled by the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from roundelay.network.client import NetworkClient
from roundelay.network.config import Served
from roundelay.network.errors import ConnectError, Forbidden, InvalidFrame, RoundelayError
from roundelay.network.extras import needs

from .a2a.push import TaskPushes
from .a2a.server import make_a2a_app
from .http.api import ENDPOINTS, make_routes, read_body, refuse, serve_while_there
from .http.connection_limit import Arrivals, HeadInTime
from .http.public_names import PublicNames
from .mcp.server import make_mcp_server
from .openai.api import make_openai_routes
from .session_pool import Callers, read_authorization
from .webhooks.api import make_webhook_endpoints
from .webhooks.delivery import WebhookPace, Webhooks

with needs("gateway"):
    import uvicorn
    from mcp.server.mcpserver import Context
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Mount, Route
    from starlette.types import ASGIApp, Receive, Scope, Send


KEYS_PATH = "/.well-known/jwks.json"
"""What proves push notifications of A2A; everybody may see it."""
STOP_S = 5
"""How long requests that are under way may go on when it stops: those that wait for a message are cut."""
BEARER_CHALLENGE = (
    'Bearer realm="roundelay", error="invalid_token", error_description="Bearer token needed, no OAuth: set the header '
    'Authorization: Bearer ID:TOKEN for this server. roundelay token create ID makes the token."'
)
"""For hosts of MCP (RFC 6750, 3), with `error` also where no token came, as the MCP SDK's own servers have it.

It names no `resource_metadata` (RFC 9728): MCP wants an authorization server in that document, and there is none.
"""
OAUTH_PATHS = ("oauth-protected-resource", "oauth-authorization-server", "openid-configuration")
"""Documents below /.well-known/ for which hosts of MCP look after a 401."""
NO_OAUTH = (
    "Bearer token needed: Roundelay has no OAuth and registers no clients. Set the header `Authorization: Bearer "
    "ID:TOKEN` in the configuration of this MCP server; `roundelay token create ID` makes the token."
)
_SINGLE = ("authorization", "host", "idempotency-key", "origin", "sec-fetch-site")


class PlainRequestsOnly:
    """Refuses what may be read in two ways, by a proxy before this and here, and what another site's page makes a
    browser ask: with a name and a password (`Basic`) that somebody gave it once, the browser proves itself to whoever
    makes it send a form."""

    def __init__(self, app: ASGIApp, names: PublicNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (name := _find_doubt(headers)) is not None:
            answer = refuse(InvalidFrame(f"The request says in two ways what its {name} is."))
            answer.headers["connection"] = "close"  # where it ends may be in doubt too
            await answer(scope, receive, send)
            return
        if _asks_elsewhere(headers, self._names):
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


def _asks_elsewhere(headers: Headers, names: PublicNames) -> bool:
    """Whether a browser says that the page of another site asks."""
    origin, said = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is not None and origin.partition("://")[2] != headers.get("host") and not names.is_own_page(origin):
        return True
    return said not in ("none", "same-origin")


class WithToken:
    """Lets requests through to another protocol's application once the hub has taken their token."""

    def __init__(
        self, app: ASGIApp, callers: Callers, refuse: Callable[[RoundelayError], JSONResponse] = refuse
    ) -> None:
        self._app = app
        self._callers = callers
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._callers.session(read_authorization(Headers(scope=scope).get("authorization"))):
                pass
        except RoundelayError as error:
            await self._refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class KnownNamesOnly:
    """Lets requests through that ask by a name of this gateway."""

    def __init__(self, app: ASGIApp, names: PublicNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (reason := self._names.find_wrong_host(Headers(scope=scope))) is not None:
            await JSONResponse({"error": {"code": "forbidden", "message": reason}}, 421)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def refuse_host(error: RoundelayError) -> JSONResponse:
    """As `refuse`, for a host of MCP: hosts take a 401 for an invitation to OAuth, so it says that a token is needed."""
    answer = refuse(error)
    if answer.status_code != 401:
        return answer
    problem = {"code": error.code, "message": f"{error} {NO_OAUTH}"}
    return JSONResponse({"error": problem}, 401, {"WWW-Authenticate": BEARER_CHALLENGE})


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
    names: PublicNames | None = None,
) -> Starlette:
    """The application of a gateway to one node, which listens on ``host``."""
    names = names or PublicNames(host)

    def find_session(context: Context[Any, Any]) -> AbstractAsyncContextManager[NetworkClient]:
        return callers.session(read_authorization((context.headers or {}).get("authorization")))

    mcp_server = make_mcp_server(find_session)
    [mcp_route] = mcp_server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        host=host,
        transport_security=TransportSecuritySettings(
            enable_dns_rebinding_protection=False
        ),  # `KnownNamesOnly` sees to it
    ).routes
    assert isinstance(mcp_route, Route)

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        async with mcp_server.session_manager.run():
            yield

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def refuse_oauth(request: Request) -> Response:
        if request.method == "POST":  # RFC 7591, 3.2.2: hosts show the description
            return JSONResponse({"error": "access_denied", "error_description": NO_OAUTH}, 403)
        return JSONResponse({"error": {"code": "unknown_operation", "message": NO_OAUTH}}, 404)

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
    a2a_app = WithToken(make_a2a_app(callers, pushes, names), callers)
    mcp_routes = [
        Route("/mcp", KnownNamesOnly(WithToken(WhileThere(mcp_route.app), callers, refuse_host), names)),
        Route("/register", refuse_oauth, methods=["POST"]),
        *(Route(f"/.well-known/{it}{rest}", refuse_oauth) for it in OAUTH_PATHS for rest in ("", "/{path:path}")),
    ]
    return Starlette(
        routes=[
            Route("/healthz", health, methods=["GET"]),
            *make_routes(callers, endpoints, names.show_base),
            *(make_openai_routes(callers) if "openai" in served else ()),
            *(mcp_routes if "mcp" in served else ()),
            *((Mount("/a2a/{agent_id}", a2a_app),) if "a2a" in served else ()),
            *((Route(KEYS_PATH, show_keys, methods=["GET"]),) if pushes is not None else ()),
        ],
        lifespan=live,
        middleware=[Middleware(PlainRequestsOnly, names=names)],
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
    public_url: str | None = None,
    web_hosts: Collection[str] = (),
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
        arrivals = Arrivals()
        stack.callback(arrivals.refusals.close)
        config = uvicorn.Config(
            make_app(callers, host, served, webhooks, pushes, PublicNames(host, public_url, web_hosts)),
            http=partial(HeadInTime, arrivals),  # type: ignore[arg-type]
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
