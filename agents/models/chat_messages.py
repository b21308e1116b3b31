"""Converts a conversation into the messages of an OpenAI-compatible API.

`write_messages` produces an order that no known server refuses:

- The first message is the only system message.
- A user message follows, and then user and assistant messages alternate.
- After tool results comes a user message or the model's next turn, depending on the server's rules.
- The last message is a user or tool message.

Call ids, and the fields that a server requires with its earlier replies, follow the rules of the endpoint
(`endpoint_rules`). This module is pure: the same request and rules lead to the same messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, assert_never

from .endpoint_rules import EndpointRules, is_sealed
from .model import (
    AssistantMessage,
    ChatMessage,
    File,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    derive_short_id,
)

if TYPE_CHECKING:  # the SDK's types check what is written here, and the SDK itself is not needed
    from openai.types.chat import (
        ChatCompletionAssistantMessageParam,
        ChatCompletionContentPartParam,
        ChatCompletionMessageParam,
    )

NOTE_OPEN, NOTE_CLOSE = "<system_note>", "</system_note>"
NOTE_HEAD = "This note is not part of the result."
"""First line of a note after the last tool result. A note is text from the reaction for the model's next turn."""

_NOTE_TAG = re.compile(r"<(?=\s*/?\s*system_note)", re.IGNORECASE)
GO_ON = "Go on."
NO_TEXT = "(no reply)"
NO_OUTPUT = "(no output)"
NO_PROMPT = "(no text)"
"""Replacements of blank texts, which some servers refuse (https://github.com/OpenHands/OpenHands/issues/5339)."""

SEEN = "I have read the results."
"""Assistant message between tool results and a message with images, because a result can contain only text."""

_ID_FORMS = {"own": re.compile(r".*", re.DOTALL), "safe": re.compile(r"[a-zA-Z0-9_-]{1,40}")}
_ID_FORMS |= {"nine": re.compile(r"[a-zA-Z0-9]{9}")}
_SUBSTITUTE = "skip_thought_signature_validator"


@dataclass(slots=True)
class _Result:
    """Result of a tool call, with the notes that follow the result."""

    message: ToolMessage
    notes: list[str] = field(default_factory=list)


_Arranged = UserMessage | AssistantMessage | _Result


def write_messages(
    messages: Sequence[ChatMessage], rules: EndpointRules | None = None, endpoint: str = ""
) -> list[ChatCompletionMessageParam]:
    """Return the API's messages for a conversation. ``endpoint`` is the name of the receiving endpoint, as in
    `ReplyOrigin`.
    """
    rules = rules or EndpointRules()
    heads = [message.content for message in messages if isinstance(message, SystemMessage)][: _count_heads(messages)]
    head = "\n\n".join(text for text in heads if text.strip())
    ids = _choose_ids(messages, rules)
    api_messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": head}] if heads else []
    api_messages += [_write(message, rules, endpoint, ids) for message in _arrange(messages[len(heads) :], rules)]
    return api_messages


def find_note(content: str) -> int:
    """Return the index in the content of a tool message at which the result ends and its notes begin. Without notes,
    return the length of the content.
    """
    index = content.find(f"\n\n{NOTE_OPEN}\n")
    return len(content) if index < 0 else index


def _count_heads(messages: Sequence[ChatMessage]) -> int:
    return next((at for at, message in enumerate(messages) if not isinstance(message, SystemMessage)), len(messages))


# --- order


def _arrange(messages: Iterable[ChatMessage], rules: EndpointRules) -> list[_Arranged]:
    arranged: list[_Arranged] = []
    for message in messages:
        match message:
            case SystemMessage(content):
                _add_user(arranged, UserMessage(content), rules)
            case UserMessage():
                _add_user(arranged, message, rules)
            case AssistantMessage():
                _add_assistant(arranged, message)
            case ToolMessage():
                arranged.append(_Result(message))
            case _:
                assert_never(message)
    # Servers require a user message after the system message, and a user or tool message at the end.
    if not arranged or isinstance(arranged[0], AssistantMessage):
        arranged.insert(0, UserMessage(GO_ON))
    if isinstance(arranged[-1], AssistantMessage) and not arranged[-1].tool_calls:
        arranged.append(UserMessage(GO_ON))
    return arranged


def _add_user(arranged: list[_Arranged], message: UserMessage, rules: EndpointRules) -> None:
    last = arranged[-1] if arranged else None
    has_files = bool(message.images or message.files)
    match last:
        case UserMessage(content, images, files):
            arranged[-1] = UserMessage(
                f"{content}\n\n{message.content}", (*images, *message.images), (*files, *message.files)
            )
        case _Result() if rules.notes == "in_results" and not has_files:
            last.notes.append(message.content)
        case _Result() if rules.notes == "in_results":
            # A result can contain only text, so send the images in a separate user message. An assistant message before
            # the user message keeps the order of roles valid.
            arranged += [AssistantMessage(SEEN), message]
        case _:
            arranged.append(message)


def _add_assistant(arranged: list[_Arranged], message: AssistantMessage) -> None:
    last = arranged[-1] if arranged else None
    if isinstance(last, AssistantMessage) and not last.tool_calls:
        texts = [text for text in (last.content, message.content) if text and text.strip()]
        arranged[-1] = replace(message, content="\n\n".join(texts) or None)
    else:
        arranged.append(message)


# --- ids


def _choose_ids(messages: Iterable[ChatMessage], rules: EndpointRules) -> dict[str, str]:
    """Return a mapping from the original id of each call to the id that the request sends."""
    chosen: dict[str, str] = {}
    used: set[str] = set()
    for message in messages:
        if not isinstance(message, AssistantMessage):
            continue
        for call in message.tool_calls:
            if call.id in chosen:
                continue
            is_sent = _ID_FORMS[rules.call_ids].fullmatch(call.id) is not None
            sent, salt = call.id, 0
            while not is_sent or sent in used:  # repeat, because two long ids may have the same short hash
                sent, salt, is_sent = derive_short_id(call.id, salt), salt + 1, True
            chosen[call.id] = sent
            used.add(sent)
    return chosen


# --- one message


def _write(message: _Arranged, rules: EndpointRules, endpoint: str, ids: dict[str, str]) -> ChatCompletionMessageParam:
    match message:
        case UserMessage(content, images, files) if images or files:
            parts: list[ChatCompletionContentPartParam] = []
            if content.strip():
                parts.append({"type": "text", "text": content})
            parts += [{"type": "image_url", "image_url": {"url": url}} for url in images]
            parts += [_write_file(file) for file in files]
            return {"role": "user", "content": parts}
        case UserMessage(content):
            return {"role": "user", "content": content if content.strip() else NO_PROMPT}
        case AssistantMessage():
            return _write_assistant(message, rules, endpoint, ids)
        case _Result(ToolMessage(call_id, content), notes):
            # Escape the tag of notes in a result: the model trusts notes, so a result must not imitate one.
            result = _NOTE_TAG.sub("&lt;", content) if content.strip() else NO_OUTPUT
            if notes:
                note_text = "\n\n".join(notes)
                result = f"{result}\n\n{NOTE_OPEN}\n{NOTE_HEAD}\n{note_text}\n{NOTE_CLOSE}"
            return {"role": "tool", "tool_call_id": ids.get(call_id, call_id), "content": result}
        case _:
            assert_never(message)


def _write_assistant(
    message: AssistantMessage, rules: EndpointRules, endpoint: str, ids: dict[str, str]
) -> ChatCompletionMessageParam:
    fields: dict[str, Any] = {"role": "assistant", "content": _drop_blank(message.content)}
    origin = message.origin
    is_own = origin is not None and origin.endpoint == endpoint and rules.reasoning != "dropped"
    if not message.tool_calls:
        fields["content"] = fields["content"] or NO_TEXT  # some servers refuse null, others an empty text
    else:  # servers refuse an empty list
        fields["tool_calls"] = [_write_call(call, ids) for call in message.tool_calls]
        if origin is not None and is_own:
            is_all = rules.reasoning in ("returned", "required")
            fields |= {name: value for name, value in origin.message.items() if is_all or is_sealed(name, value)}
            # Add signatures only if no hook has changed the number of calls: servers refuse signatures of other calls.
            if len(origin.calls) == len(message.tool_calls):
                fields["tool_calls"] = [
                    _add_fields(call, of) for call, of in zip(fields["tool_calls"], origin.calls, strict=True)
                ]
        is_signed = any("extra_content" in call for call in fields["tool_calls"])
        if rules.signs_calls and not is_signed:
            fields["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": _SUBSTITUTE}}
    if rules.reasoning == "required":
        # Send a space, because an empty string counts as missing:
        # https://github.com/NousResearch/hermes-agent/pull/17341
        fields["reasoning_content"] = fields.get("reasoning_content") or " "
    turn: ChatCompletionAssistantMessageParam = fields  # type: ignore[assignment]
    return turn


def _drop_blank(content: str | None) -> str | None:
    return content if content and content.strip() else None


def _write_call(call: ToolCall, ids: dict[str, str]) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": ids.get(call.id, call.id), "type": "function", "function": function}


def _add_fields(call: dict[str, Any], fields: Any) -> dict[str, Any]:
    """Add the fields to a call that the server requires in later requests. ``fields["function"]`` contains the fields
    for the call's ``function`` part.
    """
    inner = {name: value for name, value in fields.items() if name != "function"}
    return {**call, **inner, "function": {**fields.get("function", {}), **call["function"]}}


_AUDIO: dict[str, Literal["wav", "mp3"]] = {"audio/wav": "wav", "audio/mpeg": "mp3"}
"""Audio types that have a separate part type in the API. All other files are sent as parts of the type ``file``."""


def _write_file(file: File) -> ChatCompletionContentPartParam:
    form = _AUDIO.get(file.media_type)
    if form is not None:
        return {"type": "input_audio", "input_audio": {"data": file.data, "format": form}}
    # The API's reference documents plain base64, but the API expects a `data:` URL with the media type.
    data = f"data:{file.media_type};base64,{file.data}"
    return {"type": "file", "file": {"filename": file.name, "file_data": data}}
