"""Removal of invisible characters from text for prompts, gateways to other protocols and terminals.

These characters count as invisible: Unicode's `Default_Ignorable_Code_Point` (DerivedCoreProperties), controls,
noncharacters, lone surrogates and interlinear annotation. Attackers have used each kind to show a model text that
people do not see.

Ordinary writing needs some invisible characters, which are kept. Zero-width joiners stay between letters of scripts
that join letters (Persian, Hindi), and between emoji (families). One variation selector stays after each character that
has variants. This module does no IO.

References: https://www.unicode.org/reports/tr44/#Default_Ignorable_Code_Point, https://www.unicode.org/reports/tr36/
"""

from __future__ import annotations

import re
from collections.abc import Callable

_IGNORABLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff"
    "\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_NO_CHARACTERS = "\ufdd0-\ufdef" + "".join(
    chr(plane * 0x10000 + low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
)
_INVISIBLE = f"{_IGNORABLE}{_NO_CHARACTERS}\ufff9-\ufffb\ud800-\udfff"
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"

# Letters and marks of scripts in which a joiner changes how its neighbors are written.
# https://www.unicode.org/versions/latest/core-spec/chapter-23/ ("Cursive Connection")
_JOINING = (
    "\u0620-\u065f\u066e-\u06ff\u0700-\u07ff\u0840-\u08ff\u0900-\u0dff\u1000-\u109f\u1780-\u17b3\u17b6-\u17dd\u1807"
    "\u1810-\u18aa\ua840-\ua877\ua8e0-\ua9df\ufb50-\ufdcf\ufdf0-\ufdff\ufe70-\ufefc\U00010a00-\U00010fff"
    "\U00011000-\U00011fff\U0001e900-\U0001e95f"
)
_EMOJI = (
    "\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u2460-\u24ff\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff\u3030"
    "\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_SPACES = "\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_KEPT = (
    f"(?<=[{_JOINING}])(?:\u200c(?=[{_JOINING}])|\u200d)"
    f"|(?:(?<=[{_EMOJI}])|(?<=[{_EMOJI}]\ufe0f))\u200d(?=[{_EMOJI}])"
    f"|(?<=[0-9#*])[\ufe0e\ufe0f]|(?<=[^\x00-\x9f{_SPACES}{_INVISIBLE}])[\ufe00-\ufe0f]"
    "|(?<=[\u1820-\u18aa])[\u180b-\u180d\u180f]"
)

_LINE_ENDS = re.compile("\r\n|[\r\x85\u2028\u2029]")
_REMOVED = re.compile(f"({_KEPT})|[{_CONTROLS}{_INVISIBLE}]")
_ORDINARY = re.compile(f"[^{_CONTROLS}{_INVISIBLE}\u2028\u2029]*")


def _is_ordinary(text: str) -> bool:
    """Return whether a text has no invisible character, and no line end except newlines. Nearly every text is ordinary,
    and this test is much faster than the substitutions."""
    # Of the ASCII characters, exactly the controls are not printable. For a message of 280 characters, this test takes
    # a tenth of the pattern's time. The pattern decides about tabs and all other characters.
    if text.isascii() and text.replace("\n", "").isprintable():
        return True
    return _ORDINARY.fullmatch(text) is not None


def sanitize_text(text: str) -> str:
    """Remove invisible and control characters from a text, and convert every kind of line end to a newline."""
    if _is_ordinary(text):
        return text
    return _REMOVED.sub(lambda match: match[1] or "", _LINE_ENDS.sub("\n", text))


def escape_invisible(text: str, escape: Callable[[str], str]) -> str:
    """Replace each character that `sanitize_text` would remove or change with ``escape(character)``."""
    if _is_ordinary(text):
        return text
    return _ESCAPED.sub(lambda match: match[1] or escape(match[0]), text)


_ESCAPED = re.compile(f"({_KEPT})|[{_CONTROLS}{_INVISIBLE}\u2028\u2029]")
