"""Separates reasoning between tags such as ``<think>`` from the text of a reply. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN_TAG = re.compile(r"\s*<(think|thinking|thought)>")
ANY_OPEN = re.compile(r"<(think|thinking|thought)>")
LONE_CLOSE = re.compile(r"</(think|thinking|thought)>[ \t]*(?:\r?\n|\Z)")
_MAYBE_OPEN = re.compile(r"\s*(<(t(h(i(n(k(i(n(g)?)?)?)?)?|o(u(g(h(t)?)?)?)?)?)?)?)?")
"""Pattern of an incomplete opening tag at the beginning of a reply, whose rest may still arrive."""


@dataclass(slots=True)
class ThinkTags:
    """Separates reasoning from text in a reply that begins with ``<think>``.

    Servers that do not know the model's reasoning format send it inside the text
    (https://github.com/zed-industries/zed/pull/58042).
    """

    _held: str = ""  # text that is not yet classified
    _tag: str = ""  # expected closing tag
    _is_decided: bool = False

    def feed(self, piece: str) -> tuple[str, str]:
        """Process the next piece of a reply. Return the text and the reasoning that could be separated so far."""
        if self._is_decided or not piece:
            return piece, ""
        self._held += piece
        if not self._tag:
            # Search only at the beginning, because a later tag may be part of an answer about such tags.
            opening = _OPEN_TAG.match(self._held)
            if opening is None:
                is_open = _MAYBE_OPEN.fullmatch(self._held) is not None
                return ("", "") if is_open else (self._decide(), "")
            self._tag, self._held = f"</{opening[1]}>", self._held[opening.end() :]
        thought, closing, text = self._held.partition(self._tag)
        if closing:
            self._held = text.lstrip()
            # Drop white space after the tag. If no text follows, the next piece may begin with more white space.
            return (self._decide() if self._held else self._await_text()), thought
        kept = max(0, len(thought) - len(self._tag) + 1)  # the piece may end inside the closing tag
        self._held = thought[kept:]
        return "", thought[:kept]

    def _await_text(self) -> str:
        self._tag, self._is_decided = "", True
        return ""

    def _decide(self) -> str:
        text, self._held, self._is_decided = self._held, "", True
        return text

    def close(self) -> tuple[str, str]:
        """Return the remaining text and reasoning after the reply has ended."""
        held, self._held, self._is_decided = self._held, "", True
        return ("", held) if self._tag else (held, "")
