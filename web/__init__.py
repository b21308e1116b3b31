"""The page: what a browser gets from the node's port, under ``page/``, and how it is served. Imports `roundelay.network`
alone."""

from __future__ import annotations

if __name__ == "web":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.web (from roundelay.web import ...). Under the name web it would be a "
        "second copy with classes of its own."
    )
