"""Middleware that adds the images and files of the trigger to the model's request. The content of the trigger lists the
attachments under ``images`` and ``files``.

An image is an ``https:`` URL or the image data. A file contains its bytes, as a ``data:`` URL or as base64 under
``data``. Alternatively, ``file`` names a stored file of the mod `files`, which is downloaded for the request. The
agent's author configures the accepted kinds, because a model refuses the whole request if an attachment has any other
kind. The conversation names all attachments as text. If an attachment of an accepted kind cannot be shown, a text after
the conversation names the attachment and the reason. Records do not contain attachments, so a resumed reaction reads
the attachments from the message again.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from roundelay.agents.history import add_to_prompt, find_prompt
from roundelay.agents.middleware import Around, AskModel, Middleware
from roundelay.agents.models.model import File, ModelReply, ModelRequest, UserMessage
from roundelay.agents.options import InFile, checked
from roundelay.agents.tools import ToolContext
from roundelay.network.elements import escape_text
from roundelay.network.errors import InternalError, RequestError
from roundelay.network.file_references import read_reference
from roundelay.network.safe_text import sanitize_text

log = logging.getLogger(__name__)

KINDS = {"image": "image/*", "pdf": "application/pdf", "wav": "audio/wav", "mp3": "audio/mpeg"}
AUDIO = ("wav", "mp3")
"""Audio types that OpenAI's chat completions accept."""

MAX_BYTES = 8_000_000
MAX_NAMED = 10
"""Maximum number of omitted attachments that the request names. Further omitted attachments are only counted."""

MAX_NAME_CHARS = 100

_ALIASES = {
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
# Signatures near the beginning of a file, by media type. A provider refuses the whole request if the bytes do not match
# the media type.
_MARKS: Mapping[str, tuple[bytes, ...]] = {
    "application/pdf": (b"%PDF-",),
    "audio/wav": (b"RIFF", b"RF64"),
    "audio/mpeg": (b"ID3", b"\xff"),
}
_ADDRESS = re.compile(r"https://\S+")


@dataclass(frozen=True, slots=True)
class Attachment:
    """An attachment of a message, as its sender wrote it.

    ``url`` is an ``https:`` URL. ``data`` is base64 that is not yet validated. ``media_type`` is ``image/*`` for an
    image of unknown type. ``stored`` is the id and the version of a stored file.
    """

    name: str
    media_type: str
    url: str = ""
    data: str = ""
    stored: tuple[str, int | None] | None = None
    size: int = 0
    """Size in bytes of a stored file. Set only if the file is too large to download."""


_Kind = Annotated[str, Field(pattern=r"^(image|pdf|audio|[a-z]+/[a-z0-9.+*-]+)$")]
_Most = Annotated[int, Field(ge=1, le=64)]


class Attachments(Middleware):
    """Adds those attachments of the trigger whose kinds are listed in ``takes`` to the request of every turn.

    A kind is ``image``, ``pdf``, ``audio`` (WAV and MP3), or a pattern of media types (``text/csv``). ``models`` lists
    patterns of the names of models that accept attachments. Each message may have at most ``most`` attachments with
    ``max_bytes`` in total. Further attachments are omitted, and a text in the request names them.
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
        self._downloads: dict[tuple[str, int, str, int | None], str] = {}
        """Base64 of stored files, by agent, trigger, file and version. The cache avoids repeated downloads, because
        every turn of a reaction sends the files again.
        """

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        index = find_prompt(request.messages, around.state.history)
        # The prompt of an agent that is called as a tool does not contain the trigger, so add no attachments to it.
        if around.path or index is None or not any(fnmatchcase(around.model.name, model) for model in self._models):
            return await proceed(request)
        attachments = read_attachments(around.context.trigger.content)
        if any(attachment.stored is not None for attachment in attachments):
            attachments = await self._download_stored(around.context, attachments)
        images, files, omitted = self._select(attachments)
        messages = request.messages
        if omitted:
            messages = add_to_prompt(messages, around.state.history, _describe_omitted(omitted))
        if images or files:
            prompt = messages[index]
            assert isinstance(prompt, UserMessage)
            shown = replace(prompt, images=(*prompt.images, *images), files=(*prompt.files, *files))
            messages = (*messages[:index], shown, *messages[index + 1 :])
        return await proceed(replace(request, messages=messages))

    async def _download_stored(self, context: ToolContext, attachments: Sequence[Attachment]) -> list[Attachment]:
        """Download the stored files of accepted kinds, and return all attachments. A stored file that is not available
        has no bytes.
        """
        loaded, room, number = [], self._max_bytes, 0
        for attachment in attachments:
            if attachment.stored is not None and self._takes_kind(attachment) and number < self._most:
                number += 1
                try:
                    attachment = await self._download(context, attachment, attachment.stored, room)
                except (RequestError, InternalError) as error:
                    log.info("an attachment is not available: %s", error)
                room -= len(attachment.data) * 3 // 4
            loaded.append(attachment)
        return loaded

    async def _download(
        self, context: ToolContext, attachment: Attachment, stored: tuple[str, int | None], room: int
    ) -> Attachment:
        key = (context.agent_id, context.trigger.seq, *stored)
        if key not in self._downloads:
            args: dict[str, object] = {"file": stored[0]} | ({} if stored[1] is None else {"version": stored[1]})
            parts: list[bytes] = []
            size = offset = 0
            while not parts or offset < size:
                part = await context.client.call("files.download", {**args, "offset": offset})
                size = int(part["size"])
                if size > room:  # `_select` reports this file as too large
                    return replace(attachment, data="", stored=None, size=size)
                parts.append(base64.b64decode(part["data"]))
                if not parts[-1]:
                    break
                offset += len(parts[-1])
            if sum(len(data) for data in self._downloads.values()) > 2 * self._max_bytes:
                self._downloads.clear()
            self._downloads[key] = base64.b64encode(b"".join(parts)).decode()
        return replace(attachment, data=self._downloads[key])

    def _takes_kind(self, attachment: Attachment) -> bool:
        return any(fnmatchcase(attachment.media_type, kind) for kind in self._takes)

    def _select(self, attachments: Sequence[Attachment]) -> tuple[list[str], list[File], list[tuple[str, str]]]:
        """Split the attachments into images, files, and omitted attachments with the reason for the omission."""
        images: list[str] = []
        files: list[File] = []
        omitted: list[tuple[str, str]] = []
        room = self._max_bytes
        for attachment in attachments:
            # Skip attachments of other kinds without a notice, because the conversation already names them.
            if not self._takes_kind(attachment):
                continue
            is_image = attachment.media_type.startswith("image/")
            content = _decode(attachment)
            if len(images) + len(files) == self._most:
                omitted.append((attachment.name, f"the maximum is {self._most}"))
            elif is_image and attachment.url:
                images.append(attachment.url)
            elif attachment.size > room:
                omitted.append((attachment.name, f"it has {attachment.size:,} bytes, but only {room:,} are left"))
            elif not attachment.data:
                missing = (
                    "the message does not contain its bytes" if attachment.stored is None else "it is not available"
                )
                omitted.append((attachment.name, missing))
            elif content is None or "*" in attachment.media_type:  # a request needs the exact media type
                omitted.append((attachment.name, f"its bytes are not {attachment.media_type}"))
            elif len(content) > room:
                omitted.append((attachment.name, f"it has {len(content):,} bytes, but only {room:,} are left"))
            else:
                room -= len(content)
                data = base64.b64encode(content).decode()
                if is_image:
                    images.append(f"data:{attachment.media_type};base64,{data}")
                else:
                    files.append(File(attachment.name, attachment.media_type, data))
        return images, files, omitted


def show_images(most: _Most = 8) -> Attachments:
    """Return middleware that attaches only images. In an agent's file, this middleware is named ``images``."""
    return Attachments(["image"], most=most)


def read_attachments(content: object) -> list[Attachment]:
    """Return the attachments that a message's content lists under ``images`` and ``files``. An item is a URL, or an
    object with ``url`` or ``data``. Other values are ignored.
    """
    if not isinstance(content, dict):
        return []
    listed = [(item, key) for key in ("images", "files") if isinstance(content.get(key), list) for item in content[key]]
    return [made for item, key in listed if (made := _read(item, is_image=key == "images")) is not None]


def _read(value: object, *, is_image: bool) -> Attachment | None:
    if isinstance(value, str):
        value = {"url": value}
    if not isinstance(value, dict):
        return None
    url, data, kind = _pick(value, "url"), _pick(value, "data"), _pick(value, "media_type", "mime_type", "type")
    for address in (url, data):
        if address.startswith("data:"):
            head, _, data = address.removeprefix("data:").partition(",")
            kind = kind or head
            data = data if head.endswith(";base64") else ""
    url = url if _is_address(url) else ""
    name = sanitize_text(_pick(value, "name", "filename", "title") or urlsplit(url).path.rpartition("/")[2])
    kind = kind.partition(";")[0].strip().lower()
    kind = _ALIASES.get(kind, kind)
    if "/" not in kind or kind == "application/octet-stream":
        kind = _ENDINGS.get(name.rpartition(".")[2].lower(), "image/*" if is_image else "")
    ending = next((ending for ending, media_type in _ENDINGS.items() if media_type == kind), "")
    name = name[:MAX_NAME_CHARS] or f"{'image' if is_image else 'file'}{'.' if ending else ''}{ending}"
    return Attachment(name, kind, url, data, read_reference(value))


def _is_address(text: str) -> bool:
    """Return whether a provider can probably load an image from this URL. A provider refuses a request with an invalid
    URL.
    """
    try:
        return _ADDRESS.fullmatch(text) is not None and bool(urlsplit(text).hostname)
    except ValueError:  # for example, brackets without an IPv6 address
        return False


def _pick(fields: Mapping[str, object], *keys: str) -> str:
    return next((text for key in keys if isinstance(text := fields.get(key), str) and text), "")


def _decode(attachment: Attachment) -> bytes | None:
    """Return the decoded bytes of an attachment. Return None if the data is not base64 or does not match its media
    type.
    """
    try:
        # Remove white space: mail and some tools break base64 into lines, which strict decoding refuses.
        content = base64.b64decode("".join(attachment.data.split()), validate=True)
    except ValueError:
        return None
    marks = _MARKS.get(attachment.media_type)
    return content if marks is None or any(mark in content[:1024] for mark in marks) else None


def _describe_omitted(omitted: Sequence[tuple[str, str]]) -> str:
    # Senders choose the names of attachments, so quote and escape the names like all other text of the conversation.
    names = [f"{json.dumps(escape_text(name), ensure_ascii=False)} ({reason})" for name, reason in omitted[:MAX_NAMED]]
    if len(omitted) > MAX_NAMED:
        names.append(f"and {len(omitted) - MAX_NAMED} more")
    return f"Attachments of the incoming message that you cannot see: {', '.join(names)}."
