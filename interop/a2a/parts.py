"""What messages say, as parts of A2A, and back.

Text is a text part; content of the form ``{"text", "files", "images"}`` is a text part and file parts; any other JSON
is a data part. No IO: an address that stands in a part is passed on, and never asked for what is there.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# the package of protobuf's runtime has no types, nor does a2a-sdk bring any
from roundelay.network.extras import needs

with needs("gateway"):
    from a2a.types import Part
    from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]
    from google.protobuf.struct_pb2 import Value  # type: ignore[import-untyped]


_LINE_ENDS = re.compile("\x85|\u2028|\u2029".encode())
_FORM = {"text", "files", "images"}
_LARGEST = 1 << 53
"""Above it, a number of A2A is not exact."""


def make_parts(content: object) -> list[Part]:
    """A message's content as parts, at least one."""
    if isinstance(content, str):
        return [Part(text=_plain(content))]
    if isinstance(content, dict) and content and content.keys() <= _FORM:
        try:
            return list(_make_files(content))
        except (ValueError, TypeError):
            pass  # it only looks like that form
    return [Part(data=ParseDict(_exact(content), Value()), media_type="application/json")]


def read_parts(parts: Iterable[Part]) -> Any:
    """The content of a message that has these parts. Raises `ValueError` where one of them is empty."""
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
    given = {"text": text, "data": data, "files": files, "images": images}
    return {name: value for name, value in given.items() if value}


def escape_line_ends(data: bytes) -> bytes:
    """Events of a stream with what clients cut lines at, beside the ends of lines, written as JSON has it: those of the
    official SDK do (NEL, U+2028, U+2029)."""
    return _LINE_ENDS.sub(lambda it: b"\\u%04x" % ord(it[0].decode()), data)


def read_json(message: Any) -> Any:
    """A message of protobuf as JSON: a structure of any values, above all."""
    return _whole(MessageToDict(message))


def _make_files(content: Mapping[str, Any]) -> Iterator[Part]:
    text = content.get("text", "")
    if not isinstance(text, str):
        raise TypeError("text is no text")
    if text:
        yield Part(text=_plain(text))
    for kind in ("images", "files"):
        for given in content.get(kind, []):
            yield _make_file({"url": given} if isinstance(given, str) else given)


def _make_file(given: Mapping[str, Any]) -> Part:
    name, media_type = given.get("name") or given.get("filename", ""), given.get("media_type", "")
    url, data = given.get("url"), given.get("data")
    if url is not None and url.startswith("data:"):
        head, comma, data = url[5:].partition(",")
        kind, *marks = head.split(";")
        if not comma or "base64" not in marks:
            raise ValueError("an address with its bytes has them as base64")
        media_type, url = media_type or kind, None
    if url is not None:
        return Part(url=_plain(url), filename=_plain(name), media_type=_plain(media_type))
    if not isinstance(data, str):
        raise TypeError("a file has an address or its bytes")
    try:
        raw = base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError("bytes are written as base64") from error
    return Part(raw=raw, filename=_plain(name), media_type=_plain(media_type))


def _read_file(part: Part) -> dict[str, str]:
    """As content has it: an image by its address, a file by its bytes or address."""
    given = {"name": part.filename, "media_type": part.media_type}
    if part.WhichOneof("content") == "url":
        given["url"] = part.url
    elif part.media_type.startswith("image/"):
        given["url"] = f"data:{part.media_type};base64,{base64.b64encode(part.raw).decode()}"
    else:
        given["data"] = base64.b64encode(part.raw).decode()
    return {name: value for name, value in given.items() if value}


def _plain(text: str) -> str:
    """Text that protobuf takes: half of a surrogate pair is none."""
    return text.encode("utf-8", "replace").decode()


def _exact(value: object) -> Any:
    """JSON that a part holds as it is: a number beyond what a double holds exactly is written as text."""
    if isinstance(value, dict):
        return {_plain(str(name)): _exact(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_exact(inner) for inner in value]
    if isinstance(value, int) and abs(value) > _LARGEST:
        return str(value)
    return _plain(value) if isinstance(value, str) else value


def _whole(value: Any) -> Any:
    """What came as doubles, with whole numbers as these; names in order, so that the same is always written alike."""
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in sorted(value.items())}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST else value
