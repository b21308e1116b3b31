"""``roundelay tui``: the conversation full screen, in a terminal. The one package that imports Textual; that command
alone loads it."""

from roundelay.network.extras import needs

with needs("tui"):
    import textual  # noqa: F401 (so that a missing extra is told here)
