"""Short forms of texts for people and models: cut, put on one line, counted. Pure."""

from __future__ import annotations

MAX_LINE_CHARS = 80


def truncate(text: str, max_chars: int, mark: str = "...") -> str:
    """Return the text, or its beginning with ``mark`` at the end, in at most ``max_chars`` characters."""
    return text if len(text) <= max_chars else f"{text[: max_chars - len(mark)]}{mark}"


def shorten(text: str, max_chars: int = MAX_LINE_CHARS, mark: str = "...") -> str:
    """Return the text on one line, truncated."""
    return truncate(" ".join(text.split()), max_chars, mark)


def cut(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters. A note after them says how many there are: models must know."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut here: the first {max_chars} of {len(text)} characters]"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 turn``, ``2 turns``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
