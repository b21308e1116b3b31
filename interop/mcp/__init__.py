"""MCP servers over HTTP and stdio, through which an MCP host takes part in a network as one participant."""
