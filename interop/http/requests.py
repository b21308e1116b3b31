"""Reads HTTP requests with size limits and strict JSON, creates error responses, and cancels the work of clients that
disconnect.

All protocols of the gateway use this module, which does not depend on any endpoint or session.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from roundelay.network.errors import (
    ConnectError,
    Forbidden,
    IdConflict,
    InvalidArguments,
    InvalidFrame,
    NotAuthenticated,
    RetryLater,
    RoundelayError,
    ThreadHeld,
    TooLarge,
    UnknownMessage,
    UnknownOperation,
    UnknownRecipient,
)
from roundelay.network.extras import needs

with needs("gateway"):
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0
MAX_DIGITS = 1000
"""Maximum number of digits of an integer in JSON. The limit exists because Python converts long integers in quadratic
time.
"""
_STATUSES: tuple[tuple[type[RoundelayError], int], ...] = (
    (NotAuthenticated, 401),
    (Forbidden, 403),
    (UnknownRecipient, 404),
    (UnknownMessage, 404),
    (UnknownOperation, 501),
    (IdConflict, 409),
    (ThreadHeld, 409),
    (TooLarge, 413),
    (InvalidFrame, 400),
    (InvalidArguments, 400),
    (RetryLater, 429),
    (ConnectError, 503),
)


class Problem(BaseModel):
    """Description of a problem, including how to fix it."""

    code: str
    message: str
    retry_after_ms: int | None = None


class Refusal(BaseModel):
    error: Problem


def find_status(error: RoundelayError) -> int:
    """Return the HTTP status of an error. The default is 409, for errors that need a person (`GiveUp`)."""
    if type(error).code == "internal":
        return 500
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 409)


def make_error_response(error: RoundelayError) -> JSONResponse:
    """Return the response to a refused request, with the matching HTTP status and headers."""
    status = find_status(error)
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    if retry_after_ms is None and status == 503:
        retry_after_ms = 1000
    problem = Problem(code=error.code, message=str(error), retry_after_ms=retry_after_ms)
    headers = {} if retry_after_ms is None else {"Retry-After": format_retry_after(retry_after_ms)}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="roundelay", Basic realm="roundelay"'
    return JSONResponse(Refusal(error=problem).model_dump(exclude_none=True), status, headers)


def format_retry_after(delay_ms: int) -> str:
    """Return a delay as the value of a Retry-After header, in whole seconds, at least one."""
    return str(max(1, math.ceil(delay_ms / 1000)))


def read_query(request: Request) -> dict[str, str]:
    """Return the query of a request. Raises `InvalidFrame`."""
    names = [name for name, _ in request.query_params.multi_items()]
    # Refuse repeated parameters. A proxy may check one value, while this server uses the other.
    if len(set(names)) != len(names):
        raise InvalidFrame("The query contains a parameter more than once.")
    return dict(request.query_params)


async def read_json(request: Request) -> Any:
    """Read a body that contains any JSON that the ledger can store. Raises `TooLarge`, `InvalidFrame` and
    `ClientDisconnect`.
    """
    return parse_json(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Read the body of a request. Raises `TooLarge`, `ClientDisconnect`, and `InvalidFrame` after a timeout."""
    body = bytearray()
    try:
        # Limit the time. Otherwise a client that sends only half of a body would occupy a connection that others need.
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise TooLarge(f"The body has more than {MAX_BODY_BYTES} bytes, the maximum.")
    except TimeoutError as error:
        raise InvalidFrame(f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from error
    return bytes(body)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected. Read the body before calling this function."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, and cancel it when the client disconnects. Read the body before calling this function. Raises
    `ClientDisconnect`.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        # Wait until both tasks have ended. Otherwise the work could still use a session that the caller is about to
        # release.
        await asyncio.wait({working, gone})


async def serve_while_connected(app: ASGIApp, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
    """Let an application answer a request whose body was already read. Cancel the application when the client
    disconnects.
    """
    event: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay_body() -> Message:
        nonlocal event
        if event is None:
            await asyncio.Event().wait()  # block until a disconnect cancels the application
        replayed, event = event, None
        assert replayed is not None
        return replayed

    with suppress(ClientDisconnect):
        await run_while_connected(receive, app(scope, replay_body, send))


def parse_json(body: bytes) -> Any:
    """Parse the body of a request. Raises `InvalidFrame` for invalid JSON, and for JSON that the ledger
    cannot store.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_read_float, parse_int=_read_int)
        msgspec.json.encode(value)  # refuse lone surrogates, which Python's parser accepts
    except RecursionError as error:
        raise InvalidFrame("The body is nested too deeply. Send JSON with fewer levels.") from error
    except UnicodeError as error:
        raise InvalidFrame("The body is not UTF-8, or contains a lone surrogate (half of a character).") from error
    except ValueError as error:
        raise InvalidFrame(f"The body is not valid JSON: {error}") from error
    return value


def _read_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is too large for a number")
    return number


def _read_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(
            f"{digits[:20]}... has {len(digits)} digits, but at most {MAX_DIGITS} are allowed. Send the number as text"
        )
    return int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")
