"""Text that may be shown on a terminal: what could drive it is written out, and it is measured and broken in columns.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from roundelay.network.safe_text import escape_invisible

TAB = "    "

# Blank, and copied by a person who copies what is shown; braille is written with it, so that prompts keep it.
_BLANK = "\u2800"


def sanitize(text: str) -> str:
    """Give the text on one line, what could drive a terminal or mislead its reader written out: ``\\x1b``,
    ``\\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    shown = escape_invisible(text, _escape)
    return shown.replace("\t", "\\x09").replace("\n", "\\x0a").replace(_BLANK, "\\u2800")


def sanitize_json(text: str) -> str:
    """Give JSON as the same JSON, what could drive a terminal or mislead its reader escaped: by itself JSON leaves
    all above ASCII as it is."""
    if text.isascii() and "\x7f" not in text:
        return text
    return escape_invisible(text, _escape_in_json).replace(_BLANK, "\\u2800")


def _escape_in_json(char: str) -> str:
    if char < " ":  # JSON has escaped what stands in texts; this is its own
        return char
    code = ord(char)
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def sanitize_lines(text: str) -> list[str]:
    """Give the lines of a text, each `clean`; tabs become spaces."""
    return [sanitize(line) for line in text.replace("\r\n", "\n").replace("\t", TAB).split("\n")]


def break_lines(lines: Sequence[str], width: int, *, first_width: int | None = None) -> list[str]:
    """Break clean lines into pieces that fit into ``width`` columns, the first one into ``first_width``."""
    first = width if first_width is None else first_width
    return [
        piece for number, line in enumerate(lines) for piece in _break_line(line, width if number else first, width)
    ]


def fit_start(text: str, width: int) -> str:
    """Give as much of a clean text as ``width`` columns hold, with a sign if that is not all."""
    if display_width(text) <= width:
        return text
    return f"{text[: _find_end(text, 0, width - 1)]}…" if width > 1 else ""


def fit_end(text: str, width: int) -> str:
    """Give as much of the end of a clean text as ``width`` columns hold, with a sign if that is not all; from the
    beginning of a word where there is one near."""
    if display_width(text) <= width:
        return text
    start, room = len(text), width - 1
    for character in reversed(list(split_characters(text))):
        room -= display_width(character)
        if room < 0:
            break
        start -= len(character)
    space = text.find(" ", start)
    return f"…{text[space + 1 if start <= space < (start + len(text)) // 2 else start :]}"


def display_width(text: str) -> int:
    """How many columns a clean text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_count_columns, split_characters(text)))


def split_characters(text: str, start: int = 0) -> Iterable[str]:
    """What a reader takes for one character, one after the other: a letter with its marks, an emoji of several code
    points."""
    from wcwidth import iter_graphemes  # only where there is more than ASCII: it costs time to import

    return iter_graphemes(text, start)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _break_line(line: str, first_width: int, width: int) -> list[str]:
    """Break a clean line into pieces that fit, after a space where there is one."""
    pieces, start, room = [], 0, first_width
    while (end := _find_end(line, start, room)) < len(line):
        space = line.rfind(" ", start + 1, end)
        cut = space + 1 if space >= 0 else end
        pieces.append(line[start:cut].rstrip())
        start, room = cut, width
    return [*pieces, line[start:]]


def _find_end(line: str, start: int, room: int) -> int:
    """The index up to which a line fits into ``room`` columns, but at least one code point."""
    if line.isascii():
        return min(start + max(room, 1), len(line))
    end, left = start, room
    for character in split_characters(line, start):
        left -= _count_columns(character)
        if left < 0:
            break
        end += len(character)
    if end == start:  # a character may be wider than any line: joiners make one of a thousand emoji
        while end < len(line) and (room := room - _count_columns(line[end])) >= 0:
            end += 1
    return max(end, start + 1)


def _count_columns(character: str) -> int:
    """How many columns a character takes at most: terminals disagree on whether they join code points into one picture.

    Too many only leave a line short. Too few would have the terminal break it, where a message could then begin a line.
    """
    if len(character) == 1:
        return _code_point_columns(character)
    from wcwidth import wcswidth

    return max(wcswidth(character), sum(map(_code_point_columns, character)))


@lru_cache(maxsize=4096)
def _code_point_columns(char: str) -> int:
    from wcwidth import wcwidth

    return max(wcwidth(char), 0)
