"""Network tools of a lean prompt: the tools that the agent can use now, in short form, and `load_tools` for the others.

The network's tools can take ten times as many tokens as the conversation. A lean prompt offers only some of them at the
start of a reaction (`list_deferred`). The model loads other tools by name (`load_tools`). The result of that call names
the loaded tools, so a resumed or replayed reaction offers the same tools. A deferred tool runs even if the model calls
it without loading it. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from pydantic import JsonValue

from .lookback import read_history
from .models.json_schema import read_properties
from .models.model import JsonSchema, ToolSpec
from .network_tools import communication_tools, make_operation_tools
from .policy import AgentPolicy
from .tool_arguments import read_object
from .tools import FINISH, Output, Tool, ToolContext
from .values import ToolError

if TYPE_CHECKING:
    from roundelay.network.frames import ModInfo
    from roundelay.network.messages import BaseMessage

LOAD_TOOLS = "load_tools"
LOADED = "loaded_tools"
"""Key in a result's data for the names of the tools that the reaction offers from its next turn on."""

READ_HISTORY = read_history.name
_SEND, _ASK = "send_text_message", "ask"
USUAL_MODS = frozenset({"channels", "discovery"})
"""Mods that every network has. An operator added all other mods on purpose, so even an agent without any other
participants can load their tools.
"""

MAX_DESCRIPTION_CHARS = 100
"""Maximum characters of a network tool's description in a lean prompt. The description is the first sentence of the
original description, cut at this length.
"""

_SHORT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    _SEND: ("Send a private message.", ("target_agent_id", "text")),
    "broadcast_text_message": ("Send a message to everybody.", ("text",)),
    _ASK: ("Ask agents for answers.", ("agent_ids", "text")),
    FINISH: ("End without an answer.", ()),
    READ_HISTORY: ("Read a thread.", ("thread_id",)),
}
"""Description and parameters of the common tools in a lean prompt. Omitted parameters have defaults."""

_KEPT = frozenset({"type", "properties", "required", "items", "enum", "anyOf", "oneOf", "allOf", "$ref", "$defs"})
"""JSON schema keywords that the schemas of operations keep in a lean prompt. Keywords for limits are dropped, because
the hub checks the values and its refusals name the limits.
"""


def list_lean_tools(mods: Sequence[ModInfo], *, with_history: bool) -> tuple[list[Tool], list[Tool]]:
    """Return two lists of network tools for a lean prompt: the tools of every agent, beginning with `load_tools`, and
    the tools of the mods. With ``with_history``, the first list includes `read_history`.
    """
    common, offered = _make_lean_tools(msgspec.json.encode(mods), with_history)
    return list(common), list(offered)


@lru_cache(maxsize=16)
def _make_lean_tools(mods: bytes, with_history: bool) -> tuple[Sequence[Tool], Sequence[Tool]]:
    """Make the tools for the mods that ``mods`` describes as JSON. All agents of a process that use the same hub share
    the cached tools.
    """
    common = [*communication_tools(), *([read_history] if with_history else [])]
    common, offered = ([shorten_tool(tool) for tool in tools] for tools in (common, make_operation_tools(mods)))
    # Put `load_tools` first, because most requests contain it, and only some contain the other tools. If requests begin
    # alike, the provider's cache applies.
    return [make_load_tools([*common, *offered]), *common], offered


def shorten_tool(tool: Tool) -> Tool:
    """Return a network tool with a short description and a schema without limits. The tool still checks its arguments
    with the original schema.
    """
    if tool.name in _SHORT:
        description, names = _SHORT[tool.name]
        properties = read_properties(tool.parameters)
        shown = {name: _drop_limits(properties[name]) for name in names if name in properties}
        return replace(tool, description=description, parameters=_make_schema(shown, shown))
    first = tool.description.split(". ")[0].split("\n")[0].rstrip(".")[:MAX_DESCRIPTION_CHARS] + "."
    parameters = {**_as_schema(_drop_limits(tool.parameters)), "additionalProperties": False}
    return replace(tool, description=first, parameters=parameters)


def _make_schema(properties: Mapping[str, object], required: Iterable[str]) -> JsonSchema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _as_schema(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _drop_limits(schema: object) -> object:
    if isinstance(schema, list):
        return [_drop_limits(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, object] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, Mapping):
            kept[key] = {name: _drop_limits(inner) for name, inner in value.items()}
        elif key in ("required", "enum"):
            kept[key] = value
        elif key in _KEPT:
            kept[key] = _drop_limits(value)
    return kept


def make_load_tools(tools: Sequence[Tool]) -> Tool:
    """Return the tool `load_tools`, with which a model loads further tools of ``tools`` by name or by a word of the
    name.
    """
    names = tuple(tool.name for tool in tools if tool.name != FINISH)
    groups = dict.fromkeys(_GROUPS.get(name) or name.partition("_")[0] for name in names)
    parameters: JsonSchema = {"type": "object", "properties": {"names": {"type": "string"}}}

    def parse(arguments: str) -> dict[str, object]:
        return read_object(LOAD_TOOLS, parameters, arguments)

    async def run(context: ToolContext, kwargs: Mapping[str, object]) -> Output:
        given = kwargs.get("names", "")
        words = re.findall(r"[\w-]+", " ".join(map(str, given)) if isinstance(given, list) else str(given))
        found = [name for name in names if any(_matches(name, word) for word in words)]
        if not found:
            raise ToolError(f"No tool has this name. The tools are: {', '.join(names)}.")
        loaded: list[JsonValue] = [*found]
        return Output(f"You can call these tools now: {', '.join(found)}.", {LOADED: loaded})

    return Tool(LOAD_TOOLS, f"More tools: {', '.join(groups)}.", parameters, "idempotent", math.inf, parse, run)


_GROUPS: Mapping[str, str] = {READ_HISTORY: "history", "broadcast_text_message": "send"}
"""Words for tools in the description of `load_tools`. Tools without an entry are listed by the first word of their
name.
"""


def _matches(name: str, word: str) -> bool:
    word = word.removesuffix("_")  # `channels_` is the prefix of all operations of this mod
    return word in (name, _GROUPS.get(name), *name.split("_"))


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts that decide which network tools a lean prompt offers at the start of a reaction."""

    trigger: BaseMessage
    is_awaited: bool
    """Whether somebody waits for the agent's answer."""

    is_task: bool
    """Whether another program waits for the answer to a new task, in a direct thread."""

    is_alone: bool
    """Whether the network has no participants other than the agent and the trigger's sender."""

    is_addressed: bool
    """Whether the message is direct or names the agent."""

    lists_threads: bool
    """Whether the prompt lists threads that a tool can open."""

    is_explained: bool
    """Whether the author's template says how to answer. A template that says how to answer may demand `finish`."""


def list_deferred(tools: Collection[str], situation: Situation, policy: AgentPolicy, mods: Collection[str]) -> set[str]:
    """Return the network tools of an agent that a lean prompt does not offer at the start. ``mods`` are the ids of the
    hub's mods.
    """
    if policy.choose_tool is not None:  # the policy may name any tool
        return set()
    offered: set[str] = set()
    must_act = not situation.is_awaited or policy.on_text in ("nudge", "record")
    is_person = situation.is_awaited and not situation.is_task
    if not situation.is_alone or must_act or not USUAL_MODS.issuperset(mods) or situation.trigger.kind != "direct":
        offered.add(LOAD_TOOLS)
    if must_act or (is_person and not situation.is_alone):
        offered |= {_SEND, _ASK}
    if must_act and situation.trigger.kind == "channel":
        offered |= {"channels_reply", "channels_post"}
    if must_act or situation.is_explained or not situation.is_addressed:
        offered.add(FINISH)
    if situation.trigger.kind == "mod":
        # The message of a mod names the tools that answer it, such as `tasks_complete`.
        offered.update(re.findall(r"\w+", situation.trigger.text))
    if situation.lists_threads:
        offered.add(READ_HISTORY)
    return set(tools) - offered


def order_specs(specs: Sequence[ToolSpec], deferred: Collection[str], loaded: Iterable[str]) -> tuple[ToolSpec, ...]:
    """Return the tools that are not deferred, followed by the loaded tools in the order of loading. In this order a
    request begins like the previous one, and providers cache the common beginning.
    """
    if not deferred:
        return tuple(specs)
    known = {spec.name: spec for spec in specs}
    further = (known[name] for name in loaded if name in deferred and name in known)
    return (*(spec for spec in specs if spec.name not in deferred), *further)
