"""Tools of MCP servers, over stdio or HTTP: each tool ``server.tool``, as ``server_tool`` for the model; prompts and
resources by tools as well, what a server says about their use as a part of the prompt.

Middleware. A server is started when a reaction first needs it, and kept; one that is dead or slow answers its calls
with that, and is opened again at the next. A tool is `idempotent` if the server says so or only reads; else an
interrupted call is not repeated. Needs `roundelay[mcp]`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from roundelay.agents.arguments import ToolArgumentsError, ToolError, read_object
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import JsonSchema
from roundelay.agents.steps import Finish, PromptPart, TurnState
from roundelay.agents.tools import Effect, Output, Tool, ToolContext, tool, tool_name
from roundelay.network.errors import ConfigError

if TYPE_CHECKING:
    import mcp_types as types

    from .mcp_session import ServerSession

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class ServerOptions(BaseModel):
    """One server: a ``command`` to start, or the ``url`` of one that runs. ``env_from`` and ``headers_from`` name
    variables of the environment that are passed on; nothing else of it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    env_from: tuple[str, ...] = ()
    cwd: Path | None = None
    url: str | None = None
    headers_from: dict[str, str] = {}
    tools: tuple[str, ...] | None = None
    """Of its tools only these; None for all."""

    user_prompt: str = ""
    """What is said of it after the conversation, once it is there."""

    timeout_s: _Seconds = 60.0
    connect_timeout_s: _Seconds = 20.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server has either a command or a url")
        return self


class McpOptions(BaseModel):
    """``servers`` by the name under which their tools are known."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,32}$")], ServerOptions], Field(min_length=1)
    ]

    def build(self) -> McpServers:
        return McpServers(self.servers)


class McpServers(Middleware):
    """The tools of these servers. `close` ends them; a runner does so at its end. Raises `ConfigError` when the extra
    is not installed."""

    def __init__(self, servers: Mapping[str, ServerOptions]) -> None:
        try:
            from .mcp_session import ServerSession  # only here: it loads the SDK
        except ImportError as error:
            raise ConfigError(f"MCP servers need the extra: pip install 'roundelay[mcp]' ({error.name})") from error
        self._options = dict(servers)
        self._sessions = {name: ServerSession(name, options) for name, options in servers.items()}
        self._made: dict[str, tuple[object, list[Tool]]] = {}  # by server, with the list that they were made of

    # --- hooks

    def describe(self) -> object:
        return self._options

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        await asyncio.gather(*(session.open(now=False) for session in self._sessions.values()))
        return await proceed()

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return [made for name in self._sessions for made in self._list(name)]

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Give what each server says about its use, and what the agent's author says of it."""
        return [
            PromptPart(
                name,
                tuple(it.name for it in self._list(name)),
                session.instructions.strip(),
                self._options[name].user_prompt.strip(),
            )
            for name, session in self._sessions.items()
            if session.is_known
        ]

    async def close(self) -> None:
        """End all sessions; those that are needed again are opened again."""
        for session in self._sessions.values():
            await session.close()

    # --- tools

    def _list(self, name: str) -> list[Tool]:
        session, chosen = self._sessions[name], self._options[name].tools
        known, made = self._made.get(name, (None, []))
        if known is not session.tools or not made:
            made = [
                _make_tool(session, it, self._options[name].timeout_s)
                for it in session.tools
                if chosen is None or it.name in chosen
            ]
            made += _make_readers(session)
            self._made[name] = (session.tools, made)
        return made


def _make_tool(session: ServerSession, offered: types.Tool, timeout_s: float) -> Tool:
    hints = offered.annotations
    safe = hints is not None and (hints.read_only_hint or hints.idempotent_hint)
    effect: Effect = "idempotent" if safe else "once"
    parameters: JsonSchema = offered.input_schema
    name = tool_name(f"{session.name}_{offered.name}")

    async def run(context: ToolContext, arguments: Mapping[str, object]) -> object:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            share = f" {progress:g}{f' of {total:g}' if total is not None else ''}"
            context.report(f"{name}:{share}{f', {message}' if message else ''}")

        result = await session.request("call_tool", offered.name, dict(arguments), progress_callback=report)
        text = _write_content(result)
        if result.is_error:
            raise ToolError(text or "it failed and said nothing")
        return Output(text)

    about = offered.description or offered.title or offered.name
    return Tool(name, about, parameters, effect, timeout_s, partial(_read_arguments, name, parameters), run)


def _read_arguments(name: str, schema: JsonSchema, text: str) -> dict[str, object]:
    """Read arguments, and hold them against the server's schema."""
    import jsonschema

    value: Any = read_object(name, schema, text)
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    problems = sorted(validator.iter_errors(value), key=lambda it: [str(part) for part in it.absolute_path])
    if problems:
        told = "; ".join(
            f"{'.'.join(map(str, it.absolute_path)) or 'the arguments'}: {it.message}" for it in problems[:5]
        )
        raise ToolArgumentsError(f"Wrong arguments for {name}: {told}.")
    return dict(value)


def _write_content(result: Any) -> str:
    """Give a result as text; what is no text is named with its kind and size."""
    texts: list[str] = []
    for it in result.content:
        match it.type:
            case "text":
                texts.append(it.text)
            case "image" | "audio":
                texts.append(f"[{it.type} {it.mime_type}, {len(it.data) * 3 // 4} bytes, not shown]")
            case "resource_link":
                texts.append(f"[resource {it.uri}]")
            case _:
                texts.append(_write_resource(it.resource))
    if not texts and getattr(result, "structured_content", None) is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _write_resource(resource: Any) -> str:
    text = getattr(resource, "text", None)
    return (
        text if isinstance(text, str) else f"[resource {resource.uri}, {len(resource.blob) * 3 // 4} bytes, not shown]"
    )


def _make_readers(session: ServerSession) -> list[Tool]:
    """Make the tools by which a model uses a server's resources and prompts."""
    made: list[Tool] = []
    if session.has_resources:

        @tool(name=tool_name(f"{session.name}_list_resources"), idempotent=True)
        async def list_resources() -> object:
            """List what can be read there."""
            listed = await session.list_all("list_resources", "resources")
            return [{"uri": str(it.uri), "name": it.name, "about": it.description or ""} for it in listed]

        @tool(name=tool_name(f"{session.name}_read_resource"), idempotent=True)
        async def read_resource(uri: str) -> str:
            """Read one of the resources that are listed."""
            result = await session.request("read_resource", uri)
            return "\n".join(map(_write_resource, result.contents))

        made += [list_resources, read_resource]
    if session.has_prompts:

        @tool(name=tool_name(f"{session.name}_list_prompts"), idempotent=True)
        async def list_prompts() -> object:
            """List the prompts that are kept there, with what they take."""
            listed = await session.list_all("list_prompts", "prompts")
            return [
                {"name": it.name, "about": it.description or "", "takes": [arg.name for arg in it.arguments or ()]}
                for it in listed
            ]

        @tool(name=tool_name(f"{session.name}_get_prompt"), idempotent=True)
        async def get_prompt(name: str, arguments: dict[str, str]) -> str:
            """Give the text of one of the prompts that are listed."""
            result = await session.request("get_prompt", name, arguments)
            return "\n".join(f"{it.role}: {getattr(it.content, 'text', '[not text]')}" for it in result.messages)

        made += [list_prompts, get_prompt]
    return made
