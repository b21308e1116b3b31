"""An MCP server over stdio that offers whatever a JSON file says: ``python mcp_stranger.py FILE``. The file has ``instructions``, ``tools``
as the protocol has them, and the ``results`` of calls by the tool's name. A call is noted in ``FILE.calls``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

FILE = Path(sys.argv[1])
SAYS: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
    return types.ListToolsResult.model_validate({"tools": SAYS["tools"], "resultType": "complete"})


async def call_tool(context: Any, params: Any) -> types.CallToolResult:
    with FILE.with_suffix(".calls").open("a") as noted:
        print(params.name, file=noted)
    given = SAYS.get("results", {}).get(params.name, {"content": [{"type": "text", "text": "called"}]})
    return types.CallToolResult.model_validate(given)


async def main() -> None:
    server = Server("stranger", instructions=SAYS.get("instructions"), on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as streams:
        await server.run(*streams, server.create_initialization_options())


asyncio.run(main())
