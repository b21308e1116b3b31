"""A message's content as text that people and models read: what was said, the files beside it, and data as lines instead of JSON.

``{"text": ..., "files": [...], "images": [...], ...}`` is how this package's senders put more than text; everything else is data. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

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
    """One line for a file, and its text below it where that is known: ``[file notes.txt, text/plain, 1.2 kB, https://...]``."""
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
    for unit, factor in (("MB", 1_000_000), ("kB", 1000)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"


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
