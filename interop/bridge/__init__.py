"""The bridge: coding agents take part through hooks and an MCP server in their own configuration."""
