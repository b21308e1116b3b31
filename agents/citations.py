"""What is cited: citations in a text, ``[1]`` or ``[2, 3]``, found, given other numbers, brought together, and the
sources that they stand for, as data. Pure.

`features.references` numbers what tools found and checks what an answer cites. The names and rules here are also for
those that hand sources on without it: tools, `ask`, and agents that call each other. Code and links of Markdown are
left alone (`values[1]`, [1](https://...)). In a text that is JSON, a structured answer for example, only its strings
cite: ``{"amounts": [10, 20]}`` cites nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from pydantic import JsonValue

from .text import cut

REFERENCES, FRAGMENTS = "references", "fragments"
"""In the data of a tool's result: what may be cited."""

CITABLE = (REFERENCES, FRAGMENTS)
"""Too long for a record these are shortened rather than left out, or the result would cite somebody else's."""

SOURCES = "sources"
"""In the metadata of an answer: what it cites."""

MAX_SOURCES_CHARS = 40_000
"""As JSON: what a call gives beside its result has a quarter of a record."""

_CITATION = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|(?P<citation> ?\[\d{1,3}(?:\s*[,;]\s*\d{1,3})*\](?!\())", re.DOTALL)


def find_citations(text: str, *, is_json: bool = False) -> list[int]:
    """Give the numbers that a text cites, each once, in the order in which they stand there. ``is_json``: it is known
    to be JSON, be it a list of numbers."""
    value = _read_json(text, is_json)
    texts = [text] if value is None else _list_strings(value)
    found = (it["citation"] for one in texts for it in _CITATION.finditer(one))
    return list(dict.fromkeys(int(number) for it in found if it is not None for number in re.findall(r"\d+", it)))


def map_citations(text: str, change: Callable[[int], int | None], *, is_json: bool = False) -> str:
    """Give the text with other numbers; one without a number is taken out."""
    value = _read_json(text, is_json)
    if value is None:
        return _map(text, change)
    changed = _map_strings(value, change)
    return text if changed == value else json.dumps(changed, ensure_ascii=False, separators=(",", ":"))


def merge_sources(answers: Sequence[tuple[str, JsonValue]]) -> tuple[list[str], list[JsonValue]]:
    """Give the texts of several answers, each with its own sources (objects with their number ``n``), as they cite the
    sources of all of them, in one numbering.

    What is no source is left out, and so is a number that stands for none. Where there are no sources at all, the texts
    stay as they are.
    """
    numbers: list[dict[int, int]] = []
    merged: list[JsonValue] = []
    for _, given in answers:
        own: dict[int, int] = {}
        for it in given if isinstance(given, list) else ():
            if isinstance(it, dict) and type(n := it.get("n")) is int and n not in own:
                own[n] = len(merged) + 1
                merged.append({**it, "n": own[n]})
        numbers.append(own)
    if not merged:
        return [text for text, _ in answers], []
    kept = fit_sources(merged)
    there = {it["n"] for it in kept if isinstance(it, dict)}
    left = [{n: new for n, new in own.items() if new in there} for own in numbers]
    return [map_citations(text, own.get) for (text, _), own in zip(answers, left, strict=True)], kept


def fit_sources(sources: list[JsonValue]) -> list[JsonValue]:
    """Give sources as they go into a record beside a result: if need be with shorter texts, without any, or the first
    ones."""
    fitting = sources
    for share in (4000, 1000, 0):
        if len(json.dumps(fitting)) <= MAX_SOURCES_CHARS:
            return fitting
        fitting = [_shorten(it, share) for it in sources]
    while len(json.dumps(fitting)) > MAX_SOURCES_CHARS:
        fitting = fitting[: len(fitting) * 3 // 4]
    return fitting


def _shorten(source: JsonValue, max_chars: int) -> JsonValue:
    if not isinstance(source, dict) or not isinstance(text := source.get("text"), str):
        return source
    rest = {name: value for name, value in source.items() if name != "text"}
    return {**rest, "text": cut(text, max_chars)} if max_chars else rest


def _map(text: str, change: Callable[[int], int | None]) -> str:
    def replace(found: re.Match[str]) -> str:
        if found["citation"] is None:
            return found[0]
        numbers = [change(int(it)) for it in re.findall(r"\d+", found[0])]
        kept = ", ".join(str(it) for it in dict.fromkeys(numbers) if it is not None)
        return f"{' ' if found[0].startswith(' ') else ''}[{kept}]" if kept else ""

    return _CITATION.sub(replace, text)


def _read_json(text: str, is_known: bool) -> object | None:
    """Give what a text says that is a JSON object, or a list with anything but numbers in it (which is a citation)."""
    if not is_known and not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_citation = isinstance(value, list) and all(isinstance(it, int) for it in value)
    return None if is_citation and not is_known else value


def _list_strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for it in value.values():
                yield from _list_strings(it)
        case list():
            for it in value:
                yield from _list_strings(it)


def _map_strings(value: object, change: Callable[[int], int | None]) -> object:
    match value:
        case str():
            return _map(value, change)
        case dict():
            return {name: _map_strings(it, change) for name, it in value.items()}
        case list():
            return [_map_strings(it, change) for it in value]
        case _:
            return value
