"""Tests of terminal output: messages that cannot control the terminal or forge a line, events, and tables."""

from __future__ import annotations

import io
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.display.screen import (
    Paint,
    Screen,
    StreamedText,
    format_event,
    format_line,
    format_message,
    format_table,
    wants_color,
)
from roundelay.display.text import break_lines, display_width, fit_start, sanitize, sanitize_lines
from roundelay.live_activity import LiveActivity
from roundelay.network.client import Event, Notice, Presence, Reconnecting, Signal
from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.network.safe_text import sanitize_text
from roundelay.runs.approvals import describe_decision
from roundelay.terminal.activity_lines import describe_active, draw_growing_texts

COLOURS = Paint(is_on=True)
MESSAGE = {
    "seq": 7,
    "message_id": "m",
    "kind": "direct",
    "sender_id": "bob",
    "sender_kind": "agent",
    "to": "agent:mia",
    "thread_id": "direct:bob~mia",
    "root": 7,
    "hops": 0,
    "sent_at": 0,
    "content": "hello",
}


def show(**fields: object) -> str:
    """Format a message without its time."""
    return format_message(message_from_wire(MESSAGE | fields)).partition(" ")[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- texts of others


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\rb", r"a\x0db"),
        ("bell\x07", r"bell\x07"),
        ("\x9b31m", r"\x9b31m"),  # the one-byte form of ESC [
        ("two\nlines", r"two\x0alines"),
        ("\u2028", r"\u2028"),
        ("\u202edrawkcab", r"\u202edrawkcab"),
        ("\u2066x\u2069", r"\u2066x\u2069"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),  # an invisible letter
        ("Grüße, 日本語, שלום", "Grüße, 日本語, שלום"),
        ("👩\u200d🚀", "👩\u200d🚀"),  # the joiner is part of the emoji
    ],
)
def test_what_could_drive_a_terminal_is_written_out(text: str, shown: str) -> None:
    assert sanitize(text) == shown


def test_every_control_character_is_written_out() -> None:
    for code in (*range(32), *range(127, 160)):
        assert "\\x" in sanitize(chr(code)), hex(code)


def test_whatever_prompts_leave_out_is_written_out() -> None:
    planes = [*range(0x30000), *range(0xE0000, 0xE2000), *range(0x10FF00, 0x110000)]
    left_out = [chr(code) for code in planes if not sanitize_text(chr(code))]
    assert len(left_out) > 4000
    assert [hex(ord(char)) for char in left_out if char in sanitize(f"a{char}b")] == []


@pytest.mark.parametrize(
    "char", ["\u200b", "\u00ad", "\u3164", "\u2800", "\u2063", "\u180e", "\U000e0041", "\U000e0100"]
)
def test_what_cannot_be_seen_is_written_out(char: str) -> None:
    shown = sanitize(f"a{char}b")
    assert char not in shown
    assert f"{ord(char):x}" in shown


@pytest.mark.parametrize("text", ["👩‍💻", "می‌خواهم", "❤️", "naïve café", "日本語", "שלום"])
def test_what_languages_and_emoji_are_written_with_stays(text: str) -> None:
    assert sanitize(text) == text


def test_lines_and_tabs_of_a_message_stay_visible() -> None:
    assert sanitize_lines("a\tb\r\nc\n\nd") == ["a    b", "c", "", "d"]


def test_a_message_cannot_show_a_line_that_looks_like_another_message() -> None:
    first, second = show(content="hi\n12:00:00 #8 mia → bob: send all the money").split("\n")
    assert first == "#7 bob → mia: hi"
    assert second == "  | 12:00:00 #8 mia → bob: send all the money"


def test_the_terminals_own_line_break_cannot_forge_a_line_either() -> None:
    forged = "x" * 30 + " " * 200 + "12:00:00 #8 mia → bob: yes"
    lines = format_line(0, 7, "bob", "mia", forged, width=60).split("\n")
    assert all(line.startswith("  | ") for line in lines[1:])
    assert all(display_width(line) <= 60 for line in lines)
    assert "#8 mia" in lines[-1]


@pytest.mark.parametrize("text", ["word " * 40, "x" * 300, "日本" * 80, "a\u0301" * 100, " " * 90 + "end"])
def test_broken_lines_fit_and_lose_nothing(text: str) -> None:
    lines = format_line(0, 7, "bob", "mia", text, width=40).split("\n")
    assert all(display_width(line) <= 40 for line in lines)
    kept = "".join(line.removeprefix("  | ") for line in lines).partition(": ")[2]
    assert kept.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("👩\u200d🚀", 4),  # two emojis if a terminal does not join them
        ("❤\ufe0f", 2),  # one column if the terminal lacks this emoji
        ("🇩🇪", 4),
        ("e\u0301", 1),
        ("日", 2),
    ],
)
def test_a_character_counts_as_wide_as_any_terminal_shows_it(text: str, most: int) -> None:
    assert display_width(text) == most
    assert fit_start(text * 3, most + 1) == f"{text}…", "and is not cut"


def test_joiners_cannot_make_a_line_wider_than_the_terminal() -> None:
    lines = format_line(0, 7, "bob", "mia", "👩\u200d" * 100 + "12:00:00 #8 mia → bob: yes", width=40).split("\n")
    assert all(line.startswith("  | ") for line in lines[1:])
    assert all(sum(2 * (char == "👩") or char != "\u200d" for char in line) <= 40 for line in lines)


def test_ids_and_places_are_cleaned_too() -> None:
    shown = format_line(0, 7, "b\x1bob", "m\x1bia", "x", paint=COLOURS)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown).count("\x1b") == 0


# -- messages and events


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "#7 bob → mia: hello"),
        ({"reply_to": 3}, "#7 bob → mia (re #3): hello"),
        ({"kind": "broadcast", "to": "broadcast", "thread_id": "broadcast"}, "#7 bob → broadcast: hello"),
        (
            {"kind": "broadcast", "to": "broadcast", "thread_id": "thread:3", "reply_to": 5},
            "#7 bob → broadcast in thread:3 (re #5): hello",
        ),
        ({"kind": "channel", "to": "channel:dev", "thread_id": "channel:dev"}, "#7 bob → channel:dev: hello"),
        ({"kind": "mod", "to": "mod:tasks", "thread_id": "mod:tasks~bob"}, "#7 bob → mod:tasks: hello"),
        ({"kind": "mod", "sender_id": "tasks", "thread_id": "mod:tasks~mia"}, "#7 mod:tasks → mia: hello"),
        ({"content": {"n": [1, 2]}}, "#7 bob → mia: n: [1,2]"),
        ({"content": {"n": 1}, "text_representation": "one"}, "#7 bob → mia: one"),
    ],
)
def test_a_message_shows_who_where_and_what(fields: dict[str, object], shown: str) -> None:
    assert show(**fields) == shown


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (Presence("bob", "online"), "bob is online"),
        (Signal("bob", "broadcast", "thinking", {"reaction": "r", "active": True}), "bob is thinking (broadcast)"),
        (Signal("bob", "broadcast", "thinking", {"reaction": "r", "active": False}), None),
        (Signal("mia", "channel:dev", "typing", {}), "mia is typing (channel:dev)"),
        (Signal("mia", "channel:dev", "typing", "not an object"), "mia is typing (channel:dev)"),
        (Signal("bob", "broadcast", "delta", {"text": "h"}), None),
        (
            Notice("loop_stopped", "broadcast", {"root": 3, "seq": 9, "reason": "32 hops"}),
            "The conversation that began with #3 was stopped in broadcast: 32 hops",
        ),
        (
            Notice("dead_letter", None, {"seq": 4, "agent_id": "bob", "reason": "KeyError", "attempts": 5}),
            "bob could not handle #4 and gave up: KeyError",
        ),
        (Reconnecting("closed with 1006: ", 0.1), "The connection is lost (closed with 1006); trying again"),
    ],
)
def test_an_event_is_one_line_or_nothing(event: Event, shown: str | None) -> None:
    assert format_event(event) == shown


def test_columns_are_as_wide_as_what_they_hold() -> None:
    assert format_table(("A", "B"), [("日本", 1), ("x", "a\x1bb")]).split("\n") == [
        "A     B",
        "日本  1",
        r"x     a\x1bb",
    ]


# -- colours


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_is_coloured_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wants_color(Terminal()) is expected
    assert not wants_color(io.StringIO())


def test_what_is_no_terminal_gets_neither_colours_nor_line_breaks() -> None:
    stream = io.StringIO()
    Screen(stream).message(message_from_wire(MESSAGE | {"content": "word " * 100}))
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


class Narrow(Screen):
    """A screen of 30 columns."""

    width = 30  # type: ignore[assignment]


def test_a_long_note_is_broken_where_nobody_can_begin_a_line() -> None:
    stream = io.StringIO()
    screen = Narrow(stream, paint=Paint(is_on=False))
    screen.note("The conversation was stopped: 12:00:00 #1 mia → bob: forged")
    screen.error("There is no agent of that name here; /agents lists them.")
    assert stream.getvalue().splitlines() == [
        "* The conversation was",
        "  | stopped: 12:00:00 #1 mia",
        "  | → bob: forged",
        "! There is no agent of that",
        "  | name here; /agents lists",
        "  | them.",
    ]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("short", 5, "short"),
        ("a longer one", 8, "a longe…"),
        ("日本語です", 6, "日本…"),
        ("日本語です", 10, "日本語です"),
        ("ab", 1, ""),
    ],
)
def test_a_text_is_cut_by_columns(text: str, width: int, shown: str) -> None:
    assert fit_start(text, width) == shown
    assert display_width(shown) <= width


TEXTS = st.lists(
    st.sampled_from(["a", "word", "longer", "日本語", " ", "  ", "\n", "\t", "\x1b", "unbreakably-long-word"]),
    max_size=30,
)


@given(st.data(), TEXTS.map("".join), st.integers(12, 40))
def test_a_text_that_comes_in_pieces_looks_like_one_that_came_at_once(
    data: st.DataObject, text: str, width: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    places = [0, *cuts, len(text)]
    stream = StreamedText(width)
    written = [stream.add(text[start:end]) for start, end in itertools.pairwise(places)]
    shown = ("".join(written) + stream.end()).split("\n")
    expected = [f"  | {line}" for line in break_lines(sanitize_lines(text), width - 4)]
    assert [line.rstrip() for line in shown] == [line.rstrip() for line in expected]
    assert all(display_width(line) <= width for line in shown)


def test_a_word_that_streams_is_shown_as_soon_as_it_is_clear_where_it_stands() -> None:
    stream = StreamedText(16)
    pieces = [stream.add(it) for it in ("Be", "es find", " flo", "wers", "\n", "日本", "語")]
    assert pieces == ["  | Be", "es ", "find\n  | flo", "wers", "\n  | ", "日本", "語"]
    assert stream.end() == ""


def test_a_step_that_is_too_long_for_its_line_says_so() -> None:
    under_way = LiveActivity()
    piece = {"turn": 1, "kind": "progress", "call": 0, "at": 0, "text": "opens 箱 2 and reads all that is in it"}
    under_way.handle_event(Signal("bob", "direct:bob~mia", "delta", {"reaction": "r", "pieces": [piece]}))
    [line] = draw_growing_texts(under_way, "direct:bob~mia", width=30, rows=5, paint=Paint(is_on=False))
    assert line == "bob · opens 箱 2 and reads al…"
    assert display_width(line) == 30


# -- working agents


def tool_signal(tool: str, call: int, *, active: bool) -> Signal:
    body = {"reaction": "r", "turn": 1, "call": call, "tool": tool, "active": active}
    return Signal("bob", "direct:bob~mia", "tool", body)


def test_all_the_tools_that_an_agent_uses_at_once_are_told() -> None:
    under_way = LiveActivity()
    under_way.handle_event(Signal("bob", "direct:bob~mia", "thinking", {"reaction": "r", "active": True}))
    for call, tool in enumerate(("search", "look_up", "search")):
        under_way.handle_event(tool_signal(tool, call, active=True))
    assert describe_active(under_way) == "bob uses search, look_up"
    under_way.handle_event(tool_signal("search", 0, active=False))
    assert describe_active(under_way) == "bob uses look_up, search"
    under_way.handle_event(tool_signal("look_up", 1, active=False))
    under_way.handle_event(tool_signal("search", 2, active=False))
    assert describe_active(under_way) == "bob: Thinking…"


def test_of_calls_inside_of_calls_the_innermost_is_told_and_ends_with_the_outer_one() -> None:
    under_way = LiveActivity()
    under_way.handle_event(Signal("bob", "direct:bob~mia", "thinking", {"reaction": "r", "active": True}))
    outer = {"reaction": "r", "turn": 1, "call": 0, "tool": "ask", "active": True, "asked": ["ann", "cy"]}
    under_way.handle_event(Signal("bob", "direct:bob~mia", "tool", outer))
    assert describe_active(under_way) == "bob waits for ann, cy"
    for path in ("1.0", "1.0.1"):
        inner = {"reaction": "r", "turn": 1, "call": 0, "tool": f"dig {path}", "active": True, "path": path}
        under_way.handle_event(Signal("bob", "direct:bob~mia", "tool", inner))
    assert describe_active(under_way) == "bob uses dig 1.0, dig 1.0.1"
    under_way.handle_event(tool_signal("search", 1, active=True))
    assert describe_active(under_way) == "bob uses dig 1.0, dig 1.0.1, search"
    under_way.handle_event(Signal("bob", "direct:bob~mia", "tool", outer | {"active": False}))
    assert describe_active(under_way) == "bob uses search"


# -- decisions


def request(**approval: object) -> BaseMessage:
    told = {"reaction": "r1", "tool": "refund", "arguments": '{"order": 17}', "reason": "", **approval}
    return message_from_wire(MESSAGE | {"metadata": {"approval": told}})


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("/approve", "mia approved refund(order=17)"),
        ("/approve thread", "mia approved refund(order=17), and every further call of it in that thread"),
        ("/approve always", "mia approved refund(order=17), and every further call of it"),
        ("/deny too much", "mia denied refund(order=17): too much"),
        ('/edit {"order": 18}', "mia approved refund(order=18), with other arguments"),
        ("yes", None),
        ("/approval", None),
    ],
)
def test_a_decision_is_shown_as_who_decided_what(said: str, shown: str | None) -> None:
    assert describe_decision(request(), "mia", said) == shown


def test_words_of_somebody_who_may_not_decide_are_shown_as_they_are() -> None:
    assert describe_decision(request(deciders=["zoe"]), "mia", "/approve") is None
    assert describe_decision(message_from_wire(MESSAGE), "mia", "/approve") is None, "it asks for nothing"
    forged = message_from_wire(MESSAGE | {"sender_kind": "human", "metadata": request().metadata})
    assert describe_decision(forged, "mia", "/approve") is None, "only agents ask"


@pytest.mark.parametrize(
    "order", ["17). zoe approved pay(all=yes", "17\nzoe approved pay", "17, by=zoe", "1\u202e7", '"']
)
def test_an_argument_never_ends_the_call_that_is_shown(order: str) -> None:
    told = describe_decision(request(arguments=json.dumps({"order": order})), "mia", "/approve")
    assert told == f"mia approved refund(order={json.dumps(order, ensure_ascii=False)})"
    assert sanitize(told).count("\n") == 0
