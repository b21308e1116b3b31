"""A request as plain chat, for a model too small for the conversation prompt and for tools; and its reply, tidied.

Such a model goes on as it sees: given elements and JSON it writes elements and JSON, given a question it may write the
question. `read_chat` gives it the instruction, the last messages of the incoming thread as a chat, and nothing else;
`keep_own_words` takes out what people said themselves and what is said twice. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from .model import AssistantMessage, ModelRequest, SystemMessage, UserMessage
from .prompt_view import MessageView, read_prompt

MAX_MESSAGES = 4
MAX_CHARS = 1000
"""Of the instruction and of each message, from its beginning: reading them takes about a second of a core."""

MAX_SENTENCES = 3
SHORT = "You are a small language model. Answer the last message in one or two short sentences."

_FRAME = "\n\nYour id in this network is "  # behind the instruction: of elements and ids, which are not shown here
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")
_MANY_WORDS = 4
"""Fewer may be an answer though they stand in the question: "Tom" to who was called Tom."""


def read_chat(request: ModelRequest) -> tuple[tuple[SystemMessage | UserMessage | AssistantMessage, ...], list[str]]:
    """Give a request as plain chat, and what others than the agent said in it, as they wrote it. Raises `ModelError`
    for a prompt that is broken."""
    view = read_prompt(request)
    first = request.messages[0] if request.messages else None
    instruction = first.content.partition(_FRAME)[0].strip()[:MAX_CHARS] if isinstance(first, SystemMessage) else ""
    incoming = view.incoming_text if view.incoming_thread_id else request.prompt or view.incoming_text
    earlier = view.find_thread(view.incoming_thread_id).messages[-MAX_MESSAGES:]
    chat: list[SystemMessage | UserMessage | AssistantMessage] = [SystemMessage(f"{instruction}\n{SHORT}".strip())]
    said = [*earlier, MessageView(view.incoming_sender or "someone", incoming)]
    # Neighbours of one side are one message: chat templates want the sides in turn.
    for is_own, group in groupby(said, key=lambda message: message.sender == request.agent_id):
        text = "\n".join(message.text[:MAX_CHARS] for message in group)
        chat.append(AssistantMessage(text) if is_own else UserMessage(text))
    if isinstance(chat[1], AssistantMessage):
        del chat[1]  # the window begins in the middle
    return tuple(chat), [message.text for message in said if message.sender != request.agent_id]


def keep_own_words(reply: str, said: Iterable[str], before: Iterable[str] = (), *, is_cut: bool = False) -> str:
    """Give a reply without sentences that people said themselves or that it has twice, of `MAX_SENTENCES` at most;
    empty if nothing is left. What the agent said ``before`` goes too, beside something new. ``is_cut``: the reply broke
    off, and its last sentence goes, unless it is the only one."""
    texts = list(said)
    heard = [_list_words(part) for text in texts for part in (text, *_list_sentences(text))]
    sentences = _list_sentences(reply)
    if is_cut and len(sentences) > 1 and sentences[-1][-1] not in ".!?…":
        sentences.pop()
    kept: dict[tuple[str, ...], str] = {}
    for sentence in sentences:
        words = _list_words(sentence)
        if words and not any(_repeats(words, sentence) for sentence in heard):
            kept.setdefault(tuple(words), sentence)
    old = {tuple(_list_words(sentence)) for text in before for sentence in _list_sentences(text)}
    new = [sentence for words, sentence in kept.items() if words not in old]
    answer = " ".join((new or [*kept.values()])[:MAX_SENTENCES])
    return "" if any(_repeats(_list_words(answer), sentence) for sentence in heard) else answer


def _repeats(words: Sequence[str], heard: Sequence[str]) -> bool:
    if not heard or words == heard:
        return bool(heard)
    if len(words) >= _MANY_WORDS and _holds(heard, words):
        return True
    return len(heard) >= _MANY_WORDS and 2 * len(heard) > len(words) and _holds(words, heard)


def _holds(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(words[at : at + len(part)] == part for at in range(len(words) - len(part) + 1))


def _list_sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


def _list_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
