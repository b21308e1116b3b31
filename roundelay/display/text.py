"""Sanitize text for a terminal, measure its width in columns, and break it into lines. This module performs no IO.

All text of participants must pass through `sanitize` or a variant before it is shown. Otherwise the text could control
the terminal with escape sequences, or mislead the reader with invisible characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache

from roundelay.network.safe_text import escape_invisible

TAB = "    "

# The blank braille pattern is invisible but copied with the text. Prompts keep this character, because braille text
# needs it.
_BLANK = "\u2800"


def sanitize(text: str) -> str:
    """Return the text on one line, with control and invisible characters written as escapes: ``\\x1b``, ``\\u202e``."""
    # Return early for nearly all texts, which have no special characters.
    if text.isascii() and text.isprintable():
        return text
    shown = escape_invisible(text, _escape)
    return shown.replace("\t", "\\x09").replace("\n", "\\x0a").replace(_BLANK, "\\u2800")


def sanitize_json(text: str) -> str:
    """Return equivalent JSON with control and invisible characters escaped.

    JSON itself does not require escapes for invisible characters above ASCII.
    """
    # JSON escapes all ASCII control characters except DEL (0x7f), so other ASCII text needs no change.
    if text.isascii() and "\x7f" not in text:
        return text
    return escape_invisible(text, _escape_in_json).replace(_BLANK, "\\u2800")


def _escape_in_json(char: str) -> str:
    if char < " ":  # white space between values, because JSON has already escaped these characters inside strings
        return char
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    # A JSON escape has only four digits, so a larger code point needs a surrogate pair.
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def sanitize_lines(text: str) -> list[str]:
    """Return the lines of a text, each sanitized. Tabs become spaces."""
    # A Windows line end ends a line. `sanitize` escapes a lone carriage return, which could overwrite the line.
    return [sanitize(line) for line in text.replace("\r\n", "\n").replace("\t", TAB).split("\n")]


def break_lines(lines: Sequence[str], width: int, *, first_width: int | None = None) -> list[str]:
    """Break sanitized lines into pieces of at most ``width`` columns. The first piece has at most ``first_width``
    columns.
    """
    first = width if first_width is None else first_width
    return [
        piece for number, line in enumerate(lines) for piece in _break_line(line, width if number else first, width)
    ]


def fit_start(text: str, width: int) -> str:
    """Cut a sanitized text to ``width`` columns, with an ellipsis at the end if it was longer."""
    if display_width(text) <= width:
        return text
    return f"{text[: _find_end(text, 0, width - 1)]}…" if width > 1 else ""


def fit_end(text: str, width: int) -> str:
    """Return the end of a sanitized text in ``width`` columns, after an ellipsis if the text was longer.

    The result starts at a word boundary if its first half contains one.
    """
    if display_width(text) <= width:
        return text
    start, room = len(text), width - 1
    # Cut only between whole characters: half of an emoji would be drawn as another emoji.
    for character in reversed(list(split_characters(text))):
        room -= display_width(character)
        if room < 0:
            break
        start -= len(character)
    space = text.find(" ", start)
    return f"…{text[space + 1 if start <= space < (start + len(text)) // 2 else start :]}"


def display_width(text: str) -> int:
    """Return the width of a sanitized text in columns."""
    if text.isascii():
        return len(text)
    return sum(map(_count_columns, split_characters(text)))


def split_characters(text: str, start: int = 0) -> Iterable[str]:
    """Yield grapheme clusters: a letter with its combining marks, or an emoji of several code points."""
    from wcwidth import iter_graphemes  # import only for non-ASCII text, because the import takes time

    return iter_graphemes(text, start)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _break_line(line: str, first_width: int, width: int) -> list[str]:
    """Break a sanitized line into pieces that fit. Break after a space if possible."""
    pieces, start, room = [], 0, first_width
    while (end := _find_end(line, start, room)) < len(line):
        space = line.rfind(" ", start + 1, end)
        cut = space + 1 if space >= 0 else end
        pieces.append(line[start:cut].rstrip())
        start, room = cut, width
    return [*pieces, line[start:]]


def _find_end(line: str, start: int, room: int) -> int:
    """Return the index up to which a line fits into ``room`` columns. The part has at least one code point."""
    if line.isascii():
        return min(start + max(room, 1), len(line))
    end, left = start, room
    for character in split_characters(line, start):
        left -= _count_columns(character)
        if left < 0:
            break
        end += len(character)
    if end == start:  # one character can be wider than any line, because joiners can combine a thousand emoji
        while end < len(line) and (room := room - _count_columns(line[end])) >= 0:
            end += 1
    # Advance by at least one code point, or the caller's loop would never end.
    return max(end, start + 1)


def _count_columns(character: str) -> int:
    """Return the maximum number of columns that a character may take.

    Terminals disagree on whether joined code points are one picture. If the number is too high, a line is only shorter
    than necessary. If the number is too low, the terminal would break the line, and a message could forge a line.
    """
    if len(character) == 1:
        return _code_point_columns(character)
    from wcwidth import wcswidth

    return max(wcswidth(character), sum(map(_code_point_columns, character)))


@lru_cache(maxsize=4096)
def _code_point_columns(char: str) -> int:
    from wcwidth import wcwidth

    return max(wcwidth(char), 0)


def format_day(at: object) -> str:
    """Return a time in ms as local date and time. Third-party mods may return a value that is not a time; return such a
    value as text.
    """
    try:
        return f"{datetime.fromtimestamp(float(at) / 1000, UTC).astimezone():%Y-%m-%d %H:%M}"  # type: ignore[arg-type]
    except (ValueError, OverflowError, OSError, TypeError):
        return sanitize(str(at))
