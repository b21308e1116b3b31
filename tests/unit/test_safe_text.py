"""Tests of network/safe_text.py for every code point of Unicode: invisible characters are removed, and joiners stay
where they join.
"""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.display.text import sanitize
from roundelay.interop.rendering import plain, visible
from roundelay.network.elements import escape_text
from roundelay.network.safe_text import sanitize_text

# https://www.unicode.org/Public/16.0.0/ucd/DerivedCoreProperties.txt, Default_Ignorable_Code_Point
IGNORABLE = (
    "00AD 034F 061C 115F..1160 17B4..17B5 180B..180D 180E 180F 200B..200F 202A..202E 2060..206F 3164 FE00..FE0F FEFF FFA0 "
    "FFF0..FFF8 1BCA0..1BCA3 1D173..1D17A E0000..E0FFF"
)
CODES = [
    code
    for first, _, last in (it.partition("..") for it in IGNORABLE.split())
    for code in range(int(first, 16), int(last or first, 16) + 1)
]


@pytest.mark.parametrize("around", [("a", "b"), ("", ""), (" ", " "), ("\n", "x"), ("\u200b", "\u200b")])
def test_no_invisible_character_stays_by_itself(around: tuple[str, str]) -> None:
    others = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs")]
    signs = {
        *range(0x600, 0x606),
        0x6DD,
        0x70F,
        0x890,
        0x891,
        0x8E2,
        0x110BD,
        0x110CD,
        *range(0x13430, 0x13440),
    }  # drawn
    kept = [
        hex(code)
        for code in {*CODES, *others} - signs
        if chr(code) not in "\t\n"
        and chr(code) in sanitize_text(f"{around[0]}{chr(code)}{around[1]}").replace("\r", "\n")
    ]
    assert kept == []


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("می\u200c\u200c\u200cخواهم", "میخواهم"),
        ("x\u200cy\u200dz", "xyz"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("👩\u200d", "👩"),
        ("\u200d🚀", "🚀"),
        (" \ufe0f\u200d🚀", " 🚀"),
        ("❤\ufe0f\u200d🔥", "❤\ufe0f\u200d🔥"),
        ("👨\u200d👩\u200d👧\u200d👦", "👨\u200d👩\u200d👧\u200d👦"),
        ("👩🏽\u200d❤\ufe0f\u200d💋\u200d👨🏿", "👩🏽\u200d❤\ufe0f\u200d💋\u200d👨🏿"),
        ("👩\u200d\u200d👧", "👩👧"),
        ("نمی\u200cدانم، خانه\u200cها", "نمی\u200cدانم، خانه\u200cها"),
        ("1\ufe0f\u20e3", "1\ufe0f\u20e3"),
        ("a\ufe0fb\ufe01c", "abc"),
        ("😀\ufe0f\ufe01\ufe02", "😀\ufe0f"),
        ("क्\u200dष", "क्\u200dष"),
        ("ab\ufff9c\ufffad\ufffb", "abcd"),
        ("a\ud800b", "ab"),
        ("a\r\nb\u2028c", "a\nb\nc"),
    ],
)
def test_what_joins_stays_and_what_hides_goes(text: str, left: str) -> None:
    assert sanitize_text(text) == plain(text) == escape_text(text) == left


@given(st.text(st.characters() | st.sampled_from("\u200c\u200d\ufe0f👩🚀کمق\u115f\u3164\U000e0041")))
def test_what_is_left_has_nothing_more_to_remove_and_can_be_sent(text: str) -> None:
    left = sanitize_text(text)
    assert sanitize_text(left) == left
    assert left.encode().decode() == left
    assert "\n" not in visible(text)
    assert sanitize_text(sanitize(text)) == sanitize(text)
