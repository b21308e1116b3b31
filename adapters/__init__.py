"""Adapters that let agents of other frameworks take part in a network. Each framework has its own module, and `a2a`
connects remote agents.

No other part of Roundelay imports this package. Each framework is imported only by the module with its name.
"""

from __future__ import annotations

if __name__ == "adapters":  # the current directory is the clone's folder
    raise ImportError(
        "Import this package as roundelay.adapters (from roundelay.adapters import ...). Under the name adapters "
        "it would be a second copy with separate classes."
    )
