"""The network over HTTP, for what cannot keep a socket: a script, a cron job, a form, another language's one-liner.

Each endpoint is one row of `ENDPOINTS`: what it takes, what it gives, what it does with a session. The OpenAPI document
is made of these rows, and so is the table of routes. Nothing is kept between two requests but the caller's session; a
request that is repeated under its ``message_id`` sends nothing twice, whatever happened to the first answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema

from roundelay.interop.session_pool import Callers, Credentials, read_authorization, receive_messages
from roundelay.network.client import NetworkClient
from roundelay.network.clock import ordered_id
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
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.messages import BaseMessage

with needs("gateway"):
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


BodyT = TypeVar("BodyT", bound=BaseModel)
T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_S = 30.0
MAX_DIGITS = 1000
MAX_WAIT_S = 25
"""Below the half minute after which many proxies give up."""
PATIENCE_S = 29.0
"""How long a call waits for a node that is lost, or for its own message; then it is to be made again."""
STATUS: tuple[tuple[type[RoundelayError], int], ...] = (
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
"""The first that fits; what else refuses is 409: it needs a person (`GiveUp`)."""


def _read_whole(value: object) -> object:
    """To JSON 8.0 is a whole number too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seq = Annotated[int, Field(ge=0, lt=SEQ_LIMIT), BeforeValidator(_read_whole)]
_ID = "[a-z0-9][a-z0-9._-]{0,63}"
AgentId = Annotated[str, Field(pattern=f"^{_ID}$")]
_MESSAGE_ID = re.compile("[!-~]{1,128}")


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewMessage(_Shape):
    """A message to send."""

    to: str = Field(
        pattern=f"^(broadcast|(agent|channel|mod):{_ID})$",
        description="`agent:ID`, `channel:NAME`, `broadcast` or `mod:ID`",
        examples=["agent:bob"],
    )
    content: Any = Field(description="Any JSON; text as a string", examples=["17 and 23?"])
    message_id: str | None = Field(
        None,
        pattern="^[!-~]{1,128}$",
        description="Makes the request idempotent; the header Idempotency-Key does the same",
    )
    text_representation: str | None = None
    conversation: str | None = Field(
        None,
        pattern=f"^{_ID}$",
        description="Of a message to `agent:ID`: which of the conversations with it; each is a thread of its own",
    )
    reply_to: Seq | None = Field(None, description="The seq of the message that this one answers")
    cause: Seq | None = Field(None, description="The seq of the message that this one follows from")
    exclude_agent_ids: list[AgentId] | None = None
    requires_response: bool | list[AgentId] | None = None
    metadata: dict[str, Any] | None = None


class StoredMessage(_Shape):
    """The message is durable."""

    seq: int
    thread_id: str
    message_id: str
    duplicate: bool = Field(description="It was stored by an earlier request with this message_id")


class Received(_Shape):
    """Messages that are delivered to the caller."""

    messages: list[BaseMessage]
    next: int = Field(description="The `after` to go on with")
    has_more: bool
    damaged: list[int] | None = None


class AfterPlace(_Shape):
    after: Seq | None = Field(None, description="Messages above this seq; without it the oldest not acknowledged ones")
    limit: int = Field(100, ge=1, le=500)
    wait_s: float = Field(0, ge=0, le=MAX_WAIT_S, description="Wait so long for a message if there is none")


class HandledMessages(_Shape):
    """Messages that are handled, and not given again."""

    seqs: list[Seq] = Field(min_length=1, max_length=500)


class Acknowledged(_Shape):
    acknowledged: int = Field(description="How many of them were not handled yet")


class BeforePlace(_Shape):
    before: Seq | None = Field(None, description="What is below this seq")
    limit: int = Field(50, ge=1, le=500)


class Search(_Shape):
    query: str = Field(description="Words that stand in the text", min_length=1)
    thread_id: str | None = None
    before: Seq | None = None
    limit: int = Field(20, ge=1, le=500)


class Empty(_Shape):
    pass


class Problem(BaseModel):
    """What is wrong, and how to go on."""

    code: str
    message: str
    retry_after_ms: int | None = None


class Refusal(BaseModel):
    error: Problem


class HttpCall(NamedTuple):
    """One request: the caller's session and what proves it, the body or query, and what path and headers name."""

    client: NetworkClient
    credentials: Credentials
    given: Any
    place: Mapping[str, str]


Perform = Callable[[HttpCall], Awaitable[tuple[int, Any]]]


@dataclass(frozen=True)
class Endpoint(Generic[BodyT]):
    """One thing that HTTP can ask for. ``takes`` is the body of a POST, and the query of another method."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    summary: str
    takes: type[BodyT]
    gives: type[BaseModel] | None
    perform: Perform


async def _send(asked: HttpCall) -> tuple[int, Any]:
    body, key = asked.given, asked.place.get("idempotency-key")
    if key is not None and not _MESSAGE_ID.fullmatch(key):
        raise InvalidFrame("The header Idempotency-Key is to be 1 to 128 visible ASCII characters.")
    if key is not None and body.message_id not in (None, key):
        raise InvalidFrame("message_id and the header Idempotency-Key name two ids; give one of them.")
    given = body.model_dump(exclude={"to", "content", "message_id"}, exclude_none=True)
    if given.get("requires_response") is False:
        del given["requires_response"]
    chosen = key or body.message_id or ordered_id()
    stored = await asked.client.send(body.to, body.content, message_id=chosen, **given)
    value = {"seq": stored.seq, "thread_id": stored.thread_id, "message_id": chosen}
    return (200 if stored.duplicate else 201), value | {"duplicate": stored.duplicate}


async def _receive(asked: HttpCall) -> tuple[int, Any]:
    query = asked.given
    page = await receive_messages(asked.client, after=query.after, limit=query.limit, wait_s=query.wait_s)
    return 200, page


async def _acknowledge(asked: HttpCall) -> tuple[int, Any]:
    return 200, await asked.client.call("network.acknowledge", {"seqs": asked.given.seqs})


async def _read(op: str, asked: HttpCall) -> tuple[int, Any]:
    """Call a reading operation with the query and what the path names."""
    place = asked.place
    args: dict[str, Any] = asked.given.model_dump(exclude_none=True)
    if "seq" in place:
        args["seq"] = TypeAdapter(Seq).validate_python(place["seq"])
    if "thread_id" in place:
        args["thread_id"] = place["thread_id"]
    return 200, await asked.client.call(op, args)


ENDPOINTS: tuple[Endpoint[Any], ...] = (
    Endpoint("POST", "/v1/messages", "send", "Send a message", NewMessage, StoredMessage, _send),
    Endpoint("GET", "/v1/messages", "receive", "Receive what is delivered to you", AfterPlace, Received, _receive),
    Endpoint(
        "POST",
        "/v1/messages/acknowledge",
        "acknowledge",
        "Say which messages are handled",
        HandledMessages,
        Acknowledged,
        _acknowledge,
    ),
    Endpoint(
        "GET",
        "/v1/messages/{seq}/status",
        "status",
        "How far a message has got with each recipient",
        Empty,
        None,
        partial(_read, "network.message_status"),
    ),
    Endpoint(
        "GET",
        "/v1/messages/{seq}/why",
        "why",
        "What a message follows from",
        Empty,
        None,
        partial(_read, "network.why"),
    ),
    Endpoint(
        "GET",
        "/v1/threads",
        "threads",
        "The threads that you may read, newest first",
        BeforePlace,
        None,
        partial(_read, "network.list_threads"),
    ),
    Endpoint(
        "GET",
        "/v1/threads/{thread_id}/messages",
        "history",
        "A thread's messages, the newest of them, oldest first",
        BeforePlace,
        None,
        partial(_read, "network.history"),
    ),
    Endpoint(
        "GET",
        "/v1/search",
        "search",
        "Messages in which words stand",
        Search,
        None,
        partial(_read, "network.search"),
    ),
    Endpoint("GET", "/v1/agents", "agents", "Who is registered", Empty, None, partial(_read, "network.list_agents")),
)


def make_routes(
    callers: Callers, endpoints: Sequence[Endpoint[Any]], show_base: Callable[[Request], str]
) -> list[Route]:
    """The routes of these endpoints, and of the document that describes them, which ``show_base`` gives its URL."""

    async def show_document(request: Request) -> Response:
        return JSONResponse({**describe_api(endpoints), "servers": [{"url": show_base(request)}]})

    by_path: dict[str, dict[str, Endpoint[Any]]] = {}
    for it in endpoints:
        by_path.setdefault(it.path, {})[it.method] = it
    routes = [Route(path, partial(_answer, callers, rows), methods=[*rows]) for path, rows in by_path.items()]
    for route in routes:
        assert route.methods is not None
        route.methods.discard("HEAD")  # what is received counts as delivered, and by it nobody is given anything
    return [*routes, Route("/openapi.json", show_document, methods=["GET"])]


async def _answer(callers: Callers, rows: Mapping[str, Endpoint[Any]], request: Request) -> Response:
    endpoint = rows[request.method]
    try:
        credentials = read_authorization(request.headers.get("authorization"))
        async with asyncio.timeout(PATIENCE_S):
            given = await _read_given(endpoint, request)
            place = dict(request.path_params)
            if "idempotency-key" in request.headers:
                place["idempotency-key"] = request.headers["idempotency-key"]
            async with callers.session(credentials) as client:
                work = endpoint.perform(HttpCall(client, credentials, given, place))
                status, value = await (while_there(request.receive, work) if endpoint.method == "GET" else work)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except TimeoutError:
        return refuse(ConnectError("The node does not answer; ask again (a message: with the same message_id)."))
    except ValidationError as error:
        return refuse(InvalidFrame(_describe(error)))
    except RoundelayError as error:
        return refuse(error)
    return JSONResponse(msgspec.to_builtins(value), status)


async def _read_given(endpoint: Endpoint[Any], request: Request) -> BaseModel:
    """The body or the query, as the endpoint takes it. Raises `ValidationError`, `TooLarge`, `InvalidFrame`."""
    shape: type[BaseModel] = endpoint.takes
    if endpoint.method != "POST":
        names = [name for name, _ in request.query_params.multi_items()]
        if len(set(names)) != len(names):
            raise InvalidFrame("A parameter stands twice in the query.")
        return shape.model_validate(dict(request.query_params))
    return shape.model_validate(await read_json(request), strict=True)


async def read_json(request: Request) -> Any:
    """The body of a request, any JSON that can be stored. Raises `TooLarge`, `InvalidFrame`, `ClientDisconnect`."""
    return parse_json(await read_body(request))


async def read_body(request: Request) -> bytes:
    """Raises `TooLarge`, `InvalidFrame` where it does not come in time, `ClientDisconnect`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):  # who sends a part and no more holds a connection that others need
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise TooLarge(f"The body has more than {MAX_BODY_BYTES} bytes.")
    except TimeoutError as error:
        raise InvalidFrame(f"The body has not come within {BODY_TIMEOUT_S:g} s.") from error
    return bytes(body)


async def until_gone(receive: Receive) -> None:
    """Wait until who asked has gone, once the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_there(receive: Receive, work: Awaitable[T]) -> T:
    """Have this done as long as who asked is there, once the body was read. Raises `ClientDisconnect`."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.wait({working, gone})


async def serve_while_there(app: ASGIApp, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
    """Have an application answer a request whose body was read, as long as who asked is there."""
    whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def hear() -> Message:
        nonlocal whole
        if whole is None:
            await asyncio.Event().wait()  # whoever has gone ends all of it
        given, whole = whole, None
        assert given is not None
        return given

    with suppress(ClientDisconnect):
        await while_there(receive, app(scope, hear, send))


def parse_json(body: bytes) -> Any:
    """Raises `InvalidFrame` for what is no JSON, or none that can be stored."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, parse_float=_read_float, parse_int=_read_int)
        msgspec.json.encode(value)  # half of a surrogate pair is a string to Python alone
    except RecursionError as error:
        raise InvalidFrame("The body is nested too deeply; send flatter JSON.") from error
    except UnicodeError as error:
        raise InvalidFrame("The body is no UTF-8, or has half of a character (a lone surrogate).") from error
    except ValueError as error:
        raise InvalidFrame(f"The body is no JSON: {error}") from error
    return value


def _read_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:20]} is beyond what a number holds")
    return number


def _read_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"{digits[:20]}... has {len(digits)} characters, more than a number may; send it as text")
    return int(digits)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _describe(error: ValidationError) -> str:
    first, *more = error.errors(include_url=False, include_input=False)
    place = ".".join(map(str, first["loc"])) or "the body"
    return f"{place}: {first['msg']}" + (f" (and {len(more)} more)" if more else "") + "; /openapi.json says what fits."


def refuse(error: RoundelayError) -> JSONResponse:
    """An error's answer, with the status that clients of HTTP know for it."""
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 409)
    if type(error).code == "internal":
        status = 500
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    if retry_after_ms is None and status == 503:
        retry_after_ms = 1000
    problem = Problem(code=error.code, message=str(error), retry_after_ms=retry_after_ms)
    headers = {} if retry_after_ms is None else {"Retry-After": str(max(1, math.ceil(retry_after_ms / 1000)))}
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="roundelay", Basic realm="roundelay"'
    return JSONResponse(Refusal(error=problem).model_dump(exclude_none=True), status, headers)


# --- what it is, for programs


def describe_api(endpoints: Sequence[Endpoint[Any]] = ENDPOINTS) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these endpoints."""
    shapes = {it.takes for it in endpoints if it.method == "POST"} | {it.gives for it in endpoints if it.gives}
    ordered = sorted(shapes | {Refusal}, key=lambda it: it.__name__)
    _, schemas = models_json_schema([(it, "validation") for it in ordered], ref_template="#/components/schemas/{model}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _describe_endpoint(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Roundelay over HTTP", "version": "1"},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "`ID:TOKEN`: a participant's id and token"}
            },
        },
    }


def _describe_endpoint(endpoint: Endpoint[Any]) -> dict[str, Any]:
    refusal = {"description": "Refused", "content": _json_of(Refusal)}
    good: dict[str, Any] = {"description": "Done", "content": _json_of(endpoint.gives)}
    if endpoint.gives is StoredMessage:
        good["links"] = {
            name: {"operationId": name, "parameters": {parameter: f"$response.body#/{parameter}"}}
            for name, parameter in (("status", "seq"), ("why", "seq"), ("history", "thread_id"))
        }
    statuses = ("200", "201") if endpoint.gives is StoredMessage else ("200",)
    described: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "responses": {**dict.fromkeys(statuses, good), "default": refusal},
    }
    in_path = {"seq": TypeAdapter(Seq).json_schema(), "thread_id": {"type": "string", "minLength": 1}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in in_path.items()
        if f"{{{name}}}" in endpoint.path
    ]
    if endpoint.method != "POST":
        schema = endpoint.takes.model_json_schema()
        needed = schema.get("required", [])
        for name, it in schema.get("properties", {}).items():
            parameters.append({"name": name, "in": "query", "required": name in needed, "schema": it})
    else:
        described["requestBody"] = {"required": True, "content": _json_of(endpoint.takes)}
    if endpoint.name == "send":
        key = {"type": "string", "pattern": "^[!-~]{1,128}$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
    return described | ({"parameters": parameters} if parameters else {})


def _json_of(shape: type[BaseModel] | None) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{shape.__name__}"} if shape is not None else {"type": "object"}
    return {"application/json": {"schema": schema}}
