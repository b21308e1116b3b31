"""How a conversation looks and is led at a terminal."""
