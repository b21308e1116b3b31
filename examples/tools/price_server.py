"""An MCP server with one tool, over stdio. mcp_tools.py and the orchestrator start it."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop", instructions="Prices are in euros.")


@server.tool()
def price(article: str) -> str:
    """Look up the price of an article."""
    return f"A {article} costs 3 EUR."


if __name__ == "__main__":
    server.run()
