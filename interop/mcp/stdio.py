"""Serves MCP over stdin and stdout for the host that starts this process. The first answers do not need the SDK.

Importing the SDK takes longer than hosts wait before their first request to a model. The answers to the handshake, to
`ping` and to the lists of tools and resources are the same for every participant. A thread therefore answers these
requests from a recording of the SDK's own answers (`recorded_answers.json`, created by `recording`). The first line of
any other kind causes the import of the SDK. The handshake is then replayed to the SDK, which serves all further lines.

A host waits until this module is imported. The module therefore imports the SDK and the client only when they are
needed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from mcp.server.mcpserver import MCPServer

ANSWERS = Path(__file__).with_name("recorded_answers.json")
_PREFIX = "io.modelcontextprotocol/"
_MODERN = "2026-07-28"
"""First MCP version without a handshake."""
MAX_WAITING = 64
"""Maximum number of lines that are read before the SDK processes them. Further lines wait in the host's pipe."""


class QuickAnswers:
    """Answers an MCP host from the recording.

    A request in an unexpected form is left to the SDK, which reports its own errors.
    """

    def __init__(self, read_version: Callable[[], str]) -> None:
        self._read_version = read_version
        self._recorded: dict[str, Any] | None = None
        self.opening: tuple[object, dict[str, Any]] | None = None
        """Id and message of the request with which the host chose its protocol version."""
        self.initialized: dict[str, Any] | None = None
        """The host's notification that ended the handshake."""

    @property
    def is_modern(self) -> bool:
        return self.opening is not None and self.opening[1]["method"] != "initialize"

    def answer(self, line: str | bytes) -> str | None:
        """Return the line that answers ``line``. Return an empty string if the line needs no answer, and None if the
        SDK must answer.
        """
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return None
        if not message.keys() <= {"jsonrpc", "id", "method", "params"} or not isinstance(message.get("method"), str):
            return None
        method, params = message["method"], message.get("params", {})
        if "id" not in message:
            if method != "notifications/initialized" or params or self.is_modern or self.opening is None:
                return None
            self.initialized = message
            return ""
        is_id = isinstance(message["id"], str | int) and not isinstance(message["id"], bool)
        result = self._find_result(message, method, params) if is_id and isinstance(params, dict) else None
        if result is None:
            return None
        return json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}, separators=(",", ":"))

    def _find_result(self, message: dict[str, Any], method: str, params: dict[str, Any]) -> dict[str, Any] | None:
        if method == "initialize":
            return self._initialize(message, params) if self.opening is None and _is_handshake(params) else None
        recorded = self._recording
        if _is_modern_request(params):
            # Leave a host that mixes both kinds of protocol version to the SDK.
            if self.opening is not None and not self.is_modern:
                return None
            result: dict[str, Any] | None = recorded["modern"].get(method)
            if result is not None and self.opening is None:
                self.opening = message["id"], message
            return result
        meta = params.get("_meta", {})
        if params.keys() - {"_meta"} or not isinstance(meta, dict) or any(key.startswith(_PREFIX) for key in meta):
            return None
        if self.is_modern or self.opening is None:
            return None
        answer: dict[str, Any] | None = recorded["handshake"].get(method)
        return answer if self.initialized is not None or method == "ping" else None

    def _initialize(self, message: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
        recorded = self._recording
        wanted, versions = params["protocolVersion"], recorded["versions"]
        version = wanted if wanted in versions else versions[-1]
        # Replace the version in the replayed message by the version that was agreed. A later SDK could choose another
        # version.
        self.opening = message["id"], {**message, "params": {**params, "protocolVersion": version}}
        return {**recorded["handshake"]["initialize"], "protocolVersion": version}

    @property
    def _recording(self) -> dict[str, Any]:
        if self._recorded is None:
            text = ANSWERS.read_text(encoding="utf-8")
            self._recorded = json.loads(text.replace("%VERSION%", self._read_version()))
        return self._recorded


def _is_handshake(params: dict[str, Any]) -> bool:
    return (
        isinstance(params.get("protocolVersion"), str)
        and isinstance(params.get("capabilities"), dict)
        and _is_implementation(params.get("clientInfo"))
    )


def _is_implementation(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("version"), str)


def _is_modern_request(params: dict[str, Any]) -> bool:
    meta = params.get("_meta")
    return (
        isinstance(meta, dict)
        and params.keys() == {"_meta"}
        and meta.get(f"{_PREFIX}protocolVersion") == _MODERN
        and isinstance(meta.get(f"{_PREFIX}clientCapabilities"), dict)
        and _is_implementation(meta.get(f"{_PREFIX}clientInfo"))
    )


def is_sdk_installed() -> bool:
    """Return whether the SDK is installed, without importing the SDK."""
    return find_spec("mcp") is not None


class HostPipe:
    """Stdin and stdout of this process. Create only one instance per process, because it reads stdin until its end.

    Create the instance before the slow imports. During the imports, the thread of the instance answers the host. Call
    `serve` once after the imports.
    """

    def __init__(self) -> None:
        # Duplicate the descriptors, because stdin and stdout are redirected later. Print statements and child processes
        # must not reach the host.
        self._input, self._output = os.fdopen(os.dup(0), "rb"), os.dup(1)
        self._answers = QuickAnswers(_read_version)
        self._attached = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lines: asyncio.Queue[bytes | None] | None = None
        # Use a daemon thread, because only the host can end its blocking read.
        threading.Thread(target=self._read, name="mcp-stdin", daemon=True).start()

    async def serve(self, make_server: Callable[[], MCPServer[Any]]) -> None:
        """Serve until stdin ends. ``make_server`` is called only when the SDK is needed."""
        import asyncio

        self._loop, self._lines = asyncio.get_running_loop(), asyncio.Queue(MAX_WAITING)
        # Wake the reading thread, which passes lines on only after the event loop is known.
        self._attached.set()
        line = await self._lines.get()
        if line is None:
            return
        from mcp.server.stdio import stdio_server

        # Redirect the streams before the SDK's server starts. Otherwise a stray print would corrupt a line of the
        # protocol.
        self._divert()
        replies = _Replies(self._output, self._answers.opening)
        # The SDK's annotations require files of anyio, but the SDK uses only the methods that these two objects have.
        reading: Any = self._replay(line, replies)
        writing: Any = replies
        async with stdio_server(reading, writing) as (read_stream, write_stream):
            inner = make_server()._lowlevel_server  # the object that implements the protocol
            await inner.run(read_stream, write_stream, inner.create_initialization_options())

    def _read(self) -> None:
        """Read lines until stdin ends. This method runs in a thread. The thread answers the first lines itself, and
        passes all later lines to the SDK.
        """
        is_handed_over = False
        with suppress(OSError):  # the host has exited
            for line in self._input:
                if not is_handed_over:
                    answer = self._answers.answer(line)
                    if answer is not None:
                        _write(self._output, f"{answer}\n".encode() if answer else b"")
                        continue
                    # Pass every later line to the SDK. Otherwise the recorded answers and the SDK's answers could
                    # overtake each other.
                    is_handed_over = True
                self._put(line)
        self._put(None)

    def _put(self, line: bytes | None) -> None:
        import asyncio

        self._attached.wait()
        assert self._loop is not None
        assert self._lines is not None
        with suppress(RuntimeError):  # the event loop has ended, and the process ends too
            # Wait for the result. A full queue then stops this thread, so that the host's pipe fills up instead of this
            # process's memory.
            asyncio.run_coroutine_threadsafe(self._lines.put(line), self._loop).result()

    async def _replay(self, first: bytes, replies: _Replies) -> AsyncIterator[str]:
        """Yield lines for the SDK. The answered handshake is the first of these lines, followed by the host's lines."""
        if self._answers.opening is not None:
            yield json.dumps(self._answers.opening[1])
            # Wait until the SDK has processed the opening message. The SDK must not get the next line earlier.
            await replies.is_open.wait()
            if self._answers.initialized is not None:
                yield json.dumps(self._answers.initialized)
        line: bytes | None = first
        assert self._lines is not None
        while line is not None:
            yield line.decode(errors="replace")
            line = await self._lines.get()

    @staticmethod
    def _divert() -> None:
        """Redirect stdin to the null device and stdout to stderr. The SDK does the same for the streams that it opens
        itself.
        """
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)


class _Replies:
    """Writes the SDK's lines to the host, except the answer to the replayed opening message."""

    def __init__(self, descriptor: int, opening: tuple[object, dict[str, Any]] | None) -> None:
        import asyncio

        self._descriptor = descriptor
        self._opening = opening
        self.is_open = asyncio.Event()
        """Event that is set when the SDK has processed the opening message."""

    async def write(self, text: str) -> None:
        import asyncio

        if self._opening is not None and not self.is_open.is_set():
            message = json.loads(text)
            if message.get("id") == self._opening[0] and "method" not in message:
                self.is_open.set()
                return
        # Write in a thread. Otherwise a host that does not read would block the event loop.
        await asyncio.to_thread(_write, self._descriptor, text.encode())

    async def flush(self) -> None:
        """Do nothing, because lines are not buffered."""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        # Repeat the write, because a pipe may accept only a part of the data.
        data = data[os.write(descriptor, data) :]


def _read_version() -> str:
    from importlib.metadata import version

    return version("roundelay")
