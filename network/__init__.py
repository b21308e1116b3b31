"""The network: messages, ledger, hub, transports and client. Imports nothing of the other folders."""

from __future__ import annotations

if __name__ == "network":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.network (from roundelay.network import ...). Under the name network it "
        "would be a second copy with classes of its own."
    )
