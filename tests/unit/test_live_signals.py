"""Tests of `chat` with signals from hostile, loud or careless agents: the lines on the terminal, and the list of
working agents.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from roundelay.display.screen import PLAIN
from roundelay.display.text import display_width
from roundelay.live_activity import LiveActivity
from roundelay.network.client import Signal
from roundelay.network.messages import BaseMessage, DirectMessage
from roundelay.terminal.activity_lines import describe_active, describe_news, draw_growing_texts

WIDE = "界" * 400
ZALGO = "a\u0301\u0302" * 400
ESCAPES = "\x1b[2J\x1b]0;pwned\x07\r\n\u202e\u200b" * 40
EMOJI = "👩\u200d👩\u200d👧 " * 200


def delta(text: str, at: int = 0, *, by: str = "bob", reaction: str = "r", **more: Any) -> Signal:
    piece = {"index": 1, "turn": 1, "kind": "text", "at": at, "text": text, **more}
    return Signal(by, "t", "delta", {"reaction": reaction, "pieces": [piece]})


def call(*, by: str = "bob", reaction: str = "r", active: Any = True, **more: Any) -> Signal:
    body = {"reaction": reaction, "tool": "dig", "turn": 1, "call": 0, "active": active, **more}
    return Signal(by, "t", "tool", body)


def thinks(active: bool, *, by: str = "bob", reaction: str = "r") -> Signal:
    return Signal(by, "t", "thinking", {"reaction": reaction, "active": active})


def say(
    seq: int, by: str, text: str, reply_to: int, *, thread_id: str = "direct:bob~mia", **metadata: Any
) -> BaseMessage:
    place = {"kind": "direct", "to": "agent:bob", "thread_id": thread_id, "reply_to": reply_to}
    who = {"sender_id": by, "sender_kind": "human" if by == "mia" else "agent", "metadata": metadata or None}
    facts = {"seq": seq, "message_id": f"m{seq}", "root": seq, "hops": 0, "sent_at": 1, "content": text}
    return DirectMessage.model_validate({**place, **who, **facts})


def shown(under_way: LiveActivity, width: int = 100, rows: int = 8) -> list[str]:
    return draw_growing_texts(under_way, "t", width=width, rows=rows, paint=PLAIN)


def told(under_way: LiveActivity, signal: Signal) -> list[str]:
    """Return the text that a reader without a screen gets for a signal."""
    return [describe_news(it) for it in under_way.handle_event(signal)]


def test_an_agent_that_begins_everything_hides_nobody_else() -> None:
    under_way = LiveActivity()
    for number in range(100):
        under_way.handle_event(delta("noise", by="eve", reaction=f"e{number}"))
    under_way.handle_event(delta("The sea "))
    for number in range(100, 200):
        under_way.handle_event(delta("noise", by="eve", reaction=f"e{number}"))
    under_way.handle_event(delta("is salt.", at=8))
    assert "bob … The sea is salt." in shown(under_way, rows=1000)


def test_a_decision_that_did_not_fit_leaves_the_request_waiting_whichever_is_known_first() -> None:
    """Only the agent that asked can reject the decision."""

    for refused_first in (True, False):
        under_way = LiveActivity()
        under_way.handle_message(say(5, "bob", "May I?", 4, approval={"reaction": "r", "tool": "pay"}))
        edit, refusal = say(6, "mia", "/edit {}", 5), say(7, "bob", "It does not fit.", 6, still_waits=5)
        for message in (refusal, edit) if refused_first else (edit, refusal):
            under_way.handle_message(message)
        assert describe_active(under_way) == "bob waits for your decision"
        under_way.handle_message(say(8, "mia", "/approve", 5))
        under_way.handle_message(say(9, "eve", "It waits.", 8, still_waits=5))
        assert describe_active(under_way) == ""


def test_what_comes_of_a_text_after_its_message_is_too_late() -> None:
    under_way = LiveActivity()
    under_way.handle_event(delta("It co"))
    under_way.handle_message(say(5, "bob", "It costs 5.", 4, thread_id="t"))
    under_way.handle_event(delta("sts 5.", at=5))
    assert shown(under_way) == []
    under_way.handle_event(delta("And", turn=2))
    assert shown(under_way) == ["bob … And"]


def test_nobody_ends_what_another_one_writes() -> None:
    under_way = LiveActivity()
    for signal in (thinks(True), call(), delta("The sea "), thinks(False, by="eve"), call(by="eve", active=False)):
        under_way.handle_event(signal)
    under_way.handle_event(delta("is salt.", at=8))
    assert shown(under_way) == ["bob … The sea is salt."]
    assert describe_active(under_way) == "bob uses dig"


def test_the_end_of_one_reaction_leaves_the_calls_of_another() -> None:
    under_way = LiveActivity()
    for signal in (
        thinks(True, reaction="a"),
        thinks(True, reaction="b"),
        call(reaction="a"),
        thinks(False, reaction="b"),
    ):
        under_way.handle_event(signal)
    assert describe_active(under_way) == "bob uses dig"
    under_way.handle_event(thinks(False, reaction="a"))
    assert describe_active(under_way) == ""


@pytest.mark.parametrize("width", [19, 30, 60, 99])
@pytest.mark.parametrize(
    "text", [WIDE, ZALGO, ESCAPES, EMOJI, "word " * 300], ids=["wide", "zalgo", "escapes", "emoji", "words"]
)
def test_no_line_is_wider_than_the_terminal_whatever_stands_in_it(width: int, text: str) -> None:
    """The terminal would wrap a wider line, and the program could not redraw it."""
    names = [text[:64], "researcher-2"]
    for kind in ("text", "reasoning", "tool", "progress"):
        for by in ("bob", "a" * 64):
            under_way = LiveActivity()
            under_way.handle_event(call(by=by, asked=names, tool=text))
            for path in ("", "1.0", "1.0.1"):
                under_way.handle_event(delta(text, by=by, kind=kind, path=path, call=2, tool=text))
            lines = shown(under_way, width)
            assert len(lines) >= 3
            assert max(map(display_width, lines)) <= width
            assert not any(char in line for line in lines for char in "\x1b\r\n\u202e")


def test_a_narrow_terminal_shows_who_is_innermost_and_the_end_of_what_it_writes() -> None:
    under_way = LiveActivity()
    under_way.handle_event(call(by="guide", asked=["supervisor-of-everything"]))
    under_way.handle_event(call(by="guide", asked=["researcher-2"], path="1.0"))
    under_way.handle_event(delta("one two three four five six", by="guide", path="1.0/1.0"))
    [line] = shown(under_way, width=40)
    assert line.startswith("…")
    assert line.endswith("researcher-2 · writes: …four five six")


@pytest.mark.parametrize(
    "place",
    [
        {"turn": 10**400}, {"call": 10**400}, {"turn": -1}, {"turn": "1"}, {"path": "../1"}, {"path": ["1.0"]},
        {"path": "/".join(["1.0"] * 999)},
    ],
)  # fmt: skip
def test_what_is_at_no_place_is_passed_over(place: dict[str, Any]) -> None:
    under_way = LiveActivity()
    for signal in (thinks(True), call(**place), delta("x", **place), call(**place, active=False)):
        assert under_way.handle_event(signal) == []
    assert shown(under_way) == []
    assert describe_active(under_way) == "bob: Thinking…"


def test_what_is_kept_of_signals_is_bounded() -> None:
    under_way = LiveActivity()
    tracemalloc.start()
    for number in range(2000):
        reaction = f"{number}" * 20_000
        for signal in (
            thinks(True, reaction=reaction), call(reaction=reaction), delta("x", reaction=reaction), thinks(False, reaction=reaction),
            call(turn=number, tool="t" * 50_000, asked=["a" * 50_000] * 3), call(path="1" * 50_000),
            delta("y" * 50_000, turn=number, kind="progress"), delta("z" * 50_000, turn=number, tool="t" * 50_000),
        ):  # fmt: skip
            under_way.handle_event(signal)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2_000_000


def test_a_reader_without_a_screen_is_told_who_uses_what_and_waits_for_whom() -> None:
    under_way = LiveActivity()
    said = [
        told(under_way, it)
        for it in (
            call(tool="hand_over"), call(tool="hand_over", asked=["ann"]), call(tool="researcher", path="1.0"),
            call(tool="researcher", path="1.0", asked=["researcher"]), call(tool="search\x1b[2J", path="1.0/1.0"),
            delta("reading", kind="progress", path="1.0/1.0", call=0), call(path="1.0/1.0", active=False),
        )
    ]  # fmt: skip
    assert said == [
        ["bob uses hand_over"],
        ["bob waits for ann"],
        ["bob › ann uses researcher"],
        [],
        ["bob › ann › researcher uses search\\x1b[2J"],
        ["bob › ann › researcher: reading"],
        [],
    ]


def test_one_signal_cannot_fill_the_screen_of_a_reader() -> None:
    piece = {"index": 1, "turn": 1, "kind": "progress", "at": 0, "text": "x" * 900}
    said = told(LiveActivity(), Signal("bob", "t", "delta", {"reaction": "r", "pieces": [piece] * 3000}))
    assert len(said) == 64
    assert max(map(len, said)) < 600


def test_an_agent_that_numbers_no_calls_has_one_at_a_time() -> None:
    """Programs in other languages may omit the number of the call."""
    under_way = LiveActivity()
    body = {"reaction": "r", "tool": "dig", "active": True}
    for signal in (thinks(True), Signal("bob", "t", "tool", body)):
        news = told(under_way, signal)
    assert news == ["bob uses dig"]
    assert describe_active(under_way) == "bob uses dig"
    under_way.handle_event(Signal("bob", "t", "tool", body | {"active": False}))
    assert describe_active(under_way) == "bob: Thinking…"


def test_only_the_agent_that_asks_says_that_its_request_was_decided_elsewhere() -> None:
    """Otherwise another agent could remove a request from every screen, and its approvers would never see it."""
    under_way = LiveActivity("mia")
    under_way.handle_message(say(5, "bob", "May I?", 4, approval={"reaction": "r", "tool": "pay", "arguments": "{}"}))
    decided = {"request": 5, "is_approved": True, "by": ["mia"], "seq": 6, "at": 1}
    under_way.handle_message(say(7, "eve", "mia approved it.", 5, decided=decided))
    assert [it.seq for it in under_way.list_own_requests()] == [5]
    under_way.handle_message(say(8, "bob", "mia approved it.", 5, decided=decided))
    assert under_way.list_own_requests() == []
