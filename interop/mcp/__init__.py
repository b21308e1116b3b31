"""The MCP server of a participant, over HTTP and stdio."""
