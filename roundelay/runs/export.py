"""Export a run as the complete log, as a Markdown transcript, or as a Mermaid sequence diagram.

The log is written line by line. In transcripts and diagrams, participants' text is escaped so that it cannot change the
structure of the document.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from roundelay.display.text import sanitize, sanitize_lines
from roundelay.network.addresses import short_address, thread_start
from roundelay.network.core.rows import Row
from roundelay.network.errors import UnknownMessage
from roundelay.network.ledger.log_file import LogHead, encode_head, encode_row
from roundelay.network.messages import BaseMessage
from roundelay.network.text import shorten
from roundelay.runs.reading import read_body, read_trigger
from roundelay.runs.source import Source

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>=$])")
MAX_ARROW_CHARS = 120


def write_markdown(messages: Iterable[BaseMessage], *, title: str) -> Iterator[str]:
    """Yield a transcript line by line, with a heading for each day and thread, and each message as a quote."""
    yield f"# {_escape(title)}"
    day = thread_id = ""
    for message in messages:
        at = datetime.fromtimestamp(message.sent_at / 1000, UTC)
        if f"{at:%Y-%m-%d}" != day:
            # Repeat the thread's heading on a new day, so that each day can be read separately.
            day, thread_id = f"{at:%Y-%m-%d}", ""
            yield ""
            yield f"## {day}"
        if message.thread_id != thread_id:
            thread_id = message.thread_id
            yield ""
            yield f"### {_escape(thread_id)}"
        answered = f", answers \\#{message.reply_to}" if message.reply_to is not None else ""
        followed = f", follows from \\#{message.cause}" if message.cause not in (None, message.reply_to) else ""
        to = _escape(short_address(message.to))
        yield ""
        yield f"**{_escape(message.sender_id)}** to {to}, {at:%H:%M:%S} UTC (\\#{message.seq}{answered}{followed})"
        yield ""
        for line in sanitize_lines(message.text):
            yield f"> {_escape(line)}".rstrip()


def write_mermaid(messages: Iterable[BaseMessage]) -> Iterator[str]:
    """Yield a sequence diagram line by line. Channels and the broadcast are participants of the diagram."""
    # Iterate twice: Mermaid requires all participants before the first arrow.
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
        said = _escape_mermaid(f"#{message.seq} {shorten(message.text, MAX_ARROW_CHARS)}")
        yield f"    {sender}{arrow}{target}: {said}"


def _name_sender(message: BaseMessage) -> str:
    is_from_mod = message.kind == "mod" and message.to.startswith("agent:")
    return f"mod:{message.sender_id}" if is_from_mod else message.sender_id


def _name_target(message: BaseMessage) -> str:
    return short_address(message.to)


def _escape(text: str) -> str:
    # Markdown renders HTML and entities, so a message could otherwise insert its own elements.
    return _MARKDOWN.sub(r"\\\1", sanitize(text).replace("&", "&amp;").replace("<", "&lt;"))


def _escape_mermaid(text: str) -> str:
    """Escape characters that end a line, begin a comment or begin an entity.

    See https://mermaid.js.org/syntax/sequenceDiagram.html.
    """
    escaped = "".join(f"#{ord(char)};" if char in "#;<>{}%&$\"'`" else char for char in sanitize(text))
    return escaped or " "


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a run: one thread, one conversation (``root``), or a range of sequence numbers. The default is the whole
    run."""

    thread_id: str | None = None
    root: int | None = None
    first: int = 1
    last: int | None = None

    @property
    def is_whole(self) -> bool:
        return (self.thread_id, self.root, self.first, self.last) == (None, None, 1, None)

    def not_found(self) -> UnknownMessage:
        """Return the error for a part without messages."""
        return UnknownMessage(f"No messages that you may see in {self.describe()}. List the threads: roundelay threads")

    def describe(self) -> str:
        """Describe the part in words; the text is empty for the whole run."""
        of = [f"thread {self.thread_id}"] if self.thread_id is not None else []
        of += [f"root {self.root}"] if self.root is not None else []
        to = f"to {self.last}" if self.last is not None else "on"
        of += [f"the seqs from {self.first} {to}"] if (self.first, self.last) != (1, None) else []
        return " and ".join(of)

    def holds_seq(self, seq: int) -> bool:
        """Whether a sequence number is in the range."""
        return seq >= self.first and (self.last is None or seq <= self.last)


class Selection:
    """Selects the messages and rows of a part. Pass rows in ascending order of their sequence numbers.

    A thread includes the reply threads of its messages.
    """

    def __init__(self, part: Part) -> None:
        self._part = part
        self._begun: set[int] = set()
        """Sequence numbers of the thread's messages. Each message may have a reply thread."""
        self._reactions: set[str] = set()
        self._triggers: set[int] = set()

    def takes(self, thread_id: str, root: int, seq: int) -> bool:
        """Return whether a message belongs to the part. Remembers messages that may have reply threads."""
        part = self._part
        if part.root not in (None, root):
            return False
        if part.thread_id == thread_id:
            self._begun.add(seq)
        # The name of a reply thread contains the sequence number of the message at which it begins.
        elif part.thread_id is not None and thread_start(thread_id) not in self._begun:
            return False
        return part.holds_seq(seq)

    def takes_row(self, row: Row) -> bool:
        """Return whether a row belongs to the part. A record belongs to the part if its reaction answers a message of
        the part.
        """
        part = self._part
        if part.thread_id is None and part.root is None:
            return part.holds_seq(row.seq)
        if row.type == "record":
            # The later records of a reaction do not name its trigger, so the first record decides for all of them.
            if row.label == "started" and read_trigger(row.label, read_body(row)) in self._triggers:
                self._reactions.add(row.stream)
            return row.stream in self._reactions and part.holds_seq(row.seq)
        head = row.head
        if head is None or not self.takes(head.thread_id, head.root, row.seq):
            return False
        self._triggers.add(row.seq)
        return True


async def read_part(source: Source, part: Part) -> tuple[LogHead, AsyncIterator[Row]]:
    """Return the head of the log and the rows of a part. Raises `Forbidden` for non-operators."""
    head, rows = await source.rows()

    async def read() -> AsyncIterator[Row]:
        selection = Selection(part)
        async for row in rows:
            if selection.takes_row(row):
                yield row
            if part.last is not None and row.seq >= part.last:
                break

    return head, read()


async def write_log(source: Source, part: Part, write: Callable[[str], object]) -> None:
    """Write the log as lines of JSON.

    Raises `Forbidden` for non-operators, and `UnknownMessage` if the part is empty.
    """
    head, rows = await read_part(source, part)
    # Mark an excerpt, because a replay must recognize and refuse it.
    excerpt = LogHead(epoch=head.epoch, name=head.name, first_seq=head.first_seq, is_excerpt=not part.is_whole)
    # Write the head with the first row, so that an empty part produces an empty file and an error.
    is_begun = False
    async for row in rows:
        if not is_begun:
            write(encode_head(excerpt).decode() + "\n")
            is_begun = True
        write(encode_row(row).decode() + "\n")
    if not is_begun and not part.is_whole:
        raise part.not_found()
    if not is_begun:
        write(encode_head(excerpt).decode() + "\n")


async def write_messages(source: Source, part: Part, file: TextIO, *, as_markdown: bool) -> None:
    """Write the messages as a Markdown transcript or a Mermaid sequence diagram."""
    messages = [message async for message in read_messages(source, part)]
    if not messages and not part.is_whole:
        raise part.not_found()
    title = "A conversation" if part.thread_id is None else part.thread_id
    lines = write_markdown(messages, title=title) if as_markdown else write_mermaid(messages)
    for line in lines:
        file.write(line + "\n")


async def read_messages(source: Source, part: Part) -> AsyncIterator[BaseMessage]:
    """Yield the messages of a part that the caller may read. Raises `UnknownMessage`."""
    selection = Selection(part)
    if part.root is not None:
        found = [*(await source.messages([part.root])).values(), *(await source.following(part.root))[0]]
        if not found or found[0].seq != part.root:
            raise UnknownMessage(f"There is no message {part.root} that you may see.")
        for message in found:
            if selection.takes(message.thread_id, message.root, message.seq):
                yield message
        return
    # Replies to a channel or broadcast are in reply threads. The first message of such a thread may precede the range.
    has_answers = part.thread_id is not None and part.thread_id.startswith(("broadcast", "channel:"))
    read = source.all_messages(0) if has_answers else source.all_messages(part.first - 1, part.thread_id)
    async for message in read:
        if part.last is not None and message.seq > part.last:
            return
        if selection.takes(message.thread_id, message.root, message.seq):
            yield message
