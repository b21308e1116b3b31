"""Middleware that offers the tools of MCP servers, over stdio or HTTP. The model sees the tool ``tool`` of the server
``server`` as ``server_tool``.

A server starts when a reaction first needs it, and stays connected. If a server is dead or slow, a call of its tools
returns an error as the result, and the next call connects again. An interrupted call is repeated only if the server
declares the tool as idempotent or read-only. Additional tools read the prompts and resources of a server. The server's
instructions become a part of the prompt. This feature needs the extra `roundelay[mcp]`, which is imported when the
first `McpServers` is created. `mcp_session` contains the connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from roundelay.agents.features.mcp_schemas import (
    MAX_NAME_CHARS,
    MAX_PARAMETER_CHARS,
    OfferedTool,
    name_offered,
    tidy_parameters,
    write_line,
    write_text,
)
from roundelay.agents.middleware import Around, Middleware, RunReaction
from roundelay.agents.options import InFile, checked
from roundelay.agents.tool_arguments import read_object
from roundelay.agents.tools import Output, Tool, ToolContext, tool
from roundelay.agents.values import Finish, PromptPart, ToolError, TurnState
from roundelay.network.elements import escape_text
from roundelay.network.errors import ConfigError
from roundelay.network.extras import how_to_add

from .mcp_session import MAX_ERROR_CHARS, ServerOptions, ServerSession, remember_secrets

if TYPE_CHECKING:
    import mcp_types as types

__all__ = ["McpServers", "ServerOptions"]

MAX_RESULT_CHARS = 1_000_000
"""Maximum characters of one result of a tool. The policy's ``max_result_chars`` and `LongResults` may shorten the text
further for the model.
"""

MAX_ARGUMENTS = 50
"""Maximum number of arguments that are listed for one prompt of a server."""

_ServerName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,32}$")]
"""Name of a server, which is also the first part of the names of its tools."""


class McpServers(Middleware):
    """Middleware that offers the tools of MCP servers. The runner calls `close` to disconnect the servers. Raises
    `ConfigError` if the extra is not installed.
    """

    @checked()
    def __init__(
        self,
        servers: Annotated[Mapping[str, ServerOptions], InFile(dict[_ServerName, ServerOptions]), Field(min_length=1)],
    ) -> None:
        try:
            import mcp.client.streamable_http  # noqa: F401  # to report a missing extra at once
        except ImportError as error:
            raise ConfigError(
                f"MCP servers need the extra mcp ({error.name} is missing). Run: {how_to_add('mcp')}"
            ) from error
        for name, options in servers.items():
            remember_secrets(name, options)
        self._options = servers
        self._sessions = {name: ServerSession(name, options) for name, options in servers.items()}
        self._tools: dict[str, list[Tool]] = {}  # by server, built from `_built_from`
        self._built_from: list[object] = []

    # --- hooks

    def describe(self) -> object:
        return self._options

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        # Connect before the first turn, so that the request of that turn already includes the tools. Connect in
        # parallel, so that one slow server does not delay the others.
        await asyncio.gather(*(session.open(now=False) for session in self._sessions.values()))
        return await proceed()

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return [made for name in self._sessions for made in self._list(name)]

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Return the escaped instructions of each server, and the text about the server from the agent's author."""
        return [
            PromptPart(
                name,
                tuple(tool.name for tool in self._list(name)),
                escape_text(session.instructions),
                self._options[name].user_prompt.strip(),
            )
            for name, session in self._sessions.items()
            if session.is_known
        ]

    async def close(self) -> None:
        """End the sessions of all servers. A session opens again when a reaction needs it."""
        for session in self._sessions.values():
            await session.close()

    # --- tools

    def _list(self, name: str) -> list[Tool]:
        sessions = self._sessions.values()
        offers: list[object] = [item for session in sessions for item in (session.tools, *_list_readers(session))]
        if [*map(id, offers)] != [*map(id, self._built_from)] or not self._tools:
            # Choose the names for the tools of all servers together. If the names were chosen per server, a tool `a_b`
            # of one server and a tool `b` of a server `a` could get the same name.
            wanted = [
                (session.name, own)
                for session in sessions
                for own in (*(offered.name for offered in session.tools), *_list_readers(session))
            ]
            names = iter(name_offered(wanted))
            self._tools = {
                session.name: [
                    *(
                        _make_tool(session, next(names), offered, self._options[session.name].timeout_s)
                        for offered in session.tools
                    ),
                    *(_make_reader(session, reader, next(names)) for reader in _list_readers(session)),
                ]
                for session in sessions
            }
            self._built_from = offers
        return self._tools[name]


def _make_tool(session: ServerSession, name: str, offered: OfferedTool, timeout_s: float) -> Tool:
    parameters = tidy_parameters(offered.parameters)

    async def run(context: ToolContext, arguments: Mapping[str, object]) -> object:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            share = f" {progress:g}{f' of {total:g}' if total is not None else ''}"
            details = f", {write_line(message, MAX_ERROR_CHARS)}" if message else ""
            context.report(f"{name}:{share}{details}")

        # Check the arguments against the server's own schema. The model saw a simplified schema, which may accept more.
        await session.schemas.check(name, offered.parameters, arguments)
        result = await session.request("call_tool", offered.name, dict(arguments), progress_callback=report)
        text = _write_content(result)
        if result.is_error:
            raise ToolError(text or "the tool failed without a message")
        return Output(text)

    # Name the server as the source of the description. Without this source, a template, or a prompt for a model without
    # tool calls, could show the description as text of the agent's author.
    about = f"The MCP server {session.name} says: {offered.description}"
    # The server's own schema decides whether additional arguments are allowed.
    named = {**parameters, "additionalProperties": offered.parameters.get("additionalProperties", True)}
    read = partial(read_object, name, named)
    return Tool(name, about, parameters, offered.effect, timeout_s, read, run)


def _write_content(result: Any) -> str:
    """Return a result as text. Parts that are not text are described by kind and size."""
    texts: list[str] = []
    for part in result.content:
        match part.type:
            case "text":
                texts.append(part.text)
            case "image" | "audio":
                texts.append(f"[{part.type} {part.mime_type}, {len(part.data) * 3 // 4} bytes, not shown]")
            case "resource_link":
                texts.append(f"[resource {part.uri}]")
            case _:
                texts.append(_write_resource(part.resource))
    structured = getattr(result, "structured_content", None)
    if structured not in (None, {}) and not _has_structured(structured, texts):
        texts.append(json.dumps(structured, ensure_ascii=False))
    return write_text("\n".join(texts), MAX_RESULT_CHARS)


def _has_structured(structured: object, texts: Sequence[str]) -> bool:
    """Return whether the texts of a result already contain the structured content of the same result.

    Servers should repeat structured content in the texts as JSON
    (https://modelcontextprotocol.io/specification/2025-11-25/server/tools#structured-content). The Python SDK does so,
    and wraps values that are not objects as ``{"result": ...}``.
    """
    inner = structured["result"] if isinstance(structured, dict) and structured.keys() == {"result"} else structured
    values = [_read_json(text) for text in texts]
    return any(value in (structured, inner) for value in values) or inner in (values, list(texts)) or inner in texts


def _read_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _write_resource(resource: Any) -> str:
    text = getattr(resource, "text", None)
    return (
        text if isinstance(text, str) else f"[resource {resource.uri}, {len(resource.blob) * 3 // 4} bytes, not shown]"
    )


def _list_readers(session: ServerSession) -> list[str]:
    """Return the names of the tools that read the resources and prompts of a server."""
    resources = ["list_resources", "read_resource"] if session.has_resources else []
    return [*resources, *(["list_prompts", "get_prompt"] if session.has_prompts else [])]


def _make_reader(session: ServerSession, own_name: str, name: str) -> Tool:
    async def list_resources() -> object:
        """List the resources of the server."""
        listed = await session.list_all("list_resources", "resources")
        return [
            {"uri": str(item.uri), **_describe(item)} for item in listed if len(str(item.uri)) <= MAX_PARAMETER_CHARS
        ]

    async def read_resource(uri: str) -> str:
        """Read a resource from the list."""
        result = await session.request("read_resource", uri)
        return write_text("\n".join(map(_write_resource, result.contents)), MAX_RESULT_CHARS)

    async def list_prompts() -> object:
        """List the prompts of the server with their arguments."""
        listed = await session.list_all("list_prompts", "prompts")
        return [
            {**_describe(item), "takes": [arg.name[:MAX_NAME_CHARS] for arg in (item.arguments or ())[:MAX_ARGUMENTS]]}
            for item in listed
        ]

    async def get_prompt(name: str, arguments: dict[str, str]) -> str:
        """Return the text of a prompt from the list."""
        result = await session.request("get_prompt", name, arguments)
        texts = (f"{message.role}: {getattr(message.content, 'text', '[not text]')}" for message in result.messages)
        return write_text("\n".join(texts), MAX_RESULT_CHARS)

    functions = (list_resources, read_resource, list_prompts, get_prompt)
    reader = next(function for function in functions if function.__name__ == own_name)
    return tool(name=name, read_only=True)(reader)


def _describe(listed: types.Resource | types.Prompt) -> dict[str, str]:
    about = write_line(listed.description or "", MAX_PARAMETER_CHARS)
    return {"name": listed.name[:MAX_NAME_CHARS], "about": about}
