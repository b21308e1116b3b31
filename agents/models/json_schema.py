"""Tool calls for servers that have none: each step is one JSON object, its shape fixed by ``response_format``.

`encode_steps` turns a request into plain system, user and assistant texts and the schema that the reply must follow
(one of the tools' shapes); `decode_step` turns the reply's text into a `ToolCall`. `openai_model` sends and receives.
Pure; a model that ignores the schema is read as far as it can be, and what remains is left to the reaction loop, which
answers wrong calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import assert_never

from roundelay.agents.text import strip_code_fence

from .model import (
    AssistantMessage,
    ChatMessage,
    JsonSchema,
    ModelRequest,
    NamedTool,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
    derive_call_id,
)

PlainMessage = SystemMessage | UserMessage | AssistantMessage


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A request in plain texts, its images and files beside them. ``schema`` is the reply's (None: free text);
    ``is_strict`` that a strict server accepts that schema."""

    messages: tuple[PlainMessage, ...]
    schema: JsonSchema | None
    is_strict: bool


def encode_steps(request: ModelRequest) -> StepRequest:
    """Render tools, past calls and results as text and choose the reply's schema."""
    choice = request.tool_choice
    tools = request.tools if choice != "none" else ()
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    messages = list(_merge(_render(request.messages)))
    if tools:
        guide = _describe_tools(tools)
        if messages and isinstance(messages[0], SystemMessage):
            messages[0] = SystemMessage(f"{messages[0].content}\n\n{guide}")
        else:
            messages.insert(0, SystemMessage(guide))
    schema: JsonSchema | None = None
    if tools:
        schema = _build_step_schema(tools)
    elif any(isinstance(message, AssistantMessage) and message.tool_calls for message in request.messages):
        # The history shows steps as JSON, and a model goes on as it sees: its closing answer gets a shape too.
        schema = _build_object({"answer": {"type": "string"}})
    return StepRequest(tuple(messages), schema, schema is not None and _fits_strict_mode(schema))


def decode_step(request: ModelRequest, text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """Read a reply as (text, calls). What is no step is text; a step with broken arguments is a call with these, for
    the loop to answer."""
    written = strip_code_fence(text)
    try:
        return _decode_step(request, text, json.loads(written))
    except (ValueError, RecursionError):  # no JSON, or nested deeper than anything that is meant
        return _decode_broken_step(request, text, written)


def _decode_step(request: ModelRequest, text: str, value: object) -> tuple[str | None, tuple[ToolCall, ...]]:
    match value:
        case {"call": {"tool": str(name), **rest}} | {"tool": str(name), **rest}:
            arguments = rest.get("arguments", {})
            # Some models write the arguments as a string of JSON, as the native wire format has them.
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return None, (ToolCall(derive_call_id(request, 0), name, written),)
        case {"answer": str(answer)}:
            return answer or None, ()
        case _:
            return text or None, ()


def describe_type(schema: object) -> str:
    """Give a schema's type in few words, for people and models: ``string``, ``"a" or "b"``, ``array of integer``."""
    match schema:
        case {"enum": list(values)}:
            return " or ".join(json.dumps(value, ensure_ascii=False) for value in values)
        case {"const": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"anyOf": list(options)}:
            return " or ".join(describe_type(option) for option in options)
        case {"type": "array", "items": dict(items)} if items:
            return f"array of {describe_type(items)}"
        case {"type": "object", "properties": dict(properties)}:
            return "{" + ", ".join(f"{name}: {describe_type(inner)}" for name, inner in properties.items()) + "}"
        case {"type": str(kind)}:
            return kind
        case {"$ref": str(ref)}:
            return ref.rpartition("/")[2]
        case _:
            return "any"


def read_properties(schema: JsonSchema) -> Mapping[str, object]:
    """Give the properties of an object schema, none if it has none."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


_STEP_HEAD = re.compile(
    r'\{\s*(?:"call"\s*:\s*\{\s*)?"tool"\s*:\s*(?P<name>"(?:[^"\\\n]|\\["\\/])*")\s*,\s*"arguments"\s*:\s*'
)
_ANSWER_HEAD = re.compile(r'\{\s*"answer"\s*:\s*"')


def _decode_broken_step(request: ModelRequest, text: str, written: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """Read what a limit cut off, or a model without the schema garbled. ``written`` is the text without a fence."""
    if step := _STEP_HEAD.match(written):
        return None, (ToolCall(derive_call_id(request, 0), json.loads(step["name"]), written[step.end() :]),)
    if answer := _ANSWER_HEAD.match(written):
        rest = written[answer.end() :]
        try:
            return json.loads(f'"{rest}"') or None, ()
        except ValueError:  # cut inside an escape, say
            return rest or None, ()
    return text.strip() or None, ()


def _render(messages: Iterable[ChatMessage]) -> Iterable[PlainMessage]:
    names: dict[str, str] = {}
    for position, message in enumerate(messages):
        match message:
            case SystemMessage(content):
                # Chat templates of local models know one system text, at the start; a later one is said by the user.
                yield message if position == 0 else UserMessage(content)
            case UserMessage():
                yield message
            case AssistantMessage(content, calls):
                names.update((call.id, call.name) for call in calls)
                texts = [*([content] if content else []), *(_render_call(call) for call in calls)]
                yield AssistantMessage("\n".join(texts))
            case ToolMessage(call_id, content):
                yield UserMessage(f"Result of {names.get(call_id, 'a tool')}: {_write_result(content)}")
            case _:
                assert_never(message)


def _merge(messages: Iterable[PlainMessage]) -> Iterable[PlainMessage]:
    """Join neighbours of one role: many chat templates refuse a conversation that does not alternate."""
    for _, group in groupby(messages, key=type):
        neighbours = list(group)
        joined = replace(neighbours[0], content="\n\n".join(neighbour.content or "" for neighbour in neighbours))
        if isinstance(joined, UserMessage):
            said = [neighbour for neighbour in neighbours if isinstance(neighbour, UserMessage)]
            images, files = (
                [image for one in said for image in one.images],
                [file for one in said for file in one.files],
            )
            joined = replace(joined, images=tuple(images), files=tuple(files))
        yield joined


def _write_result(content: str) -> str:
    """Give a result as JSON, as it is if it is that: in a message of the user's, no text of a tool's passes for what
    stands behind it."""
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return json.dumps(content, ensure_ascii=False)
    return content


def _render_call(call: ToolCall) -> str:
    try:
        return _write_step(call.name, json.loads(call.arguments or "{}"))
    except (ValueError, RecursionError):
        # It was answered with an error; shown as the text it is, so that this stays JSON.
        return _write_step(call.name, call.arguments)


def _write_step(tool: str, arguments: object) -> str:
    return json.dumps({"call": {"tool": tool, "arguments": arguments}}, ensure_ascii=False)


def _describe_tools(tools: Sequence[ToolSpec]) -> str:
    lines = [
        "Each step is one tool call, written as one JSON object of the form "
        '{"call": {"tool": NAME, "arguments": {...}}} and nothing else.',
        "Tools:",
    ]
    for tool in tools:
        properties = read_properties(tool.parameters)
        required = tool.parameters.get("required")
        optional = properties.keys() - set(required if isinstance(required, list) else ())
        taken = ", ".join(
            f"{name}{'?' if name in optional else ''}: {describe_type(schema)}" for name, schema in properties.items()
        )
        lines.append(f"- {tool.name}({taken}): {tool.description}")
        for name, schema in properties.items():
            if isinstance(schema, dict) and isinstance(schema.get("description"), str):
                lines.append(f"  {name}: {schema['description']}")
    return "\n".join(lines)


def _build_step_schema(tools: Sequence[ToolSpec]) -> JsonSchema:
    definitions: dict[str, object] = {}
    shapes = []
    for tool in tools:
        arguments = {key: value for key, value in tool.parameters.items() if key != "$defs"}
        own = tool.parameters.get("$defs")
        # `#/$defs/X` counts from the root, which is another one here: each tool's definitions move up under its name.
        if isinstance(own, dict):
            definitions.update((f"{tool.name}.{name}", _rename_refs(shape, tool.name)) for name, shape in own.items())
        shapes.append(
            _build_object(
                {"tool": {"type": "string", "enum": [tool.name]}, "arguments": _rename_refs(arguments, tool.name)}
            )
        )
    step = _build_object({"call": {"anyOf": shapes}})
    return {**step, "$defs": definitions} if definitions else step


def _build_object(properties: dict[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _rename_refs(value: object, prefix: str) -> object:
    match value:
        case {"$ref": str(ref), **rest} if ref.startswith("#/$defs/"):
            return {"$ref": f"#/$defs/{prefix}.{ref.removeprefix('#/$defs/')}", **rest}
        case dict():
            return {key: _rename_refs(item, prefix) for key, item in value.items()}
        case list():
            return [_rename_refs(item, prefix) for item in value]
        case _:
            return value


# https://platform.openai.com/docs/guides/structured-outputs#supported-schemas
_STRICT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const", "description", "$ref"}
    | {"$defs", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    | {"minItems", "maxItems"}
)


def _fits_strict_mode(schema: object) -> bool:
    """Tell whether OpenAI's strict mode takes the schema; with ``strict`` on an unfit one the call would be refused."""
    if not isinstance(schema, dict) or not schema.keys() <= _STRICT_KEYWORDS:
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" and (
        schema.get("additionalProperties") is not False or list(schema.get("required", ())) != list(properties)
    ):
        return False
    inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
    return all(_fits_strict_mode(item) for item in [*inner, *([schema["items"]] if "items" in schema else [])])
