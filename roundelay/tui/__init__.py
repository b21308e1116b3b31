"""Full-screen terminal of ``roundelay tui``. Only this package imports Textual, and only that command loads the
package.
"""

from roundelay.network.extras import needs

with needs("tui"):
    import textual  # noqa: F401 (reports a missing extra here)
