"""What is done to text on its way to a model, the ledger or a reader. Pure."""

from __future__ import annotations

import re

# What is removed: the control characters but newline and tab (no XML parser takes most of them, and terminals obey
# them), lone surrogates and noncharacters, and what steers a reader without being seen: bidi overrides and isolates,
# zero-width space and joiners of words, invisible operators, interlinear annotation, tags and the supplementary
# variation selectors (both used to smuggle text). Kept, because languages and emoji are written with them: ZWNJ, ZWJ,
# LRM, RLM, ALM, variation selectors 1-16.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff"
    "\U000e0000-\U000e0fff"
    + "".join(chr(plane * 0x10000 + low) for plane in range(1, 17) for low in (0xFFFE, 0xFFFF))
    + "]"
)
_LINE_ENDS = re.compile("\r\n|[\r\x85\u2028\u2029]")
# Whatever the two above touch lies outside of this: one quick look spares nearly every text the replacing.
_ORDINARY = re.compile(
    "[\t\n\x20-\x7e\xa0-\u200a\u200c-\u2027\u202f-\u205f\u2070-\ud7ff\ue000-\ufefe\uff00-\ufff8\U00010000-\U0001fffd]*"
)


def strip_unseen(text: str) -> str:
    """Remove the control and format characters that a reader does not see; every kind of line end becomes a newline."""
    if _ORDINARY.fullmatch(text):
        return text
    return _UNSEEN.sub("", _LINE_ENDS.sub("\n", text))


def escape_text(text: str) -> str:
    """Give a text as it may stand between tags: without what a reader does not see. Quotes stay as they are."""
    return strip_unseen(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def replace_surrogates(text: str) -> str:
    """Join halves of characters, which JSON escapes bring apart where a text comes in pieces, and replace a half that
    stays alone by a question mark: no frame may hold one."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "replace").decode("utf-8")


def take_fence_away(text: str) -> str:
    """Give a text without the fence that models like to put around JSON, if there is one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = re.sub(r"\A[a-zA-Z0-9]*\n", "", text[3:-3])
        text = text.removeprefix("json")
    return text


def cut(text: str, max_chars: int) -> str:
    """Shorten a text that is longer, and say so."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut here: the first {max_chars} of {len(text)} characters]"
