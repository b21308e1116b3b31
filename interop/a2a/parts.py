"""Converts the content of a message to A2A parts and back.

Text becomes a text part. Content of the form ``{"text", "files", "images"}`` becomes a text part and file parts. Any
other JSON becomes a data part. The module performs no IO. A URL in a part is passed on and never fetched.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# protobuf's runtime package and a2a-sdk have no type annotations.
from roundelay.network.extras import needs

with needs("gateway"):
    from a2a.types import Part
    from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]
    from google.protobuf.struct_pb2 import Value  # type: ignore[import-untyped]


_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())
_FORM = {"text", "files", "images"}
_MAX_EXACT = 1 << 53
"""Largest integer that a number in A2A (a double) represents exactly."""


def make_parts(content: object) -> list[Part]:
    """Return the content of a message as a list of at least one A2A part."""
    if isinstance(content, str):
        return [Part(text=_plain(content))]
    if isinstance(content, dict) and content and content.keys() <= _FORM:
        try:
            return list(_make_files(content))
        except (ValueError, TypeError):
            pass  # this dictionary is not content with files, so it becomes a data part
    return [Part(data=ParseDict(_exact(content), Value()), media_type="application/json")]


def read_parts(parts: Iterable[Part]) -> Any:
    """Return the message content that corresponds to these A2A parts. Raises `ValueError` for an empty part."""
    texts: list[str] = []
    data: list[Any] = []
    files: list[dict[str, str]] = []
    images: list[dict[str, str]] = []
    for number, part in enumerate(parts, 1):
        match part.WhichOneof("content"):
            case "text":
                texts.append(part.text)
            case "data":
                data.append(_whole(MessageToDict(part.data)))
            case "raw" | "url":
                (images if part.media_type.startswith("image/") else files).append(_read_file(part))
            case _:
                raise ValueError(f"part {number} has neither text nor data, raw or url")
    text = "\n".join(texts)
    if not (files or images or data):
        return text
    if len(data) == 1 and not (files or images or texts):
        return data[0]
    content = {"text": text, "data": data, "files": files, "images": images}
    return {name: value for name, value in content.items() if value}


def escape_line_ends(data: bytes) -> bytes:
    """Escape NEL, U+2028 and U+2029 in events of a stream. The client of the official SDK splits lines at these
    characters.
    """
    return _LINE_ENDS.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), data)


def read_json(message: Any) -> Any:
    """Return a protobuf message as JSON."""
    return _whole(MessageToDict(message))


def _make_files(content: Mapping[str, Any]) -> Iterator[Part]:
    text = content.get("text", "")
    if not isinstance(text, str):
        raise TypeError("text is not a string")
    if text:
        yield Part(text=_plain(text))
    for kind in ("images", "files"):
        for entry in content.get(kind, []):
            yield _make_file({"url": entry} if isinstance(entry, str) else entry)


def _make_file(file: Mapping[str, Any]) -> Part:
    name, media_type = file.get("name") or file.get("filename", ""), file.get("media_type", "")
    url, data = file.get("url"), file.get("data")
    if url is not None and url.startswith("data:"):
        head, comma, data = url[5:].partition(",")
        kind, *marks = head.split(";")
        if not comma or "base64" not in marks:
            raise ValueError("a data URL needs base64")
        media_type, url = media_type or kind, None
    if url is not None:
        return Part(url=_plain(url), filename=_plain(name), media_type=_plain(media_type))
    if not isinstance(data, str):
        raise TypeError("a file needs url or data")
    try:
        raw = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError("data must be base64") from error
    return Part(raw=raw, filename=_plain(name), media_type=_plain(media_type))


def _read_file(part: Part) -> dict[str, str]:
    """Convert a file part to message content. An image always gets a URL. Any other file keeps its data or its URL."""
    file = {"name": part.filename, "media_type": part.media_type}
    if part.WhichOneof("content") == "url":
        file["url"] = part.url
    elif part.media_type.startswith("image/"):
        file["url"] = f"data:{part.media_type};base64,{base64.b64encode(part.raw).decode()}"
    else:
        file["data"] = base64.b64encode(part.raw).decode()
    return {name: value for name, value in file.items() if value}


def _plain(text: str) -> str:
    """Replace lone surrogates in a text, because protobuf rejects them."""
    return text.encode("utf-8", "replace").decode()


def _exact(value: object) -> Any:
    """Convert JSON to a form that an A2A part represents without loss. Integers that a double cannot represent become
    text.
    """
    if isinstance(value, dict):
        return {_plain(str(name)): _exact(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    if isinstance(value, int) and abs(value) > _MAX_EXACT:
        return str(value)
    return _plain(value) if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """Convert integral doubles in JSON to integers and sort the keys, so that equal contents have the same serialized
    form.
    """
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT else value
