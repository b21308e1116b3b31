"""The network: messages, ledger, hub, transports and client. Imports nothing from the other top-level folders."""

from __future__ import annotations

if __name__ == "network":  # imported from the current directory of a clone
    raise ImportError(
        "Import this package as roundelay.network (from roundelay.network import ...). Under the name network it "
        "would be a second copy with classes of its own."
    )
