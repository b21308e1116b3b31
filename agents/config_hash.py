"""One hash of everything that determines an agent's behavior. A reaction that resumes with a different hash reports the
change.

`simple` calls `hash_config`. The hash covers the values of the instruction, model settings, limits, tools, handoffs and
middleware options, but only the names of functions. It is the same in every process. Options may contain secrets,
because only the hash is stored. This module is pure.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from re import Pattern

from pydantic import BaseModel

from .agent import Agent
from .approval_rule import DEFAULT_RULE
from .middleware import Middleware
from .patterns import BoundedPattern
from .tools import Tool, index_tools

MAX_DEPTH = 20
"""Maximum nesting of values in a configuration. Only the type of a more deeply nested value is hashed."""


MAX_OBJECTS = 2
"""Maximum nesting of objects with attributes, for example middleware that contains a check."""


_OPAQUE = sys.stdlib_module_names | {"pydantic", "jinja2"}
"""Packages whose objects are hashed by type only, because they contain runtime state or values that differ in each
process, such as locks or compiled templates.
"""


def hash_config(agent: Agent, described: Mapping[int, object], *beside: object) -> str:
    """Return the hash of an agent, of all agents that can take over from this agent, and of the values in ``beside``.
    ``described`` comes from `describe_middleware`.
    """
    return hash_text(json.dumps([_describe_agent(agent, described), describe_value(beside)], sort_keys=True))


def hash_text(text: str) -> str:
    """Return the hash of a text as 32 characters."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


def describe_middleware(agents: Iterable[Agent]) -> dict[int, object]:
    """Return the settings of these agents' middleware, keyed by ``id()``. Call this function once, before the
    middleware runs and stores runtime state in its attributes.
    """
    return {id(layer): _describe_layer(layer) for agent in agents for layer in agent.middleware}


def describe_value(value: object, depth: int = 0, objects: int = 0) -> object:
    """Return a value as JSON that is the same in every process. Data is represented by its value, functions by their
    names, and other objects by their types and attributes.
    """

    def inside(it: object) -> object:
        return describe_value(it, depth + 1, objects)

    if depth > MAX_DEPTH:
        return type(value).__qualname__
    match value:
        case Enum():
            return value.name
        case None | bool() | int() | float() | str():
            return value
        case Decimal() | PurePath() | date():
            return str(value)
        case Pattern():
            return [inside(value.pattern), value.flags]
        case BoundedPattern():
            return [value.source, value.flags]
        case Tool():
            return _describe_tool(_Same(value), depth, objects)
        case Agent():
            return value.id
        case BaseModel():
            return {name: inside(getattr(value, name)) for name in type(value).model_fields}
        case Mapping():
            return {str(name): inside(it) for name, it in value.items()}
        case set() | frozenset():
            return sorted((inside(it) for it in value), key=partial(json.dumps, sort_keys=True))
        case list() | tuple():
            return [inside(it) for it in value]
        case partial():
            return [inside(value.func), inside(value.args), inside(value.keywords)]
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    name = type(value).__qualname__
    if is_dataclass(value):
        return [name, {field.name: inside(getattr(value, field.name)) for field in fields(value)}]
    if callable(getattr(value, "complete", None)):  # a model, whose attributes may include an API key
        return [name, str(getattr(value, "name", "")), inside(getattr(value, "settings", None))]
    if objects >= MAX_OBJECTS or type(value).__module__.partition(".")[0] in _OPAQUE:
        return name
    held = {key: describe_value(it, depth + 1, objects + 1) for key, it in getattr(value, "__dict__", {}).items()}
    return [name, held]


class _Same:
    """Key of a cache that compares tools by identity, because their parameters have no hash."""

    __slots__ = ("tool",)

    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    def __hash__(self) -> int:
        return id(self.tool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.tool is self.tool


@lru_cache(maxsize=512)
def _describe_tool(same: _Same, depth: int, objects: int) -> list[object]:
    """Describe a tool once for all agents of the process that share it, as they share the network's tools."""
    tool = same.tool
    described = [tool.name, tool.description, describe_value(tool.parameters, depth + 1, objects), tool.effect]
    return (
        described if tool.approval == DEFAULT_RULE else [*described, describe_value(tool.approval, depth + 1, objects)]
    )


def _describe_layer(layer: Middleware) -> object:
    return [type(layer).__qualname__, describe_value(layer.describe(), objects=1)]


def _describe_agent(agent: Agent, described: Mapping[int, object]) -> list[object]:
    policy = {field.name: describe_value(getattr(agent.policy, field.name)) for field in fields(agent.policy)}
    # omit the default, because agents of older releases did not have this field and must keep their hash
    if policy["shows_standing"]:
        del policy["shows_standing"]
    tools = [describe_value(tool) for tool in index_tools(agent.tools).values()]
    handoffs = [
        [_describe_agent(handoff.agent, described), handoff.returns, describe_value(handoff.history)]
        for handoff in agent.all_handoffs
    ]
    layers = [described.get(id(layer)) or _describe_layer(layer) for layer in agent.middleware]
    instruction, model = describe_value(agent.instruction), describe_value(agent.model)
    return [instruction, agent.description, model, policy, tools, handoffs, layers]
