"""The bridge: coding agents take part with hooks and an MCP server in their own configuration."""
