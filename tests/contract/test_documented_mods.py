"""Test that docs/protocol/channels.md describes every operation of the included mods, with the arguments in `welcome`
and the fields of the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.node import Node

PAGE = (Path(__file__).parents[2] / "docs/protocol/channels.md").read_text(encoding="utf-8")

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("ann", "channels.create", {"name": "tea", "topic": "leaves"}),
    ("bob", "channels.join", {"name": "tea"}),
    ("ann", "channels.set_topic", {"name": "tea", "topic": "cups"}),
    ("ann", "channels.set_title", {"name": "tea", "title": "Tea Time"}),
    ("ann", "channels.set_history", {"name": "tea", "history": "members"}),
    ("ann", "channels.post", {"name": "tea", "text": "Who pours?"}),
    ("bob", "channels.reply", {"reply_to": 0, "text": "I do."}),
    ("bob", "channels.leave", {"name": "tea"}),
    ("ann", "channels.set_access", {"name": "tea", "access": "invite"}),
    ("ann", "channels.invite", {"name": "tea", "agent_id": "bob"}),
    ("bob", "channels.list", {}),
    ("bob", "channels.join", {"name": "tea"}),
    ("ann", "channels.members", {"name": "tea"}),
    ("ann", "channels.set_owner", {"name": "tea", "agent_id": "bob"}),
    ("bob", "channels.remove", {"name": "tea", "agent_id": "ann"}),
    ("ann", "discovery.find", {"query": "pours"}),
]


def read_rows() -> dict[str, tuple[str, str]]:
    """Return the arguments and the result of each operation in the tables."""
    rows = {}
    for ops, args, value in re.findall(r"^\| (`\w+\.\w+`(?:, `\w+\.\w+`)*) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`([\w.]+)`", ops), (args, value))
    return rows


def list_keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key != "card":  # the card is free-form
                yield from list_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from list_keys(inner)


async def test_the_page_has_each_operation_with_its_arguments_and_all_that_its_value_holds(node: Node) -> None:
    rows = read_rows()
    sessions = {"ann": await node.agent("ann"), "bob": await node.agent("bob", card={"description": "Pours"})}
    offered = {it["op"]: it["args_schema"] for mod in sessions["ann"].welcome["mods"] for it in mod["operations"]}
    assert rows.keys() == offered.keys() == {op for _, op, _ in CALLS}
    for op, schema in offered.items():
        for name in schema["properties"]:
            mark = "" if name in schema.get("required", ()) else r"\?"
            assert re.search(rf"`{name}`{mark}(?!\?)", rows[op][0]), (
                f"{op} takes {name}, and the page has {rows[op][0]}"
            )
    posted = 0
    for who, op, args in CALLS:
        value = await sessions[who].call(op, {**args, "reply_to": posted} if "reply_to" in args else args)
        posted = value.get("seq", posted)
        shape = rows[op][1].partition("}:")[0]
        told, optional = set(re.findall(r"`(\w+)`", shape)), set(re.findall(r"`(\w+)`\?", shape))
        given = set(list_keys(value))
        assert told - optional <= given <= told, f"{op} gives {sorted(given)}, and the page has {rows[op][1]}"
