"""Records the answers of the MCP SDK to requests that need no session. `stdio` replays these answers.

Usage: python -m roundelay.interop.mcp.recording > interop/mcp/recorded_answers.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

from roundelay.network.extras import needs

from .server import make_mcp_server

with needs("bridge"):
    import anyio
    from mcp.server.stdio import stdio_server
    from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS


LISTS = ("tools/list", "resources/list", "resources/templates/list", "prompts/list")
_CLIENT = {"name": "roundelay", "version": "1"}


def make_handshake(protocol_version: str) -> list[dict[str, Any]]:
    """Return the messages of a host that starts with a handshake, and then requests everything that is recorded."""
    params = {"protocolVersion": protocol_version, "capabilities": {}, "clientInfo": _CLIENT}
    return [
        {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        *({"jsonrpc": "2.0", "id": method, "method": method} for method in ("ping", *LISTS)),
    ]


def make_modern() -> list[dict[str, Any]]:
    """Return the messages of a host whose protocol version has no handshake."""
    prefix = "io.modelcontextprotocol/"
    meta = {
        f"{prefix}protocolVersion": "2026-07-28",
        f"{prefix}clientInfo": _CLIENT,
        f"{prefix}clientCapabilities": {},
    }
    return [
        {"jsonrpc": "2.0", "id": method, "method": method, "params": {"_meta": meta}}
        for method in ("server/discover", *LISTS)
    ]


async def ask_sdk(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of the SDK to the messages, in the same order."""
    answers: list[dict[str, Any]] = []
    is_answered = anyio.Event()

    class Writing:
        async def write(self, text: str) -> None:
            nonlocal is_answered
            answers.append(json.loads(text))
            is_answered.set()

        async def flush(self) -> None:
            """Do nothing, because lines are not buffered."""

    async def read() -> Any:
        nonlocal is_answered
        for message in messages:
            is_answered = anyio.Event()
            yield json.dumps(message)
            if "id" in message:
                await is_answered.wait()

    def find_session(_: object) -> Any:
        raise AssertionError("listing a server's tools opens no session")

    reading: Any = read()
    writing: Any = Writing()
    async with stdio_server(reading, writing) as (read_stream, write_stream):
        inner = make_mcp_server(find_session)._lowlevel_server  # the object that implements the protocol
        await inner.run(read_stream, write_stream, inner.create_initialization_options())
    return answers


async def record() -> dict[str, Any]:
    """Return the recording. The placeholder `%VERSION%` replaces the version of this package."""
    versions = list(HANDSHAKE_PROTOCOL_VERSIONS)
    with_handshake = await ask_sdk(make_handshake(versions[-1]))
    modern = await ask_sdk(make_modern())
    recorded = {
        "versions": versions,
        "handshake": {
            "initialize": with_handshake[0]["result"],
            **{answer["id"]: answer["result"] for answer in with_handshake[1:]},
        },
        "modern": {answer["id"]: answer["result"] for answer in modern},
    }
    text = json.dumps(recorded).replace(json.dumps(version("roundelay")), '"%VERSION%"')
    result: dict[str, Any] = json.loads(text)
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(record()), indent=1, ensure_ascii=False) + "\n")
