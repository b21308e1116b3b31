"""Access to a network for programs that do not speak its protocol. It runs in one process next to the node.

`gateway` assembles and serves the protocols. Each folder is one form of access: `http`, `openai`, `a2a`, `mcp` and
`webhooks` for other programs, and `bridge` for coding agents with hooks.

Every caller identifies itself with a Roundelay token, which only the hub checks. Guarantees come from the ledger. The
gateway itself stores only webhook and push registrations (`json_store`), never a message.
"""

from __future__ import annotations

if __name__ == "interop":  # the current directory is the clone's folder
    raise ImportError(
        "Import this package as roundelay.interop (from roundelay.interop import ...). Under the name interop it "
        "would be a second copy with classes of its own."
    )
