"""Generator of docs/asyncapi.json, which describes the frames. A test checks that the file is up to date.

To write the file, run ``python -m roundelay.network.asyncapi > docs/asyncapi.json``.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .frames import CLIENT_FRAMES, HUB_FRAMES, PROTOCOL_VERSION, SUBPROTOCOL

_REFERENCE = "#/components/schemas/{name}"


def asyncapi_document() -> dict[str, Any]:
    """Return an AsyncAPI 3.0 document that describes the frames of both directions over one WebSocket."""
    frames = (*CLIENT_FRAMES, *HUB_FRAMES)
    _, schemas = msgspec.json.schema_components(frames, ref_template=_REFERENCE)
    messages = {
        cls.__name__: {"name": cls.__struct_config__.tag, "payload": {"$ref": _reference(cls)}} for cls in frames
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Roundelay wire protocol",
            "version": str(PROTOCOL_VERSION),
            "description": f"WebSocket subprotocol {SUBPROTOCOL}, one JSON object per text frame. "
            "The rules are in docs/protocol/.",
        },
        "servers": {"local": {"host": "127.0.0.1:8700", "protocol": "ws"}},
        "channels": {
            "session": {
                "address": "/",
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
            }
        },
        "operations": {
            "receive": _operation("receive", "What a client sends to the hub.", CLIENT_FRAMES),
            "send": _operation("send", "What the hub sends to a client.", HUB_FRAMES),
        },
        "components": {"messages": messages, "schemas": schemas},
    }


def _reference(cls: type[msgspec.Struct]) -> str:
    return _REFERENCE.format(name=cls.__name__)


def _operation(action: str, summary: str, frames: tuple[type[msgspec.Struct], ...]) -> dict[str, Any]:
    return {
        "action": action,
        "summary": summary,
        "channel": {"$ref": "#/channels/session"},
        "messages": [{"$ref": f"#/channels/session/messages/{cls.__name__}"} for cls in frames],
    }


if __name__ == "__main__":
    print(json.dumps(asyncapi_document(), indent=2))  # noqa: T201 - this is the command's output
