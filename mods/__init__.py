"""The included mods, one module each. They import only `roundelay.network`."""

from __future__ import annotations

if __name__ == "mods":  # Python found the folder of a clone in the current directory
    raise ImportError(
        "Import this package as roundelay.mods (from roundelay.mods import ...). Under the name mods it would be "
        "a second copy with classes of its own."
    )
