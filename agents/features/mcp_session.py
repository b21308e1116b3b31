"""The session with one MCP server: a task of its own owns it, from the connection to its end, and opens it again when
it was lost.

Used by `mcp_servers`. Everything that enters or leaves the SDK's client happens in that task; other tasks only make
requests. What the server offers is read once it is connected, and again whenever it says that its tools have changed;
what it says about their use as well, if it speaks a version of the protocol in which that can be asked for again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import ListenNotSupportedError, SubscriptionLost

from roundelay.agents.arguments import ToolError
from roundelay.agents.foreign import describe_error, first_error

if TYPE_CHECKING:
    from .mcp_servers import ServerOptions

_logger = logging.getLogger(__name__)

MAX_PAGES = 100
RETRY_AFTER_S = 30.0
"""How long reactions begin without a server that could not be reached; a call of one of its tools tries at once."""

STDERR_BYTES = 2000


class ServerSession:
    """One server. ``tools`` is what it offers, as far as is known."""

    def __init__(self, name: str, options: ServerOptions) -> None:
        self.name = name
        self.tools: Sequence[types.Tool] = ()
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

    async def open(self, *, now: bool = True) -> None:
        """Connect, unless that is done, and wait for it, in bounded time. What goes wrong stands in ``failure``; not
        ``now``: a server that failed a moment ago is left alone."""
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
        task, self._task = self._task, None
        if task is not None:
            self._lost.set()
            if self._client is None:
                task.cancel()  # it is still connecting: there is nothing to end in good order
            await self._end(task)

    async def _end(self, task: asyncio.Task[None]) -> None:
        try:
            await asyncio.wait({task}, timeout=self._options.connect_timeout_s)
        finally:
            task.cancel()  # nothing happens to one that has ended
        await asyncio.wait({task})

    async def request(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a request by a method of the SDK's client. Raises `ToolError` with a sentence for the model, whatever
        happens to the server."""
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
            raise ToolError(f"The MCP server {self.name} refused: {error}") from error
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
                self.failure = describe_error(single) + _read_end(stderr.fileno())
                self._resting_until = asyncio.get_running_loop().time() + RETRY_AFTER_S
                _logger.warning("MCP server not available", extra={"server": self.name, "reason": self.failure})
            finally:
                self._client = None
                self.failure = self.failure or "it was closed"
                _settle(settled)

    @asynccontextmanager
    async def _connect(self, stderr: Any) -> Any:
        it = self._options
        timeout_s = it.timeout_s
        if it.command is not None:
            passed = {name: os.environ[name] for name in it.env_from if name in os.environ}
            parameters = StdioServerParameters(
                command=it.command, args=list(it.args), env={**passed, **it.env}, cwd=it.cwd
            )
            # Text, as the SDK wants it; what the server writes there is for the log.
            with os.fdopen(os.dup(stderr.fileno()), "w") as errors:
                transport = stdio_client(parameters, errlog=errors)
                async with Client(transport, read_timeout_seconds=timeout_s, message_handler=self._hear) as client:
                    yield client
            return
        assert it.url is not None
        headers = {name: os.environ.get(variable, "") for name, variable in it.headers_from.items()}
        async with httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(timeout_s, read=None)) as http:
            transport = streamable_http_client(it.url, http_client=http)
            async with Client(transport, read_timeout_seconds=timeout_s, message_handler=self._hear) as client:
                yield client

    async def _serve(self, client: Client) -> None:
        """Listen for changes until the session is to end."""
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(client))
            await self._lost.wait()
            listening.cancel()

    async def _listen(self, client: Client) -> None:
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
        if isinstance(message, types.ToolListChangedNotification) and self._client is not None:
            await self._read_tools(self._client)

    async def _read_offer(self, client: Client) -> None:
        capabilities = client.server_capabilities
        self.instructions = client.instructions or ""
        self.has_resources = capabilities.resources is not None
        self.has_prompts = capabilities.prompts is not None
        if capabilities.tools is not None:
            await self._read_tools(client)
        self.is_known = True

    async def _read_changes(self, client: Client) -> None:
        if client.session.discover_result is not None:  # since 2026-07-28 the protocol lets a client ask again
            try:
                raw = await client.session.send_discover(client.protocol_version)
                self.instructions = types.DiscoverResult.model_validate(raw).instructions or ""
            except (MCPError, ValueError) as error:  # what it said before holds, and its tools count for themselves
                _logger.warning("MCP server not described again", extra={"server": self.name, "reason": str(error)})
        await self._read_tools(client)

    async def _read_tools(self, client: Client) -> None:
        self.tools = await _read_pages(partial(client.list_tools, cache_mode="bypass"), "tools")


async def _read_pages(fetch: Callable[..., Awaitable[Any]], kind: str) -> list[Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await fetch(cursor=cursor)
        found += getattr(page, kind)
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _settle(settled: asyncio.Future[None]) -> None:
    if not settled.done():
        settled.set_result(None)


def _read_end(stderr: int) -> str:
    """What a server process said last."""
    size = os.fstat(stderr).st_size
    os.lseek(stderr, max(0, size - STDERR_BYTES), os.SEEK_SET)
    lines = os.read(stderr, STDERR_BYTES).decode(errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1][:300]}" if lines else ""
