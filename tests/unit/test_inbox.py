"""Tests of the triggers that wake an agent, and of the order of its reactions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.agents.inbox import MAX_IN_THREAD, REMEMBERED, Arrival, Inbox, ReactTo, wakes
from roundelay.agents.mentions import mentions
from roundelay.network.messages import BaseMessage, message_from_wire

CASES = json.loads((Path(__file__).parents[1] / "support/mentions.json").read_text("utf-8"))


def make_message(seq: int = 1, **fields: Any) -> BaseMessage:
    kind = fields.get("kind", "direct")
    defaults = {
        "direct": {"to": "agent:bob", "thread_id": "direct:bob~mia"},
        "broadcast": {"to": "broadcast", "thread_id": "broadcast"},
        "channel": {"to": "channel:dev", "thread_id": "channel:dev"},
        "mod": {"to": "agent:bob", "thread_id": "mod:tasks~bob"},
    }[str(kind)]
    return message_from_wire(
        {
            "seq": seq, "message_id": f"m{seq}", "kind": kind, "sender_id": "carl", "sender_kind": "agent", "root": seq, "hops": 0,
            "sent_at": seq, "content": "hello", **defaults, **fields,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "react_to", "expected"),
    [
        ({"kind": "direct"}, "mentions", True),
        ({"kind": "direct", "sender_id": "bob"}, "mentions", False),
        ({"kind": "direct"}, "mentions_only", True),
        ({"kind": "mod"}, "mentions_only", True),
        ({"kind": "channel", "sender_kind": "human"}, "mentions_only", False),
        ({"kind": "broadcast", "sender_kind": "human"}, "mentions_only", False),
        ({"kind": "channel", "sender_kind": "human", "content": "@bob look"}, "mentions_only", True),
        ({"kind": "channel", "requires_response": ["bob"]}, "mentions_only", True),
        ({"kind": "channel", "requires_response": True}, "mentions_only", True),
        ({"kind": "channel", "requires_response": ["ann"]}, "mentions_only", False),
        ({"kind": "direct", "sender_id": "bob"}, "all", False),
        ({"kind": "mod"}, "mentions", True),
        ({"kind": "mod", "sender_id": "bob", "thread_id": "mod:bob~bob"}, "mentions", True),
        ({"kind": "mod", "sender_id": "bob", "to": "mod:tasks"}, "all", False),
        ({"kind": "mod", "sender_id": "network", "thread_id": "mod:network~bob"}, "all", False),
        ({"kind": "channel"}, "mentions", False),
        ({"kind": "channel"}, "all", True),
        ({"kind": "channel", "sender_kind": "human"}, "mentions", True),
        ({"kind": "channel", "sender_kind": "service"}, "mentions", False),
        ({"kind": "channel", "content": "@bob look"}, "mentions", True),
        ({"kind": "channel", "content": {"text": "@bob look"}}, "mentions", True),
        ({"kind": "channel", "content": "hello", "text_representation": "@bob look"}, "mentions", True),
        ({"kind": "channel", "requires_response": True}, "mentions", True),
        ({"kind": "channel", "requires_response": False}, "mentions", False),
        ({"kind": "channel", "requires_response": ["ann", "bob"]}, "mentions", True),
        ({"kind": "channel", "requires_response": ["ann"]}, "mentions", False),
        ({"kind": "channel", "sender_kind": "human", "requires_response": ["ann"]}, "mentions", False),
        ({"kind": "channel", "sender_kind": "human", "requires_response": ["ann"]}, "all", True),
        (
            {"kind": "channel", "sender_kind": "human", "requires_response": ["ann"], "content": "@bob"},
            "mentions",
            True,
        ),
        ({"kind": "channel", "sender_kind": "human", "requires_response": ["bob"]}, "mentions", True),
        ({"kind": "channel", "sender_kind": "human", "requires_response": True}, "mentions", True),
        ({"kind": "broadcast", "sender_kind": "human", "requires_response": []}, "mentions", False),
        ({"kind": "direct", "sender_kind": "human", "requires_response": []}, "mentions", True),
        ({"kind": "broadcast"}, "mentions", False),
        ({"kind": "broadcast", "sender_kind": "human"}, "mentions", True),
        ({"kind": "broadcast", "sender_kind": "human", "sender_id": "bob"}, "mentions", False),
        ({"kind": "broadcast", "content": "@bob", "sender_id": "bob"}, "mentions", False),
        ({"kind": "channel", "thread_id": "thread:7", "reply_to": 7}, "mentions", False),
    ],
)
def test_what_wakes_an_agent(fields: dict[str, object], react_to: ReactTo, expected: bool) -> None:
    assert wakes(make_message(1, **fields), "bob", react_to) is expected


@pytest.mark.parametrize("text", CASES["wakes"])
def test_a_mention(text: str) -> None:
    assert mentions(text, "bob")


@pytest.mark.parametrize("text", CASES["does_not_wake"])
def test_no_mention(text: str) -> None:
    assert not mentions(text, "bob")


def test_an_id_with_dots_is_mentioned() -> None:
    assert mentions("ask @bob.smith, please", "bob.smith")
    assert mentions("ask @bob.", "bob.")


def drain(inbox: Inbox) -> list[int]:
    seqs = []
    while (message := inbox.next_message()) is not None:
        seqs.append(message.seq)
    return seqs


def test_a_message_that_does_not_wake_is_context() -> None:
    inbox = Inbox("bob")
    assert inbox.offer(make_message(1, kind="channel")) is Arrival.CONTEXT
    assert inbox.next_message() is None
    assert len(inbox) == 0


def test_a_thread_has_one_reaction_at_a_time_in_order() -> None:
    inbox = Inbox("bob")
    first, second = make_message(1), make_message(2)
    assert [inbox.offer(first), inbox.offer(second)] == [Arrival.QUEUED] * 2
    assert drain(inbox) == [1]
    inbox.finish(first)
    assert drain(inbox) == [2]


def test_what_is_put_back_stands_before_what_came_later() -> None:
    inbox = Inbox("bob")
    for seq in (1, 2, 3):
        inbox.offer(make_message(seq))
    first = inbox.next_message()
    assert first is not None
    taken = inbox.withdraw(first)
    inbox.offer(make_message(4))
    inbox.put_back(taken)
    order = []
    for message in (first, *taken):
        inbox.finish(message)
        order += drain(inbox)
    assert order == [2, 3, 4]


def test_threads_go_in_parallel_up_to_the_bound() -> None:
    inbox = Inbox("bob", max_parallel=2)
    messages = [make_message(seq, thread_id=f"direct:bob~p{seq}") for seq in (1, 2, 3)]
    for message in messages:
        inbox.offer(message)
    assert drain(inbox) == [1, 2]
    inbox.finish(messages[1])
    assert drain(inbox) == [3]


def test_a_busy_thread_does_not_hold_up_a_waiting_one() -> None:
    inbox = Inbox("bob", max_parallel=1)
    busy = [make_message(seq, thread_id="direct:ann~bob") for seq in (1, 2, 3)]
    for message in (*busy, make_message(4)):
        inbox.offer(message)
    assert drain(inbox) == [1]
    inbox.finish(busy[0])
    assert drain(inbox) == [4]


def test_a_message_is_taken_once_while_it_waits_is_in_work_and_after() -> None:
    inbox = Inbox("bob")
    message = make_message(1)
    inbox.offer(message)
    assert inbox.offer(message) is Arrival.PENDING
    inbox.next_message()
    assert inbox.offer(message) is Arrival.PENDING
    inbox.finish(message)
    assert inbox.offer(message) is Arrival.HANDLED
    assert drain(inbox) == []


def test_a_message_handed_back_may_come_again() -> None:
    inbox = Inbox("bob")
    message = make_message(1)
    inbox.offer(message)
    inbox.next_message()
    inbox.release(message)
    assert inbox.offer(message) is Arrival.QUEUED
    assert drain(inbox) == [1]


def test_a_reaction_that_was_begun_before_is_queued_whatever_the_rule_says() -> None:
    inbox = Inbox("bob")
    inbox.admit(make_message(1, kind="channel"))
    assert inbox.offer(make_message(1, kind="channel", sender_kind="human")) is Arrival.PENDING
    assert drain(inbox) == [1]


def test_the_memory_of_handled_messages_is_bounded() -> None:
    inbox = Inbox("bob")
    for seq in range(1, REMEMBERED + 3):
        message = make_message(seq)
        inbox.offer(message)
        assert inbox.next_message() is message
        inbox.finish(message)
    assert len(inbox) == 0
    assert inbox.offer(make_message(2)) is Arrival.QUEUED  # forgotten
    assert inbox.offer(make_message(3)) is Arrival.HANDLED


def test_of_one_pairs_conversations_a_place_is_left_for_others() -> None:
    inbox = Inbox("bob", max_parallel=3)
    for seq in range(1, 6):
        inbox.offer(make_message(seq, thread_id=f"direct:bob~carl:c{seq}"))
    first, second, nothing = (inbox.next_message() for _ in range(3))
    assert (first, second, nothing) == (make_message(1, thread_id="direct:bob~carl:c1"), second, None)
    inbox.offer(make_message(6, sender_id="mia", thread_id="direct:bob~mia:tea"))
    assert [it and it.seq for it in (inbox.next_message(), inbox.next_message())] == [6, None]
    assert first is not None
    inbox.pause("r", first.thread_id)  # a reaction that only waits for others does not count
    assert [it and it.seq for it in (inbox.next_message(), inbox.next_message())] == [3, None]


@given(st.lists(st.one_of(st.tuples(st.integers(1, 12), st.integers(0, 3)), st.none()), max_size=60), st.integers(1, 3))
def test_every_message_reacts_once_in_its_threads_order(steps: list[tuple[int, int] | None], max_parallel: int) -> None:
    """A step offers a message (seq, thread). None ends the oldest running reaction."""
    inbox = Inbox("bob", max_parallel=max_parallel)
    offered: dict[str, list[int]] = {}
    begun: dict[str, list[int]] = {}
    running: list[BaseMessage] = []

    def start() -> None:
        while (message := inbox.next_message()) is not None:
            assert message.thread_id not in [other.thread_id for other in running]
            running.append(message)
            begun.setdefault(message.thread_id, []).append(message.seq)
            assert len(running) <= max_parallel

    for step in steps:
        if step is None:
            if running:
                inbox.finish(running.pop(0))
        else:
            message = make_message(step[0] * 4 + step[1], thread_id=f"direct:bob~p{step[1]}")
            if inbox.offer(message) is Arrival.QUEUED:
                offered.setdefault(message.thread_id, []).append(message.seq)
        start()
    while running:
        inbox.finish(running.pop(0))
        start()
    assert begun == offered
    assert all(len(seqs) == len(set(seqs)) for seqs in begun.values())
    assert len(inbox) == 0


def test_what_waits_behind_a_message_in_work_can_be_taken_out() -> None:
    inbox = Inbox("bob")
    first, second, third = (make_message(seq) for seq in (1, 2, 3))
    for message in (first, second, third):
        inbox.offer(message)
    assert inbox.next_message() == first
    assert inbox.withdraw(first) == [second, third]
    assert inbox.withdraw(first) == []
    inbox.note_handled(2)
    inbox.note_handled(3)
    inbox.finish(first)
    assert len(inbox) == 0
    assert inbox.next_message() is None
    assert inbox.offer(second) is Arrival.HANDLED


def test_a_reaction_that_waits_gives_its_place_to_another_thread() -> None:
    inbox = Inbox("bob", max_parallel=1)
    for seq, thread in ((1, "direct:a~bob"), (2, "direct:bob~c")):
        inbox.offer(make_message(seq, thread_id=thread))
    assert inbox.next_message() is not None
    assert inbox.next_message() is None
    inbox.pause("r1", "direct:a~bob")
    other = inbox.next_message()
    assert other is not None
    inbox.resume("r1")
    inbox.finish(other)
    assert inbox.next_message() is None


def test_a_reaction_that_waits_in_two_calls_gives_one_place() -> None:
    inbox = Inbox("bob", max_parallel=1)
    for seq in (1, 2, 3):
        inbox.offer(make_message(seq, thread_id=f"direct:bob~p{seq}"))
    assert inbox.next_message() is not None
    for _ in range(2):
        inbox.pause("r1", "direct:bob~p1")
    assert inbox.next_message() is not None
    assert inbox.next_message() is None
    inbox.resume("r1")  # the other call still waits
    assert inbox.at_work == 1
    inbox.resume("r1")
    assert inbox.at_work == 2


def make_question(seq: int) -> BaseMessage:
    return make_message(seq, requires_response=["bob"], metadata={"ask": {"waiting": ["carl"]}})


def test_a_question_goes_ahead_where_all_reactions_only_wait() -> None:
    inbox = Inbox("bob")
    first, second, question, other = make_message(1), make_message(2), make_question(3), make_question(4)
    for message in (first, second, question, other):
        inbox.offer(message)
    assert drain(inbox) == [1]
    inbox.pause("r1", first.thread_id)
    assert drain(inbox) == [3], "one at a time"
    inbox.pause("r3", first.thread_id)
    inbox.resume("r1")
    assert drain(inbox) == [], "nor where one goes on"
    inbox.pause("r1", first.thread_id)
    assert drain(inbox) == [4]
    for message, reaction in ((other, ""), (question, "r3"), (first, "r1")):
        assert drain(inbox) == [], "what is no question waits for all of them"
        if reaction:
            inbox.resume(reaction)
        inbox.finish(message)
    assert drain(inbox) == [2]
    inbox.finish(second)
    assert (len(inbox), inbox.at_work) == (0, 0)


def test_a_question_that_comes_later_or_to_somebody_else_or_too_often() -> None:
    inbox = Inbox("bob")
    first = make_message(1)
    inbox.offer(first)
    assert drain(inbox) == [1]
    inbox.pause("r1", first.thread_id)
    inbox.offer(make_message(2, requires_response=["bob"]))
    inbox.offer(make_message(3, requires_response=["ann"], metadata={"ask": {"waiting": ["carl"]}}))
    assert drain(inbox) == [], "no question to this agent"
    for seq in range(4, 4 + 2 * MAX_IN_THREAD):
        inbox.offer(make_question(seq))
        for taken in drain(inbox):
            inbox.pause(f"r{taken}", first.thread_id)
    assert inbox.at_work == 0
    assert len(inbox) == 3 + 2 * MAX_IN_THREAD
    assert inbox._working[first.thread_id].reactions == MAX_IN_THREAD


def test_a_question_is_not_read_in_another_reaction() -> None:
    inbox = Inbox("bob")
    first, second, question = make_message(1), make_message(2), make_question(3)
    for message in (first, second, question):
        inbox.offer(message)
    assert inbox.next_message() == first
    assert inbox.withdraw(first) == [second]
    inbox.note_handled(2)
    inbox.finish(first)
    assert drain(inbox) == [3]


def test_a_wait_that_outlives_its_reaction_changes_no_other() -> None:
    """Code that swallows its cancellation keeps running, and may end at any later time."""
    inbox = Inbox("bob")
    first, second = make_message(1), make_message(2)
    inbox.offer(first)
    drain(inbox)
    inbox.pause("r1", first.thread_id)
    inbox.finish(first)
    inbox.offer(second)
    assert drain(inbox) == [2]
    inbox.resume("r1")
    inbox.offer(make_question(3))
    assert drain(inbox) == []
    inbox.pause("r2", first.thread_id)
    assert drain(inbox) == [3]


@pytest.mark.parametrize(
    ("fields", "wakes_bob"),
    [
        ({"metadata": {"declined": True}, "reply_to": 1}, False),
        ({"content": "/approve", "reply_to": 1, "sender_kind": "human"}, False),
        ({"content": "/approve", "sender_kind": "human"}, True),
        ({"content": "/approve", "reply_to": 1, "sender_kind": "agent"}, True),
        ({"content": "/approval is fine", "reply_to": 1, "sender_kind": "human"}, True),
    ],
)
def test_a_decline_and_a_decision_wake_nobody(fields: dict[str, Any], wakes_bob: bool) -> None:
    assert wakes(make_message(5, **fields), "bob") is wakes_bob
