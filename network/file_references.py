"""References to files in the content of messages, and the names and media types of files. This module does no IO.

A message attaches a file with an object that contains the file's id: ``{"files": [{"file": "f-…", "version": 1}]}``.
"""

from __future__ import annotations

import re

from .safe_text import sanitize_text

FILE_ID_PATTERN = "f-[0-9a-f]{11}-[0-9a-f]{8}"
MAX_NAME_CHARS = 120
MEDIA_TYPES = {
    "csv": "text/csv",
    "gif": "image/gif",
    "jpeg": "image/jpeg",
    "jpg": "image/jpeg",
    "json": "application/json",
    "md": "text/markdown",
    "mp3": "audio/mpeg",
    "pdf": "application/pdf",
    "png": "image/png",
    "py": "text/x-python",
    "txt": "text/plain",
    "wav": "audio/wav",
    "webp": "image/webp",
    "yaml": "application/yaml",
    "zip": "application/zip",
}
"""Media types by file ending. The table is fixed, because the tables of operating systems differ."""

_FILE_ID = re.compile(FILE_ID_PATTERN)
_NOT_IN_NAMES = re.compile(r'[<>:"|?*\x00-\x1f]')
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def read_references(content: object) -> list[tuple[str, int | None]]:
    """Return the ids and versions of the files in a message's content, listed under ``files`` and ``images``. Values
    that are not file references are ignored."""
    if not isinstance(content, dict):
        return []
    listed = [it for key in ("files", "images") if isinstance(content.get(key), list) for it in content[key]]
    references = [reference for it in listed if (reference := read_reference(it)) is not None]
    return list(dict.fromkeys(references))


def read_reference(value: object) -> tuple[str, int | None] | None:
    """Return the id and the version of one attached file, or None if the value is not a reference to a stored file."""
    if not isinstance(value, dict) or not isinstance(file_id := value.get("file"), str):
        return None
    if not _FILE_ID.fullmatch(file_id):
        return None
    version = value.get("version")
    return file_id, version if type(version) is int else None


def normalize_name(name: str) -> str:
    """Return a display name that is also a safe file name. Folders, control characters and leading dots are removed,
    and names that Windows reserves are prefixed with ``_``."""
    name = sanitize_text(name).replace("\\", "/").rstrip("/").rpartition("/")[2]
    name = " ".join(_NOT_IN_NAMES.sub("_", name).split()).lstrip(".").rstrip(". ")
    if len(name) > MAX_NAME_CHARS:
        stem, dot, ending = name.rpartition(".")
        name = f"{stem[: MAX_NAME_CHARS - 11]}.{ending[:10]}" if dot else name[:MAX_NAME_CHARS]
    if _RESERVED.fullmatch(name):
        name = f"_{name}"
    return name or "file"


def guess_media_type(name: str) -> str:
    """Return the media type that a name's ending suggests."""
    return MEDIA_TYPES.get(name.rpartition(".")[2].lower(), "application/octet-stream")
