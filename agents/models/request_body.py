"""Builds the body of a request to an OpenAI-compatible server: messages, tools and cache markers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .chat_messages import find_note, write_messages
from .endpoint_rules import EndpointRules
from .json_schema import StepRequest
from .model import ModelRequest, NamedTool, ToolChoice, ToolSpec

if TYPE_CHECKING:  # the SDK's types check what is written here, and the SDK itself is not needed
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionToolChoiceOptionParam
    from openai.types.shared_params import ResponseFormatJSONSchema


def encode_request(
    request: ModelRequest,
    step: StepRequest | None,
    *,
    cache_control: bool = False,
    rules: EndpointRules | None = None,
    endpoint: str = "",
) -> dict[str, object]:
    """Return the fields of the body for a request. If ``step`` is set, send this plain-text form of the request,
    without tools.
    """
    rules = rules or EndpointRules()
    messages = write_messages(request.messages if step is None else step.messages, rules, endpoint)
    if cache_control:
        _mark_caches(messages, request.prompt)
    body: dict[str, object] = {"messages": messages}
    if step is None and request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.tool_choice != "auto":  # "auto" is the default
            body["tool_choice"] = _encode_choice(request.tool_choice)
    elif step is None and rules.declares_used_tools:
        used_tools = dict.fromkeys(
            call.name for message in request.messages for call in getattr(message, "tool_calls", ())
        )
        if used_tools:
            body["tools"] = [
                _encode_tool(ToolSpec(name, "Not available any more.", _NO_PARAMETERS)) for name in used_tools
            ]
    if step is not None and step.schema is not None:
        body["response_format"] = _encode_schema(step)
    return body


_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}


def _mark_caches(messages: Sequence[Any], prompt: str) -> None:
    """Add cache markers at the ends of the parts that the next turn repeats. Anthropic's models cache a request only up
    to a cache marker.

    A request may contain four markers, and this function uses three
    (https://platform.claude.com/docs/en/build-with-claude/prompt-caching).
    """
    system = (message for message in messages if message["role"] == "system")
    conversation = (
        message for message in messages if message["role"] == "user" and _read_first_text(message).startswith(prompt)
    )
    results = (message for message in reversed(messages) if message["role"] == "tool")
    for candidates, end in ((system, None), (conversation, len(prompt)), (results, None)):
        message = next(candidates, None)
        if message is not None:
            # Place the marker between a result and its notes, because notes are specific to this turn.
            _mark(message, find_note(message["content"]) if message["role"] == "tool" else end)


def _mark(message: Any, end: int | None) -> None:
    """Add a cache marker to a message after the first ``end`` characters of its text, or after the whole text."""
    text, content = _read_first_text(message), message["content"]
    stable = text[:end]
    if not stable:  # servers refuse a marker on an empty text
        return
    parts: list[dict[str, object]] = [{"type": "text", "text": stable, "cache_control": {"type": "ephemeral"}}]
    if len(text) > len(stable):
        parts.append({"type": "text", "text": text[len(stable) :]})
    message["content"] = [*parts, *(content[1:] if isinstance(content, list) else ())]


def _read_first_text(message: Any) -> str:
    content = message["content"]
    return str(content[0]["text"] if isinstance(content, list) else content or "")


def _encode_tool(tool: ToolSpec) -> ChatCompletionFunctionToolParam:
    parameters = dict(tool.parameters)
    # Omit this keyword: only strict tools need it, and the agent itself refuses unknown arguments.
    if parameters.get("additionalProperties") is False:
        del parameters["additionalProperties"]
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _encode_choice(choice: ToolChoice | NamedTool) -> ChatCompletionToolChoiceOptionParam:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _encode_schema(step: StepRequest) -> ResponseFormatJSONSchema:
    schema = dict(step.schema or {})
    return {"type": "json_schema", "json_schema": {"name": "step", "schema": schema, "strict": step.is_strict}}
