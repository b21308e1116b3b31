"""Formats messages, events and agents' activity for a terminal, and sanitizes the text that is shown."""
