"""Tests of details in docs/protocol.md: bodies of notices, nacks during a crash, attempts at or below the cursor, and
readers of a reply to a reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.test_redelivery import Visitor
from tests.support.node import Node
from tests.support.stepped_hub import SteppedHub
from tests.support.wire import WireSession, contents


@pytest.fixture
def hub() -> Iterator[SteppedHub]:
    stepped = SteppedHub({"root_messages_per_s": 100_000})
    yield stepped
    stepped.close()


def take_notices(visitor: Visitor) -> list[dict[str, Any]]:
    return [frame for frame in visitor.connection.take_frames() if frame["type"] == "notice"]


# -- notices


def test_a_dead_letter_notice_says_what_failed_where_why_and_how_often(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    for number in range(5):
        bob.say(type="nack", seq=hard, reason=f"failed for the {number}th time", retry_after_ms=1)
        hub.loop.step(0.1)
    body = {"seq": hard, "agent_id": "bob", "reason": "failed for the 4th time", "attempts": 5}
    assert take_notices(bob) == [{"type": "notice", "kind": "dead_letter", "body": body}]


def test_an_overtaken_reactor_is_told_whose_session_is_superseded(hub: SteppedHub) -> None:
    older = Visitor(hub, "bot", role="reactor")
    Visitor(hub, "bot", role="reactor")
    assert take_notices(older) == [{"type": "notice", "kind": "superseded", "body": {"agent_id": "bot"}}]
    assert older.connection.closed == 4409


def test_everybody_is_told_why_a_stopping_hub_drains(hub: SteppedHub) -> None:
    bob = Visitor(hub, "bob")
    hub.restart()
    [notice] = take_notices(bob)
    assert (notice["kind"], set(notice["body"])) == ("draining", {"reason"})
    assert isinstance(notice["body"]["reason"], str)
    assert bob.connection.closed == 4503


# -- attempts


def test_another_attempt_may_come_at_or_below_the_cursor(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard, easy = alice.send("hard"), alice.send("easy")
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=500)
    bob.drop()
    again = Visitor(hub, "bob", resume={"epoch": hub.hub.epoch, "cursor": easy})
    assert (again.welcome["cursor"], again.given()) == (easy, [])
    hub.loop.step(0.6)
    assert again.given() == [("hard", 2)]


def test_a_nack_counts_when_it_is_committed_with_what_was_sent_after_it(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=0)
    hub.loop.step(0.1)
    assert bob.given() == [("hard", 1), ("hard", 2)]
    hub.receive(bob.session, {"type": "nack", "seq": hard, "reason": "again", "retry_after_ms": 0})
    bob.say(type="send", message_id="after", to="agent:alice", content="after the second nack")
    # The frame is stored, and so is the nack before it.
    assert bob.connection.take_frames()[-1]["message_id"] == "after"
    hub.crash()
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hub.loop.step(0.1)
    assert bob.given() == [("hard", 3)]


def test_a_nack_that_a_crash_meets_on_its_way_was_never_said(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    alice.send("hard")
    [(_, attempt)] = bob.given()
    assert attempt == 1
    hub.receive(bob.session, {"type": "nack", "seq": hub.hub.state.head, "reason": "failed", "retry_after_ms": 60_000})
    hub.crash()
    assert Visitor(hub, "bob").given() == [("hard", 1)], "at once, and as the same attempt"


def test_a_killed_hub_counts_no_attempt(hub: SteppedHub) -> None:
    alice, bot = Visitor(hub, "alice"), Visitor(hub, "bob", role="reactor")
    begun, given = alice.send("begun"), alice.send("given")
    bot.say(type="record", record_id="r", reaction="r", kind="started", body={"trigger": begun})
    hub.loop.step(1.0)  # the stored ack of a trigger may lag behind a crash, as every ack may
    for _ in range(6):
        hub.crash()
        bot = Visitor(hub, "bob", role="reactor")
        assert bot.given() == [("given", 1)]
    bot.say(type="call", call_id="status", op="network.message_status", args={"seq": begun})
    [status] = bot.connection.take_frames()[-1]["value"]["recipients"]
    assert (status["state"], status["attempts"], status["reaction_status"]) == ("in_prompt", 1, "open")
    assert given > begun


@pytest.mark.parametrize("leaves", ["with a bye", "overtaken"])
def test_a_reactor_that_leaves_counts_no_attempt(hub: SteppedHub, leaves: str) -> None:
    alice, bot = Visitor(hub, "alice"), Visitor(hub, "bob", role="reactor")
    begun = alice.send("begun")
    bot.say(type="record", record_id="r", reaction="r", kind="started", body={"trigger": begun})
    if leaves == "with a bye":
        bot.say(type="bye")
    Visitor(hub, "bob", role="reactor")
    bot.drop()
    alice.say(type="call", call_id="status", op="network.message_status", args={"seq": begun})
    [status] = alice.connection.take_frames()[-1]["value"]["recipients"]
    assert status["attempts"] == 1


# -- answers


async def test_a_wrong_frame_and_a_read_are_both_answered_in_no_order(node: Node) -> None:
    alice = await node.agent("alice")
    for number in range(20):
        await alice.send_frame({"type": "call", "call_id": f"c{number}", "op": "network.info", "args": {}})
        await alice.send_frame({"type": "signal", "message_id": f"m{number}"})
    for number in reversed(range(20)):
        assert (await alice.answer(f"m{number}"))["code"] == "invalid_frame"
        assert (await alice.answer(f"c{number}"))["type"] == "result"
    assert alice.unread == []


# -- readers of a reply to a reply


async def thread_of(session: WireSession, thread_id: str) -> list[Any]:
    return contents((await session.call("network.history", {"thread_id": thread_id}))["messages"])


async def test_a_broadcasts_reply_to_a_reply_is_for_whom_nothing_above_it_excludes(node: Node) -> None:
    alice, bob, carol, dave = [await node.agent(name) for name in ("alice", "bob", "carol", "dave")]
    first = await alice.send("broadcast", "first", exclude_agent_ids=["dave"])
    reply = await alice.send("broadcast", "reply", reply_to=first["seq"], exclude_agent_ids=["carol"])
    late = await node.agent("late")
    await alice.send("broadcast", "reply to the reply", reply_to=reply["seq"])
    await alice.send("broadcast", "another reply to the first", reply_to=first["seq"])
    await alice.send("broadcast", "marker")
    replies = ["reply", "reply to the reply", "another reply to the first"]
    expected = {
        bob: ["first", *replies], carol: ["first", "another reply to the first"], dave: list[str](), late: list[str](),
    }  # fmt: skip
    for session, given in expected.items():
        assert await session.contents_until("marker") == given
    assert await thread_of(bob, reply["thread_id"]) == replies
    assert await thread_of(carol, reply["thread_id"]) == replies[2:]
    for session in (dave, late):
        await session.call_refused("unknown_message", "network.history", {"thread_id": reply["thread_id"]})


@pytest.mark.parametrize(("history", "given"), [("since_join", []), ("members", ["reply to the reply"])])
async def test_a_channels_reply_to_a_reply_is_for_late_joiners_if_its_history_is(
    node: Node, history: str, given: list[str]
) -> None:
    alice, bob, late = [await node.agent(name) for name in ("alice", "bob", "late")]
    await alice.call("channels.create", {"name": "dev", "history": history})
    await bob.call("channels.join", {"name": "dev"})
    first = await alice.send("channel:dev", "first")
    await bob.call("channels.leave", {"name": "dev"})
    reply = await alice.send("channel:dev", "reply", reply_to=first["seq"])
    for session in (bob, late):
        await session.call("channels.join", {"name": "dev"})
    deeper = await alice.send("channel:dev", "reply to the reply", reply_to=reply["seq"])
    assert deeper["thread_id"] == reply["thread_id"] == f"thread:{first['seq']}"
    for session in (alice, bob, late):
        await alice.send(f"agent:{session.welcome['agent_id']}", "marker")
    assert await bob.contents_until("marker") == [
        "first",
        "reply to the reply",
    ]  # the agent was a member at the first message, and is one now
    assert await late.contents_until("marker") == given
