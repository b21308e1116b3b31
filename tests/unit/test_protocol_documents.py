"""Tests that docs/protocol/*.md and docs/asyncapi.json match the frames in the code."""

import json
import re
from pathlib import Path

from msgspec import UNSET
from msgspec.json import schema as json_schema
from msgspec.structs import fields

from roundelay.network.asyncapi import asyncapi_document
from roundelay.network.frames import CLIENT_FRAMES, HUB_FRAMES
from roundelay.network.operations import network_operations

DOCS = Path(__file__).parents[2] / "docs"
FRAMES = (DOCS / "protocol/frames.md").read_text(encoding="utf-8")


def read_frames(heading: str) -> dict[str, str]:
    """Return the row of each frame below a heading, and the text of the section named like the frame."""
    section = FRAMES.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    frames = dict(re.findall(r"^\| `([a-z_]+)` \|(.*)$", section.partition("\n### ")[0], re.MULTILINE))
    for name in frames:
        frames[name] += section.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    return frames


def read_operations() -> dict[str, str]:
    """Return the arguments that the pages list for each operation."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("protocol/operations-*.md"))
    found = re.findall(r"^## (network\.\w+)\n- Arguments: (.*?)\n- Returns: ", pages, re.MULTILINE | re.DOTALL)
    assert len(found) == len(dict(found)), "an operation is described twice"
    return {op: " ".join(arguments.split()) for op, arguments in found}


def test_asyncapi_json_is_what_the_frames_generate() -> None:
    written = json.loads((DOCS / "asyncapi.json").read_text(encoding="utf-8"))
    assert written == asyncapi_document(), "run: python -m roundelay.network.asyncapi > docs/asyncapi.json"


def test_protocol_names_every_frame_and_field_of_the_code() -> None:
    for heading, frames in (("Client to hub", CLIENT_FRAMES), ("Hub to client", HUB_FRAMES)):
        rows = read_frames(heading)
        assert set(rows) == {str(cls.__struct_config__.tag) for cls in frames}
        for cls in frames:
            row = rows[str(cls.__struct_config__.tag)]
            for field in fields(cls):
                assert f"`{field.name}`" in row, f"{cls.__name__}.{field.name} is not in docs/protocol/frames.md"
                is_optional = field.default is UNSET
                if is_optional and cls in CLIENT_FRAMES and cls.__struct_config__.tag != "signal":
                    assert re.search(rf"`{field.name}`\s*(= \w+)?\?", row), (
                        f"{cls.__name__}.{field.name} is optional in the code"
                    )


def test_protocol_lists_every_network_operation_and_its_arguments() -> None:
    rows = read_operations()
    operations = {operation.op: operation for operation in network_operations()}
    assert set(rows) == set(operations)
    for op, operation in operations.items():
        for field in fields(operation.args_type):
            mark = "" if field.required else "?"
            if op != "network.cancel":
                assert f"`{field.name}`{mark}" in rows[op], f"{op} takes {field.name}{mark}"


def test_protocol_states_default_and_maximum_of_each_limit() -> None:
    rows = read_operations()
    stated = {op: found[1] for op, row in rows.items() if (found := re.search(r"`limit`\? \(([^)]*)\)", row))}
    expected = {}
    for operation in network_operations():
        schemas = json_schema(operation.args_type)["$defs"]
        if (limit := schemas[operation.args_type.__name__]["properties"].get("limit")) is not None:
            expected[operation.op] = f"{limit['default']}, at most {limit['maximum']}"
    assert stated == expected


def test_protocol_marks_the_operations_of_operators() -> None:
    rows = read_operations()
    marked = {op for op, row in rows.items() if row.endswith("Only for operators.")}
    assert marked == {operation.op for operation in network_operations() if operation.is_for_operators}
