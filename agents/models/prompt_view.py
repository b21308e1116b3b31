"""Parses a prompt into its threads, messages and tool results, for scripts and tests.

`read_prompt` parses the conversation that the runner rendered into the user message (``<conversation>``,
docs/prompts.md), and the tool calls after this message. The result depends only on the request, so a script that uses
`read_prompt` makes the same decision when a reaction resumes. This module does no IO.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree  # nosec B405  # see where it parses

from .model import AssistantMessage, ChatMessage, ModelError, ModelRequest, ToolCall, ToolMessage, UserMessage

# Characters that XML 1.0 does not allow (https://www.w3.org/TR/xml/#charsets). A prompt may contain such characters,
# and the parser would refuse the whole prompt.
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
EXAMPLE_MARK = "(An example of how to work; it is not from this conversation.)"
"""First line of an example's user message (`features.few_shot`). The example ends at the next user message."""

_OPEN, _CLOSE = "<conversation>", "</conversation>"


@dataclass(frozen=True, slots=True)
class MessageView:
    """Parsed message of a prompt."""

    sender: str
    text: str


@dataclass(frozen=True, slots=True)
class ThreadView:
    """Parsed thread of a prompt, with its oldest message first."""

    thread_id: str
    messages: tuple[MessageView, ...]


@dataclass(frozen=True, slots=True)
class ToolResultView:
    """Tool call of the current reaction, with its result. ``turn`` is the turn that made the call, counted from 1."""

    turn: int
    tool: str
    arguments: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptView:
    """Parsed content of a model request. Without a conversation prompt, ``incoming_text`` is the first user message."""

    threads: tuple[ThreadView, ...]
    incoming_thread_id: str
    incoming_sender: str
    incoming_text: str
    tool_results: tuple[ToolResultView, ...]
    turn: int
    """Number of the turn that the request begins, from 1."""

    def find_thread(self, thread_id: str) -> ThreadView:
        """Return the thread with this id. If the prompt does not show the thread, return a thread without messages."""
        for thread in self.threads:
            if thread.thread_id == thread_id:
                return thread
        return ThreadView(thread_id, ())


def read_prompt(request: ModelRequest) -> PromptView:
    """Parse the prompt of a request. Raises `ModelError` if its ``<conversation>`` is not well-formed."""
    index = _find_prompt(request.messages, request.prompt)
    results, turn = _read_results(request, index)
    prompt_message = request.messages[index] if index < len(request.messages) else None
    prompt = prompt_message.content if isinstance(prompt_message, UserMessage) else ""
    if _OPEN not in prompt:
        return PromptView((), request.thread_id, "", prompt, results, turn)
    end = prompt.find(_CLOSE)
    text = prompt[prompt.index(_OPEN) : end + len(_CLOSE)] if end >= 0 else prompt
    try:
        # A DTD cannot appear inside an element, so the text cannot declare entities that expand without end.
        root = ElementTree.fromstring(_NOT_XML.sub("\ufffd", text))  # nosec B314  # the text cannot contain a DTD
    except ElementTree.ParseError as error:
        raise ModelError(
            f"The conversation prompt is not well-formed XML ({error}): a template must escape every id and text.",
            reason="misconfigured",
        ) from error
    threads = tuple(
        ThreadView(thread.get("id", ""), tuple(_read_message(message) for message in thread.findall("message")))
        for thread in root.findall("threads/thread")
    )
    incoming = root.find("current_interaction/incoming_message")
    message = _read_message(incoming) if incoming is not None else MessageView("", "")
    # A lean prompt without threads omits the thread id, so use the id in the request.
    thread_id = root.findtext("current_interaction/incoming_thread_id", "").strip() or request.thread_id
    return PromptView(threads, thread_id, message.sender, message.text, results, turn)


def _read_message(element: ElementTree.Element) -> MessageView:
    return MessageView(element.get("sender", ""), element.findtext("content", ""))


def _find_prompt(messages: Sequence[ChatMessage], prompt: str) -> int:
    """Return the index of the prompt message. Examples and earlier chat messages may come before this message."""
    users = [(at, message.content) for at, message in enumerate(messages) if isinstance(message, UserMessage)]
    conversation = next((at for at, content in users if _OPEN in content), None)
    if conversation is not None:
        return conversation
    if prompt and (found := [at for at, content in users if content.startswith(prompt)]):
        return found[-1]
    return next((at for at, content in users if not content.startswith(EXAMPLE_MARK)), 0)


def _read_results(request: ModelRequest, prompt: int) -> tuple[tuple[ToolResultView, ...], int]:
    calls: dict[str, tuple[int, ToolCall]] = {}
    results = []
    turn = 1
    for message in request.messages[prompt:]:
        match message:
            case AssistantMessage(tool_calls=made):
                calls.update((call.id, (turn, call)) for call in made)
                turn += 1
            case ToolMessage(tool_call_id, content) if tool_call_id in calls:
                asked, call = calls[tool_call_id]
                results.append(ToolResultView(asked, call.name, call.arguments, content))
            case _:
                pass
    # After a handoff, the history does not contain its first turns, so add the number of missing turns.
    missing = max(0, request.turn - turn)
    return tuple(replace(result, turn=result.turn + missing) for result in results), turn + missing
