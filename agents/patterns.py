"""Regular expressions of operators that run on strangers' texts: each search ends after a while.

Python's `re` may search without end, for example with ``(a+)+$`` in a text that almost matches, and it holds Python's
lock meanwhile: the agent would be gone. The package `regex` reads the same patterns and has a time limit. Rejected:
engines without backtracking, which know neither lookarounds nor backreferences, and a process for each search, which
costs more than most searches.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import regex

from roundelay.network.errors import RoundelayError

SEARCH_S = 0.5
"""Time limit of one search, in seconds; an ordinary one takes microseconds. The engine checks the clock now and then:
in a long text a search may take two seconds more."""

_FLAGS = {re.ASCII: regex.ASCII, re.I: regex.I, re.M: regex.M, re.S: regex.S, re.X: regex.X}


class PatternTimedOut(RoundelayError):
    """A search took too long and was stopped. ``source`` is its pattern."""

    code = "pattern"

    def __init__(self, source: str, chars: int) -> None:
        super().__init__(
            f"The regular expression {source!r} was stopped after {SEARCH_S:g} s in a text of {chars:,} characters. "
            "Write it without a repetition inside of a repetition, such as (a+)+."
        )
        self.source = source


class BoundedPattern:
    """A regular expression with a time limit; ``flags`` are those of `re`. Raises `re.error` for a wrong one."""

    def __init__(self, source: str, flags: int = 0) -> None:
        self.source = source
        self.flags = re.compile(source, flags).flags  # raises the error that people know
        # The two packages number some flags differently: re.DEBUG is regex.ASCII.
        mapped = sum(int(ours) for theirs, ours in _FLAGS.items() if flags & theirs)
        try:
            self._compiled: Any = regex.compile(source, mapped)
        except regex.error as error:
            raise re.error(str(error), source) from error

    @classmethod
    def of(cls, pattern: re.Pattern[str]) -> BoundedPattern:
        """Return the same expression as one that `re` has compiled."""
        return cls(pattern.pattern, pattern.flags)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the first match. Raises `PatternTimedOut`."""
        try:
            match: re.Match[str] | None = self._compiled.search(text, timeout=SEARCH_S)
        except TimeoutError:
            raise PatternTimedOut(self.source, len(text)) from None
        return match

    def replace(self, text: str, replacement: str) -> str:
        """Replace all matches by a literal text. Raises `PatternTimedOut`."""
        try:
            replaced: str = self._compiled.sub(lambda _: replacement, text, timeout=SEARCH_S)
        except TimeoutError:
            raise PatternTimedOut(self.source, len(text)) from None
        return replaced


@lru_cache(maxsize=1024)
def compile_pattern(source: str) -> BoundedPattern:
    """Return the pattern; compiled once. Raises `re.error`."""
    return BoundedPattern(source)
