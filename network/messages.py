"""Messages and threads as users see them, and a message's content as text that people and models read.

The messages are pydantic models at the client's edge; the hub carries messages as bytes (see `frames`) and never builds
these. Content of the form ``{"text": ..., "files": [...], "images": [...], ...}`` is how this package's senders put
more than text; everything else is data, written as lines instead of JSON. No IO, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .addresses import name_of
from .units import format_file_size

MAX_DEPTH = 6
"""What lies deeper is shown as JSON."""

MAX_SIZE = 10**15
"""Of a file, in bytes: a sender may write any number."""

_NAMES, _TYPES, _SIZES, _PLACES = (
    ("name", "filename", "title"),
    ("media_type", "mime_type", "type"),
    ("size", "bytes"),
    ("url", "path"),
)


def write_content(content: object) -> str:
    """Give any JSON value as text. The bytes of a file are never in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        return "\n".join(_write_lines(content, 0))
    rest = dict(content)
    parts: list[str] = []
    if isinstance(content.get("text"), str):
        parts.append(rest.pop("text"))
    for key, word in (("files", "file"), ("images", "image")):
        if isinstance(content.get(key), list):
            parts += [_write_file(word, it) for it in rest.pop(key)]
    if rest or not parts:
        parts += _write_lines(rest, 0)
    return "\n".join(parts[1:] if len(parts) > 1 and not parts[0] else parts)


def _write_file(word: str, given: object) -> str:
    """One line for a file, and its text below it where that is known: ``[file notes.txt, text/plain, 1.2 kB,
    https://...]``."""
    if isinstance(given, str):
        given = {"url": given}
    if not isinstance(given, dict):
        return f"[{word} {_write_value(given)}]"
    name, kind, place = (_pick(given, keys) for keys in (_NAMES, _TYPES, _PLACES))
    if place.startswith("data:"):
        kind, place = kind or place[5:].partition(";")[0].partition(",")[0], ""
    size = next((given[key] for key in _SIZES if isinstance(given.get(key), int)), None)
    facts = [it for it in (name, kind, _write_size(size), place) if it]
    text = given.get("text")
    below = f"\n{text}" if isinstance(text, str) and text else ""
    return f"[{' '.join([word, ', '.join(facts)]).strip()}]{below}"


def _pick(given: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return next((it for key in keys if isinstance(it := given.get(key), str) and it), "")


def _write_size(size: object) -> str:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < MAX_SIZE:
        return ""
    return format_file_size(size)


def _write_lines(value: object, depth: int) -> Iterator[str]:
    """Give data as lines: ``name: value``, ``- item``, two spaces deeper for what is inside."""
    pad = "  " * depth
    if isinstance(value, dict) and value and depth < MAX_DEPTH:
        for name, inner in value.items():
            yield from _write_entry(f"{pad}{name}:", inner, depth)
    elif isinstance(value, list) and value and depth < MAX_DEPTH:
        for inner in value:
            yield from _write_entry(f"{pad}-", inner, depth)
    else:
        yield f"{pad}{_write_value(value)}"


def _write_entry(head: str, value: object, depth: int) -> Iterator[str]:
    pad = "  " * (depth + 1)
    is_plain = isinstance(value, list) and not any(isinstance(it, str | dict | list) for it in value)
    if isinstance(value, dict | list) and value and not is_plain and depth + 1 < MAX_DEPTH:
        yield head
        yield from _write_lines(value, depth + 1)
    elif isinstance(value, str) and "\n" in value:
        yield head
        yield from (f"{pad}{line}" for line in value.split("\n"))
    else:
        yield f"{head} {_write_value(value)}"


def _write_value(value: object) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if value.startswith("data:") and len(value) > 200:
        return f"({len(value)} characters of data)"
    return value


class BaseMessage(BaseModel):
    """One message of the ledger; fields as in the ``deliver`` frame of docs/protocol.md.

    ``seq`` orders it in its network, ``sent_at`` is in milliseconds since the Unix epoch, stamped by the hub.
    ``content`` is any JSON value; the senders of this package put plain text there as a string."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    seq: int
    message_id: str
    kind: str
    sender_id: str
    sender_kind: str
    to: str
    thread_id: str
    reply_to: int | None = None
    cause: int | None = None
    root: int
    hops: int
    sent_at: int
    content: Any = None
    text_representation: str | None = None
    requires_response: bool | list[str] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The message as text: ``text_representation``, else the content, files and data in it as lines
        (`write_content`)."""
        return self.text_representation or write_content(self.content)

    @property
    def said(self) -> str:
        """The words alone, without the files and data beside them: what commands and decisions are read from."""
        if self.text_representation is None and isinstance(self.content, dict):
            words = self.content.get("text")
            return words if isinstance(words, str) else ""
        return self.text


class DirectMessage(BaseMessage):
    """From one participant to another; its thread is ``direct:A~B``, the ids sorted."""

    kind: Literal["direct"] = "direct"


class BroadcastMessage(BaseMessage):
    """To everyone registered at its ``seq``."""

    kind: Literal["broadcast"] = "broadcast"


class ChannelMessage(BaseMessage):
    """To the members of a channel at its ``seq``."""

    kind: Literal["channel"] = "channel"

    @property
    def channel(self) -> str:
        """The channel's name, without ``channel:``."""
        return name_of(self.to)


class ModMessage(BaseMessage):
    """Between one participant and a mod; its thread is ``mod:ID~PARTICIPANT``."""

    kind: Literal["mod"] = "mod"


Message = Annotated[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage] = TypeAdapter(Message)


def message_from_wire(value: Mapping[str, Any]) -> DirectMessage | BroadcastMessage | ChannelMessage | ModMessage:
    """Build the message from the ``message`` object of a frame. Raises `pydantic.ValidationError` on another shape."""
    return _ADAPTER.validate_python(value)


class MessageThread(BaseModel):
    """The messages of one thread that its reader may see, oldest first.

    ``omitted`` counts earlier messages that are left out of this window, where that is known.
    """

    model_config = ConfigDict(frozen=True)

    thread_id: str
    messages: list[Message] = Field(default_factory=list)
    omitted: int = 0
