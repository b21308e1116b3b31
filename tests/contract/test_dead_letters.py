"""Tests of dead letters: their recipient, and operators for everybody, can list, restore and drop them."""

from __future__ import annotations

import pytest

from tests.support.node import Node
from tests.support.wire import WireSession


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def poison(alice: WireSession, bob: WireSession, content: str = "poison") -> int:
    """Send a message that bob refuses five times. Return the message's seq."""
    stored = await alice.send("agent:bob", content)
    for _ in range(5):
        await bob.expect("deliver")
        await bob.nack(stored["seq"])
    await bob.expect("notice", kind="dead_letter")
    return int(stored["seq"])


async def listed(session: WireSession, **args: object) -> list[int]:
    value = await session.call("network.dead_letters", args)
    return [letter["seq"] for letter in value["dead_letters"]]


async def test_the_recipient_and_operators_see_a_dead_letter_and_nobody_else_does(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    seq = await poison(alice, bob)
    operator = await node.person("mia")
    assert await listed(bob) == [seq]
    assert await listed(operator) == [seq]
    assert await listed(operator, agent_id="bob") == [seq]
    assert await listed(operator, agent_id="alice") == []
    assert await listed(alice) == []
    await alice.call_refused("forbidden", "network.dead_letters", {"agent_id": "bob"})
    letter = (await bob.call("network.dead_letters"))["dead_letters"][0]
    assert (letter["agent_id"], letter["attempts"], letter["reason"]) == ("bob", 5, "handler failed")


async def test_a_dead_letter_taken_back_is_delivered_again_from_the_first_attempt(
    alice: WireSession, bob: WireSession
) -> None:
    seq = await poison(alice, bob)
    await bob.call("network.retry_dead_letter", {"seq": seq})
    again = await bob.expect("deliver")
    assert (again["message"]["seq"], again["attempt"]) == (seq, 1)
    assert await listed(bob) == []
    await bob.nack(seq)
    assert (await bob.expect("deliver"))["attempt"] == 2
    await bob.ack(seq, only=True)
    await alice.send("agent:bob", "marker")
    assert await bob.contents_until("marker") == []


async def test_a_dead_letter_taken_back_outlives_its_session(node: Node, alice: WireSession, bob: WireSession) -> None:
    seq = await poison(alice, bob)
    await alice.send("agent:bob", "later")
    later = await bob.message("later")
    await bob.ack(later["seq"])
    await bob.call("network.retry_dead_letter", {"seq": seq})
    await bob.expect("deliver")
    await bob.drop()
    again = await node.agent("bob")
    returned = await again.expect("deliver")
    assert returned["message"]["seq"] == seq
    await again.ack(seq, only=True)
    await again.bye()
    third = await node.agent("bob")
    await alice.send("agent:bob", "marker")
    assert await third.contents_until("marker") == []


async def test_a_dead_letter_is_taken_once(node: Node, alice: WireSession, bob: WireSession) -> None:
    seq = await poison(alice, bob)
    operator = await node.person("mia")
    await alice.call_refused("unknown_message", "network.drop_dead_letter", {"seq": seq})
    await operator.call("network.drop_dead_letter", {"seq": seq, "agent_id": "bob"})
    await bob.call_refused("unknown_message", "network.retry_dead_letter", {"seq": seq})
    assert await listed(operator) == []
    history = await bob.call("network.history", {"thread_id": "direct:alice~bob"})
    assert [message["seq"] for message in history["messages"]] == [seq]
