"""A request as OpenAI's chat completions take it: messages with their images and files, tools, choice, and the schema of
a step.

Used by `openai_model`, which adds the model's settings and sends it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, assert_never

from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionToolChoiceOptionParam,
)
from openai.types.shared_params import ResponseFormatJSONSchema

from .json_schema import StepRequest
from .model import (
    AssistantMessage,
    ChatMessage,
    File,
    ModelRequest,
    NamedTool,
    SystemMessage,
    ToolChoice,
    ToolMessage,
    ToolSpec,
    UserMessage,
)

_AUDIO: Mapping[str, Literal["wav", "mp3"]] = {"audio/wav": "wav", "audio/mpeg": "mp3"}
"""What the API has a part for; anything else goes as a file."""


def encode_request(request: ModelRequest, step: StepRequest | None) -> dict[str, object]:
    """Give the fields of the body that say what is asked. ``step``: the request in plain texts, in place of tools."""
    messages = request.messages if step is None else step.messages
    body: dict[str, object] = {"messages": [_encode_message(message) for message in messages]}
    if step is None and request.tools:
        body["tools"] = [_encode_tool(tool) for tool in request.tools]
        if request.tool_choice != "auto":  # the API's default, and refused without tools
            body["tool_choice"] = _encode_choice(request.tool_choice)
    if step is not None and step.schema is not None:
        body["response_format"] = _encode_schema(step)
    return body


def _encode_message(message: ChatMessage) -> ChatCompletionMessageParam:
    match message:
        case SystemMessage(content):
            return {"role": "system", "content": content}
        case UserMessage(content, images, files) if images or files:
            parts: list[ChatCompletionContentPartParam] = [{"type": "text", "text": content}]
            parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
            parts += [_encode_file(file) for file in files]
            return {"role": "user", "content": parts}
        case UserMessage(content):
            return {"role": "user", "content": content}
        case AssistantMessage(content, calls):
            turn: ChatCompletionAssistantMessageParam = {"role": "assistant", "content": content}
            if calls:  # an empty list is refused
                turn["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ]
            elif content is None:
                turn["content"] = ""  # null is refused beside no calls
            return turn
        case ToolMessage(call_id, content):
            return {"role": "tool", "tool_call_id": call_id, "content": content}
        case _:
            assert_never(message)


def _encode_file(file: File) -> ChatCompletionContentPartParam:
    form = _AUDIO.get(file.media_type)
    if form is not None:
        return {"type": "input_audio", "input_audio": {"data": file.data, "format": form}}
    # The API's reference says base64; what it takes is that as a `data:` address, with the type.
    data = f"data:{file.media_type};base64,{file.data}"
    return {"type": "file", "file": {"filename": file.name, "file_data": data}}


def _encode_tool(tool: ToolSpec) -> ChatCompletionFunctionToolParam:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
    }


def _encode_choice(choice: ToolChoice | NamedTool) -> ChatCompletionToolChoiceOptionParam:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _encode_schema(step: StepRequest) -> ResponseFormatJSONSchema:
    schema = dict(step.schema or {})
    return {"type": "json_schema", "json_schema": {"name": "step", "schema": schema, "strict": step.is_strict}}
