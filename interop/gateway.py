"""The gateway: one process beside a node that lets other protocols in, on a port of its own.

Puts together what is asked for and serves it until it is stopped. It holds no state that outlives it: what is asked for
twice is settled by the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from roundelay.network.errors import ConnectError, RoundelayError

from .callers import Callers
from .http_api import make_routes, refuse

STOP_S = 5
"""How long requests that are under way may go on when it stops: those that wait for a message are cut."""


def make_app(callers: Callers) -> Starlette:
    """The application of a gateway to one node."""

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def refuse_path(request: Request, error: Exception) -> Response:
        status: int = getattr(error, "status_code", 404)
        problem = {"code": "unknown_operation", "message": f"There is no {request.method} here; see /openapi.json."}
        return JSONResponse({"error": problem}, status, getattr(error, "headers", None))

    async def refuse_call(_: Request, error: Exception) -> Response:
        assert isinstance(error, RoundelayError)
        return refuse(error)

    return Starlette(
        routes=[Route("/healthz", health, methods=["GET"]), *make_routes(callers)],
        exception_handlers={404: refuse_path, 405: refuse_path, RoundelayError: refuse_call},
    )


@asynccontextmanager
async def serve_gateway(node_url: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Run a gateway to a node for the length of an ``async with``; gives its URL. Raises `ConnectError` where the
    address cannot be bound."""
    try:
        listening = _bind(host, port)
    except OSError as error:
        raise ConnectError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}; choose another --port."
        ) from error
    async with Callers(node_url) as callers:
        config = uvicorn.Config(
            make_app(callers),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=STOP_S,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]  # its owner stops it
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="gateway")
        try:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
            listening.close()


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


async def run_gateway(node_url: str, host: str, port: int, announce: Callable[[str], None]) -> None:
    """Serve until the task is cancelled; ``announce`` is given the URL once it listens."""
    async with serve_gateway(node_url, host, port) as url:
        announce(url)
        await asyncio.Event().wait()
