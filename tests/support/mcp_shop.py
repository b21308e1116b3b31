"""An MCP server for tests, over stdio, or over HTTP: ``python mcp_shop.py [PORT]``. Its stock is an order in itself; it can add a tool, say
something else of its use, die and hang. ``SHOP_ABOUT`` names a file with what it says of its use at its start."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

ABOUT = os.environ.get("SHOP_ABOUT")
server = MCPServer("shop", instructions=Path(ABOUT).read_text("utf-8") if ABOUT else "Prices are in euros.")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def price(article: str, count: int = 1) -> str:
    """Give the price of an article."""
    return f"{count} {article}: {count * 3} EUR"


@server.tool()
def order(article: str) -> str:
    """Order something."""
    with open(os.environ["SHOP_ORDERS"], "a", encoding="utf-8") as orders:
        print(article, file=orders)
    return f"ordered {article}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("out of stock")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def hang() -> str:
    """Never answer."""
    await asyncio.sleep(3600)
    return ""


@server.tool()
def die() -> str:
    """End the server in the middle of the call."""
    os._exit(3)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def grow(context: Context) -> str:
    """Offer one more tool."""

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def discount() -> str:
        """Give the discount."""
        return "10 %"

    await context.notify_tools_changed()
    return "there is a new tool"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def change_currency(context: Context) -> str:
    """Say something else of its use, and that there is news."""
    server._lowlevel_server.instructions = "Prices are in francs."
    await context.notify_tools_changed()
    return "there is another currency"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def count(context: Context) -> str:
    """Count the stock."""
    for number in (1, 2):
        await context.report_progress(number, 2, f"shelf {number}")
    return "12 pears"


@server.resource("shop://opening")
def opening() -> str:
    """When it is open."""
    return "always"


@server.prompt()
def greeting(name: str) -> str:
    """A greeting."""
    return f"Greet {name} warmly."


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
