"""Short forms of texts for people and models: truncated, put on one line, counted. Pure."""

from __future__ import annotations

MAX_LINE_CHARS = 80


def truncate(text: str, max_chars: int, mark: str = "...") -> str:
    """Return the text in at most ``max_chars`` characters. A truncated text ends with ``mark``."""
    return text if len(text) <= max_chars else f"{text[: max_chars - len(mark)]}{mark}"


def shorten(text: str, max_chars: int = MAX_LINE_CHARS, mark: str = "...") -> str:
    """Return the text on one line, truncated to ``max_chars``."""
    return truncate(" ".join(text.split()), max_chars, mark)


def cut(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters, followed by a note with the full length. Without the note a model
    would take the text for complete."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut here: the first {max_chars} of {len(text)} characters]"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 turn``, ``2 turns``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
