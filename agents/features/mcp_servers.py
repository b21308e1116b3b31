"""Tools of MCP servers, over stdio or HTTP: each tool ``server.tool``, as ``server_tool`` for the model; prompts and
resources by tools as well, what a server says about their use as a part of the prompt.

`McpServers` is middleware. A server is started when a reaction first needs it, and kept; one that is dead or slow
answers its calls with that, and is opened again at the next. A tool is `idempotent` if the server says so or only
reads; else an interrupted call is not repeated. Needs `roundelay[mcp]`, which is imported when servers are first made.

A `ServerSession` is the session with one server. A task of its own owns it, from the connection to its end: everything
that enters or leaves the SDK's client happens in that task, other tasks only make requests. What the server offers is
read once it is connected, and again whenever it says that its tools have changed; what it says about their use as well,
if it speaks a version of the protocol in which that can be asked for again. Servers are strangers: whatever one says is
bounded and cleaned before a model or a person reads it (`mcp_schemas`, for what it offers).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from roundelay.agents.features.mcp_schemas import (
    MAX_NAME_CHARS,
    MAX_PARAMETER_CHARS,
    OfferedTool,
    SchemaCheck,
    name_offered,
    read_offer,
    tidy_parameters,
    write_line,
    write_text,
)
from roundelay.agents.isolation import describe_error, first_error
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.options import InFile, Strict, VariableName, checked
from roundelay.agents.outgoing_http import check_environment, load_certificates
from roundelay.agents.prompt import escape_text
from roundelay.agents.tool_arguments import read_object
from roundelay.agents.tools import Effect, Output, Tool, ToolContext, tool
from roundelay.agents.values import Finish, PromptPart, ToolError, TurnState
from roundelay.network.credentials import (
    check_secret_text,
    clean_secret,
    describe_variable,
    hide_secrets,
    read_secret,
    remember_secret,
    remember_url,
)
from roundelay.network.errors import ConfigError
from roundelay.network.extras import how_to_add

if TYPE_CHECKING:
    import mcp_types as types
    from mcp import Client

_logger = logging.getLogger(__name__)

MAX_PAGES = 100
MAX_LISTED = 1000
"""Tools, resources or prompts that are read of one server."""

MAX_INSTRUCTIONS_CHARS = 4000
MAX_RESULT_CHARS = 1_000_000
"""Of one result, before the policy's ``max_result_chars`` and `LongResults` cut what a model reads of it."""

MAX_TOLD_CHARS = 500
"""Of an error or a report of progress."""

MAX_REPLY_BYTES = 8_000_000
"""Of one reply over HTTP that is no stream; events of a stream are held to 1 MiB by the SDK."""

RETRY_AFTER_S = 30.0
"""How long reactions begin without a server that could not be reached; a call of one of its tools tries at once."""

STDERR_BYTES = 2000
MAX_ARGUMENTS = 50
"""Of a prompt, that are named."""

MIN_ENV_SECRET_CHARS = 12
"""Length from which a value in a server's environment is taken for a secret; shorter ones are settings."""

_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,32}$")]
"""Under which a server's tools are known."""

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class ServerOptions(Strict):
    """One server: a ``command`` to start, or the ``url`` of one that runs. ``env_from`` and ``headers_from`` name
    variables of the environment that are passed on; nothing else of it is."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, Annotated[str, BeforeValidator(check_secret_text)]] = Field(default_factory=dict)
    env_from: tuple[VariableName, ...] = ()
    cwd: Path | None = None
    url: str | None = None
    headers_from: dict[str, VariableName] = Field(default_factory=dict)
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


class McpServers(Middleware):
    """The tools of these servers. `close` ends them; a runner does so at its end. Raises `ConfigError` when the extra
    is not installed."""

    @checked()
    def __init__(
        self, servers: Annotated[Mapping[str, ServerOptions], InFile(dict[_Name, ServerOptions]), Field(min_length=1)]
    ) -> None:
        try:
            import mcp.client.streamable_http  # noqa: F401  # so that a missing extra is told here
        except ImportError as error:
            raise ConfigError(
                f"MCP servers need the extra mcp ({error.name} is missing). Run: {how_to_add('mcp')}"
            ) from error
        for name, options in servers.items():
            _remember_secrets(name, options)
        self._options = servers
        self._sessions = {name: ServerSession(name, options) for name, options in servers.items()}
        self._made: dict[str, list[Tool]] = {}  # by server, of the lists in `_listed`
        self._listed: list[object] = []

    # --- hooks

    def describe(self) -> object:
        return self._options

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        await asyncio.gather(*(session.open(now=False) for session in self._sessions.values()))
        return await proceed()

    def list_tools(self, state: TurnState) -> Sequence[Tool]:
        return [made for name in self._sessions for made in self._list(name)]

    def list_parts(self, state: TurnState) -> Sequence[PromptPart]:
        """Give what each server says about its use, escaped, and what the agent's author says of it."""
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
        """End all sessions; those that are needed again are opened again."""
        for session in self._sessions.values():
            await session.close()

    # --- tools

    def _list(self, name: str) -> list[Tool]:
        sessions = self._sessions.values()
        listed: list[object] = [item for session in sessions for item in (session.tools, *_list_readers(session))]
        if [*map(id, listed)] != [*map(id, self._listed)] or not self._made:
            # All servers' at once: `a_b` of one server and `b` of another, which is called `a`, have one name.
            wanted = [
                (session.name, own)
                for session in sessions
                for own in (*(offered.name for offered in session.tools), *_list_readers(session))
            ]
            names = iter(name_offered(wanted))
            self._made = {
                session.name: [
                    *(
                        _make_tool(session, next(names), offered, self._options[session.name].timeout_s)
                        for offered in session.tools
                    ),
                    *(_make_reader(session, reader, next(names)) for reader in _list_readers(session)),
                ]
                for session in sessions
            }
            self._listed = listed
        return self._made[name]


def _read_headers(name: str, options: ServerOptions) -> dict[str, str]:
    """Return the headers of a server's requests. Raises `ConfigError` for a value that no header can carry."""
    source = f"of the MCP server {name}"
    return {
        header: read_secret(os.environ.get(variable, ""), f"the variable {describe_variable(variable)} {source}")
        for header, variable in options.headers_from.items()
    }


def _remember_secrets(name: str, options: ServerOptions) -> None:
    """Have what a server is given kept out of logs and records, where its errors may repeat it. Raises `ConfigError`
    as `_read_headers` does."""
    _read_headers(name, options)
    if options.url is not None:
        remember_url(options.url)
    given = {**{variable: os.environ.get(variable, "") for variable in options.env_from}, **options.env}
    for value in given.values():
        if "://" in value:
            remember_url(value)
        elif len(value) >= MIN_ENV_SECRET_CHARS and not value.startswith(("/", ".")):  # a path is no secret
            remember_secret(clean_secret(value))


def _make_tool(session: ServerSession, name: str, offered: OfferedTool, timeout_s: float) -> Tool:
    effect: Effect = "idempotent" if offered.is_idempotent else "once"
    parameters = tidy_parameters(offered.parameters)

    async def run(context: ToolContext, arguments: Mapping[str, object]) -> object:
        async def report(progress: float, total: float | None, message: str | None) -> None:
            share = f" {progress:g}{f' of {total:g}' if total is not None else ''}"
            told = f", {write_line(message, MAX_TOLD_CHARS)}" if message else ""
            context.report(f"{name}:{share}{told}")

        await session.schemas.check(name, offered.parameters, arguments)
        result = await session.request("call_tool", offered.name, dict(arguments), progress_callback=report)
        text = _write_content(result)
        if result.is_error:
            raise ToolError(text or "it failed and said nothing")
        return Output(text)

    # Whose words these are stands with them: a template or a model without tool calls puts them among the author's.
    about = f"The MCP server {session.name} says: {offered.description}"
    # The server says itself whether it takes more than it names.
    named = {**parameters, "additionalProperties": offered.parameters.get("additionalProperties", True)}
    read = partial(read_object, name, named)
    return Tool(name, about, parameters, effect, timeout_s, read, run)


def _write_content(result: Any) -> str:
    """Give a result as text; what is no text is named with its kind and size."""
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
    if structured not in (None, {}) and not _is_said(structured, texts):
        texts.append(json.dumps(structured, ensure_ascii=False))
    return write_text("\n".join(texts), MAX_RESULT_CHARS)


def _is_said(structured: object, texts: Sequence[str]) -> bool:
    """Whether the texts of a result hold its structured content already. Servers should write it there as JSON
    (https://modelcontextprotocol.io/specification/2025-11-25/server/tools#structured-content); the SDK for Python does,
    and wraps what is no object as ``{"result": ...}``."""
    inner = structured["result"] if isinstance(structured, dict) and structured.keys() == {"result"} else structured
    read = [_read_json(text) for text in texts]
    return any(value in (structured, inner) for value in read) or inner in (read, list(texts)) or inner in texts


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
    """Return the names of the tools by which a model uses a server's resources and prompts."""
    resources = ["list_resources", "read_resource"] if session.has_resources else []
    return [*resources, *(["list_prompts", "get_prompt"] if session.has_prompts else [])]


def _make_reader(session: ServerSession, own_name: str, name: str) -> Tool:
    async def list_resources() -> object:
        """List what can be read there."""
        listed = await session.list_all("list_resources", "resources")
        return [
            {"uri": str(item.uri), **_describe(item)} for item in listed if len(str(item.uri)) <= MAX_PARAMETER_CHARS
        ]

    async def read_resource(uri: str) -> str:
        """Read one of the resources that are listed."""
        result = await session.request("read_resource", uri)
        return write_text("\n".join(map(_write_resource, result.contents)), MAX_RESULT_CHARS)

    async def list_prompts() -> object:
        """List the prompts that are kept there, with what they take."""
        listed = await session.list_all("list_prompts", "prompts")
        return [
            {**_describe(item), "takes": [arg.name[:MAX_NAME_CHARS] for arg in (item.arguments or ())[:MAX_ARGUMENTS]]}
            for item in listed
        ]

    async def get_prompt(name: str, arguments: dict[str, str]) -> str:
        """Give the text of one of the prompts that are listed."""
        result = await session.request("get_prompt", name, arguments)
        texts = (f"{message.role}: {getattr(message.content, 'text', '[not text]')}" for message in result.messages)
        return write_text("\n".join(texts), MAX_RESULT_CHARS)

    functions = (list_resources, read_resource, list_prompts, get_prompt)
    made = next(function for function in functions if function.__name__ == own_name)
    return tool(name=name, idempotent=True)(made)


def _describe(listed: types.Resource | types.Prompt) -> dict[str, str]:
    about = write_line(listed.description or "", MAX_PARAMETER_CHARS)
    return {"name": listed.name[:MAX_NAME_CHARS], "about": about}


class ServerSession:
    """One server. ``tools`` is what it offers, as far as is known and fit to be offered on."""

    def __init__(self, name: str, options: ServerOptions) -> None:
        self.name = name
        self.schemas = SchemaCheck(name)
        self.tools: Sequence[OfferedTool] = ()
        self.instructions = ""
        self.has_resources = False
        self.has_prompts = False
        self.is_known = False
        """Whether it has said what it offers; that holds while it is away."""

        self.failure: str | None = None
        """Why there is no connection."""

        self._options = options
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled: asyncio.Future[None] | None = None  # when this attempt is connected, or has failed
        self._lost = asyncio.Event()
        self._opening = asyncio.Lock()
        self._resting_until = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def _follow_loop(self) -> None:
        """Begin anew in another event loop: connections, tasks and locks belong to the loop in which they were made."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._client, self._task, self._settled = loop, None, None, None
            self._lost, self._opening, self._resting_until = asyncio.Event(), asyncio.Lock(), 0.0
            self.schemas = SchemaCheck(self.name)

    async def open(self, *, now: bool = True) -> None:
        """Connect, unless that is done, and wait for it, in bounded time. What goes wrong stands in ``failure``; not
        ``now``: a server that failed a moment ago is left alone."""
        self._follow_loop()
        if not now and asyncio.get_running_loop().time() < self._resting_until:
            return
        async with self._opening:
            if self._task is not None and self._lost.is_set():
                await self._end(self._task)
            if self._task is None or self._task.done():
                self._lost.clear()
                self._settled = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._own(self._settled), name=f"mcp-{self.name}")
        if self._settled is not None:
            await asyncio.shield(self._settled)

    async def close(self) -> None:
        """End the session; a server process ends with it. Idempotent."""
        self._follow_loop()
        task, self._task = self._task, None
        if task is not None:
            self._lost.set()
            if self._client is None:
                task.cancel()  # it is still connecting: there is nothing to end in good order
            await self._end(task)
        await self.schemas.close()

    async def _end(self, task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({task}, timeout=self._options.connect_timeout_s)
        finally:
            task.cancel()  # nothing happens to one that has ended
        await asyncio.wait({task})

    async def request(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a request by a method of the SDK's client. Raises `ToolError` with a sentence for the model, whatever
        happens to the server."""
        import httpx2
        import mcp_types as types
        from mcp import MCPError

        await self.open()
        client = self._client
        if client is None:
            raise ToolError(
                f"The MCP server {self.name} is not there ({self.failure}). Go on without it, or try later."
            )
        try:
            return await getattr(client, method)(*args, **options)
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                self._lost.set()
                raise ToolError(self._explain_loss()) from error
            if error.code == types.REQUEST_TIMEOUT:
                raise ToolError(f"The MCP server {self.name} gave no answer in time.") from error
            raise ToolError(f"The MCP server {self.name} refused: {_tell(error)}") from error
        except TimeoutError as error:
            raise ToolError(f"The MCP server {self.name} gave no answer in time.") from error
        except (OSError, httpx2.HTTPError, RuntimeError, ValueError) as error:
            # Closed streams, a reset, a reply that is none: the SDK lets its transports' errors through.
            self._lost.set()
            raise ToolError(self._explain_loss()) from error

    async def list_all(self, method: str, kind: str) -> list[Any]:
        """Give all that a method lists, page by page; ``kind`` is what it is called there."""
        return await _read_pages(partial(self.request, method), kind)

    def _explain_loss(self) -> str:
        return f"The MCP server {self.name} was lost in the middle of the call. Whether it took effect is unknown."

    async def _own(self, settled: asyncio.Future[None]) -> None:
        """The session's own task: everything of the SDK is entered and left here."""
        with tempfile.TemporaryFile() as stderr:
            try:
                async with asyncio.timeout(self._options.connect_timeout_s) as patience:
                    async with self._connect(stderr) as client:
                        await self._read_offer(client)
                        patience.reschedule(None)
                        self._client, self.failure = client, None
                        _settle(settled)
                        await self._serve(client)
            except asyncio.CancelledError:
                self.failure = "it was closed"
                raise
            except BaseException as error:  # the SDK wraps what ends a server, in groups of any kind
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                single = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                told = describe_error(single) + hide_secrets(_read_end(stderr.fileno()))
                self.failure = write_line(told, MAX_TOLD_CHARS)
                self._resting_until = asyncio.get_running_loop().time() + RETRY_AFTER_S
                _logger.warning("MCP server not available", extra={"server": self.name, "reason": self.failure})
            finally:
                self._client = None
                self.failure = self.failure or "it was closed"
                _settle(settled)

    @asynccontextmanager
    async def _connect(self, stderr: Any) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        options = self._options
        timeout_s = options.timeout_s
        if options.command is not None:
            _remember_secrets(self.name, options)  # again: the variables may be others since
            passed = {name: os.environ[name] for name in options.env_from if name in os.environ}
            parameters = StdioServerParameters(
                command=options.command, args=list(options.args), env={**passed, **options.env}, cwd=options.cwd
            )
            # Text, as the SDK wants it; what the server writes there is for the log.
            with os.fdopen(os.dup(stderr.fileno()), "w") as errors:
                transport = stdio_client(parameters, errlog=errors)
                async with Client(transport, read_timeout_seconds=timeout_s, message_handler=self._hear) as client:
                    yield client
            return
        assert options.url is not None
        # Unpacked, a small reply may be huge.
        headers = {"Accept-Encoding": "identity", **_read_headers(self.name, options)}
        hooks = {"response": [_bound_reply]}
        check_environment()
        time = httpx2.Timeout(timeout_s, read=None)
        async with httpx2.AsyncClient(
            headers=headers, timeout=time, event_hooks=hooks, verify=load_certificates()
        ) as http:
            transport = streamable_http_client(options.url, http_client=http)
            async with Client(transport, read_timeout_seconds=timeout_s, message_handler=self._hear) as client:
                yield client

    async def _serve(self, client: Client) -> None:
        """Listen for changes until the session is to end."""
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(client))
            await self._lost.wait()
            listening.cancel()

    async def _listen(self, client: Client) -> None:
        from mcp import MCPError
        from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

        while True:
            try:
                async with client.listen(tools_list_changed=True) as changes:
                    async for _ in changes:
                        await self._read_changes(client)
                return
            except ListenNotSupportedError:
                return  # an older server: it sends notifications, which `_hear` gets
            except MCPError:
                return  # it does not offer it
            except SubscriptionLost:
                await self._read_changes(client)  # what changed meanwhile is not repeated

    async def _hear(self, message: Any) -> None:
        import mcp_types as types

        if isinstance(message, types.ToolListChangedNotification) and self._client is not None:
            await self._read_tools(self._client)

    async def _read_offer(self, client: Client) -> None:
        capabilities = client.server_capabilities
        self.instructions = write_text((client.instructions or "").strip(), MAX_INSTRUCTIONS_CHARS)
        self.has_resources = capabilities.resources is not None
        self.has_prompts = capabilities.prompts is not None
        if capabilities.tools is not None:
            await self._read_tools(client)
        self.is_known = True

    async def _read_changes(self, client: Client) -> None:
        import mcp_types as types
        from mcp import MCPError

        if client.session.discover_result is not None:  # since 2026-07-28 the protocol lets a client ask again
            try:
                raw = await client.session.send_discover(client.protocol_version)
                said = types.DiscoverResult.model_validate(raw).instructions or ""
                self.instructions = write_text(said.strip(), MAX_INSTRUCTIONS_CHARS)
            except (MCPError, ValueError) as error:  # what it said before holds, and its tools count for themselves
                _logger.warning("MCP server not described again", extra={"server": self.name, "reason": str(error)})
        await self._read_tools(client)

    async def _read_tools(self, client: Client) -> None:
        # The SDK would hold results against the server's own schema, a pattern of its choice, in the event loop.
        setattr(client.session, "validate_tool_result", _take_as_it_is)  # noqa: B010  # assigned, mypy refuses it
        listed = await _read_pages(partial(client.list_tools, cache_mode="bypass"), "tools")
        await self.schemas.open()
        chosen = self._options.tools
        self.tools, left_out = read_offer(item for item in listed if chosen is None or item.name in chosen)
        for name, reason in left_out.items():
            _logger.warning("MCP tool left out", extra={"server": self.name, "tool": name, "reason": reason})


async def _read_pages(fetch: Callable[..., Awaitable[Any]], kind: str) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await fetch(cursor=cursor)
        found += getattr(page, kind)
        cursor = page.next_cursor
        if cursor is None or len(found) >= MAX_LISTED:
            break
    return found[:MAX_LISTED]


async def _take_as_it_is(*_: object) -> None:
    return


async def _bound_reply(response: Any) -> None:
    """Let a reply that grows too large fail while it is read; a stream has no end by itself."""
    import httpx2

    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the reply is packed, which was not asked for")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = _make_bounded(response.stream)


def _make_bounded(stream: Any) -> Any:
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > MAX_REPLY_BYTES:
                    raise httpx2.DecodingError(f"the reply has more than {MAX_REPLY_BYTES} bytes")
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _tell(error: Exception) -> str:
    return write_line(hide_secrets(str(error)), MAX_TOLD_CHARS)


def _settle(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _read_end(stderr: int) -> str:
    """What a server process said last."""
    size = os.fstat(stderr).st_size
    os.lseek(stderr, max(0, size - STDERR_BYTES), os.SEEK_SET)
    lines = os.read(stderr, STDERR_BYTES).decode(errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1][:300]}" if lines else ""
