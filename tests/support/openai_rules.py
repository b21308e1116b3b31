"""The requests that OpenAI's chat completions API refuses, with the API's own error messages.

`find_refusal` checks the body of a request. The fake server (`fake_openai`) returns the result as its answer. Tests
may also call it directly.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

Body = dict[str, Any]


class Refusal(Exception):
    """Reason for a refused request, with the fields of the API's error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


def find_refusal(body: Body) -> Refusal | None:
    """Return the error that the real API would answer to this request, or None."""
    try:
        _check_parameters(body)
        _check_messages(body.get("messages"))
        _check_tools(body)
        _check_response_format(body.get("response_format"))
    except Refusal as refusal:
        return refusal
    return None


_PARAMETERS = frozenset(
    {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stream", "stream_options"}
    | {"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "user", "n", "reasoning_effort"}
    | {"metadata", "store", "logprobs", "top_logprobs", "frequency_penalty", "presence_penalty", "logit_bias"}
    | {"service_tier", "prompt_cache_key", "safety_identifier", "verbosity"}
)
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def _check_parameters(body: Body) -> None:
    unknown = next((name for name in body if name not in _PARAMETERS), None)
    if unknown is not None:
        raise Refusal(f"Unrecognized request argument supplied: {unknown}")
    if not isinstance(body.get("model"), str):
        raise Refusal("you must provide a model parameter")
    if body.get("stream_options") is not None and not body.get("stream"):
        sentence = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise Refusal(sentence, "stream_options")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise Refusal(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "messages",
            "empty_array",
        )
    open_calls: dict[str, None] = {}
    for index, message in enumerate(messages):
        place = f"messages.[{index}]"
        role = message.get("role")
        if role == "tool":
            call_id = message.get("tool_call_id")
            asked: Body = next((earlier for earlier in reversed(messages[:index]) if earlier.get("role") != "tool"), {})
            if not asked.get("tool_calls"):
                sentence = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
                raise Refusal(f"Invalid parameter: {sentence}", f"{place}.role")  # the API's own spelling
            if call_id not in open_calls:
                raise Refusal(
                    f"Invalid parameter: 'tool_call_id' of '{call_id}' not found in 'tool_calls' of previous message.",
                    f"{place}.tool_call_id",
                )
            del open_calls[call_id]
            _check_text(message, index)
            continue
        _refuse_open_calls(open_calls, place)
        if role not in ("system", "developer", "user", "assistant"):
            raise Refusal(
                f"Invalid value: '{role}'. Supported values are: 'system', 'assistant', 'user', 'tool'.",
                f"{place}.role",
            )
        made = message.get("tool_calls")
        if role != "assistant" or made is None:
            _check_text(message, index)
            continue
        if not made:
            sentence = f"Invalid '{place}.tool_calls': empty array. Expected an array with minimum length 1."
            raise Refusal(sentence, f"{place}.tool_calls", "empty_array")
        for position, item in enumerate(made):
            _check_call(item, f"{place}.tool_calls[{position}]")
            if item["id"] in open_calls:
                raise Refusal(
                    f"Duplicate value for 'tool_call_id' of '{item['id']}' in message.", f"{place}.tool_calls"
                )
            open_calls[item["id"]] = None
    _refuse_open_calls(open_calls, f"messages.[{len(messages)}]")


def _refuse_open_calls(open_calls: Mapping[str, None], place: str) -> None:
    if open_calls:
        raise Refusal(
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
            f"The following tool_call_ids did not have response messages: {', '.join(open_calls)}",
            f"{place}.role",
        )


def _check_text(message: Body, index: int) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        for position, part in enumerate(content):
            _check_part(message.get("role"), part, f"messages[{index}].content[{position}]")
        return
    if isinstance(content, str):
        return
    got = "null" if content is None else type(content).__name__
    raise Refusal(f"Invalid value for 'content': expected a string, got {got}.", f"messages.[{index}].content")


def _check_part(role: Any, part: Any, place: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    kinds = ("text", "image_url", "input_audio", "file") if role == "user" else ("text",)
    if kind not in kinds:
        listed = ", ".join(f"'{it}'" for it in kinds)
        raise Refusal(f"Invalid value: '{kind}'. Supported values are: {listed}.", f"{place}.type", "invalid_value")
    fields = {"text": (), "image_url": ("url",), "input_audio": ("data", "format"), "file": ("file_data", "filename")}[
        kind
    ]
    inner = part.get(kind)
    if not isinstance(inner, dict) if fields else not isinstance(inner, str):
        raise Refusal(f"Missing required parameter: '{place}.{kind}'.", f"{place}.{kind}", "missing_required_parameter")
    for name in fields:
        if not isinstance(inner.get(name), str) or not inner[name]:
            told = "file_id" if kind == "file" else name
            sentence = f"Missing required parameter: '{place}.{kind}.{told}'."
            raise Refusal(sentence, f"{place}.{kind}.{told}", "missing_required_parameter")
    if kind == "input_audio":
        if inner["format"] not in ("wav", "mp3"):
            sentence = f"Invalid value: '{inner['format']}'. Supported values are: 'wav' and 'mp3'."
            raise Refusal(sentence, f"{place}.input_audio.format", "invalid_value")
        _check_base64(
            inner["data"], f"Invalid value: '{place}.input_audio.data' is no base64.", f"{place}.input_audio.data"
        )
    if kind == "file":
        head, _, data = inner["file_data"].partition(",")
        sentence = (
            f"Invalid file data: '{place}.file.file_data'. Expected a base64-encoded data URL with an application/pdf MIME type "
            "(e.g. 'data:application/pdf;base64,SGVsbG8sIFdvcmxkIQ=='), but got "
        )
        if head.startswith("data:") and head != "data:application/pdf;base64":
            kind = head.removeprefix("data:").partition(";")[0]
            raise Refusal(f"{sentence}unsupported MIME type '{kind}'.", f"{place}.file.file_data", "invalid_value")
        _check_base64(data, f"{sentence}an invalid base64-encoded value.", f"{place}.file.file_data")


def _check_base64(data: str, sentence: str, place: str) -> None:
    try:
        good = bool(data) and bool(base64.b64decode(data, validate=True))
    except ValueError:
        good = False
    if not good:
        raise Refusal(sentence, place, "invalid_value")


def _check_call(item: Any, place: str) -> None:
    function = item.get("function") or {}
    if not isinstance(item.get("id"), str) or not item["id"]:
        raise Refusal(f"Missing required parameter: '{place}.id'.", f"{place}.id", "missing_required_parameter")
    if item.get("type") != "function":
        raise Refusal(f"Missing required parameter: '{place}.type'.", f"{place}.type", "missing_required_parameter")
    if not isinstance(function.get("arguments"), str):
        sentence = f"Invalid type for '{place}.function.arguments': expected a string, but got an object instead."
        raise Refusal(sentence, f"{place}.function.arguments", "invalid_type")
    _check_name(function.get("name"), f"{place}.function.name")


def _check_name(name: Any, place: str) -> None:
    if not isinstance(name, str) or not name:
        raise Refusal(f"Missing required parameter: '{place}'.", place, "missing_required_parameter")
    if not _NAME.fullmatch(name):
        raise Refusal(
            f"Invalid '{place}': string does not match pattern. Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'.",
            place,
            "invalid_value",
        )
    if len(name) > 64:
        raise Refusal(
            f"Invalid '{place}': string too long. Expected a string with maximum length 64, "
            f"but got a string with length {len(name)} instead.",
            place,
            "string_above_max_length",
        )


def _check_tools(body: Body) -> None:
    if "tools" not in body:
        for name in ("tool_choice", "parallel_tool_calls"):
            if body.get(name) is not None:
                raise Refusal(f"Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified.", name)
        return
    if not isinstance(body["tools"], list) or not body["tools"]:
        raise Refusal(
            "Invalid 'tools': empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "tools",
            "empty_array",
        )
    names: set[str] = set()
    for index, item in enumerate(body["tools"]):
        place = f"tools[{index}].function"
        function = item.get("function") if item.get("type") == "function" else None
        if not isinstance(function, dict):
            raise Refusal(f"Missing required parameter: '{place}'.", place, "missing_required_parameter")
        _check_name(function.get("name"), f"{place}.name")
        name: str = function["name"]
        if name in names:
            raise Refusal(
                f"Invalid 'tools': the function name '{name}' is used more than once; names must be unique.", "tools"
            )
        names.add(name)
        schema = function.get("parameters")
        if schema is not None:
            _check_object(schema, f"function '{name}'", f"{place}.parameters", "invalid_function_parameters")
            _check_schema(schema, (), f"function '{name}'", f"{place}.parameters", strict=bool(function.get("strict")))


def _check_response_format(shape: Any) -> None:
    if shape is None or shape.get("type") in ("text", "json_object"):
        return
    described = shape.get("json_schema") or {}
    place = "response_format.json_schema"
    _check_name(described.get("name"), f"{place}.name")
    subject = f"response_format '{described['name']}'"
    if described.get("strict"):
        _check_object(described.get("schema"), subject, "response_format", None)
    _check_schema(described.get("schema"), (), subject, "response_format", strict=bool(described.get("strict")))


def _check_object(schema: Any, subject: str, param: str, code: str | None) -> None:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "object":
        got = json.dumps(kind) if kind else '"None"'
        raise Refusal(
            f"""Invalid schema for {subject}: schema must be a JSON Schema of 'type: "object"', got 'type: {got}'.""",
            param,
            code,
        )


def _check_schema(schema: Any, context: tuple[str, ...], subject: str, param: str, *, strict: bool) -> None:
    def refuse(what: str) -> None:
        raise Refusal(
            f"Invalid schema for {subject}: In context={context!r}, {what}", param, "invalid_function_parameters"
        )

    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        refuse(f"{json.dumps(schema)} is not of type 'object', 'boolean'.")
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _TYPES:
            refuse(f"'{kind}' is not valid under any of the given schemas.")
    if schema.get("type") == "array" and "items" not in schema:
        refuse("array schema missing items.")
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        refuse("properties must be an object.")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(f"{json.dumps(required)} is not of type 'array'.")
    if strict:
        if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
            refuse("'additionalProperties' is required to be supplied and to be false.")
        missing = next((name for name in properties if name not in required), None)
        if missing is not None:
            refuse(
                "'required' is required to be supplied and to be an array including every key in properties. "
                f"Missing '{missing}'."
            )
        for keyword in (
            "oneOf",
            "allOf",
            "not",
            "default",
            "patternProperties",
            "prefixItems",
            "minLength",
            "maxLength",
        ):
            if keyword in schema:
                refuse(f"'{keyword}' is not permitted.")
    for keyword in ("properties", "$defs"):
        for name, inner in (schema.get(keyword) or {}).items():
            _check_schema(inner, (*context, keyword, name), subject, param, strict=strict)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for index, inner in enumerate(schema.get(keyword) or ()):
            _check_schema(inner, (*context, keyword, str(index)), subject, param, strict=strict)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            _check_schema(schema[keyword], (*context, keyword), subject, param, strict=strict)
