"""``roundelay tui``, the full-screen terminal. The only package that imports Textual, loaded by that command alone."""

from roundelay.network.extras import needs

with needs("tui"):
    import textual  # noqa: F401 (reports a missing extra here)
