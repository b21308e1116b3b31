"""Show a conversation at a terminal, and handle the person's input."""
