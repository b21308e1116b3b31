"""Text that may be shown on a terminal: what could drive it is written out, and it is measured and broken in columns. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

TAB = "    "

# What a reader does not see, or sees elsewhere than it stands: bidi marks, overrides and isolates, zero-width and blank fillers,
# invisible operators, annotation, tags, supplementary variation selectors, noncharacters. All that prompts leave out (agents/text.py),
# and more: a person copies what is shown. Kept, because languages and emoji are written with them: ZWNJ, ZWJ, variation selectors 1-16.
# https://www.unicode.org/reports/tr9/#Directional_Formatting_Codes, https://www.unicode.org/reports/tr36/
_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufdd0-\ufdef\ufeff\uffa0"
    "\ufff0-\ufffb\ufffe\uffff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    + "".join(chr(plane * 0x10000 + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_HIGH_CONTROLS = re.compile("[\x7f-\x9f]")
_ESCAPED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


def clean(text: str) -> str:
    """Give the text on one line, what could drive a terminal or mislead its reader written out: ``\\x1b``, ``\\u202e``."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(char) for char in text)


def clean_json(text: str) -> str:
    """Give JSON as the same JSON, without what could drive a terminal: it leaves the controls above ASCII as they are."""
    return _HIGH_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def clean_lines(text: str) -> list[str]:
    """Give the lines of a text, each `clean`; tabs become spaces."""
    return [clean(line) for line in text.replace("\r\n", "\n").replace("\t", TAB).split("\n")]


def break_lines(lines: Sequence[str], width: int, *, first_width: int | None = None) -> list[str]:
    """Break clean lines into pieces that fit into ``width`` columns, the first one into ``first_width``."""
    first = width if first_width is None else first_width
    return [
        piece for number, line in enumerate(lines) for piece in _break_line(line, width if number else first, width)
    ]


def fit(text: str, width: int) -> str:
    """Give as much of a clean text as ``width`` columns hold, with a sign if that is not all."""
    if display_width(text) <= width:
        return text
    return f"{text[: _find_end(text, 0, width - 1)]}…" if width > 1 else ""


def display_width(text: str) -> int:
    """How many columns a clean text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def _escape(char: str) -> str:
    if unicodedata.category(char) not in _ESCAPED_CATEGORIES and not _UNSEEN.match(char):
        return char
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
    """The index up to which a line fits into ``room`` columns, but at least one character."""
    taken, end = 0, start
    while end < len(line):
        taken += _char_width(line[end])
        if taken > room and end > start:
            break
        end += 1
    return end


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in ("W", "F") else 1
