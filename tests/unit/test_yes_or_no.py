"""Tests of a plain yes, ok or no in a terminal: the call that it decides."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.live_activity import LiveActivity
from roundelay.network.errors import InvalidArguments
from roundelay.network.messages import message_from_wire
from roundelay.terminal.actions import read_yes_or_no

THREAD = "direct:desk~mia"


def say(seq: int, sender: str, text: str, *, kind: str = "agent", **more: Any) -> Any:
    to = "agent:desk" if sender == "mia" else "agent:mia"
    message = {
        "seq": seq, "message_id": f"m{seq}", "kind": "direct", "sender_id": sender, "sender_kind": kind, "to": to,
        "thread_id": THREAD, "root": 1, "hops": 0, "sent_at": seq, "content": text,
    }  # fmt: skip
    return message_from_wire({**message, **more})


def ask(seq: int, **approval: Any) -> Any:
    metadata = {"approval": {"reaction": "r", "tool": "pay", "arguments": "{}", **approval}}
    return say(seq, "desk", "May I?", metadata=metadata)


@pytest.mark.parametrize(
    ("text", "word"), [("yes", "approve"), ("OK.", "approve"), ("okay", "approve"), ("No!", "deny")]
)
def test_a_plain_word_decides_the_one_call_that_waits_there(text: str, word: str) -> None:
    under_way = LiveActivity("mia")
    assert read_yes_or_no(under_way, THREAD, text) is None
    under_way.handle_message(ask(3))
    assert read_yes_or_no(under_way, THREAD, text) == (word, 3)
    assert read_yes_or_no(under_way, "direct:desk~zoe", text) is None
    assert read_yes_or_no(under_way, THREAD, f"{text} but later") is None


def test_of_several_calls_it_asks_which() -> None:
    under_way = LiveActivity("mia")
    for seq in (3, 4):
        under_way.handle_message(ask(seq))
    with pytest.raises(InvalidArguments, match=r"Several calls wait for your decision: #3 of desk, #4 of desk\."):
        read_yes_or_no(under_way, THREAD, "ok")


def test_what_others_decide_is_no_call_of_ones_own() -> None:
    under_way = LiveActivity("mia")
    under_way.handle_message(ask(3, deciders=["zoe"]))
    assert read_yes_or_no(under_way, THREAD, "yes") is None
    under_way.handle_message(say(4, "mia", "/approve", kind="human", reply_to=3))
    assert 3 in under_way.requests, "her word decides nothing"
    decided = {"request": 3, "is_approved": True, "by": ["zoe"], "seq": 5, "at": 5}
    under_way.handle_message(say(6, "desk", "zoe approved pay().", reply_to=3, metadata={"decided": decided}))
    assert under_way.requests == {}
