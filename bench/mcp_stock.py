"""An MCP server over stdio that offers the tool of the measured loops. `features` uses this server."""

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("stock")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def look_up(article: str, warehouse: str) -> str:
    """Return the stock and the unit price of an article."""
    return f"{article}: 12 pieces in {warehouse}, 9.90 each"


if __name__ == "__main__":
    server.run("stdio")
