"""Writes a run out: the log itself, line by line and losing nothing, or what was said as a document."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TextIO

from roundelay.network.errors import UnknownMessage
from roundelay.network.ledger import Row
from roundelay.network.log_lines import LogHead, encode_head, encode_row
from roundelay.network.messages import BaseMessage
from roundelay.sources import FileSource, LiveSource, Source
from roundelay.transcripts import write_markdown, write_mermaid


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


async def write_log(source: Source, part: Part, file: TextIO) -> None:
    """Write the log as lines of JSON. Raises `Forbidden` for who is no operator."""
    head, rows = await _read_rows(source)
    excerpt = LogHead(epoch=head.epoch, name=head.name, first_seq=head.first_seq, is_excerpt=not part.is_whole)
    file.write(encode_head(excerpt).decode() + "\n")
    triggers: set[int] = set()
    reactions: set[str] = set()
    async for row in rows:
        if row.type == "record" and row.label == "started" and _read_trigger(row) in triggers:
            reactions.add(row.stream)
        if part.holds_row(row, reactions):
            if row.type == "message":
                triggers.add(row.seq)
            file.write(encode_row(row).decode() + "\n")
        if part.last is not None and row.seq >= part.last:
            break


async def write_messages(source: Source, part: Part, file: TextIO, *, as_markdown: bool) -> None:
    """Write what was said as a Markdown transcript, or as a Mermaid sequence diagram."""
    messages = [message async for message in _read_messages(source, part)]
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


async def _read_rows(source: Source) -> tuple[LogHead, AsyncIterator[Row]]:
    if isinstance(source, LiveSource):
        return await source.rows()
    assert isinstance(source, FileSource)
    recording = source.recording

    async def read() -> AsyncIterator[Row]:
        for row in recording.rows:
            yield row

    return recording.head, read()


def _read_trigger(row: Row) -> int | None:
    import msgspec

    body = msgspec.json.decode(row.data)
    trigger = body.get("trigger") if isinstance(body, dict) else None
    return trigger if isinstance(trigger, int) else None
