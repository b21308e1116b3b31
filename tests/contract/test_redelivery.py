"""Another attempt at a message: which session gets it, what an ack leaves open, what outlives a session. docs/protocol.md, "Delivery"."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.node import Node, node_process
from tests.support.wire import WireSession


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def send_hard(alice: WireSession, *sessions: WireSession) -> int:
    """The seq of a message that these sessions have been given."""
    stored = await alice.send("agent:bob", "hard")
    for session in sessions:
        await session.message("hard")
    return int(stored["seq"])


async def expect_attempt(session: WireSession, seq: int, attempt: int) -> None:
    delivery = await session.delivery()
    assert (delivery["message"]["seq"], delivery["attempt"]) == (seq, attempt)


async def test_an_ack_of_a_later_one_after_a_reconnect_leaves_a_nacked_one_open(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    seq = await send_hard(alice, bob)
    await bob.nack(seq, retry_after_ms=1000)
    await bob.settle()
    await bob.drop()
    later = await alice.send("agent:bob", "later")
    again = await node.agent("bob")
    await again.message("later")
    await again.ack(later["seq"])
    await expect_attempt(again, seq, 2)
    await again.ack(seq, only=True)
    await again.bye()
    third = await node.agent("bob")
    assert third.welcome["cursor"] >= later["seq"]


async def test_another_attempt_is_passed_on_when_the_session_that_has_it_is_lost(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    seq = await send_hard(alice, bob)
    await bob.nack(seq, retry_after_ms=600)
    await bob.settle()
    other = await node.agent("bob")  # its pages leave it out, so it is the one that gets it
    await expect_attempt(other, seq, 2)
    later = await alice.send("agent:bob", "later")
    await bob.message("later")
    await bob.ack(later["seq"])  # not that one: it is elsewhere
    await other.drop()
    await expect_attempt(bob, seq, 2)


async def test_a_nack_of_what_another_session_has_handled_changes_nothing(
    node: Node, alice: WireSession, bob: WireSession
) -> None:
    other = await node.agent("bob")
    seq = await send_hard(alice, bob, other)
    await other.ack(seq, only=True)
    await other.settle()
    await bob.nack(seq)
    harder = await send_hard(alice, bob, other)
    await bob.nack(harder)
    await expect_attempt(bob, harder, 2)  # and not that one before it
    status = await alice.call("network.message_status", {"seq": seq})
    assert [recipient["state"] for recipient in status["recipients"]] == ["handled"]


async def test_a_dead_letter_is_not_delivered_again_after_kill_9(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db") as process:
        alice, bob = await process.agent("alice"), await process.agent("bob")
        stored = await alice.send("agent:bob", "poison")
        for _ in range(5):
            await bob.expect("deliver")
            await bob.nack(stored["seq"])
        await bob.expect("notice", kind="dead_letter")
        await process.kill9()
        await process.restart()
        alice, bob = await process.agent("alice"), await process.agent("bob")
        await alice.send("agent:bob", "marker")
        assert await bob.contents_until("marker") == []
        letters = (await bob.call("network.dead_letters"))["dead_letters"]
        assert [letter["seq"] for letter in letters] == [stored["seq"]]
