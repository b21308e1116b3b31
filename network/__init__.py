"""The network: messages, ledger, hub, transports and client. This package imports no other top-level folder."""

from __future__ import annotations

if __name__ == "network":  # imported from the current directory of a clone
    raise ImportError(
        "Import this package as roundelay.network (from roundelay.network import ...). Under the name network it "
        "would be a second copy with classes of its own."
    )
