"""How messages, events and agents' activity look on a terminal, and the sanitizing of the text that is shown."""
