"""Serves each agent of a network as an A2A 1.0 server at ``/a2a/AGENT``: its card, JSON-RPC and HTTP+JSON.

The routes of the official SDK implement the protocol, and `handler` answers the requests from the ledger. This module
combines the routes and the handler. This module also adds what the SDK lacks: body limits, strict JSON, correct media
types, and cancellation when a client disconnects.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from typing import Any

from roundelay.interop.conversations import (
    find_agent,
)
from roundelay.interop.http.public_names import PublicNames
from roundelay.interop.http.requests import parse_json, read_body, serve_while_connected
from roundelay.interop.session_pool import Credentials, SessionPool, read_authorization
from roundelay.network.client import NetworkClient
from roundelay.network.errors import (
    InvalidFrame,
    RoundelayError,
    UnknownRecipient,
)

# protobuf's runtime package has no type annotations.
from roundelay.network.extras import needs

from .handler import SENT_SEQS, ContextBuilder, LedgerHandler
from .parts import escape_line_ends, read_json
from .push import TaskPushes

with needs("gateway"):
    from a2a.server.jsonrpc_models import JSONParseError
    from a2a.server.request_handlers import build_error_response
    from a2a.server.routes import create_jsonrpc_routes, create_rest_routes
    from a2a.types import (
        AgentCapabilities,
        AgentCard,
        AgentInterface,
        AgentSkill,
        ContentTypeNotSupportedError,
        HTTPAuthSecurityScheme,
        SecurityRequirement,
        SecurityScheme,
        StringList,
    )
    from a2a.utils.constants import A2A_JSON_MEDIA_TYPE
    from a2a.utils.error_handlers import build_rest_error_payload
    from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route, Router
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.types import Message as ServerEvent


_logger = logging.getLogger(__name__)

INPUT_MODES = ("text/plain", "application/json", "*/*")
"""Media types that an agent accepts. A message may contain any file, and the agent's model decides how to use it."""
OUTPUT_MODES = ("text/plain", "application/json")
CARD_PATH = "/.well-known/agent-card.json"


def make_a2a_app(pool: SessionPool, pushes: TaskPushes | None, names: PublicNames) -> ASGIApp:
    """Return the ASGI application that serves the agent in the path parameter ``agent_id``. Callers need a
    valid token.
    """
    handler, builder = LedgerHandler(pool, pushes), ContextBuilder()

    async def show_card(request: Request) -> Response:
        credentials = read_authorization(request.headers.get("authorization"))
        async with pool.session(credentials) as client:
            agent_id = request.path_params["agent_id"]
            agent = await find_agent(client, agent_id)
            if agent is None:
                raise UnknownRecipient(
                    f"There is no agent {agent_id[:80]!r} here. GET /v1/agents lists the participants."
                )
            url = f"{names.show_base(request)}{request.scope['root_path']}"
            card = make_card(client, agent, url, is_pushing=pushes is not None)
        body = read_json(card)
        tag = f'W/"{hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}"'
        return JSONResponse(body, headers={"ETag": tag, "Cache-Control": "private, max-age=60"})

    routes = [
        Route(CARD_PATH, show_card, methods=["GET"]),
        *create_jsonrpc_routes(handler, "/", builder),
        *create_rest_routes(handler, builder),
    ]
    return _AgentServer(Router(routes), pool)


class _AgentServer:
    """Wraps the routes of the SDK with the rules and limits of this gateway.

    Request bodies have the same limits as in the other protocols, and must be JSON that the ledger can store. Requests
    and responses use ``application/json``, as sections 9.1 and 11.1 of the A2A specification require. The SDK accepts
    any type and answers with the media type of a later A2A version. A request is cancelled when its client disconnects.
    Messages in a response are acknowledged after the client has received the complete response.
    """

    def __init__(self, app: ASGIApp, pool: SessionPool) -> None:
        self._app = app
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind not in ("", "application/json", A2A_JSON_MEDIA_TYPE):
            await _refuse(
                scope, ContentTypeNotSupportedError("The content type of a request must be application/json")
            )(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive))
            if body:
                parse_json(body)
        except ClientDisconnect:
            return
        except InvalidFrame as error:
            await _refuse(scope, JSONParseError(message=str(error)))(scope, receive, send)
            return
        is_sent = False

        async def send_event(event: ServerEvent) -> None:
            nonlocal is_sent
            if event["type"] == "http.response.start":
                headers = MutableHeaders(scope=event)
                if headers.get("content-type") == A2A_JSON_MEDIA_TYPE:
                    headers["content-type"] = "application/json"
            elif event.get("more_body"):  # part of a streamed response
                event["body"] = escape_line_ends(event["body"])
            await send(event)
            # Acknowledge messages only after the complete response. A client that disconnected earlier may not have
            # read the messages.
            is_sent = event["type"] == "http.response.body" and not event.get("more_body")

        await serve_while_connected(self._app, scope, receive, send_event, body)
        if is_sent and (seqs := scope.get(SENT_SEQS)):
            await self._acknowledge(read_authorization(Headers(scope=scope).get("authorization")), seqs)

    async def _acknowledge(self, credentials: Credentials, seqs: Iterable[int]) -> None:
        try:
            async with self._pool.conversations(credentials, is_cleanup=True) as conversations:
                await conversations.client.call("network.acknowledge", {"seqs": sorted(seqs)})
        except RoundelayError as error:
            _logger.info("answers could not be acknowledged", extra={"code": error.code})


def _refuse(scope: Scope, error: ContentTypeNotSupportedError | JSONParseError) -> Response:
    """Return an error response in the form of the called A2A binding, which is JSON-RPC or HTTP+JSON."""
    if scope["path"] == f"{scope['root_path']}/":
        return JSONResponse(build_error_response(None, error))
    if isinstance(error, JSONParseError):
        return JSONResponse(build_rest_error_payload(ParseError(error.message)), 400)
    payload = build_rest_error_payload(error)
    payload["error"]["code"] = 415  # section 5.4 of A2A requires 415, but the SDK answers 400
    return JSONResponse(payload, 415)


def make_card(client: NetworkClient, agent: dict[str, Any], url: str, *, is_pushing: bool) -> AgentCard:
    """Return the A2A card of an agent, created from the agent's card in the network."""
    agent_id: str = agent["agent_id"]
    card: dict[str, Any] = agent["card"] if isinstance(agent.get("card"), dict) else {}
    description = _text(card.get("description")) or f"An agent of the network {client.welcome.network.name}"
    tags = [tag for tag in card.get("tags") or [] if isinstance(tag, str)]
    skills = [_make_skill(tool, tags) for tool in card.get("tools") or []] or [
        AgentSkill(id="converse", name="Converse", description=description, tags=tags or ["conversation"])
    ]
    return AgentCard(
        name=agent_id,
        description=description,
        version=client.welcome.server.rpartition("/")[2],
        supported_interfaces=[
            AgentInterface(url=f"{url}/", protocol_binding="JSONRPC", protocol_version="1.0"),
            AgentInterface(url=url, protocol_binding="HTTP+JSON", protocol_version="1.0"),
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=is_pushing, extended_agent_card=False),
        security_schemes={
            "token": SecurityScheme(
                http_auth_security_scheme=HTTPAuthSecurityScheme(
                    scheme="Bearer", bearer_format="ID:TOKEN", description="A participant's id and its token"
                )
            )
        },
        security_requirements=[SecurityRequirement(schemes={"token": StringList()})],
        default_input_modes=INPUT_MODES,
        default_output_modes=OUTPUT_MODES,
        skills=skills,
    )


def _make_skill(tool: object, tags: list[str]) -> AgentSkill:
    described = tool if isinstance(tool, dict) else {"name": tool}
    name = _text(described.get("name")) or "tool"
    return AgentSkill(
        id=name,
        name=name,
        description=_text(described.get("description")) or f"Uses its tool {name}",
        tags=tags or ["tool"],
    )


def _text(value: object) -> str:
    return value.strip() if isinstance(value, str) else ""
