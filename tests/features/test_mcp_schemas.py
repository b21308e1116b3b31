"""Tests of schemas, names and structured results of MCP servers, as a strict provider receives them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.features.mcp_schemas import name_offered, tidy_parameters
from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.app import Network
from tests.features.test_mcp_strangers import STRANGER, ask, offered, results, say
from tests.support.fake_openai import calls

X = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
Y = {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}

ODD: dict[str, dict[str, Any]] = {
    "no properties": {"type": "object"},
    "nothing": {},
    "null for all": {"type": "object", "properties": None, "required": None, "description": None},
    "an array without items": {"type": "object", "properties": {"a": {"type": "array"}}},
    "an array or null without items": {"type": "object", "properties": {"a": {"type": ["array", "null"]}}},
    "a nested array without items": {
        "type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"anyOf": [{"type": "array"}]}}}},
    },
    "an array in definitions": {
        "type": "object", "properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"type": "array"}},
    },
    "items for each place": {
        "type": "object", "properties": {"a": {"type": "array", "items": [{"type": "string"}, {"type": "array"}]}},
    },
    "required names what is not there": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    "required as in draft 3": {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    "anyOf at the top": {"anyOf": [X, Y]},
    "oneOf at the top": {"type": "object", "oneOf": [X, {**X, "properties": {**X["properties"], **Y["properties"]}}]},
    "allOf at the top": {"allOf": [X, {"$ref": "#/$defs/Y"}], "$defs": {"Y": Y}},
    "a reference at the top": {"$ref": "#/$defs/Y", "$defs": {"Y": Y}},
    "a reference to itself": {"$ref": "#"},
    "a reference to nothing": {"type": "object", "properties": {"a": {"$ref": "#/$defs/None"}}},
    "its dialect": {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "x", **X},
    "true for a schema": {"type": "object", "properties": {"a": True}},
    "no enum": {"type": "object", "properties": {"a": {"type": "string", "enum": []}}},
    "a parameter called title": {"type": "object", "properties": {"title": {"type": "string", "title": "Title"}}},
}  # fmt: skip


def walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    if isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            for it in value.values() if key in ("properties", "$defs", "definitions") else [value]:
                for one in it if isinstance(it, list) else [it]:
                    yield from walk(one)


def check_strictly(parameters: dict[str, Any]) -> None:
    """Check that a schema contains nothing that any provider refuses (see `tidy_parameters`)."""
    assert parameters["type"] == "object"
    assert isinstance(parameters["properties"], dict)
    assert parameters.keys().isdisjoint({"anyOf", "oneOf", "allOf", "enum", "not", "$ref"})
    for schema in walk(parameters):
        assert schema.keys().isdisjoint({"$schema", "$id"})
        assert None not in [value for key, value in schema.items() if key != "default"]
        kinds = schema.get("type", [])
        if "array" in (kinds if isinstance(kinds, list) else [kinds]):
            assert isinstance(schema["items"], dict)
        if "required" in schema:
            assert set(schema["required"]) <= set(schema.get("properties", {}))
        assert schema.get("enum", True)


async def test_a_strict_provider_takes_the_schemas_of_any_server(network: Network, tmp_path: Path) -> None:
    # One server has all the schemas, because a process for each would cost a second.
    tools = [
        {"name": f"t{number}", "inputSchema": {"type": "object", **schema}}
        for number, schema in enumerate(ODD.values())
    ]
    [first, *_] = await ask(network, say(tmp_path, *tools), calls([("odd_fine", {})]))
    shown = offered(first)
    assert len(shown) == len(ODD) + 1
    for number in range(len(ODD)):
        check_strictly(shown[f"odd_t{number}"]["parameters"])


@pytest.mark.parametrize("kind", ODD)
def test_a_tidied_schema_is_strict(kind: str) -> None:
    check_strictly(tidy_parameters(ODD[kind]))


def test_alternatives_at_the_top_become_one_object() -> None:
    assert tidy_parameters({"anyOf": [X, Y]})["properties"] == {**X["properties"], **Y["properties"]}
    assert tidy_parameters({"anyOf": [X, Y]})["required"] == []
    assert tidy_parameters(ODD["oneOf at the top"])["required"] == ["x"]
    assert tidy_parameters(ODD["allOf at the top"])["required"] == ["x", "y"]
    assert tidy_parameters(ODD["a reference at the top"])["properties"] == Y["properties"]


def test_references_that_name_each_other_many_times_are_merged_once() -> None:
    parts = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 40} for n in range(30)}
    made = tidy_parameters({"allOf": [{"$ref": "#/$defs/d0"}], "$defs": {**parts, "d30": X}})
    assert made["properties"] == X["properties"]


async def test_the_servers_own_schema_still_holds_for_arguments(network: Network, tmp_path: Path) -> None:
    tool = {"name": "odd", "inputSchema": {"type": "object", "anyOf": [X, Y]}}
    replies = calls([("odd_odd", {"z": 1})]), calls([("odd_odd", {"x": "a"})])
    [_, second, third] = await ask(network, say(tmp_path, tool), *replies)
    assert "Wrong arguments for odd_odd" in second["messages"][3]["content"]
    assert third["messages"][5]["content"] == "called"
    assert (tmp_path / "says.calls").read_text().split() == ["odd"]


NAMES = ["get.price", "get/price", "get_price", "get price"]


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids=["as listed", "reversed"])
async def test_tools_whose_names_become_equal_are_all_reached(
    network: Network, tmp_path: Path, order: list[str]
) -> None:
    long = ["x" * 80 + "1", "x" * 80 + "2"]
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in (*order, *long)]
    names = dict(zip((*order, *long), name_offered([("odd", it) for it in (*order, *long)]), strict=True))
    answers = {name: {"content": [{"type": "text", "text": f"I am {name}"}]} for name in names}
    wanted = [(names[name], {}) for name in (*NAMES, *long)]
    [first, second] = await ask(network, say(tmp_path, *tools, results=answers), calls(wanted))
    assert len(set(names.values())) == 6
    assert names["get_price"] == "odd_get_price"
    assert set(offered(first)) == {*names.values(), "odd_fine"}
    assert all(len(it) <= 64 for it in names.values())
    said = [it["content"] for it in second["messages"] if it["role"] == "tool"]
    assert said == [f"I am {name}" for name in (*NAMES, *long)]


async def test_tools_of_two_servers_whose_names_become_equal_are_both_reached(network: Network, tmp_path: Path) -> None:
    servers = {}
    for server, own in (("a_b", "c"), ("a", "b_c")):
        file = tmp_path / f"{server}.json"
        answer = {own: {"content": [{"type": "text", "text": f"{own} of {server}"}]}}
        file.write_text(json.dumps({"tools": [{"name": own, "inputSchema": {"type": "object"}}], "results": answer}))
        servers[server] = ServerOptions(command=sys.executable, args=(str(STRANGER), str(file)))
    names = name_offered([("a_b", "c"), ("a", "b_c")])
    assert len(set(names)) == 2
    requests = await ask(network, McpServers(servers), calls([(name, {}) for name in names]))
    said = [it["content"] for it in requests[1]["messages"] if it["role"] == "tool"]
    assert said == ["c of a_b", "b_c of a"]


STRUCTURED = {"price": 3, "currency": "EUR"}


async def test_structured_content_beside_text_is_kept_once(network: Network, tmp_path: Path) -> None:
    cases: list[tuple[list[str], Any, str]] = [
        (["It costs 3 EUR."], STRUCTURED, 'It costs 3 EUR.\n{"price": 3, "currency": "EUR"}'),
        ([json.dumps(STRUCTURED, indent=2)], STRUCTURED, json.dumps(STRUCTURED, indent=2)),
        ([], STRUCTURED, json.dumps(STRUCTURED)),
        (["3"], {"result": 3}, "3"),
        (["three"], {"result": "three"}, "three"),
        (["1", "2"], {"result": [1, 2]}, "1\n2"),
        (["a", "b"], {"result": ["a", "b"]}, "a\nb"),
        (["ok"], {}, "ok"),
        (["ok"], None, "ok"),
    ]
    answers: dict[str, dict[str, Any]] = {}
    for number, (texts, structured, _) in enumerate(cases):
        result: dict[str, Any] = {"content": [{"type": "text", "text": it} for it in texts]}
        if structured is not None:
            result["structuredContent"] = structured
        answers[f"t{number}"] = result
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in answers]
    wanted = [(f"odd_{name}", {}) for name in answers]
    [_, second] = await ask(network, say(tmp_path, *tools, results=answers), calls(wanted))
    assert results(second) == [read for *_, read in cases]
