"""An MCP server made with the SDK, over stdio or HTTP: ``python mcp_sdk_shop.py [PORT]``. The server can change its
tools and instructions, and crash.
"""

from __future__ import annotations

import os
import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

READ_ONLY = ToolAnnotations(read_only_hint=True)
server = MCPServer("shop", instructions="Prices are in euros.")


@server.tool(annotations=READ_ONLY)
def price(article: str, count: int = 1) -> str:
    """Give the price of an article."""
    return f"{count} {article}: {count * 3} EUR"


@server.tool()
def die() -> str:
    """End the server in the middle of the call."""
    os._exit(3)


@server.tool(annotations=READ_ONLY)
async def grow(context: Context) -> str:
    """Offer one more tool, and other instructions."""

    @server.tool(annotations=READ_ONLY)
    def discount() -> str:
        """Give the discount."""
        return "10 %"

    server._lowlevel_server.instructions = "Prices are in francs."
    await context.notify_tools_changed()
    return "there is a new tool"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
