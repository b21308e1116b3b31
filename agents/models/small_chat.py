"""Plain chat for a model that is too small for the conversation prompt and for tools.

A small model imitates its input: it answers XML elements with elements and JSON with JSON, and it may repeat a
question. `read_chat` reduces a request to the instruction and the last messages of the trigger's thread.
`remove_echoes` removes sentences that people wrote themselves, and repeated sentences. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from .model import AssistantMessage, ModelRequest, SystemMessage, UserMessage
from .prompt_view import MessageView, read_prompt

MAX_MESSAGES = 4
MAX_CHARS = 1000
"""Maximum characters of the instruction and of each message. The rest is cut off. The model reads 1000 characters in
about one second on one core.
"""

MAX_SENTENCES = 3
SHORT = "You are a small language model. Answer the last message in one or two short sentences."

# Beginning of the text that follows the instruction in a system message. This text explains elements and ids, which the
# plain chat does not contain.
_FRAME = re.compile(
    r'\n\n(?:Your id in this network is |(?:As "[^"\n]+", a|A)nswer the message\. Senders are not operators\.)'
)
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+")
_MANY_WORDS = 4
"""Minimum number of words in an echo. A shorter sentence may be a real answer even if the question contains it, such
as "Tom".
"""


def read_chat(request: ModelRequest) -> tuple[tuple[SystemMessage | UserMessage | AssistantMessage, ...], list[str]]:
    """Return a request as plain chat, and the texts of other participants in this chat. Raises `ModelError` for a
    broken prompt.
    """
    view = read_prompt(request)
    first = request.messages[0] if request.messages else None
    instruction = _FRAME.split(first.content)[0].strip()[:MAX_CHARS] if isinstance(first, SystemMessage) else ""
    incoming = view.incoming_text if view.incoming_thread_id else request.prompt or view.incoming_text
    earlier = view.find_thread(view.incoming_thread_id).messages[-MAX_MESSAGES:]
    chat: list[SystemMessage | UserMessage | AssistantMessage] = [SystemMessage(f"{instruction}\n{SHORT}".strip())]
    shown = [*earlier, MessageView(view.incoming_sender or "someone", incoming)]
    # Join consecutive messages of the same side, because chat templates require alternating roles.
    for is_own, group in groupby(shown, key=lambda message: message.sender == request.agent_id):
        text = "\n".join(message.text[:MAX_CHARS] for message in group)
        chat.append(AssistantMessage(text) if is_own else UserMessage(text))
    if isinstance(chat[1], AssistantMessage):
        del chat[1]  # drop the agent's own first message, because the window does not contain the message before it
    return tuple(chat), [message.text for message in shown if message.sender != request.agent_id]


def remove_echoes(reply: str, said: Iterable[str], before: Iterable[str] = (), *, is_cut: bool = False) -> str:
    """Return at most `MAX_SENTENCES` sentences of a reply, without echoes and repetitions. The result is empty if no
    sentence is left.

    An echo repeats a text in ``said``, which contains the texts of other participants. Sentences that the agent sent
    ``before`` are also removed if any other sentence remains. ``is_cut``: the reply was cut off, so its last sentence
    is dropped unless it is the only sentence.
    """
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
    # Also check the whole reply: short sentences that are not echoes separately may together repeat the question.
    return "" if any(_repeats(_list_words(answer), sentence) for sentence in heard) else answer


def _repeats(words: Sequence[str], heard: Sequence[str]) -> bool:
    if not heard or words == heard:
        return bool(heard)
    if len(words) >= _MANY_WORDS and _contains(heard, words):
        return True
    return len(heard) >= _MANY_WORDS and 2 * len(heard) > len(words) and _contains(words, heard)


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    return any(words[at : at + len(part)] == part for at in range(len(words) - len(part) + 1))


def _list_sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


def _list_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
