"""Tests of operators' regular expressions: a search ends on any text, and finds what `re` finds."""

from __future__ import annotations

import re

import pytest

from roundelay.agents import patterns
from roundelay.agents.patterns import BoundedPattern, PatternTimedOut, compile_pattern

ALMOST = "a" * 5000 + "!"
ENDLESS = [
    (r"(\w+\s?)*$", "ab " * 5000 + "!"),
    (r"(a+)+b", ALMOST),
    (r"^(([a-z])+.)+[A-Z]([a-z])+$", ALMOST),
    (r"(x+x+)+y", "x" * 20_000),
    (r"(.*?,){30}P", "1," * 20_000),
]


@pytest.mark.parametrize(("source", "text"), ENDLESS)
def test_a_search_that_would_not_end_is_stopped_and_names_its_pattern(
    source: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SEARCH_S", 0.05)
    with pytest.raises(PatternTimedOut, match="was stopped after") as caught:
        compile_pattern(source).search(text)
    assert repr(source) in str(caught.value)
    assert text not in str(caught.value)
    with pytest.raises(PatternTimedOut):
        compile_pattern(source).replace(text, "x")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"(?P<a>\d+) times (?P<b>\d+)", "what is 6 times 7?"),
        (r"(?i)STRASSE\b", "die strasse"),
        (r"(\w)\1(?=o)(?<!x)", "boot oo zoo ffo"),
        (r"^a.c$", "xx\nabc"),
        (r"(?m)^a.c$", "xx\nabc"),
        (r"[^\W\d_]+", "été 12"),
        (r"\bfoo\b|(bar)?", "a bar"),
    ],
)
def test_an_ordinary_search_finds_what_re_finds(source: str, text: str) -> None:
    ours, theirs = compile_pattern(source).search(text), re.search(source, text)
    assert (ours is None) is (theirs is None)
    if ours is not None and theirs is not None:
        assert (ours.span(), ours.groups(), ours.groupdict()) == (theirs.span(), theirs.groups(), theirs.groupdict())
    assert compile_pattern(source).replace(text, r"\1") == re.sub(source, lambda _: r"\1", text)


def test_flags_of_a_compiled_pattern_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert BoundedPattern.of(re.compile("^B.$", re.I | re.M | re.S)).search("a\nb\n") is not None
    assert BoundedPattern.of(re.compile(r"é\w", re.ASCII)).search("éé") is None
    assert capsys.readouterr().out == "", "a flag of one package means another thing to the other"


def test_a_wrong_pattern_is_refused_as_re_refuses_it() -> None:
    with pytest.raises(re.error, match="unterminated"):
        compile_pattern("(a")
