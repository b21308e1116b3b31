"""Converts the history of a reaction into a form that providers accept, and into shorter forms.

In the converted history, each call is paired with its result, ids are unique and arguments are valid JSON. `reaction`
uses these functions before every model call and at a handoff. The functions are pure and return new lists. Only
`append_user_text` changes its argument.
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
"""Selects the earlier turns that an agent sees after a handoff. "texts" selects the turns without tool calls. A number
N selects the last N messages. A callable returns the messages itself.
"""

COMPACT_RESULT_CHARS = 400
"""Maximum characters of each earlier result in a shortened history."""


def append_user_text(messages: list[ChatMessage], text: str) -> None:
    """Append a text to the last message if that is a user message, or else as a new user message. Many chat templates
    refuse two user messages in a row.
    """
    last = messages[-1] if messages else None
    if isinstance(last, UserMessage):
        messages[-1] = replace(last, content=f"{last.content}\n\n{text}")
    else:
        messages.append(UserMessage(text))


def find_prompt(messages: Sequence[ChatMessage], history: Sequence[ChatMessage]) -> int | None:
    """Return the index of the run's prompt in the messages of a request. Examples may precede the prompt, and more
    messages may follow.
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
    """Insert a text into a request directly after the prompt. In the first turn, other text may follow the prompt;
    insert before that text. The position is therefore the same in every turn.
    """
    place = find_prompt(messages, history)
    if place is None:
        return tuple(messages)
    prompt, original = messages[place], history[1].content if len(history) > 1 else None
    assert isinstance(prompt, UserMessage)
    if original is None or not prompt.content.startswith(original):  # true if other middleware has rewritten the prompt
        original = prompt.content
    extended = replace(prompt, content=f"{original}\n\n{text}{prompt.content[len(original) :]}")
    return (*messages[:place], extended, *messages[place + 1 :])


def repair(messages: Sequence[ChatMessage], trailing: str | None = None) -> list[ChatMessage]:
    """Pair calls and results: the results follow directly after the message with the calls, in order. Drop results
    without a call. Add ``trailing`` at the end.
    """
    # Pair calls and results again, because hooks may drop or move messages. Providers refuse a call without a result,
    # and a result without its call.
    results = {it.tool_call_id: it for it in messages if isinstance(it, ToolMessage)}
    repaired: list[ChatMessage] = []
    for message in messages:
        match message:
            case ToolMessage():
                continue
            case AssistantMessage(tool_calls=calls) if calls:
                repaired.append(message)
                repaired += [results.get(call.id) or ToolMessage(call.id, "No result is known.") for call in calls]
            # Skip an empty assistant message. Several providers refuse such a message, and it contains no information.
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
    """If the request ends with ``trailing``, return the request with ``other`` instead of ``trailing``."""
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
    """Shorten long texts: every result before the last turn, and also the prompt if the ``prompt`` to use instead is
    given.
    """
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
        has_prompt = len(short) > 1 and isinstance(short[1], UserMessage)  # false if a hook has removed the prompt
        short[1 : 2 if has_prompt else 1] = [UserMessage(prompt)]
    return short


def filter_history(messages: Sequence[ChatMessage], chosen: HistoryFilter) -> list[ChatMessage]:
    """Return those messages after the prompt that a filter selects."""
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
            # Handle 0 separately, because ``messages[-0:]`` is the whole list.
            kept = messages[-count:] if count > 0 else ()
        case _:
            kept = [it for it in chosen(tuple(messages)) if not isinstance(it, SystemMessage)]
    return repair(kept)


def drop_turn(messages: Sequence[ChatMessage], calls: Sequence[ToolCall]) -> list[ChatMessage]:
    """Return the messages without system messages and without the turn that contains these calls."""
    ids = {call.id for call in calls}
    return [
        message
        for message in messages
        if not isinstance(message, SystemMessage)
        and not (isinstance(message, AssistantMessage) and any(call.id in ids for call in message.tool_calls))
        and not (isinstance(message, ToolMessage) and message.tool_call_id in ids)
    ]


def sanitize_call(call: ToolCall) -> ToolCall:
    """Return a call in the form in which the history shows it, with a valid name and a JSON object as arguments.

    Servers parse the arguments of earlier calls. A single malformed call makes them refuse the whole conversation
    (https://github.com/vllm-project/vllm/issues/43995, https://github.com/OpenHands/software-agent-sdk/issues/2887).
    """
    # Providers refuse the whole history if a function name is longer than 64 characters or contains other characters.
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
    """Return a text argument of a call. Return an empty string if the argument is missing or the arguments are
    malformed.
    """
    try:
        value = json.loads(call.arguments or "{}")[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        value = ""
    return value if isinstance(value, str) else ""
