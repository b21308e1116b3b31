"""Images and files of the incoming message, for a model that takes them: what stands in its content under ``images``
and ``files`` goes into the request as what it is.

Middleware. An image is an address (``https:``), or the image itself; of a file the bytes have to be there, as a
``data:`` address or as base64 under ``data``, and so have to fit into a frame. What kinds a model takes is set: one
that is given others refuses the request. All attachments are named in the conversation, as text; those that should be
shown and cannot be are named once more behind it, with the reason. Attachments are in no record but the message itself:
a resumed reaction reads them there again.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from roundelay.agents.history import add_to_prompt, find_prompt
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import File, ModelReply, ModelRequest, UserMessage
from roundelay.agents.options import InFile, checked
from roundelay.agents.prompt import escape_text
from roundelay.network.safe_text import sanitize_text

KINDS = {"image": "image/*", "pdf": "application/pdf", "wav": "audio/wav", "mp3": "audio/mpeg"}
AUDIO = ("wav", "mp3")
"""The audio that OpenAI's chat completions have a part for."""

MAX_BYTES = 8_000_000
MAX_NAMED = 10
"""How many of those that are left out are named; the others are counted."""

MAX_NAME_CHARS = 100

_SAME = {
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/mp3": "audio/mpeg",
    "image/jpg": "image/jpeg",
}
_ENDINGS = {
    "pdf": "application/pdf",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "gif": "image/gif",
    "webp": "image/webp",
}
# What such a file has near its beginning: a provider refuses the whole request for one that is something else.
_MARKS: Mapping[str, tuple[bytes, ...]] = {
    "application/pdf": (b"%PDF-",),
    "audio/wav": (b"RIFF", b"RF64"),
    "audio/mpeg": (b"ID3", b"\xff"),
}
_ADDRESS = re.compile(r"https://\S+")


@dataclass(frozen=True, slots=True)
class Attachment:
    """One of a message, as its sender wrote it. ``url`` is an ``https:`` address; ``data`` is base64, if it is what it
    should be. ``media_type`` is ``image/*`` for an image of which nothing else is known."""

    name: str
    media_type: str
    url: str = ""
    data: str = ""


_Kind = Annotated[str, Field(pattern=r"^(image|pdf|audio|[a-z]+/[a-z0-9.+*-]+)$")]
_Most = Annotated[int, Field(ge=1, le=64)]


class Attachments(Middleware):
    """Shows the incoming message's attachments of the kinds in ``takes`` to the model, in every turn.

    A kind is ``image``, ``pdf``, ``audio`` (WAV and MP3), or a pattern of media types (``text/csv``). ``models`` are
    patterns of the names of models that take them. Of one message at most ``most``, whose bytes are at most
    ``max_bytes``; further ones are left out, which the model is told.
    """

    @checked()
    def __init__(
        self,
        takes: Annotated[Sequence[str], InFile(tuple[_Kind, ...]), Field(min_length=1)],
        *,
        models: Annotated[Sequence[str], InFile(tuple[str, ...]), Field(min_length=1)] = ("*",),
        most: _Most = 8,
        max_bytes: Annotated[int, Field(ge=1, le=50_000_000)] = MAX_BYTES,
    ) -> None:
        kinds = [kind for name in takes for kind in (AUDIO if name == "audio" else (name,))]
        self._takes = tuple(KINDS.get(name, name) for name in kinds)
        self._models = tuple(models)
        self._most = most
        self._max_bytes = max_bytes

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        place = find_prompt(request.messages, around.state.history)
        if around.path or place is None or not any(fnmatchcase(around.model.name, model) for model in self._models):
            return await proceed(request)
        images, files, left_out = self._choose(read_attachments(around.context.trigger.content))
        messages = request.messages
        if left_out:
            messages = add_to_prompt(messages, around.state.history, _tell_left_out(left_out))
        if images or files:
            prompt = messages[place]
            assert isinstance(prompt, UserMessage)
            shown = replace(prompt, images=(*prompt.images, *images), files=(*prompt.files, *files))
            messages = (*messages[:place], shown, *messages[place + 1 :])
        return await proceed(replace(request, messages=messages))

    def _choose(self, given: Sequence[Attachment]) -> tuple[list[str], list[File], list[tuple[str, str]]]:
        """Give images, files, and those that are left out, each with the reason."""
        images: list[str] = []
        files: list[File] = []
        left_out: list[tuple[str, str]] = []
        room = self._max_bytes
        for attachment in given:
            if not any(fnmatchcase(attachment.media_type, kind) for kind in self._takes):
                continue
            is_image = attachment.media_type.startswith("image/")
            content = _decode(attachment)
            if len(images) + len(files) == self._most:
                left_out.append((attachment.name, f"at most {self._most} are shown"))
            elif is_image and attachment.url:
                images.append(attachment.url)
            elif not attachment.data:
                left_out.append((attachment.name, "its bytes are not in the message"))
            elif content is None or "*" in attachment.media_type:
                left_out.append((attachment.name, f"its bytes cannot be read as {attachment.media_type}"))
            elif len(content) > room:
                left_out.append((attachment.name, f"it has {len(content):,} bytes, and there is room for {room:,}"))
            else:
                room -= len(content)
                data = base64.b64encode(content).decode()
                if is_image:
                    images.append(f"data:{attachment.media_type};base64,{data}")
                else:
                    files.append(File(attachment.name, attachment.media_type, data))
        return images, files, left_out


def show_images(most: _Most = 8) -> Attachments:
    """Give attachments of which only images are shown: ``images`` in an agent's file."""
    return Attachments(["image"], most=most)


def read_attachments(content: object) -> list[Attachment]:
    """Give what a message's content has under ``images`` and ``files``: texts, or objects with ``url`` or ``data``.
    What is neither is passed over."""
    if not isinstance(content, dict):
        return []
    listed = [(item, key) for key in ("images", "files") if isinstance(content.get(key), list) for item in content[key]]
    return [made for item, key in listed if (made := _read(item, is_image=key == "images")) is not None]


def _read(given: object, *, is_image: bool) -> Attachment | None:
    if isinstance(given, str):
        given = {"url": given}
    if not isinstance(given, dict):
        return None
    url, data, kind = _pick(given, "url"), _pick(given, "data"), _pick(given, "media_type", "mime_type", "type")
    for address in (url, data):
        if address.startswith("data:"):
            head, _, data = address.removeprefix("data:").partition(",")
            kind = kind or head
            data = data if head.endswith(";base64") else ""
    url = url if _is_address(url) else ""
    name = sanitize_text(_pick(given, "name", "filename", "title") or urlsplit(url).path.rpartition("/")[2])
    kind = kind.partition(";")[0].strip().lower()
    kind = _SAME.get(kind, kind)
    if "/" not in kind or kind == "application/octet-stream":
        kind = _ENDINGS.get(name.rpartition(".")[2].lower(), "image/*" if is_image else "")
    ending = next((ending for ending, media_type in _ENDINGS.items() if media_type == kind), "")
    name = name[:MAX_NAME_CHARS] or f"{'image' if is_image else 'file'}{'.' if ending else ''}{ending}"
    return Attachment(name, kind, url, data)


def _is_address(text: str) -> bool:
    """Whether a model's provider may find something there: it refuses the whole request for what is no address."""
    try:
        return _ADDRESS.fullmatch(text) is not None and bool(urlsplit(text).hostname)
    except ValueError:  # of brackets around no IPv6 address, say
        return False


def _pick(given: Mapping[str, object], *keys: str) -> str:
    return next((text for key in keys if isinstance(text := given.get(key), str) and text), "")


def _decode(given: Attachment) -> bytes | None:
    """Give the bytes; None if they are no base64, or nothing of this kind."""
    try:
        content = base64.b64decode("".join(given.data.split()), validate=True)
    except ValueError:
        return None
    marks = _MARKS.get(given.media_type)
    return content if marks is None or any(mark in content[:1024] for mark in marks) else None


def _tell_left_out(left_out: Sequence[tuple[str, str]]) -> str:
    # Names are a sender's words: quoted, and escaped like everything of the conversation.
    told = [f"{json.dumps(escape_text(name), ensure_ascii=False)} ({reason})" for name, reason in left_out[:MAX_NAMED]]
    if len(left_out) > MAX_NAMED:
        told.append(f"and {len(left_out) - MAX_NAMED} more")
    return f"Attached to the incoming message, but not shown to you: {', '.join(told)}."
