"""``roundelay tui``: the conversation full screen, in a terminal. The one package that imports Textual; that command
alone loads it."""
