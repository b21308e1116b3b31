"""Agents that other frameworks run, as participants of a network: one module for each framework, imported by name;
`a2a` for agents elsewhere.

Nothing here is imported by the rest of the package, and nothing here imports a framework but the module that is named
for it.
"""

from __future__ import annotations

if __name__ == "adapters":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.adapters (from roundelay.adapters import ...). Under the name adapters "
        "it would be a second copy with classes of its own."
    )
