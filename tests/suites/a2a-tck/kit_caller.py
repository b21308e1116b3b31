"""A pytest plugin for the A2A compatibility kit. The kit has no tokens, so the plugin adds one to each request of its
client.

With ``KIT_UNIQUE``, each message gets its own ID, as the specification requires (4.1.4). The kit itself uses one ID
for many messages.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import httpx

_send = httpx.Client.send
_numbers = itertools.count(1)


def _send_with_token(self: httpx.Client, request: httpx.Request, **options: Any) -> httpx.Response:
    request.headers.setdefault("Authorization", f"Bearer {os.environ['KIT_TOKEN']}")
    return _send(self, request, **options)


def _number(method: Any) -> Any:
    def send(self: Any, message: dict[str, Any], **options: Any) -> Any:
        numbered = {**message, "messageId": f"{message['messageId']}-{next(_numbers)}"}
        return method(self, message=numbered, **options)

    return send


httpx.Client.send = _send_with_token  # type: ignore[method-assign]  # every client of the kit is made of it

if os.environ.get("KIT_UNIQUE"):
    from tck.transport.http_json_client import HttpJsonClient
    from tck.transport.jsonrpc_client import JsonRpcClient

    for client in (HttpJsonClient, JsonRpcClient):
        for name in ("send_message", "send_streaming_message"):
            setattr(client, name, _number(getattr(client, name)))
