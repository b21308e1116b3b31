"""The HTTP API of a network, for programs that cannot keep a socket open, such as scripts, cron jobs and forms.

Each endpoint is one row of `ENDPOINTS`. The row names the types of the request and the response, and the function that
performs the request with the caller's session. The routes and the OpenAPI document are generated from these rows. The
gateway keeps only the session between requests. A request that is repeated with the same ``message_id`` never sends a
message twice, even if the first response was lost.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema

from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization, receive_messages
from roundelay.network.client import NetworkClient
from roundelay.network.clock import ordered_id
from roundelay.network.errors import ConnectError, InvalidFrame, RoundelayError, UnknownOperation
from roundelay.network.extras import needs
from roundelay.network.frames import SEQ_LIMIT
from roundelay.network.messages import BaseMessage

from .files import describe_paths
from .requests import Refusal, make_error_response, read_json, read_query, run_while_connected

with needs("gateway"):
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route


BodyT = TypeVar("BodyT", bound=BaseModel)

MAX_WAIT_S = 25
"""Maximum time that a request may wait for a message, in seconds. Many proxies time out after 30 s."""
PATIENCE_S = 29.0
"""Maximum duration of a call, in seconds. The limit includes waits for a message and for an unreachable node."""


def _read_integer(value: object) -> object:
    """Convert a float such as 8.0 to an integer, because JSON does not distinguish them."""
    # Strict validation of the body would refuse 8.0 for an integer.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Seq = Annotated[int, Field(ge=0, lt=SEQ_LIMIT), BeforeValidator(_read_integer)]
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
    content: Any = Field(description="Any JSON value. Text is a string", examples=["17 and 23?"])
    message_id: str | None = Field(
        None,
        pattern="^[!-~]{1,128}$",
        description="Makes the request idempotent. The header Idempotency-Key has the same effect",
    )
    text_representation: str | None = None
    conversation: str | None = Field(
        None,
        pattern=f"^{_ID}$",
        description="Only for `agent:ID`: name of a conversation. Each conversation is a separate thread",
    )
    reply_to: Seq | None = Field(None, description="Seq of the message that this message answers")
    cause: Seq | None = Field(None, description="Seq of the message that this message follows from")
    exclude_agent_ids: list[AgentId] | None = None
    requires_response: bool | list[AgentId] | None = None
    metadata: dict[str, Any] | None = None


class StoredMessage(_Shape):
    """Result of a send: the message is durable."""

    seq: int
    thread_id: str
    message_id: str
    duplicate: bool = Field(
        description="Whether an earlier request with this message_id had already stored the message"
    )


class Received(_Shape):
    """Messages delivered to the caller."""

    messages: list[BaseMessage]
    next: int = Field(description="Value of `after` for the next request")
    has_more: bool
    damaged: list[int] | None = None


class ReceiveQuery(_Shape):
    after: Seq | None = Field(
        None, description="Return messages above this seq. Without it, return the oldest unacknowledged messages"
    )
    limit: int = Field(100, ge=1, le=500)
    wait_s: float = Field(0, ge=0, le=MAX_WAIT_S, description="Maximum time to wait if there is no message, in seconds")


class HandledMessages(_Shape):
    """Messages to acknowledge. An acknowledged message is not returned again."""

    seqs: list[Seq] = Field(min_length=1, max_length=500)


class Acknowledged(_Shape):
    acknowledged: int = Field(description="Number of these messages that were not handled before")


class PageQuery(_Shape):
    before: Seq | None = Field(None, description="Only entries with a lower seq")
    limit: int = Field(50, ge=1, le=500)


class Search(_Shape):
    query: str = Field(description="Words in the text", min_length=1)
    thread_id: str | None = None
    before: Seq | None = None
    limit: int = Field(20, ge=1, le=500)


class OperationCall(_Shape):
    """A call of an operation of a mod."""

    operation: str = Field(
        description="Name of the operation. GET /v1/operations lists all operations", examples=["tasks.list"]
    )
    arguments: dict[str, Any] = Field(default_factory=dict)
    call_id: str | None = Field(
        None,
        pattern="^[!-~]{1,128}$",
        description="Makes a change idempotent. A repeated call gets the result of the first call",
    )


class ListFiles(_Shape):
    thread_id: str | None = Field(None, max_length=200, description="Only files in messages of this thread")
    after: str | None = Field(None, max_length=40, description="`next` of the previous page")
    limit: int = Field(50, ge=1, le=200)


class Empty(_Shape):
    pass


class HttpCall(NamedTuple):
    """One request: the caller's session and credentials, the body or query (``arguments``), and the values from the
    path and the headers (``names``).
    """

    client: NetworkClient
    credentials: Credentials
    arguments: Any
    names: Mapping[str, str]


Perform = Callable[[HttpCall], Awaitable[tuple[int, Any]]]


@dataclass(frozen=True)
class Endpoint(Generic[BodyT]):
    """One endpoint of the HTTP API. ``takes`` is the type of the body of a POST, and the type of the query for every
    other method.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    name: str
    summary: str
    takes: type[BodyT]
    gives: type[BaseModel] | None
    perform: Perform


async def _send(call: HttpCall) -> tuple[int, Any]:
    body, key = call.arguments, call.names.get("idempotency-key")
    if key is not None and not _MESSAGE_ID.fullmatch(key):
        raise InvalidFrame("The header Idempotency-Key must be 1 to 128 visible ASCII characters.")
    # Refuse two different ids. Otherwise a retry with only one of them could create a second message.
    if key is not None and body.message_id not in (None, key):
        raise InvalidFrame("message_id and the header Idempotency-Key name different ids. Send only one of them.")
    options = body.model_dump(exclude={"to", "content", "message_id"}, exclude_none=True)
    # Omit a False value, because `NetworkClient.send` does not accept it. A missing option has the same effect.
    if options.get("requires_response") is False:
        del options["requires_response"]
    # Create a new id for a request without one. A request without an id is not idempotent: a retry sends the message
    # again.
    message_id = key or body.message_id or ordered_id()
    stored = await call.client.send(body.to, body.content, message_id=message_id, **options)
    value = {"seq": stored.seq, "thread_id": stored.thread_id, "message_id": message_id}
    return (200 if stored.duplicate else 201), value | {"duplicate": stored.duplicate}


async def _receive(call: HttpCall) -> tuple[int, Any]:
    query = call.arguments
    page = await receive_messages(call.client, after=query.after, limit=query.limit, wait_s=query.wait_s)
    return 200, page


async def _acknowledge(call: HttpCall) -> tuple[int, Any]:
    return 200, await call.client.call("network.acknowledge", {"seqs": call.arguments.seqs})


async def _list_operations(call: HttpCall) -> tuple[int, Any]:
    mods = {"mods": [msgspec.to_builtins(mod) for mod in call.client.welcome.mods]}
    return 200, mods


async def _call_operation(call: HttpCall) -> tuple[int, Any]:
    body = call.arguments
    # Refuse the hub's own operations, which have separate endpoints with documented types.
    if body.operation not in {it.op for mod in call.client.welcome.mods for it in mod.operations}:
        raise UnknownOperation(f"No mod of this network offers {body.operation[:80]!r}. GET /v1/operations lists them.")
    return 200, await call.client.call(body.operation, body.arguments, call_id=body.call_id)


async def _read(op: str, call: HttpCall) -> tuple[int, Any]:
    """Call an operation that only reads, with the values of the query and the path as its arguments."""
    place = call.names
    args: dict[str, Any] = call.arguments.model_dump(exclude_none=True)
    if "seq" in place:
        args["seq"] = TypeAdapter(Seq).validate_python(place["seq"])
    if "thread_id" in place:
        args["thread_id"] = place["thread_id"]
    return 200, await call.client.call(op, args)


ENDPOINTS: tuple[Endpoint[Any], ...] = (
    Endpoint("POST", "/v1/messages", "send", "Send a message", NewMessage, StoredMessage, _send),
    Endpoint(
        "GET", "/v1/messages", "receive", "Receive messages that are delivered to you", ReceiveQuery, Received, _receive
    ),
    Endpoint(
        "POST",
        "/v1/messages/acknowledge",
        "acknowledge",
        "Acknowledge handled messages",
        HandledMessages,
        Acknowledged,
        _acknowledge,
    ),
    Endpoint(
        "GET",
        "/v1/messages/{seq}/status",
        "status",
        "State of a message at each recipient",
        Empty,
        None,
        partial(_read, "network.message_status"),
    ),
    Endpoint(
        "GET",
        "/v1/messages/{seq}/why",
        "why",
        "Messages that led to a message",
        Empty,
        None,
        partial(_read, "network.why"),
    ),
    Endpoint(
        "GET",
        "/v1/threads",
        "threads",
        "Threads that you may read, newest first",
        PageQuery,
        None,
        partial(_read, "network.list_threads"),
    ),
    Endpoint(
        "GET",
        "/v1/threads/{thread_id}/messages",
        "history",
        "The newest messages of a thread, oldest first",
        PageQuery,
        None,
        partial(_read, "network.history"),
    ),
    Endpoint(
        "GET",
        "/v1/search",
        "search",
        "Search messages by their words",
        Search,
        None,
        partial(_read, "network.search"),
    ),
    Endpoint(
        "GET",
        "/v1/agents",
        "agents",
        "List registered participants",
        Empty,
        None,
        partial(_read, "network.list_agents"),
    ),
    Endpoint(
        "GET",
        "/v1/operations",
        "operations",
        "Operations of the node's mods, with the schemas of their arguments",
        Empty,
        None,
        _list_operations,
    ),
    Endpoint("POST", "/v1/call", "call", "Call an operation of a mod", OperationCall, None, _call_operation),
    Endpoint(
        "GET",
        "/v1/files",
        "files",
        "Files that you may read, newest first",
        ListFiles,
        None,
        partial(_read, "files.list"),
    ),
)


def make_routes(
    pool: SessionPool, endpoints: Sequence[Endpoint[Any]], show_base: Callable[[Request], str]
) -> list[Route]:
    """Return the routes of these endpoints and of their OpenAPI document. ``show_base`` returns the URL of
    the gateway.
    """

    async def show_document(request: Request) -> Response:
        document = make_openapi_document(endpoints)
        if endpoints[: len(ENDPOINTS)] == ENDPOINTS:
            for path, methods in describe_paths().items():
                document["paths"].setdefault(path, {}).update(methods)
        return JSONResponse({**document, "servers": [{"url": show_base(request)}]})

    by_path: dict[str, dict[str, Endpoint[Any]]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [Route(path, partial(_answer, pool, rows), methods=[*rows]) for path, rows in by_path.items()]
    for route in routes:
        assert route.methods is not None
        # Remove HEAD, which Starlette answers like GET. A HEAD request would mark messages as delivered and discard
        # them.
        route.methods.discard("HEAD")
    return [*routes, Route("/openapi.json", show_document, methods=["GET"])]


async def _answer(pool: SessionPool, rows: Mapping[str, Endpoint[Any]], request: Request) -> Response:
    endpoint = rows[request.method]
    try:
        credentials = read_authorization(request.headers.get("authorization"))
        # Read the body before taking a session from the pool. Otherwise a slow sender would occupy a session.
        async with asyncio.timeout(PATIENCE_S):
            arguments = await _read_body_or_query(endpoint, request)
            place = dict(request.path_params)
            if "idempotency-key" in request.headers:
                place["idempotency-key"] = request.headers["idempotency-key"]
            async with pool.session(credentials) as client:
                work = endpoint.perform(HttpCall(client, credentials, arguments, place))
                # Cancel only a GET when its client disconnects. A send that has started is completed, so that a retry
                # finds the message.
                status, value = await (run_while_connected(request.receive, work) if endpoint.method == "GET" else work)
    except ClientDisconnect:
        return Response(status_code=400)  # the client has disconnected and reads no response
    except TimeoutError:
        return make_error_response(
            ConnectError("The node does not answer. Try again; send a message with the same message_id.")
        )
    except ValidationError as error:
        return make_error_response(InvalidFrame(_format_validation_error(error)))
    except RoundelayError as error:
        return make_error_response(error)
    return JSONResponse(msgspec.to_builtins(value), status)


async def _read_body_or_query(endpoint: Endpoint[Any], request: Request) -> BaseModel:
    """Read the body or the query of a request. Raises `ValidationError`, `TooLarge` or `InvalidFrame`."""
    shape: type[BaseModel] = endpoint.takes
    if endpoint.method != "POST":
        return shape.model_validate(read_query(request))
    # Validate JSON strictly, because its values have types. Query parameters are text, so they were converted above.
    return shape.model_validate(await read_json(request), strict=True)


def _format_validation_error(error: ValidationError) -> str:
    first, *more = error.errors(include_url=False, include_input=False)
    place = ".".join(map(str, first["loc"])) or "the body"
    return f"{place}: {first['msg']}" + (f" (and {len(more)} more)" if more else "") + "; see /openapi.json."


# --- the OpenAPI document


def make_openapi_document(endpoints: Sequence[Endpoint[Any]] = ENDPOINTS) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints."""
    shapes = {endpoint.takes for endpoint in endpoints if endpoint.method == "POST"} | {
        endpoint.gives for endpoint in endpoints if endpoint.gives
    }
    ordered = sorted(shapes | {Refusal}, key=lambda shape: shape.__name__)
    _, schemas = models_json_schema(
        [(shape, "validation") for shape in ordered], ref_template="#/components/schemas/{model}"
    )
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
    refusal = {"description": "Refused", "content": _describe_json(Refusal)}
    good: dict[str, Any] = {"description": "Done", "content": _describe_json(endpoint.gives)}
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
        required = schema.get("required", [])
        for name, described_field in schema.get("properties", {}).items():
            parameters.append({"name": name, "in": "query", "required": name in required, "schema": described_field})
    else:
        described["requestBody"] = {"required": True, "content": _describe_json(endpoint.takes)}
    if endpoint.name == "send":
        key = {"type": "string", "pattern": "^[!-~]{1,128}$"}
        parameters.append({"name": "Idempotency-Key", "in": "header", "required": False, "schema": key})
    return described | ({"parameters": parameters} if parameters else {})


def _describe_json(shape: type[BaseModel] | None) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{shape.__name__}"} if shape is not None else {"type": "object"}
    return {"application/json": {"schema": schema}}
