"""Connections to MCP servers: options, secrets and the session with one server.

A separate task runs each `ServerSession` from the connection to its end. All code that enters or exits the SDK's client
runs in this task. All other tasks only send requests to the session. The session reads the list of the server's tools
after connecting, and again when the server announces a change. If the protocol version allows it, the session also
reads the server's instructions again. Servers are untrusted, so every text is limited and sanitized before a model or a
person reads it. `mcp_schemas` sanitizes the texts of tools.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from roundelay.agents.features.mcp_schemas import (
    OfferedTool,
    SchemaCheck,
    read_offer,
    write_line,
    write_text,
)
from roundelay.agents.isolation import describe_error, first_error
from roundelay.agents.options import Strict, VariableName
from roundelay.agents.outgoing_http import check_environment, load_certificates
from roundelay.agents.values import ToolError
from roundelay.network.credentials import (
    check_secret_text,
    clean_secret,
    describe_variable,
    hide_secrets,
    read_secret,
    remember_secret,
    remember_url,
)

if TYPE_CHECKING:
    from mcp import Client

_logger = logging.getLogger(__name__)

MAX_PAGES = 100
MAX_LISTED = 1000
"""Maximum number of tools, resources or prompts read from one server."""

MAX_INSTRUCTIONS_CHARS = 4000
MAX_ERROR_CHARS = 500
"""Maximum characters of an error or of a progress report."""

MAX_REPLY_BYTES = 8_000_000
"""Maximum bytes of one HTTP reply that is not a stream. For streams, the SDK limits each event to 1 MiB."""

RETRY_AFTER_S = 30.0
"""Time after a server's failure during which reactions do not wait for this server, in seconds. A call to a tool of the
server still reconnects at once.
"""

STDERR_BYTES = 2000

MIN_ENV_SECRET_CHARS = 12
"""Minimum length of a value in a server's environment that is treated as a secret, in characters. Shorter values are
treated as settings.
"""

_Seconds = Annotated[float, Field(gt=0, le=3600)]


class ServerOptions(Strict):
    """Options of one MCP server: a ``command`` to start, or the ``url`` of a running server.

    ``env_from`` and ``headers_from`` name the environment variables to pass to the server. The server receives no other
    variables.
    """

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, Annotated[str, BeforeValidator(check_secret_text)]] = Field(default_factory=dict)
    env_from: tuple[VariableName, ...] = ()
    cwd: Path | None = None
    url: str | None = None
    headers_from: dict[str, VariableName] = Field(default_factory=dict)
    tools: tuple[str, ...] | None = None
    """Names of the tools to offer, or None for all tools."""

    user_prompt: str = ""
    """Text about the server from the agent's author. The prompt shows the text after the conversation while the server
    is connected.
    """

    timeout_s: _Seconds = 60.0
    connect_timeout_s: _Seconds = 20.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server has either a command or a url")
        return self


def _read_headers(name: str, options: ServerOptions) -> dict[str, str]:
    """Return the headers of a server's requests. Raises `ConfigError` for a value that is not valid in a header."""
    source = f"of the MCP server {name}"
    return {
        header: read_secret(os.environ.get(variable, ""), f"the variable {describe_variable(variable)} {source}")
        for header, variable in options.headers_from.items()
    }


def remember_secrets(name: str, options: ServerOptions) -> None:
    """Register a server's secrets so that logs and records hide them, even if an error from the server contains a
    secret. Raises `ConfigError` like `_read_headers`.
    """
    _read_headers(name, options)
    if options.url is not None:
        remember_url(options.url)
    values = {**{variable: os.environ.get(variable, "") for variable in options.env_from}, **options.env}
    for value in values.values():
        if "://" in value:
            remember_url(value)
        elif len(value) >= MIN_ENV_SECRET_CHARS and not value.startswith(("/", ".")):  # a path is not a secret
            remember_secret(clean_secret(value))


class ServerSession:
    """Connection to one server. ``tools`` lists the server's tools as last read, without the tools that cannot be
    offered.
    """

    def __init__(self, name: str, options: ServerOptions) -> None:
        self.name = name
        self.schemas = SchemaCheck(name)
        self.tools: Sequence[OfferedTool] = ()
        self.instructions = ""
        self.has_resources = False
        self.has_prompts = False
        self.is_known = False
        """Whether the server's tools are known. The value stays true while the server is disconnected."""

        self.failure: str | None = None
        """Reason why there is no connection, or None."""

        self._options = options
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt: asyncio.Future[None] | None = None  # done when the current attempt has connected or failed
        self._lost = asyncio.Event()
        self._open_lock = asyncio.Lock()
        self._retry_at_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def _follow_loop(self) -> None:
        """Reset the connection if the event loop has changed: connections, tasks and locks belong to the loop that
        created them.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._client, self._task, self._attempt = loop, None, None, None
            self._lost, self._open_lock, self._retry_at_s = asyncio.Event(), asyncio.Lock(), 0.0
            self.schemas = SchemaCheck(self.name)

    async def open(self, *, now: bool = True) -> None:
        """Connect if necessary and wait for the result for a limited time. An error is stored in ``failure``.

        If ``now`` is False, do not reconnect to a server that failed within the last `RETRY_AFTER_S` seconds.
        """
        self._follow_loop()
        # Without this check, each reaction would wait for the timeout of a server that is down.
        if not now and asyncio.get_running_loop().time() < self._retry_at_s:
            return
        async with self._open_lock:
            if self._task is not None and self._lost.is_set():
                await self._end_task(self._task)
            if self._task is None or self._task.done():
                self._lost.clear()
                self._attempt = asyncio.get_running_loop().create_future()
                self._task = asyncio.create_task(self._run(self._attempt), name=f"mcp-{self.name}")
        if self._attempt is not None:
            # Shield the attempt: other calls wait for the same attempt, so the cancellation of one call must not end
            # it.
            await asyncio.shield(self._attempt)

    async def close(self) -> None:
        """End the session, which also ends the process of a local server. Further calls of this method do nothing."""
        self._follow_loop()
        task, self._task = self._task, None
        if task is not None:
            self._lost.set()
            if self._client is None:
                task.cancel()  # still connecting, so there is no session to close cleanly
            await self._end_task(task)
        await self.schemas.close()

    async def _end_task(self, task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({task}, timeout=self._options.connect_timeout_s)
        finally:
            task.cancel()  # no effect on a finished task
        await asyncio.wait({task})

    async def request(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the SDK's client. Every failure of the server raises `ToolError` with a sentence for the
        model.
        """
        import httpx2
        import mcp_types as types
        from mcp import MCPError

        await self.open()
        client = self._client
        if client is None:
            raise ToolError(
                f"The MCP server {self.name} is not available ({self.failure}). Continue without it, or try later."
            )
        try:
            return await getattr(client, method)(*args, **options)
        except MCPError as error:
            if error.code == types.CONNECTION_CLOSED:
                self._lost.set()
                raise ToolError(self._explain_loss()) from error
            if error.code == types.REQUEST_TIMEOUT:
                raise ToolError(f"The MCP server {self.name} gave no answer in time.") from error
            raise ToolError(f"The MCP server {self.name} refused: {_describe(error)}") from error
        except TimeoutError as error:
            raise ToolError(f"The MCP server {self.name} gave no answer in time.") from error
        except (OSError, httpx2.HTTPError, RuntimeError, ValueError) as error:
            # Handle closed streams, resets and invalid replies here, because the SDK does not convert the errors of its
            # transports.
            self._lost.set()
            raise ToolError(self._explain_loss()) from error

    async def list_all(self, method: str, kind: str) -> list[Any]:
        """Return all items of a list method, page by page. ``kind`` is the name of the page's field with the items."""
        return await _read_pages(partial(self.request, method), kind)

    def _explain_loss(self) -> str:
        return f"The connection to the MCP server {self.name} broke during the call. It may have taken effect."

    async def _run(self, attempt: asyncio.Future[None]) -> None:
        """Run the session from the connection to its end. All context managers of the SDK are entered and exited in
        this task.
        """
        with tempfile.TemporaryFile() as stderr:
            try:
                async with asyncio.timeout(self._options.connect_timeout_s) as deadline:
                    async with self._connect(stderr) as client:
                        await self._read_offer(client)
                        # Remove the deadline, which applies only to connecting. The session itself has no time limit.
                        deadline.reschedule(None)
                        self._client, self.failure = client, None
                        _resolve(attempt)
                        await self._serve(client)
            except asyncio.CancelledError:
                self.failure = "it was closed"
                raise
            except BaseException as error:  # if a server ends, the SDK raises exception groups
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                single = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                reason = describe_error(single) + hide_secrets(_read_last_line(stderr.fileno()))
                self.failure = write_line(reason, MAX_ERROR_CHARS)
                self._retry_at_s = asyncio.get_running_loop().time() + RETRY_AFTER_S
                _logger.warning("MCP server not available", extra={"server": self.name, "reason": self.failure})
            finally:
                self._client = None
                self.failure = self.failure or "it was closed"
                _resolve(attempt)

    @asynccontextmanager
    async def _connect(self, stderr: Any) -> Any:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        options = self._options
        timeout_s = options.timeout_s
        if options.command is not None:
            remember_secrets(self.name, options)  # register the secrets again, because the variables may have changed
            # Pass only the named variables. The server is untrusted, and the environment contains API keys.
            variables = {name: os.environ[name] for name in options.env_from if name in os.environ}
            parameters = StdioServerParameters(
                command=options.command, args=list(options.args), env={**variables, **options.env}, cwd=options.cwd
            )
            # The SDK requires a text file for stderr. The log quotes the last line of this file to explain why a server
            # ended.
            with os.fdopen(os.dup(stderr.fileno()), "w") as errors:
                transport = stdio_client(parameters, errlog=errors)
                async with Client(
                    transport, read_timeout_seconds=timeout_s, message_handler=self._handle_notification
                ) as client:
                    yield client
            return
        assert options.url is not None
        # Refuse compression, because a small compressed reply may expand to a huge one.
        headers = {"Accept-Encoding": "identity", **_read_headers(self.name, options)}
        hooks = {"response": [_bound_reply]}
        check_environment()
        # Set no read timeout, because an event stream may be silent for hours.
        time = httpx2.Timeout(timeout_s, read=None)
        async with httpx2.AsyncClient(
            headers=headers, timeout=time, event_hooks=hooks, verify=load_certificates()
        ) as http:
            transport = streamable_http_client(options.url, http_client=http)
            async with Client(
                transport, read_timeout_seconds=timeout_s, message_handler=self._handle_notification
            ) as client:
                yield client

    async def _serve(self, client: Client) -> None:
        """Listen for changes until the session ends."""
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
                return  # an older server sends notifications to `_handle_notification` instead
            except MCPError:
                return  # the server does not support subscriptions
            except SubscriptionLost:
                # the server does not report changes that happened before the subscription
                await self._read_changes(client)

    async def _handle_notification(self, message: Any) -> None:
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

        # protocol versions since 2026-07-28 let a client ask for the instructions again
        if client.session.discover_result is not None:
            try:
                raw = await client.session.send_discover(client.protocol_version)
                instructions = types.DiscoverResult.model_validate(raw).instructions or ""
                self.instructions = write_text(instructions.strip(), MAX_INSTRUCTIONS_CHARS)
            except (MCPError, ValueError) as error:  # keep the earlier instructions, and still read the tools
                _logger.warning(
                    "the instructions of an MCP server could not be read again",
                    extra={"server": self.name, "reason": str(error)},
                )
        await self._read_tools(client)

    async def _read_tools(self, client: Client) -> None:
        # Disable the SDK's validation of results. The validation would match patterns from the server's schema in the
        # event loop, and a slow pattern would block the loop.
        setattr(client.session, "validate_tool_result", _skip_validation)  # noqa: B010  # assigned, mypy refuses it
        offered = await _read_pages(partial(client.list_tools, cache_mode="bypass"), "tools")
        # Start the process here, so that the first call of a tool does not have to wait.
        await self.schemas.open()
        chosen = self._options.tools
        self.tools, left_out = read_offer(item for item in offered if chosen is None or item.name in chosen)
        for name, reason in left_out.items():
            _logger.warning(
                "a tool of an MCP server is not offered", extra={"server": self.name, "tool": name, "reason": reason}
            )


async def _read_pages(fetch: Callable[..., Awaitable[Any]], kind: str) -> list[Any]:
    items: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await fetch(cursor=cursor)
        items += getattr(page, kind)
        cursor = page.next_cursor
        if cursor is None or len(items) >= MAX_LISTED:
            break
    return items[:MAX_LISTED]


async def _skip_validation(*_: object) -> None:
    return


async def _bound_reply(response: Any) -> None:
    """Make reading a reply raise an error as soon as the reply is too large. Event streams are not limited here."""
    import httpx2

    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.DecodingError("the reply is compressed, although no compression was requested")
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
                    raise httpx2.DecodingError(f"the reply has more than {MAX_REPLY_BYTES} bytes, the maximum")
                yield piece

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _describe(error: Exception) -> str:
    return write_line(hide_secrets(str(error)), MAX_ERROR_CHARS)


def _resolve(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _read_last_line(stderr: int) -> str:
    """Return the last line that a server's process wrote to stderr."""
    size = os.fstat(stderr).st_size
    os.lseek(stderr, max(0, size - STDERR_BYTES), os.SEEK_SET)
    lines = os.read(stderr, STDERR_BYTES).decode(errors="replace").strip().splitlines()
    return f"; its last line on stderr: {lines[-1][:300]}" if lines else ""
