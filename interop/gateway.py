"""The gateway: a process next to a node that serves other protocols on its own port.

This module assembles the enabled protocols and serves them until the gateway is stopped. The gateway stores only
registrations of webhooks and push notifications. The gateway stores no requests, because the ledger recognizes repeated
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from roundelay.network.client import NetworkClient
from roundelay.network.config import Served
from roundelay.network.errors import ConnectError, RoundelayError
from roundelay.network.extras import needs

from .a2a.push import TaskPushes
from .a2a.server import make_a2a_app
from .http.api import ENDPOINTS, make_routes
from .http.connection_limit import ConnectionLimit, LimitedConnection
from .http.files import make_file_routes
from .http.middleware import (
    NO_OAUTH,
    CancelOnDisconnect,
    KnownHostsOnly,
    TokenRequired,
    UnambiguousRequestsOnly,
    make_mcp_error_response,
)
from .http.public_names import PublicNames
from .http.requests import make_error_response
from .mcp.server import make_mcp_server
from .openai.api import make_openai_routes
from .registrations import WebhookPace
from .session_pool import SessionPool, read_authorization
from .webhooks.api import make_webhook_endpoints
from .webhooks.delivery import Webhooks

with needs("gateway"):
    import uvicorn
    from mcp.server.mcpserver import Context
    from mcp.server.transport_security import TransportSecuritySettings
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Match, Mount, Route


KEYS_PATH = "/.well-known/jwks.json"
"""Path of the public keys with which receivers verify A2A push notifications. The path needs no token."""
STOP_S = 5
"""Time that running requests have to finish when the gateway stops, in seconds. Requests that are still running
afterwards are cancelled.
"""
OAUTH_PATHS = ("oauth-protected-resource", "oauth-authorization-server", "openid-configuration")
"""Documents below /.well-known/ that MCP hosts request after a response with status 401."""


def make_app(
    pool: SessionPool,
    host: str = "127.0.0.1",
    served: Collection[Served] = get_args(Served),
    webhooks: Webhooks | None = None,
    pushes: TaskPushes | None = None,
    names: PublicNames | None = None,
) -> Starlette:
    """Return the ASGI application of a gateway for one node. ``host`` is the address on which the gateway listens."""
    names = names or PublicNames(host)

    def find_session(context: Context[Any, Any]) -> AbstractAsyncContextManager[NetworkClient]:
        return pool.session(read_authorization((context.headers or {}).get("authorization")))

    mcp_server = make_mcp_server(find_session)
    [mcp_route] = mcp_server.streamable_http_app(
        # Do not use MCP sessions. All state is in the ledger, so any gateway can answer the next request.
        stateless_http=True,
        json_response=True,
        host=host,
        # Disable the SDK's protection against DNS rebinding. `KnownHostsOnly` provides this protection, and knows all
        # host names of this gateway.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    ).routes
    assert isinstance(mcp_route, Route)

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        async with mcp_server.session_manager.run():
            yield

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def refuse_oauth(request: Request) -> Response:
        if request.method == "POST":  # MCP hosts show error_description to the user (RFC 7591, 3.2.2)
            return JSONResponse({"error": "access_denied", "error_description": NO_OAUTH}, 403)
        return JSONResponse({"error": {"code": "unknown_operation", "message": NO_OAUTH}}, 404)

    async def show_keys(_: Request) -> Response:
        assert pushes is not None
        return JSONResponse(pushes.list_keys(), headers={"Cache-Control": "public, max-age=300"})

    async def refuse_path(request: Request, error: Exception) -> Response:
        status: int = getattr(error, "status_code", 404)
        message = f"There is no {request.method} {request.url.path[:80]} here; see /openapi.json."
        message += " OpenAI's API is below /v1." if "openai" in served else ""
        problem = {"code": "unknown_operation", "message": message}
        headers: dict[str, str] | None = getattr(error, "headers", None)
        # Several routes may serve one path. Starlette names only the methods of the first one.
        if status == 405 and (methods := list_methods(request)):
            headers = {"Allow": ", ".join(methods)}
        return JSONResponse({"error": problem}, status, headers)

    async def refuse_call(_: Request, error: Exception) -> Response:
        assert isinstance(error, RoundelayError)
        return make_error_response(error)

    endpoints = ENDPOINTS if "http" in served else ()
    if webhooks is not None:
        endpoints += make_webhook_endpoints(webhooks)
    a2a_app = TokenRequired(make_a2a_app(pool, pushes, names), pool)
    mcp_routes = [
        Route(
            "/mcp",
            KnownHostsOnly(TokenRequired(CancelOnDisconnect(mcp_route.app), pool, make_mcp_error_response), names),
        ),
        Route("/register", refuse_oauth, methods=["POST"]),
        *(Route(f"/.well-known/{name}{rest}", refuse_oauth) for name in OAUTH_PATHS for rest in ("", "/{path:path}")),
    ]
    return Starlette(
        routes=[
            Route("/healthz", health, methods=["GET"]),
            *make_routes(pool, endpoints, names.show_base),
            *(make_file_routes(pool) if "http" in served else ()),
            *(make_openai_routes(pool) if "openai" in served else ()),
            *(mcp_routes if "mcp" in served else ()),
            *((Mount("/a2a/{agent_id}", a2a_app),) if "a2a" in served else ()),
            *((Route(KEYS_PATH, show_keys, methods=["GET"]),) if pushes is not None else ()),
        ],
        lifespan=live,
        middleware=[Middleware(UnambiguousRequestsOnly, names=names)],
        exception_handlers={404: refuse_path, 405: refuse_path, RoundelayError: refuse_call},
    )


def list_methods(request: Request) -> list[str]:
    """Return the methods of all routes for the path of a request, sorted by name."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})


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
    """Run a gateway for a node until the ``async with`` block ends. Yields the URL of the gateway.

    Webhooks and A2A push notifications need ``webhooks_file``. Raises `ConnectError` if the address cannot be bound,
    and `ConfigError` if the file is invalid or in use.
    """
    try:
        # Bind the socket here, not in uvicorn. If the port is in use, uvicorn ends the process with SystemExit.
        listening = _bind(host, port)
    except OSError as error:
        raise ConnectError(
            f"The gateway cannot listen on {host}:{port}: {error.strerror or error}. Stop the program that "
            "listens there, or choose another port: --port, or --interop-port of roundelay up."
        ) from error
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        pool = await stack.enter_async_context(SessionPool(node_url))
        webhooks, pushes = None, None
        if webhooks_file is not None and "webhooks" in served:
            allowed = frozenset(host.lower() for host in webhook_hosts)
            webhooks = await stack.enter_async_context(Webhooks(node_url, webhooks_file, allowed, pace))
            if "a2a" in served:
                task_pushes = TaskPushes(node_url, Path(f"{webhooks_file}.a2a"), allowed, pace)
                pushes = await stack.enter_async_context(task_pushes)
        limit = ConnectionLimit()
        stack.callback(limit.refusals.close)
        config = uvicorn.Config(
            make_app(pool, host, served, webhooks, pushes, PublicNames(host, public_url, web_hosts)),
            http=partial(LimitedConnection, limit),  # type: ignore[arg-type]
            log_config=None,
            access_log=False,
            lifespan="on",
            server_header=False,
            # Disable WebSockets. No protocol of the gateway uses WebSockets, and the middleware checks only HTTP
            # requests.
            ws="none",
            timeout_graceful_shutdown=STOP_S,
        )
        server = uvicorn.Server(config)
        # Disable uvicorn's signal handlers, because the command that runs the gateway handles signals. uvicorn has no
        # setting to disable the handlers.
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="gateway")
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening.getsockname()[1]}"
        finally:
            # Let uvicorn finish. Cancelling its task would interrupt responses that are nearly complete.
            server.should_exit = True
            await serving


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Let a restarted gateway bind its port while old connections are still in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen()  # clients can connect from now on, and wait until they are served
    except OSError:
        sock.close()
        raise
    return sock
