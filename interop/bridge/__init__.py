"""The bridge connects coding agents to a network, through hooks and an MCP server in the agents' own configuration."""
