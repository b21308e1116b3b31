"""Ways into a network for programs that do not speak its protocol, in one process beside the node.

`gateway` assembles and serves them. Each folder is one way in: `http`, `openai`, `a2a`, `mcp` and `webhooks` for other
programs, `bridge` for coding agents that have hooks.

Every caller identifies itself with a Roundelay token, and the hub alone checks it. Guarantees come from the ledger. The
gateway itself stores only webhook and push registrations (`json_store`), never a message.
"""

from __future__ import annotations

if __name__ == "interop":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.interop (from roundelay.interop import ...). Under the name interop it "
        "would be a second copy with classes of its own."
    )
