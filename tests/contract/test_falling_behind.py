"""Tests of two sessions of one participant that both start at the ack cursor. The slow one also receives the messages
that the other one has handled meanwhile.

The messages of a session depend on the moment when it joined, and not on its reading speed:
docs/protocol/delivery.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.contract.test_redelivery import Visitor
from tests.support.node import Node, running_node
from tests.support.stepped_hub import SteppedHub
from tests.support.wire import Frame, WireSession

WINDOW = 4
LIMITS = {"max_unacked": WINDOW, "session_queue_bytes": 2048, "root_messages_per_s": 100_000}
"""Limits that a session without acks reaches soon: its window after four messages, and its queue after five or six
more.
"""
PADDING = "." * 250
MANY = 40


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running_node(limits=LIMITS) as running:
        yield running


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


async def say(alice: WireSession, number: int) -> int:
    return int((await alice.send("agent:bob", f"{number} {PADDING}"))["seq"])


async def handle(session: WireSession, *, only: bool = False) -> int:
    """Read the next delivery and acknowledge it. Return the message's seq."""
    seq: int = (await session.delivery())["message"]["seq"]
    await session.ack(seq, only=only)
    return seq


async def read_on(session: WireSession, until: int) -> list[Frame]:
    """Read the deliveries up to a seq, and acknowledge each."""
    frames = [await session.delivery()]
    while (seq := frames[-1]["message"]["seq"]) < until:
        await session.ack(seq)
        frames.append(await session.delivery())
    await session.ack(seq)
    return frames


def seqs(frames: list[Frame]) -> list[int]:
    return [frame["message"]["seq"] for frame in frames]


@pytest.mark.parametrize("only", [False, True])
async def test_a_session_that_falls_behind_is_given_what_another_acknowledged_meanwhile(
    node: Node, alice: WireSession, only: bool
) -> None:
    quick, slow = await node.agent("bob"), await node.agent("bob")
    sent = []
    for number in range(MANY):
        sent.append(await say(alice, number))
        assert await handle(quick, only=only) == sent[-1]
    await quick.settle()
    behind = await slow.expect("notice", kind="behind")
    assert behind["body"] == {"from_seq": sent[WINDOW - 1]}  # everything up to this seq was delivered
    frames = await read_on(slow, sent[-1])
    assert seqs(frames) == sent
    assert {frame["attempt"] for frame in frames} == {1}
    await slow.settle()
    live = await say(alice, MANY)
    assert await handle(slow) == live == await handle(quick)


async def test_a_session_that_stops_reading_is_given_everything_when_it_reads_on() -> None:
    limits = {"session_queue_bytes": 64 * 1024, "root_messages_per_s": 100_000}
    async with running_node(limits=limits) as node:
        alice, quick = await node.agent("alice"), await node.agent("bob")
        slow = await node.connect(max_queue=1, receive_buffer_bytes=8 * 1024)
        await slow.hello("bob", token=node.token_of("bob"))
        sent = []
        for number in range(150):
            sent.append((await alice.send("agent:bob", f"{number} {'x' * 60_000}"))["seq"])
            assert await handle(quick) == sent[-1]
        await quick.settle()
        assert seqs(await read_on(slow, sent[-1])) == sent
        await slow.expect("notice", kind="behind")


async def test_of_three_sessions_the_slow_one_is_given_what_two_handled(node: Node, alice: WireSession) -> None:
    slow, one, other = [await node.agent("bob") for _ in range(3)]
    sent = []
    for number in range(MANY):
        sent.append(await say(alice, number))
        for place, session in enumerate((one, other)):
            seq = (await session.delivery())["message"]["seq"]
            await session.ack(seq, only=number % 2 == place)
    await one.settle()
    await other.settle()
    assert seqs(await read_on(slow, sent[-1])) == sent


async def test_what_one_session_refuses_and_handles_then_comes_to_a_slow_one_once(
    node: Node, alice: WireSession
) -> None:
    quick, slow = await node.agent("bob"), await node.agent("bob")
    sent = []
    for number in range(MANY):
        sent.append(await say(alice, number))
        seq = (await quick.delivery())["message"]["seq"]
        for failures in range(number % 6 if number > 2 * WINDOW else 0):  # the fifth failure makes a dead letter
            await quick.nack(seq)
            if failures < 4:
                assert (await quick.delivery())["attempt"] == failures + 2
        await quick.ack(seq, only=True)
    await quick.settle()
    assert seqs(await read_on(slow, sent[-1])) == sent


async def test_what_waits_for_another_attempt_elsewhere_comes_to_a_slow_session_in_its_order(
    node: Node, alice: WireSession
) -> None:
    """A session that is not behind gets the message in the same place. The next attempt goes to the session that
    refused the first one.
    """
    quick, slow = await node.agent("bob"), await node.agent("bob")
    sent = []
    for number in range(MANY):
        sent.append(await say(alice, number))
        seq = (await quick.delivery())["message"]["seq"]
        if number == MANY // 2:
            await quick.nack(seq, retry_after_ms=60_000)
        else:
            await quick.ack(seq, only=True)
    await quick.settle()
    frames = await read_on(slow, sent[-1])
    assert seqs(frames) == sent
    assert [frame["attempt"] for frame in frames if frame["attempt"] != 1] == [2]


async def test_own_messages_come_to_a_slow_session_from_its_joining_on(node: Node, alice: WireSession) -> None:
    quick = await node.agent("bob")
    await quick.send("agent:alice", f"before {PADDING}")
    slow = await node.agent("bob")
    sent = []
    for number in range(MANY):
        sent.append(await say(alice, number))
        await handle(quick)
        sent.append((await quick.send("agent:alice", f"{number} {PADDING}"))["seq"])
    await quick.settle()
    assert seqs(await read_on(slow, sent[-1])) == sent


async def test_what_was_handled_before_a_session_joined_is_left_out_and_what_is_handled_later_is_not(
    node: Node, alice: WireSession
) -> None:
    quick = await node.agent("bob")
    sent = [await say(alice, number) for number in range(MANY)]
    for seq in sent[1:WINDOW]:
        await quick.ack(seq, only=True)
    for _ in sent[:WINDOW]:
        await quick.delivery()
    await quick.settle()
    slow = await node.agent("bob")
    await quick.ack(sent[0])
    for _ in sent[WINDOW:]:
        await handle(quick)
    await quick.settle()
    assert seqs(await read_on(slow, sent[-1])) == [sent[0], *sent[WINDOW:]]


async def test_a_slow_session_that_reconnects_is_given_what_was_open_when_it_came_back(
    node: Node, alice: WireSession
) -> None:
    quick, slow = await node.agent("bob"), await node.agent("bob")
    early = []
    for number in range(MANY):
        early.append(await say(alice, number))
        await handle(quick, only=True)
    await quick.settle()
    await slow.expect("notice", kind="behind")
    await slow.drop()
    again = await node.agent("bob")
    assert again.welcome["cursor"] >= early[-1]
    late = []
    for number in range(MANY):
        late.append(await say(alice, number))
        await handle(quick, only=True)
    await quick.settle()
    assert seqs(await read_on(again, late[-1])) == late


@pytest.fixture
def hub() -> Iterator[SteppedHub]:
    stepped = SteppedHub(LIMITS)
    yield stepped
    stepped.close()


def say_here(alice: Visitor, number: int) -> int:
    alice.say(type="send", message_id=f"m{number}", to="agent:bob", content=PADDING)
    return int(alice.connection.take_frames()[-1]["seq"])


def given(visitor: Visitor) -> list[int]:
    """Read and acknowledge the deliveries to a session until no more arrive. Return their seqs."""
    found: list[int] = []
    while frames := [frame for frame in visitor.connection.take_frames() if frame["type"] == "deliver"]:
        for frame in frames:
            found.append(frame["message"]["seq"])
            visitor.say(type="ack", seq=found[-1])
    return found


@pytest.mark.parametrize("crashes", [False, True])
def test_after_a_restart_a_slow_session_is_given_what_is_handled_while_it_is_behind(
    hub: SteppedHub, crashes: bool
) -> None:
    alice, quick = Visitor(hub, "alice"), Visitor(hub, "bob")
    early = [say_here(alice, number) for number in range(MANY)]
    slow = Visitor(hub, "bob")
    assert given(quick) == early
    hub.loop.step(1.0)  # stored acks may lag behind a crash by this time
    if crashes:
        hub.crash()
    else:
        hub.restart()
    alice, quick, slow = Visitor(hub, "alice"), Visitor(hub, "bob"), Visitor(hub, "bob")
    assert slow.welcome["cursor"] >= early[-1]
    late = [say_here(alice, MANY + number) for number in range(MANY)]
    assert given(quick) == late
    assert given(slow) == late


def test_a_session_that_joined_while_a_message_waited_is_given_it_as_another_attempt(hub: SteppedHub) -> None:
    alice, quick = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    quick.say(type="nack", seq=hard, reason="failed", retry_after_ms=1000)
    slow = Visitor(hub, "bob")
    late = [say_here(alice, number) for number in range(MANY)]
    assert [seq for seq in given(quick) if seq != hard] == late
    assert given(slow) == late, "not before it is due"
    hub.loop.step(1.1)
    frames: list[dict[str, Any]] = slow.connection.take_frames()
    assert [(frame["message"]["seq"], frame["attempt"]) for frame in frames] == [(hard, 2)]
