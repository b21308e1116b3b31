"""Models of messages and threads for programs, and the conversion of a message's content to text.

The messages are pydantic models that the client builds. The hub carries messages as bytes (see `frames`) and never
builds these models. To send a text with files, this package uses content like ``{"text": ..., "files": [...], "images":
[...], ...}``. Any other content is data and is shown as lines instead of JSON. This module does no IO and reads no
clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .addresses import name_of
from .file_references import read_reference
from .units import format_file_size

MAX_DEPTH = 6
"""Maximum nesting depth of data that is shown as lines. Deeper values are shown as JSON."""

MAX_SIZE = 10**15
"""Maximum file size that is shown, in bytes. Larger numbers are ignored, because senders may claim any size."""

_NAMES, _TYPES, _SIZES, _PLACES = (
    ("name", "filename", "title"),
    ("media_type", "mime_type", "type"),
    ("size", "bytes"),
    ("url", "path"),
)


def write_content(content: object) -> str:
    """Return a message's content, which is any JSON value, as text. The bytes of files are never included."""
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        return "\n".join(_write_lines(content, 0))
    rest = dict(content)
    parts: list[str] = []
    # Remove the text and the files from the content. The remaining fields are data, and are written as lines below.
    if isinstance(content.get("text"), str):
        parts.append(rest.pop("text"))
    for key, word in (("files", "file"), ("images", "image")):
        if isinstance(content.get(key), list):
            parts += [_write_file(word, file) for file in rest.pop(key)]
    if rest or not parts:
        parts += _write_lines(rest, 0)
    return "\n".join(parts[1:] if len(parts) > 1 and not parts[0] else parts)


def _write_file(word: str, file: object) -> str:
    """Return one line for a file: ``[file notes.txt, text/plain, 1.2 kB, https://...]``. If the content includes the
    file's text, this text follows below the line."""
    if isinstance(file, str):
        file = {"url": file}
    if not isinstance(file, dict):
        return f"[{word} {_write_value(file)}]"
    name, kind, location = (_pick(file, keys) for keys in (_NAMES, _TYPES, _PLACES))
    # A data: URL contains the whole file, which may be megabytes long. Show only its media type.
    if location.startswith("data:"):
        kind, location = kind or location[5:].partition(";")[0].partition(",")[0], ""
    size = next((file[key] for key in _SIZES if isinstance(file.get(key), int)), None)
    reference = read_reference(file)
    stored = reference[0] if reference is not None else ""
    facts = [fact for fact in (name, kind, _write_size(size), location, stored) if fact]
    text = file.get("text")
    below = f"\n{text}" if isinstance(text, str) and text else ""
    return f"[{' '.join([word, ', '.join(facts)]).strip()}]{below}"


def _pick(values: Mapping[str, object], keys: tuple[str, ...]) -> str:
    return next((value for key in keys if isinstance(value := values.get(key), str) and value), "")


def _write_size(size: object) -> str:
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < MAX_SIZE:
        return ""
    return format_file_size(size)


def _write_lines(value: object, depth: int) -> Iterator[str]:
    """Yield data as lines, ``name: value`` or ``- item``, with two spaces of indentation per level."""
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
    is_plain = isinstance(value, list) and not any(isinstance(item, str | dict | list) for item in value)
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
    """One message of the ledger. The fields are the same as in the ``deliver`` frame (docs/protocol.md).

    ``seq`` is the message's position in the network's log. ``sent_at`` is the hub's time in milliseconds since the Unix
    epoch. ``content`` is any JSON value. This package sends plain text as a string."""

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
    edited_at: int | None = None
    deleted_at: int | None = None

    @property
    def text(self) -> str:
        """The message as text: ``text_representation`` if the sender set it, or else the content with files and data as
        lines (`write_content`)."""
        return self.text_representation or write_content(self.content)

    @property
    def said(self) -> str:
        """The message's text without files and data. Commands and decisions are parsed from this text."""
        if self.text_representation is None and isinstance(self.content, dict):
            words = self.content.get("text")
            return words if isinstance(words, str) else ""
        return self.text


class DirectMessage(BaseMessage):
    """Message from one participant to another. Its thread is ``direct:A~B``, with sorted ids."""

    kind: Literal["direct"] = "direct"


class BroadcastMessage(BaseMessage):
    """Message to every participant that was registered when the message was stored."""

    kind: Literal["broadcast"] = "broadcast"


class ChannelMessage(BaseMessage):
    """Message to the participants that were members of the channel when the message was stored."""

    kind: Literal["channel"] = "channel"

    @property
    def channel(self) -> str:
        """The channel's name, without ``channel:``."""
        return name_of(self.to)


class ModMessage(BaseMessage):
    """Message between one participant and a mod. Its thread is ``mod:ID~PARTICIPANT``."""

    kind: Literal["mod"] = "mod"


Message = Annotated[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage, Field(discriminator="kind")]

_ADAPTER: TypeAdapter[DirectMessage | BroadcastMessage | ChannelMessage | ModMessage] = TypeAdapter(Message)


def message_from_wire(value: Mapping[str, Any]) -> DirectMessage | BroadcastMessage | ChannelMessage | ModMessage:
    """Return the message of a frame's ``message`` object. Raises `pydantic.ValidationError` for invalid objects."""
    return _ADAPTER.validate_python(value)


class MessageThread(BaseModel):
    """The messages of one thread that the reader may see, oldest first.

    ``omitted`` is the number of earlier messages that are left out, or 0 if this number is unknown.
    """

    model_config = ConfigDict(frozen=True)

    thread_id: str
    messages: list[Message] = Field(default_factory=list)
    omitted: int = 0
