"""The web page that a node serves on its port, with the page's files in ``page/``.

This package imports only `roundelay.network`.
"""

from __future__ import annotations

if __name__ == "web":  # the current directory is the clone's folder
    raise ImportError(
        "Import this package as roundelay.web (from roundelay.web import ...). Under the name web it would be a "
        "second copy with separate classes."
    )
