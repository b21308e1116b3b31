"""Writes a conversation for an OpenAI-compatible server.

`write_messages` turns a request's messages into those of the API. No known server refuses the order:

- one system message, and it stands first;
- then a user's message; users and the model alternate;
- behind tool results a user's message, or nothing but the model's next turn, by the server's rules;
- the last message is a user's or a tool's.

Call ids and what a server wants back with a reply follow the rules of the endpoint (`endpoint_rules`). Pure: the same
request and rules give the same messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, assert_never

from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
)

from .endpoint_rules import EndpointRules, is_sealed
from .model import (
    AssistantMessage,
    ChatMessage,
    File,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    derive_nine,
)

NOTE_OPEN, NOTE_CLOSE = "<system_note>", "</system_note>"
NOTE_HEAD = "This note is not part of the result."
"""Behind the last result: what the reaction tells the model before its next turn."""

_NOTE_TAG = re.compile(r"<(?=\s*/?\s*system_note)", re.IGNORECASE)
GO_ON = "Go on."
NO_TEXT = "(no reply)"
NO_OUTPUT = "(no output)"
NO_PROMPT = "(no text)"
"""In place of blank texts, which some servers refuse (https://github.com/OpenHands/OpenHands/issues/5339)."""

SEEN = "I have read the results."
"""Said in the model's name between results and a message with images: a result holds text only."""

_ID_FORMS = {"own": re.compile(r".*", re.DOTALL), "safe": re.compile(r"[a-zA-Z0-9_-]{1,40}")}
_ID_FORMS |= {"nine": re.compile(r"[a-zA-Z0-9]{9}")}
_SUBSTITUTE = "skip_thought_signature_validator"


@dataclass(slots=True)
class _Result:
    """A tool's result, with the notes that follow it."""

    message: ToolMessage
    notes: list[str] = field(default_factory=list)


_Arranged = UserMessage | AssistantMessage | _Result


def write_messages(
    messages: Sequence[ChatMessage], rules: EndpointRules | None = None, endpoint: str = ""
) -> list[ChatCompletionMessageParam]:
    """Return the messages of the API for a conversation. ``endpoint``: who is asked, as `ReplyOrigin` names it."""
    rules = rules or EndpointRules()
    heads = [message.content for message in messages if isinstance(message, SystemMessage)][: _count_heads(messages)]
    head = "\n\n".join(text for text in heads if text.strip())
    ids = _choose_ids(messages, rules)
    written: list[ChatCompletionMessageParam] = [{"role": "system", "content": head}] if heads else []
    written += [_write(message, rules, endpoint, ids) for message in _arrange(messages[len(heads) :], rules)]
    return written


def find_note(content: str) -> int:
    """Return where a result ends and its notes begin; the whole length if there are none."""
    place = content.find(f"\n\n{NOTE_OPEN}\n")
    return len(content) if place < 0 else place


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
    """Return the id under which each call is sent."""
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
            while not is_sent or sent in used:
                sent, salt, is_sent = derive_nine(call.id, salt), salt + 1, True
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
            result = _NOTE_TAG.sub("&lt;", content) if content.strip() else NO_OUTPUT
            if notes:
                told = "\n\n".join(notes)
                result = f"{result}\n\n{NOTE_OPEN}\n{NOTE_HEAD}\n{told}\n{NOTE_CLOSE}"
            return {"role": "tool", "tool_call_id": ids.get(call_id, call_id), "content": result}
        case _:
            assert_never(message)


def _write_assistant(
    message: AssistantMessage, rules: EndpointRules, endpoint: str, ids: dict[str, str]
) -> ChatCompletionMessageParam:
    made: dict[str, Any] = {"role": "assistant", "content": _leave_blank_out(message.content)}
    origin = message.origin
    is_own = origin is not None and origin.endpoint == endpoint and rules.reasoning != "dropped"
    if not message.tool_calls:
        made["content"] = made["content"] or NO_TEXT  # neither null nor an empty text is taken everywhere
    else:  # an empty list is refused
        made["tool_calls"] = [_write_call(call, ids) for call in message.tool_calls]
        if origin is not None and is_own:
            is_all = rules.reasoning in ("returned", "required")
            made |= {name: value for name, value in origin.message.items() if is_all or is_sealed(name, value)}
            if len(origin.calls) == len(message.tool_calls):
                made["tool_calls"] = [
                    _add_fields(call, of) for call, of in zip(made["tool_calls"], origin.calls, strict=True)
                ]
        is_signed = any("extra_content" in call for call in made["tool_calls"])
        if rules.signs_calls and not is_signed:
            made["tool_calls"][0]["extra_content"] = {"google": {"thought_signature": _SUBSTITUTE}}
    if rules.reasoning == "required":
        # An empty text counts as missing, a space does not: https://github.com/NousResearch/hermes-agent/pull/17341
        made["reasoning_content"] = made.get("reasoning_content") or " "
    turn: ChatCompletionAssistantMessageParam = made  # type: ignore[assignment]
    return turn


def _leave_blank_out(content: str | None) -> str | None:
    return content if content and content.strip() else None


def _write_call(call: ToolCall, ids: dict[str, str]) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": ids.get(call.id, call.id), "type": "function", "function": function}


def _add_fields(call: dict[str, Any], fields: Any) -> dict[str, Any]:
    """Put what the server wants back to a call; ``function`` holds fields of that part."""
    inner = {name: value for name, value in fields.items() if name != "function"}
    return {**call, **inner, "function": {**fields.get("function", {}), **call["function"]}}


_AUDIO: dict[str, Literal["wav", "mp3"]] = {"audio/wav": "wav", "audio/mpeg": "mp3"}
"""Audio types that the API has a part for. Other files go as a file part."""


def _write_file(file: File) -> ChatCompletionContentPartParam:
    form = _AUDIO.get(file.media_type)
    if form is not None:
        return {"type": "input_audio", "input_audio": {"data": file.data, "format": form}}
    # The API's reference says base64; what it takes is that as a `data:` address, with the type.
    data = f"data:{file.media_type};base64,{file.data}"
    return {"type": "file", "file": {"filename": file.name, "file_data": data}}
