"""Tests that read one reaction from its records, including a program that writes records of other kinds."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.network.messages import BaseMessage, message_from_wire
from roundelay.runs.reading import RecordedReaction, choose_author
from roundelay.runs.why_text import describe_work
from roundelay.runs.work import choose_earlier

STARTED = {"trigger": 3, "thread_id": "direct:ann~mia", "as_of": 3, "manifest": [1, 3], "config_hash": "c"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}
REPLY = {
    "turn": 1, "agent": "ann", "is_last": False,
    "reply": {"text": None, "tool_calls": [{"id": "c1", "name": "pay", "arguments": "{}"}], "usage": USAGE},
}  # fmt: skip
AT = {"turn": 1, "call": 0}
APPROVAL = {"kind": "approval", "questions": {"mia": 4}, "until": 99, "is_approval": True}
END = {"status": "failed", "reason": "limit", "turns": 1, "usage": USAGE}


def said(seq: int, sender_id: str, text: str, **more: Any) -> BaseMessage:
    common = {
        "kind": "direct",
        "sender_kind": "agent",
        "thread_id": "direct:ann~bob",
        "root": 1,
        "hops": 0,
        "sent_at": 1,
    }
    return message_from_wire(
        {
            **common,
            "seq": seq,
            "sender_id": sender_id,
            "to": "agent:x",
            "message_id": f"{seq:032x}",
            "content": text,
            **more,
        }
    )


def read(*records: tuple[str, Any]) -> RecordedReaction:
    return RecordedReaction(
        "r1",
        "ann",
        [
            {"seq": 10 + place, "agent_id": "ann", "record_id": f"id{place}", "kind": kind, "body": body, "at": 0}
            for place, (kind, body) in enumerate(records)
        ],
    )


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ({"status": "failed"}, "failed"),
        ({"status": "happy"}, "finished"),
        ({"status": ["x"]}, "finished"),
        ([], "finished"),
    ],
)
def test_how_another_programs_reaction_ended_is_told(end: object, state: str) -> None:
    found = read(("started", {"trigger": 3}), ("finished", end))
    assert (found.run, found.trigger, found.state) == (None, 3, state)


def test_what_can_be_read_of_another_programs_records_is_told() -> None:
    strange = ("model_reply", {"turn": "first"})
    result = ("tool_result", {**AT, "tool": "pay", "content": "paid", "ok": True})
    found = read(("started", {"trigger": 3}), strange, ("tool_started", {**AT, "tool": "pay", "args": "{}"}), result)
    assert found.run is None
    assert [(call.tool, call.parsed(), call.result, call.is_ok) for call in found.calls] == [("pay", {}, "paid", True)]
    assert (found.state, found.turns) == ("open", 0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("tool_started", {"tool": "pay", "args": "{}"}),
        ("tool_started", {"turn": 1, "tool": "pay", "args": "{}"}),
        ("tool_result", {"call": 0, "tool": "pay", "content": "paid", "ok": True}),
        ("model_reply", {"agent": "ann", "reply": REPLY["reply"]}),
        ("note", {"name": "plan", "value": 1}),
    ],
)
def test_a_record_that_does_not_say_where_it_stands_is_another_programs(kind: str, body: dict[str, Any]) -> None:
    found = read(("started", STARTED), (kind, body))
    assert found.run is None
    assert (found.calls, found.turns, found.find_reply("", 1)) == ([], 0, None)


def test_a_call_that_was_approved_waits_for_nobody() -> None:
    records: list[tuple[str, Any]] = [("started", STARTED), ("model_reply", REPLY), ("waiting", {**AT, **APPROVAL})]
    assert read(*records).state == "waiting"
    records.append(("approval", {**AT, "is_approved": True, "by": "mia", "seq": 5, "at": 1}))
    assert read(*records).state == "open"
    records.append(("finished", END))
    assert (read(*records).state, read(*records).reason) == ("failed", "limit")


ASKED = ("waiting", {**AT, "questions": {"bob": 4}, "until": 99})
GAVE = {**AT, "tool": "pay", "content": "paid", "ok": True}


@pytest.mark.parametrize(
    ("records", "lines"),
    [
        (
            [("waiting", {**AT, **APPROVAL})],
            ["turn 1 called pay {}, no result yet", "  Needed approval (#4): nobody has decided yet"],
        ),
        (
            [("waiting", {**AT, **APPROVAL}), ("tool_result", {**GAVE, "content": "Not run.", "ok": False})],
            ["turn 1 called pay {}, failed: Not run.", "  Needed approval (#4): nobody decided"],
        ),
        (
            [
                ("waiting", {**AT, **APPROVAL}),
                ("approval", {**AT, "is_approved": False, "by": "mia", "seq": 5, "at": 1, "reason": "no"}),
            ],
            ["turn 1 called pay {}, no result yet", "  Needed approval (#4): mia denied it (#5): no"],
        ),
        (
            [ASKED],
            [
                "turn 1 called pay {}, no result yet",
                "  Asked bob (#4): May I?",
                "  Has no answer yet",
            ],
        ),
        (
            [ASKED, ("tool_result", GAVE)],
            ["turn 1 called pay {}, result: paid", "  Asked bob (#4): May I?", "  Got no answer"],
        ),
        (
            [ASKED, ("tool_result", {**GAVE, "replies": [6]})],
            ["turn 1 called pay {}, result: paid", "  Asked bob (#4): May I?", "  bob declined (#6)"],
        ),
        (
            [("model_reply", {**REPLY, "turn": 2, "agent": "bob"}), ("model_reply", {**REPLY, "turn": 3})],
            ["turn 1: ann handed the conversation back to bob", "turn 2: bob handed the conversation back to ann"],
        ),
        (
            [("review", {"turn": 1, "call": 0, "send": 1, "answer": "a", "is_blocked": True, "notes": ["rude"]})],
            ["turn 1: the message of call 1.0 was blocked (rude)"],
        ),
        (
            [("review", {"turn": 1, "answer": "a", "notes": ["rude"]})],
            ["turn 1: the answer was sent although it did not pass the review (rude)"],
        ),
    ],
)
def test_work_is_told_in_words(records: list[tuple[str, Any]], lines: list[str]) -> None:
    found = read(("started", STARTED), ("model_reply", REPLY), *records)
    messages = {4: said(4, "ann", "May I?"), 6: said(6, "bob", "", reply_to=4, metadata={"declined": True})}
    assert [line for it in found.work for line in describe_work(it, messages)] == lines
    assert [it.tool for it in found.calls] == (["pay"] if any(kind == "tool_result" for kind, _ in records) else [])


@pytest.mark.parametrize(
    ("path", "turn", "earlier"),
    [
        ("", 1, []),
        ("", 2, ["", "1.0", "1.0.1", "1.1/3.0"]),
        ("1.0", 1, []),
        ("1.0", 2, ["1.0"]),
        ("1.0.1", 1, ["1.0"]),
        ("1.1/3.0", 2, ["1.1/3.0"]),
        ("not a path", 1, []),
    ],
)
def test_what_was_over_before_a_turn(path: str, turn: int, earlier: list[str]) -> None:
    """Calls of one turn run in parallel, in whatever order they are recorded."""
    places = [("", 1), ("", 3), ("1.0", 1), ("1.0.1", 1), ("1.1/3.0", 1), ("3.0", 1)]
    calls = [("tool_started", {**GAVE, "path": inside, "turn": at, "args": "{}"}) for inside, at in places]
    found = read(("started", STARTED), *calls)
    assert [it.path for it in choose_earlier(found.work, path, turn)] == earlier


def test_replies_of_runs_inside_count_and_their_turns_do_not() -> None:
    found = read(("started", STARTED), ("model_reply", REPLY), ("model_reply", {**REPLY, "path": "1.0"}))
    assert (found.turns, len(found.replies), found.usage.prompt_tokens) == (1, 2, 20)
    assert list(found.manifest) == [1, 3]


def test_the_author_of_a_reaction_is_who_it_was_derived_for_else_who_wrote_first() -> None:
    from roundelay.agents.reaction_ids import reaction_id

    name = reaction_id("bob", 3, "epoch")
    records = [
        {"seq": seq, "agent_id": agent_id, "record_id": "x", "kind": "started", "body": {"trigger": 3}, "at": 0}
        for seq, agent_id in enumerate(("eve", "bob"))
    ]
    assert choose_author(name, records, "epoch") == "bob"
    assert choose_author("other", records, "epoch") == "eve"
