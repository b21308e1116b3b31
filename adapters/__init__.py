"""Adapters: agents of other frameworks as participants of a network, one module per framework; `a2a` for remote agents.

The rest of the package imports nothing from here. Each framework is imported only by the module with its name.
"""

from __future__ import annotations

if __name__ == "adapters":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.adapters (from roundelay.adapters import ...). Under the name adapters "
        "it would be a second copy with classes of its own."
    )
