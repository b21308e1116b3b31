"""An MCP server over stdio that lists one item per page: ``python mcp_shop.py``. The server's tools order, show
progress, fail, hang and crash.

``SHOP_ABOUT`` names a file with the server's instructions. ``SHOP_ORDERS`` names a file to which orders are appended.
The server does not use the SDK, whose imports take most of a second in each process. `mcp_sdk_shop.py` is a server
that uses the SDK.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ABOUT = os.environ.get("SHOP_ABOUT")
ARTICLE = {"type": "string"}
TOOLS = [
    {
        "name": "price", "description": "Give the price of an article.",
        "inputSchema": {"type": "object", "properties": {"article": ARTICLE, "count": {"type": "integer"}}, "required": ["article"]},
    },
    {"name": "order", "inputSchema": {"type": "object", "properties": {"article": ARTICLE}, "required": ["article"]}},
    *({"name": name, "inputSchema": {"type": "object"}} for name in ("fail", "hang", "die", "count")),
]  # fmt: skip
RESOURCES = [{"name": "opening", "uri": "shop://opening"}, {"name": "address", "uri": "shop://address"}]
PROMPTS = [
    {"name": "greeting", "description": "A greeting.", "arguments": [{"name": "name", "required": True}]},
    {"name": "farewell"},
]


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def list_page(kind: str, items: list[dict[str, Any]], params: dict[str, Any]) -> dict[str, Any]:
    at = int(params.get("cursor", 0))
    return {kind: [items[at]], **({"nextCursor": str(at + 1)} if at + 1 < len(items) else {})}


def call(name: str, arguments: dict[str, Any], params: dict[str, Any]) -> str:
    """Return the text of a tool's result. Raise `ValueError` if the tool fails."""
    if name == "price":
        count = arguments.get("count", 1)
        return f"{count} {arguments['article']}: {count * 3} EUR"
    if name == "order":
        with open(os.environ["SHOP_ORDERS"], "a", encoding="utf-8") as orders:
            print(arguments["article"], file=orders)
        return f"ordered {arguments['article']}"
    if name == "count":
        token = params["_meta"]["progressToken"]
        for number in (1, 2):
            progress = {"progressToken": token, "progress": number, "total": 2, "message": f"shelf {number}"}
            send(method="notifications/progress", params=progress)
        return "12 pears"
    if name == "die":
        os._exit(3)
    raise ValueError("out of stock")


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, or None for an unknown method."""
    match method:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}, "resources": {}, "prompts": {}},
                "serverInfo": {"name": "shop", "version": "1"},
                "instructions": Path(ABOUT).read_text("utf-8") if ABOUT else "Prices are in euros.",
            }
        case "tools/list":
            return list_page("tools", TOOLS, params)
        case "resources/list":
            return list_page("resources", RESOURCES, params)
        case "prompts/list":
            return list_page("prompts", PROMPTS, params)
        case "resources/read":
            return {"contents": [{"uri": params["uri"], "text": "always"}]}
        case "prompts/get":
            text = f"Greet {params['arguments']['name']} warmly."
            return {"messages": [{"role": "user", "content": {"type": "text", "text": text}}]}
        case "tools/call":
            try:
                result = call(params["name"], params.get("arguments", {}), params)
            except ValueError as error:
                return {"content": [{"type": "text", "text": str(error)}], "isError": True}
            return {"content": [{"type": "text", "text": result}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    parameters = request.get("params", {})
    if "id" not in request or parameters.get("name") == "hang":
        continue
    result = answer(request["method"], parameters)
    error = {"code": -32601, "message": "Method not found"}
    send(id=request["id"], **({"error": error} if result is None else {"result": result}))
