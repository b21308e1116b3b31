"""Ways into a network for programs that do not speak its protocol, in one process beside the node.

`callers` keeps a session for each token that calls, `http_api` is the network over HTTP, `a2a_server` agents for those
of other makers, `mcp_server` for hosts of MCP, `gateway` puts them together; `hosts`, `installing`, `participants` and
`delivering` bring coding agents in by their own hooks. Identity is always a Roundelay token, and what is promised is
what the ledger does: of its own a gateway keeps in `kept_files` whom to call, and nothing of what is said.
"""

from __future__ import annotations

if __name__ == "interop":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.interop (from roundelay.interop import ...). Under the name interop it "
        "would be a second copy with classes of its own."
    )
