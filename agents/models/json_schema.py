"""Tool calls for servers that do not support them. The model writes each call as a step, which is one JSON object, and
``response_format`` enforces the form of this object.

`encode_steps` converts a request to plain system, user and assistant texts, and to the schema that the reply must
follow. `decode_step` converts the reply's text to a `ToolCall`. `openai_model` sends the request. This module does no
IO. If a model ignores the schema, as much as possible of its reply is parsed. The reaction loop answers each call that
is still invalid with an error.
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
    """A request as plain texts with their images and files, without tools and tool calls.

    ``schema`` is the schema of the reply, or None for free text. ``is_strict``: whether the strict mode of servers
    accepts the schema.
    """

    messages: tuple[PlainMessage, ...]
    schema: JsonSchema | None
    is_strict: bool


def encode_steps(request: ModelRequest) -> StepRequest:
    """Render tools, past calls and results as text, and choose the reply's schema."""
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
        # Set a schema for the final answer too: the history contains steps as JSON, and the model would imitate them.
        schema = _build_object({"answer": {"type": "string"}})
    return StepRequest(tuple(messages), schema, schema is not None and _fits_strict_mode(schema))


def decode_step(request: ModelRequest, text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """Parse a reply into its text and its calls. A reply without a step is text. A step with broken arguments becomes a
    call with these arguments, and the loop answers this call with an error.
    """
    unfenced = strip_code_fence(text)
    try:
        return _decode_step(request, text, json.loads(unfenced))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return _decode_broken_step(request, text, unfenced)


def _decode_step(request: ModelRequest, text: str, value: object) -> tuple[str | None, tuple[ToolCall, ...]]:
    match value:
        case {"call": {"tool": str(name), **rest}} | {"tool": str(name), **rest}:
            arguments = rest.get("arguments", {})
            # Some models write the arguments as a string of JSON, like the native API.
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            return None, (ToolCall(derive_call_id(request, 0), name, written),)
        case {"answer": str(answer)}:
            return answer or None, ()
        case _:
            return text or None, ()


def describe_type(schema: object) -> str:
    """Return a short description of a schema's type for people and models: ``string``, ``"a" or "b"``, ``array of
    integer``."""
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
    """Return the properties of an object schema, or an empty mapping if the schema defines none."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


_STEP_HEAD = re.compile(
    r'\{\s*(?:"call"\s*:\s*\{\s*)?"tool"\s*:\s*(?P<name>"(?:[^"\\\n]|\\["\\/])*")\s*,\s*"arguments"\s*:\s*'
)
_ANSWER_HEAD = re.compile(r'\{\s*"answer"\s*:\s*"')


def _decode_broken_step(request: ModelRequest, text: str, written: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """Parse a step that is not valid JSON, because a length limit cut it off or because the model made a mistake.
    ``written`` is the text without a code fence.
    """
    if step := _STEP_HEAD.match(written):
        return None, (ToolCall(derive_call_id(request, 0), json.loads(step["name"]), written[step.end() :]),)
    if answer := _ANSWER_HEAD.match(written):
        rest = written[answer.end() :]
        try:
            return json.loads(f'"{rest}"') or None, ()
        except ValueError:  # for example, the text was cut off inside an escape sequence
            return rest or None, ()
    return text.strip() or None, ()


def _render(messages: Iterable[ChatMessage]) -> Iterable[PlainMessage]:
    names: dict[str, str] = {}
    for position, message in enumerate(messages):
        match message:
            case SystemMessage(content):
                # Chat templates of local models accept one system text at the start. Send later system texts as user
                # texts.
                yield message if position == 0 else UserMessage(content)
            case UserMessage():
                yield message
            case AssistantMessage(content, calls):
                # Plain text has no call ids, so remember the tool of each call. The text of a result names its tool.
                names.update((call.id, call.name) for call in calls)
                texts = [*([content] if content else []), *(_render_call(call) for call in calls)]
                yield AssistantMessage("\n".join(texts))
            case ToolMessage(call_id, content):
                yield UserMessage(f"Result of {names.get(call_id, 'a tool')}: {_write_result(content)}")
            case _:
                assert_never(message)


def _merge(messages: Iterable[PlainMessage]) -> Iterable[PlainMessage]:
    """Join consecutive messages of the same role, because many chat templates refuse roles that do not alternate."""
    for _, group in groupby(messages, key=type):
        neighbours = list(group)
        joined = replace(neighbours[0], content="\n\n".join(neighbour.content or "" for neighbour in neighbours))
        if isinstance(joined, UserMessage):
            users = [neighbour for neighbour in neighbours if isinstance(neighbour, UserMessage)]
            images, files = (
                [image for one in users for image in one.images],
                [file for one in users for file in one.files],
            )
            joined = replace(joined, images=tuple(images), files=tuple(files))
        yield joined


def _write_result(content: str) -> str:
    """Return a tool's result as JSON. A result that already is JSON stays unchanged. JSON separates the result from the
    text that follows it in the user message.
    """
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return json.dumps(content, ensure_ascii=False)
    return content


def _render_call(call: ToolCall) -> str:
    try:
        return _write_step(call.name, json.loads(call.arguments or "{}"))
    except (ValueError, RecursionError):
        # The loop answered this call with an error. Write the invalid arguments of the call as a string, so that the
        # step stays JSON.
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
        # A reference `#/$defs/X` is relative to the root of the schema, and here all tools share one root. Move each
        # tool's definitions to this root, with the tool's name as a prefix.
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
    """Return whether OpenAI's strict mode accepts the schema. The server refuses a request with ``strict`` and any
    other schema.
    """
    if not isinstance(schema, dict) or not schema.keys() <= _STRICT_KEYWORDS:
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" and (
        schema.get("additionalProperties") is not False or list(schema.get("required", ())) != list(properties)
    ):
        return False
    inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
    return all(_fits_strict_mode(item) for item in [*inner, *([schema["items"]] if "items" in schema else [])])
