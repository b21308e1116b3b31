"""The TypeScript client's types of frames and operations, from what the hub itself is made of:
``python -m tests.support.typescript_types > clients/typescript/src/protocol.ts``. A test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from roundelay.mods.channels import Channels
from roundelay.mods.discovery import Discovery
from roundelay.network.asyncapi import asyncapi_document
from roundelay.network.core.mod import Operation
from roundelay.network.operations import network_operations

FRAMES = (
    "WireMessage", "WelcomeFrame", "NetworkInfo", "OpenReactionInfo", "ModInfo", "OperationInfo", "StoredFrame",
    "SignalOutFrame", "PresenceFrame", "NoticeFrame",
)  # fmt: skip
"""Of the schemas of asyncapi.json those whose values a program is given."""
HEAD = """\
/**
 * What the hub's frames and operations hold. Made by `python -m tests.support.typescript_types` of docs/asyncapi.json and
 * of the operations of a hub with its own mods; not to be changed by hand.
 */

/** Any JSON value. */
export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
"""


def list_operations() -> list[Operation]:
    """Those of every hub, and of the mods that come along."""
    mods = [*Channels().operations(), *Discovery().operations()]
    return sorted([*network_operations(), *mods], key=lambda it: it.op)


def write_types() -> str:
    """The whole file."""
    schemas = asyncapi_document()["components"]["schemas"]
    parts = [HEAD]
    for name in _with_inner(FRAMES, schemas):
        members = _members(schemas[name], "")
        if name == "NoticeFrame":  # protocol.md: there may be kinds that this page does not name
            members = members.replace("  kind: ", "  kind: (string & {}) | ")
        parts.append(f"export interface {name} {members}\n")
    rows, inner = [], {}
    for operation in list_operations():
        schema = operation.info().args_schema
        inner |= schema.get("$defs", {})
        rows.append(f"  /** {operation.description.replace('*/', '* /')} */")
        rows.append(f'  "{operation.op}": {_members(schema, "  ")};')
    parts += [f"export interface {name} {_members(inner[name], '')}\n" for name in sorted(inner)]
    parts.append(
        "/** The arguments of each operation. */\nexport interface OperationArgs {\n" + "\n".join(rows) + "\n}\n"
    )
    return "\n".join(parts)


def _with_inner(names: Iterable[str], schemas: Mapping[str, Any]) -> list[str]:
    """Give these schemas, each followed by those that it refers to and that are not listed yet."""
    listed = list(names)
    for name in listed:  # which grows meanwhile
        listed += [it for it in dict.fromkeys(_list_references(schemas[name])) if it not in listed]
    return listed


def _list_references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(name := schema.get("$ref"), str):
            yield name.rpartition("/")[2]
        schema = list(schema.values())
    if isinstance(schema, list):
        for inner in schema:
            yield from _list_references(inner)


def _members(schema: Mapping[str, Any], pad: str) -> str:
    members = list(_lines(schema, pad))
    return "{\n" + "\n".join(members) + f"\n{pad}}}" if members else "{}"


def _lines(schema: Mapping[str, Any], pad: str) -> Iterator[str]:
    required = schema.get("required", [])
    for name, inner in schema.get("properties", {}).items():
        if name != "type":  # of a frame: the client has looked at it
            yield f"{pad}  {name}{'' if name in required else '?'}: {_type_of(inner)};"


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(json.dumps(it) for it in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type_of(it) for it in schema["anyOf"]))
    match schema.get("type"):
        case "integer" | "number":
            return "number"
        case "string":
            return "string"
        case "boolean":
            return "boolean"
        case "null":
            return "null"
        case "array":
            inner = _type_of(schema.get("items", {}))
            return f"({inner})[]" if " | " in inner else f"{inner}[]"
        case "object":
            inner = schema.get("additionalProperties")
            return f"Record<string, {_type_of(inner) if isinstance(inner, Mapping) else 'Json'}>"
        case _:
            return "Json"


if __name__ == "__main__":
    print(write_types(), end="")
