"""History of a reaction in a form that providers accept, and shorter versions of it.

Each call is paired with its result, ids are unique and arguments are valid JSON. `reaction` uses these functions before
every model call and at a handoff. Pure: each function returns a new list, except `append_user_text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from roundelay.network.text import cut

from .models.model import AssistantMessage, ChatMessage, SystemMessage, ToolCall, ToolMessage, UserMessage

HistoryFilter = Literal["texts", "all", "none"] | int | Callable[[Sequence[ChatMessage]], Sequence[ChatMessage]]
"""Selects the earlier turns that an agent sees after a handoff: texts without tool calls, all turns, no turns, the
last N messages, or the result of a callable.
"""

COMPACT_RESULT_CHARS = 400
"""Maximum characters of an earlier result in a shortened history."""


def append_user_text(messages: list[ChatMessage], text: str) -> None:
    """Append a text to the last message if it is a user message, else append a new user message. Many chat templates
    refuse two user messages in a row.
    """
    last = messages[-1] if messages else None
    if isinstance(last, UserMessage):
        messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
    else:
        messages.append(UserMessage(text))


def find_prompt(messages: Sequence[ChatMessage], history: Sequence[ChatMessage]) -> int | None:
    """Return the index of the run's prompt in a request. Examples may precede the prompt, and more text may follow
    it.
    """
    prompt = history[1] if len(history) > 1 else None
    users = [place for place, it in enumerate(messages) if isinstance(it, UserMessage)]
    if isinstance(prompt, UserMessage):
        for place in users:
            if str(messages[place].content).startswith(prompt.content):
                return place
    return users[0] if users else None


def add_to_prompt(
    messages: Sequence[ChatMessage], history: Sequence[ChatMessage], text: str
) -> tuple[ChatMessage, ...]:
    """Return a request with a text directly after its prompt, and before the text that follows the prompt in the
    first turn. The position is the same in every turn.
    """
    place = find_prompt(messages, history)
    if place is None:
        return tuple(messages)
    prompt, original = messages[place], history[1].content if len(history) > 1 else None
    assert isinstance(prompt, UserMessage)
    if original is None or not prompt.content.startswith(original):  # other middleware has rewritten the prompt
        original = prompt.content
    extended = replace(prompt, content=f"{original}\n\n{text}{prompt.content[len(original) :]}")
    return (*messages[:place], extended, *messages[place + 1 :])


def repair(messages: Sequence[ChatMessage], trailing: str | None = None) -> list[ChatMessage]:
    """Pair calls and results: the results follow directly after the message with the calls, in order. Drop results
    without a call. ``trailing`` is added at the end.
    """
    # Hooks may drop or move messages. Providers refuse a call without a result, and a result without its call.
    results = {it.tool_call_id: it for it in messages if isinstance(it, ToolMessage)}
    repaired: list[ChatMessage] = []
    for message in messages:
        match message:
            case ToolMessage():
                continue
            case AssistantMessage(tool_calls=calls) if calls:
                repaired.append(message)
                repaired += [results.get(call.id) or ToolMessage(call.id, "No result is known.") for call in calls]
            # Skip an empty assistant message. Several providers refuse it, and it adds no information.
            case AssistantMessage(content) if not content:
                continue
            case UserMessage(content, images, files):
                append_user_text(repaired, content)
                said = repaired[-1]
                if isinstance(said, UserMessage) and (images or files):
                    repaired[-1] = replace(said, images=(*said.images, *images), files=(*said.files, *files))
            case _:
                repaired.append(message)
    if trailing is not None:
        append_user_text(repaired, trailing)
    return repaired


def replace_trailing_text(messages: Sequence[ChatMessage], trailing: str, other: str) -> tuple[ChatMessage, ...]:
    """Return the request with ``other`` in place of ``trailing`` at its end, if it ends with ``trailing``."""
    if not trailing:
        extended = list(messages)
        if other:
            append_user_text(extended, other)
        return tuple(extended)
    *before, last = messages
    if not isinstance(last, UserMessage) or not last.content.endswith(trailing):
        return tuple(messages)
    return (*before, replace(last, content=last.content.removesuffix(trailing) + other))


def compact(messages: Sequence[ChatMessage], prompt: str | None = None) -> list[ChatMessage]:
    """Shorten long texts: every result before the last turn, and also the prompt if ``prompt`` is given."""
    turns = [place for place, message in enumerate(messages) if isinstance(message, AssistantMessage)]
    last = turns[-1] if turns else 0
    # Keep the results of the last turn complete, because the model has not read them yet.
    short: list[ChatMessage] = [
        replace(message, content=cut(message.content, COMPACT_RESULT_CHARS))
        if isinstance(message, ToolMessage) and place < last
        else message
        for place, message in enumerate(messages)
    ]
    if prompt is not None:
        has_prompt = len(short) > 1 and isinstance(short[1], UserMessage)  # a hook may have removed the prompt
        short[1 : 2 if has_prompt else 1] = [UserMessage(prompt)]
    return short


def filter_history(messages: Sequence[ChatMessage], chosen: HistoryFilter) -> list[ChatMessage]:
    """Return the messages after the prompt that a filter selects."""
    kept: Sequence[ChatMessage]
    match chosen:
        case "all":
            kept = messages
        case "none":
            kept = ()
        case "texts":
            kept = [
                AssistantMessage(message.content) if isinstance(message, AssistantMessage) else message
                for message in messages
                if not isinstance(message, ToolMessage)
            ]
        case int(count):
            # Handle 0 separately: ``messages[-0:]`` is the whole list.
            kept = messages[-count:] if count > 0 else ()
        case _:
            kept = [it for it in chosen(tuple(messages)) if not isinstance(it, SystemMessage)]
    return repair(kept)


def drop_turn(messages: Sequence[ChatMessage], calls: Sequence[ToolCall]) -> list[ChatMessage]:
    """Return the messages without system messages and without the turn that made these calls."""
    ids = {call.id for call in calls}
    return [
        message
        for message in messages
        if not isinstance(message, SystemMessage)
        and not (isinstance(message, AssistantMessage) and any(call.id in ids for call in message.tool_calls))
        and not (isinstance(message, ToolMessage) and message.tool_call_id in ids)
    ]


def sanitize_call(call: ToolCall) -> ToolCall:
    """Return the call as the history shows it: with a valid name and with a JSON object as arguments.

    Servers parse the arguments of earlier calls. One malformed call makes them refuse the whole conversation
    (https://github.com/vllm-project/vllm/issues/43995, https://github.com/OpenHands/software-agent-sdk/issues/2887).
    """
    # Providers refuse the whole history if a function name has other characters or is longer than 64.
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", call.name)[:64] or "unnamed"
    arguments = call.arguments if call.arguments.strip() else "{}"
    try:
        if not isinstance(json.loads(arguments, parse_constant=_refuse_constant), dict):
            arguments = json.dumps({"invalid": arguments})
    except (ValueError, RecursionError):
        arguments = json.dumps({"invalid": arguments})
    return ToolCall(call.id, name, arguments)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")  # Python accepts NaN and Infinity, but servers do not


def read_argument(call: ToolCall, name: str) -> str:
    """Return a text argument of a call. Return an empty string if it is missing or the arguments are malformed."""
    try:
        value = json.loads(call.arguments or "{}")[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = ""
    return value if isinstance(value, str) else ""
