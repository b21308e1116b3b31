"""Writes a run out: the log itself, line by line and losing nothing, or what was said as a document."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from roundelay.network.durable_files import give_name
from roundelay.network.errors import UnknownMessage
from roundelay.network.ledger import Row
from roundelay.network.log_lines import LogHead, encode_head, encode_row
from roundelay.network.messages import BaseMessage
from roundelay.reading.recording import read_body, read_trigger
from roundelay.reading.sources import Source
from roundelay.reading.transcripts import write_markdown, write_mermaid


@dataclass(frozen=True, slots=True)
class Part:
    """What of a run is wanted: one thread, one root, a range of seqs; everything without them."""

    thread_id: str | None = None
    root: int | None = None
    first: int = 1
    last: int | None = None

    @property
    def is_whole(self) -> bool:
        return (self.thread_id, self.root, self.first, self.last) == (None, None, 1, None)

    def not_found(self) -> UnknownMessage:
        """What to raise where nothing belongs to it."""
        of = [f"thread {self.thread_id}"] if self.thread_id is not None else []
        of += [f"root {self.root}"] if self.root is not None else []
        to = f"to {self.last}" if self.last is not None else "on"
        of += [f"the seqs from {self.first} {to}"] if (self.first, self.last) != (1, None) else []
        return UnknownMessage(
            f"Nothing that may be seen is of {' and '.join(of)}; roundelay threads lists the threads."
        )

    def holds(self, message: BaseMessage) -> bool:
        return (
            self.thread_id in (None, message.thread_id)
            and self.root in (None, message.root)
            and self._holds_seq(message.seq)
        )

    def holds_row(self, row: Row, reactions: set[str]) -> bool:
        """Whether a row belongs to it. ``reactions`` are those to messages that did: their records do too."""
        if not self._holds_seq(row.seq):
            return False
        if self.thread_id is None and self.root is None:
            return True
        if row.type == "record":
            return row.stream in reactions
        head = row.head
        return head is not None and self.thread_id in (None, head.thread_id) and self.root in (None, head.root)

    def _holds_seq(self, seq: int) -> bool:
        return seq >= self.first and (self.last is None or seq <= self.last)


@contextmanager
def replace_file(path: Path) -> Iterator[TextIO]:
    """Open a file to be written as a whole: one that is there stays as it is until all is written, and if that fails.

    A half of a log looks like a whole one. It is on the disk then: whoever exports may delete what was exported. What is no plain file, a pipe say, is written as it comes.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    target = path.resolve()  # a link stays one
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            yield file
        give_name(draft, target, replaces=True)
    except BaseException as error:
        with suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError) and error.filename == str(draft):
            error.filename = str(path)  # the name that the caller knows
        raise


async def write_log(source: Source, part: Part, file: TextIO) -> None:
    """Write the log as lines of JSON. Raises `Forbidden` for who is no operator, `UnknownMessage` if nothing is of that thread or root."""
    head, rows = await source.rows()
    excerpt = LogHead(epoch=head.epoch, name=head.name, first_seq=head.first_seq, is_excerpt=not part.is_whole)
    is_begun = False
    triggers: set[int] = set()
    reactions: set[str] = set()
    async for row in rows:
        if row.type == "record" and row.label == "started" and read_trigger(row.label, read_body(row)) in triggers:
            reactions.add(row.stream)
        if part.holds_row(row, reactions):
            if row.type == "message":
                triggers.add(row.seq)
            if not is_begun:
                file.write(encode_head(excerpt).decode() + "\n")
                is_begun = True
            file.write(encode_row(row).decode() + "\n")
        if part.last is not None and row.seq >= part.last:
            break
    if not is_begun and not part.is_whole:
        raise part.not_found()
    if not is_begun:
        file.write(encode_head(excerpt).decode() + "\n")


async def write_messages(source: Source, part: Part, file: TextIO, *, as_markdown: bool) -> None:
    """Write what was said as a Markdown transcript, or as a Mermaid sequence diagram."""
    messages = [message async for message in _read_messages(source, part)]
    if not messages and not part.is_whole:
        raise part.not_found()
    title = "A conversation" if part.thread_id is None else part.thread_id
    lines = write_markdown(messages, title=title) if as_markdown else write_mermaid(messages)
    for line in lines:
        file.write(line + "\n")


async def _read_messages(source: Source, part: Part) -> AsyncIterator[BaseMessage]:
    if part.root is not None:
        found = [*(await source.messages([part.root])).values(), *await source.following(part.root)]
        if not found or found[0].seq != part.root:
            raise UnknownMessage(f"There is no message {part.root} that may be seen.")
        for message in found:
            if part.holds(message):
                yield message
        return
    async for message in source.all_messages(part.first - 1, part.thread_id):
        if part.last is not None and message.seq > part.last:
            return
        if part.holds(message):
            yield message
