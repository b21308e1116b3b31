"""An MCP server over stdio whose content is defined by a JSON file: ``python mcp_stranger.py FILE``.

The file has ``instructions``, ``tools`` in the protocol's format, and ``results`` of calls by tool name. Each call is
appended to ``FILE.calls``. The server does not use the SDK, whose imports take most of a second in each process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FILE = Path(sys.argv[1])
SAYS: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
CALLED = {"content": [{"type": "text", "text": "called"}]}
UNKNOWN_METHOD = -32601


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, or None for an unknown method."""
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "stranger", "version": "1"},
            "instructions": SAYS.get("instructions", ""),
        }
    if method == "tools/list":
        return {"tools": SAYS["tools"]}
    if method == "tools/call":
        with FILE.with_suffix(".calls").open("a") as calls:
            print(params["name"], file=calls)
        result: dict[str, Any] = SAYS.get("results", {}).get(params["name"], CALLED)
        return result
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        error = {"code": UNKNOWN_METHOD, "message": "Method not found"}
        reply = {"error": error} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **reply}), flush=True)
