"""Regular expressions that operators write and that run on strangers' texts. Every search ends within a time limit.

Python's `re` may search forever, for example with ``(a+)+$`` in a text that almost matches. `re` holds the GIL during
the search, so the whole agent would hang. The package `regex` reads the same patterns and has a time limit. Two
alternatives were rejected. Engines without backtracking support neither lookarounds nor backreferences, and one process
per search costs more than most searches.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import regex

from roundelay.network.errors import RoundelayError

SEARCH_S = 0.5
"""Time limit of one search, in seconds. An ordinary search takes microseconds. The engine checks the clock only at
intervals, so a search in a long text may take up to two seconds more.
"""

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
    """Regular expression with a time limit. ``flags`` are flags of the module `re`. Raises `re.error` for an invalid
    expression.
    """

    def __init__(self, source: str, flags: int = 0) -> None:
        self.source = source
        self.flags = re.compile(source, flags).flags  # raises `re.error`, which callers expect
        # The two packages number some flags differently: re.DEBUG is regex.ASCII.
        mapped = sum(int(ours) for theirs, ours in _FLAGS.items() if flags & theirs)
        try:
            self._compiled: Any = regex.compile(source, mapped)
        except regex.error as error:
            raise re.error(str(error), source) from error

    @classmethod
    def of(cls, pattern: re.Pattern[str]) -> BoundedPattern:
        """Return the bounded version of an expression that `re` has compiled."""
        return cls(pattern.pattern, pattern.flags)

    def search(self, text: str) -> re.Match[str] | None:
        """Return the first match. Raises `PatternTimedOut`."""
        try:
            match: re.Match[str] | None = self._compiled.search(text, timeout=SEARCH_S)
        except TimeoutError:
            raise PatternTimedOut(self.source, len(text)) from None
        return match

    def replace(self, text: str, replacement: str) -> str:
        """Replace all matches with a literal text. Raises `PatternTimedOut`."""
        try:
            replaced: str = self._compiled.sub(lambda _: replacement, text, timeout=SEARCH_S)
        except TimeoutError:
            raise PatternTimedOut(self.source, len(text)) from None
        return replaced


@lru_cache(maxsize=1024)
def compile_pattern(source: str) -> BoundedPattern:
    """Compile a pattern with a time limit. The result is cached for each source. Raises `re.error`."""
    return BoundedPattern(source)
