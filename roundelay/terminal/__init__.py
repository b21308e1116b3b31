"""Shows a conversation at a terminal, and runs the person's input."""
