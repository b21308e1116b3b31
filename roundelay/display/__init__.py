"""Format messages, events and agents' activity for a terminal, and sanitize text."""
