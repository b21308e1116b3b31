"""Gives programs that do not speak the network's protocol access to a network. The gateway is one process next to the
node.

`gateway` assembles and serves the protocols. Each folder contains one form of access. `http`, `openai`, `a2a`, `mcp`
and `webhooks` serve other programs, and `bridge` connects coding agents through hooks.

Every caller authenticates with a Roundelay token, which only the hub checks. The ledger provides all guarantees. The
gateway itself stores only registrations of webhooks and push notifications (`json_store`), never a message.
"""

from __future__ import annotations

if __name__ == "interop":  # the current directory is the clone's folder
    raise ImportError(
        "Import this package as roundelay.interop (from roundelay.interop import ...). Under the name interop it "
        "would be a second copy with separate classes."
    )
