"""A conversation as a document: a Markdown transcript, a Mermaid sequence diagram. Pure; what participants wrote cannot leave its place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from roundelay.clean_text import clean, clean_lines
from roundelay.network.messages import BaseMessage
from roundelay.reading.recording import shorten

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>=$])")
MAX_ARROW_CHARS = 120


def write_markdown(messages: Iterable[BaseMessage], *, title: str) -> Iterator[str]:
    """Give a transcript line by line: a heading for each day and thread, and each message quoted under who said it."""
    yield f"# {_escape(title)}"
    day = thread_id = ""
    for message in messages:
        at = datetime.fromtimestamp(message.sent_at / 1000, UTC)
        if f"{at:%Y-%m-%d}" != day:
            day, thread_id = f"{at:%Y-%m-%d}", ""
            yield ""
            yield f"## {day}"
        if message.thread_id != thread_id:
            thread_id = message.thread_id
            yield ""
            yield f"### {_escape(thread_id)}"
        answered = f", answers \\#{message.reply_to}" if message.reply_to is not None else ""
        followed = f", follows from \\#{message.cause}" if message.cause not in (None, message.reply_to) else ""
        to = _escape(message.to.removeprefix("agent:"))
        yield ""
        yield f"**{_escape(message.sender_id)}** to {to}, {at:%H:%M:%S} UTC (\\#{message.seq}{answered}{followed})"
        yield ""
        for line in clean_lines(message.text):
            yield f"> {_escape(line)}".rstrip()


def write_mermaid(messages: Iterable[BaseMessage]) -> Iterator[str]:
    """Give a sequence diagram line by line: who said what to whom. Threads of many are participants of their own."""
    found = list(messages)
    names: dict[str, str] = {}
    for message in found:
        for name in (_name_sender(message), _name_target(message)):
            names.setdefault(name, f"p{len(names) + 1}")
    yield "sequenceDiagram"
    for name, alias in names.items():
        yield f"    participant {alias} as {_escape_mermaid(name)}"
    for message in found:
        arrow = "-->>" if message.reply_to is not None else "->>"
        sender, target = names[_name_sender(message)], names[_name_target(message)]
        yield f"    {sender}{arrow}{target}: {_escape_mermaid(f'#{message.seq} {shorten(message.text, MAX_ARROW_CHARS)}')}"


def _name_sender(message: BaseMessage) -> str:
    is_from_mod = message.kind == "mod" and message.to.startswith("agent:")
    return f"mod:{message.sender_id}" if is_from_mod else message.sender_id


def _name_target(message: BaseMessage) -> str:
    return message.to.removeprefix("agent:")


def _escape(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", clean(text).replace("&", "&amp;").replace("<", "&lt;"))


def _escape_mermaid(text: str) -> str:
    """Nothing in it ends the line, begins a comment or is an entity of theirs (https://mermaid.js.org/syntax/sequenceDiagram.html)."""
    escaped = "".join(f"#{ord(char)};" if char in "#;<>{}%&$\"'`" else char for char in clean(text))
    return escaped or " "
