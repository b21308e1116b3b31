"""Functions that shorten texts for people and models, and that count things. This module does no IO."""

from __future__ import annotations

MAX_LINE_CHARS = 80


def truncate(text: str, max_chars: int, mark: str = "...") -> str:
    """Truncate a text to ``max_chars`` characters. A truncated text ends with ``mark``."""
    return text if len(text) <= max_chars else f"{text[: max_chars - len(mark)]}{mark}"


def shorten(text: str, max_chars: int = MAX_LINE_CHARS, mark: str = "...") -> str:
    """Put a text on one line and truncate it to ``max_chars`` characters."""
    return truncate(" ".join(text.split()), max_chars, mark)


def cut(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters of a text. If the text is longer, append a note with its full length,
    so that a model does not assume that the text is complete."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut here: the first {max_chars} of {len(text)} characters]"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 turn``, ``2 turns``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
