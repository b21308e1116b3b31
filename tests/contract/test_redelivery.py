"""Tests of further attempts at a message: the session that gets it, messages that an ack leaves open, and state that
outlives a session. docs/protocol/delivery.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from roundelay.app import Network
from roundelay.network.core.rows import Row
from tests.support.node import Node, node_process
from tests.support.stepped_hub import SteppedHub
from tests.support.wire import WireSession


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def send_hard(alice: WireSession, *sessions: WireSession) -> int:
    """Send a message, wait until these sessions have received it, and return its seq."""
    stored = await alice.send("agent:bob", "hard")
    for session in sessions:
        await session.message("hard")
    return int(stored["seq"])


async def expect_attempt(session: WireSession, seq: int, attempt: int) -> None:
    delivery = await session.delivery()
    assert (delivery["message"]["seq"], delivery["attempt"]) == (seq, attempt)


@pytest.fixture
def hub() -> Iterator[SteppedHub]:
    """A stepped hub with a simulated clock, so that the order of events does not depend on the machine."""
    stepped = SteppedHub({"root_messages_per_s": 100_000})
    yield stepped
    stepped.close()


class Visitor:
    """A session of the stepped hub."""

    def __init__(self, hub: SteppedHub, agent_id: str, **hello: object) -> None:
        self.hub = hub
        self.connection, self.session = hub.connect()
        self.say(type="hello", protocol=1, agent_id=agent_id, kind="agent", **hello)
        [self.welcome] = [frame for frame in self.connection.frames if frame["type"] == "welcome"]

    def say(self, **frame: object) -> None:
        self.hub.receive(self.session, frame)
        self.hub.loop.step()

    def send(self, text: str) -> int:
        self.say(type="send", message_id=text, to="agent:bob", content=text)
        return int(self.connection.take_frames()[-1]["seq"])

    def given(self) -> list[tuple[str, int]]:
        """Return the deliveries since the last call, each with its attempt."""
        frames = [frame for frame in self.connection.take_frames() if frame["type"] == "deliver"]
        return [(frame["message"]["content"], frame["attempt"]) for frame in frames]

    def drop(self) -> None:
        self.hub.hub.disconnect(self.session)
        self.hub.loop.step()


def test_an_ack_of_a_later_one_after_a_reconnect_leaves_a_nacked_one_open(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=1000)
    bob.drop()
    later = alice.send("later")
    again = Visitor(hub, "bob")
    assert again.given() == [("later", 1)]
    again.say(type="ack", seq=later)
    hub.loop.step(1.1)
    assert again.given() == [("hard", 2)]
    again.say(type="ack", seq=hard, only=True)
    again.say(type="bye")
    assert Visitor(hub, "bob").welcome["cursor"] >= later


def test_another_attempt_is_passed_on_when_the_session_that_has_it_is_lost(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    assert bob.given() == [("hard", 1)]
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=600)
    other = Visitor(hub, "bob")  # the pages of this session skip the message, so the session gets the next attempt
    assert other.given() == []
    hub.loop.step(0.7)
    assert (other.given(), bob.given()) == ([("hard", 2)], [])
    later = alice.send("later")
    assert bob.given() == [("later", 1)]
    bob.say(type="ack", seq=later)  # this ack does not cover the message, because another session has it
    other.drop()
    assert bob.given() == [("hard", 2)]


def test_an_ack_that_meets_another_attempt_on_its_way_does_not_cover_it(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard, later = alice.send("hard"), alice.send("later")
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=1000)
    hub.loop.step(1.1)
    bob.say(type="ack", seq=later)  # bob sent this ack before he read the next attempt
    assert bob.given() == [("hard", 1), ("later", 1), ("hard", 2)]
    bob.drop()
    again = Visitor(hub, "bob")
    hub.loop.step(1.1)
    assert again.given() == [("hard", 2)]


@pytest.mark.parametrize("names", ["itself", "a later one"])
def test_another_attempt_is_acknowledged_by_itself_or_by_what_came_after_it(hub: SteppedHub, names: str) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard, later = alice.send("hard"), alice.send("later")
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=1000)
    hub.loop.step(1.1)
    last = alice.send("last")
    assert bob.given() == [("hard", 1), ("later", 1), ("hard", 2), ("last", 1)]
    bob.say(type="ack", seq=hard if names == "itself" else last)
    bob.say(type="ack", seq=later)
    bob.drop()
    again = Visitor(hub, "bob")
    hub.loop.step(1.1)
    assert again.given() == ([("last", 1)] if names == "itself" else [])


def test_without_retry_after_ms_the_next_attempt_comes_after_a_second_doubled_each_time(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    assert bob.given() == [("hard", 1)]
    for failures, delay_s in enumerate((1, 2, 4, 8), 1):
        bob.say(type="nack", seq=hard, reason="failed")
        hub.loop.step(delay_s - 0.005)
        assert bob.given() == []
        hub.loop.step(0.01)
        assert bob.given() == [("hard", failures + 1)]


def count_attempts(visitor: Visitor, seq: int) -> tuple[str, int]:
    """Return the state and the attempts of a message's only recipient."""
    visitor.say(type="call", call_id="status", op="network.message_status", args={"seq": seq})
    [status] = visitor.connection.take_frames()[-1]["value"]["recipients"]
    return status["state"], status["attempts"]


def test_attempts_count_every_try_and_stay_when_the_message_is_handled(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    easy, hard = alice.send("easy"), alice.send("hard")
    bob.say(type="ack", seq=easy)
    for tries in (1, 2, 3):
        assert count_attempts(alice, hard) == ("delivered", tries)
        bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=100)
        assert count_attempts(alice, hard) == ("delivered", tries), "it waits"
        hub.loop.step(0.2)
        assert bob.given()[-1] == ("hard", tries + 1)
    assert count_attempts(alice, hard) == ("delivered", 4)
    bob.say(type="ack", seq=hard, only=True)
    assert [count_attempts(alice, seq) for seq in (easy, hard)] == [("handled", 1), ("handled", 4)]
    hub.loop.step(5.0)
    assert [count_attempts(alice, seq) for seq in (easy, hard)] == [("handled", 1), ("handled", 4)]
    hub.crash()
    assert [count_attempts(Visitor(hub, "alice"), seq) for seq in (easy, hard)] == [("handled", 1), ("handled", 4)]


@pytest.mark.parametrize("is_dropped", [True, False])
def test_attempts_of_a_dead_letter_stay_when_it_is_dropped_and_begin_again_when_it_is_taken_back(
    hub: SteppedHub, is_dropped: bool
) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    for _ in range(5):
        bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=100)
        hub.loop.step(0.2)
    assert count_attempts(alice, hard) == ("dead", 5)
    op = "network.drop_dead_letter" if is_dropped else "network.retry_dead_letter"
    bob.say(type="call", call_id="take", op=op, args={"seq": hard})
    hub.loop.step(0.2)
    bob.say(type="ack", seq=hard, only=True)
    for _ in range(2):
        assert count_attempts(alice, hard) == ("handled", 5 if is_dropped else 1)
        hub.loop.step(5.0)


def test_attempts_at_a_trigger_count_the_reactors_that_were_lost_and_stay_when_one_finishes(hub: SteppedHub) -> None:
    alice, bot = Visitor(hub, "alice"), Visitor(hub, "bob", role="reactor")
    hard = alice.send("hard")
    bot.say(type="record", record_id="r1", reaction="r", kind="started", body={"trigger": hard})
    for lost in range(3):
        assert count_attempts(alice, hard) == ("in_prompt", 1 + lost)
        bot.drop()
        bot = Visitor(hub, "bob", role="reactor")
    bot.say(type="record", record_id="r2", reaction="r", kind="finished", body={})
    for _ in range(2):
        assert count_attempts(alice, hard) == ("in_prompt", 4)
        hub.loop.step(5.0)


def test_an_attempt_whose_reading_is_slow_comes_once_however_often_its_recipient_comes_back(hub: SteppedHub) -> None:
    alice, bob = Visitor(hub, "alice"), Visitor(hub, "bob")
    hard = alice.send("hard")
    read, readings = hub.ledger.messages, []

    async def read_late(seqs: Sequence[int]) -> Mapping[int, Row]:
        readings.append(asyncio.Event())
        await readings[-1].wait()
        return await read(seqs)  # type: ignore[no-any-return]

    hub.ledger.messages = read_late
    bob.say(type="nack", seq=hard, reason="failed", retry_after_ms=0)
    hub.loop.step(0.1)
    bob.say(type="bye")
    again = Visitor(hub, "bob")
    hub.loop.step(0.1)
    assert len(readings) == 2
    given = []
    for reading in readings:
        reading.set()
        hub.loop.step()
        given += again.given()
        if len(given) == 1:
            again.say(type="nack", seq=hard, reason="failed", retry_after_ms=60_000)
    assert given == [("hard", 2)]
    del hub.ledger.messages
    hub.loop.step(60.1)
    assert again.given() == [("hard", 3)]


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
    await expect_attempt(bob, harder, 2)  # the message before this one is not delivered again
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


async def test_what_was_handled_on_another_attempt_is_acknowledged_whatever_else_is() -> None:
    """The test uses the project's own client. The hub lets no ack of a later message cover an attempt that may have
    crossed with it.
    """
    async with Network.open() as network, AsyncExitStack() as stack:
        ann = await network.join("ann")
        async with await network.join("bob") as bob:
            for number in range(4):
                await ann.send_text("bob", f"m{number}")
            deliveries = bob.deliveries()
            first, failed, *others = [await anext(deliveries) for _ in range(4)]
            await first.ack()
            await failed.nack("busy", retry_after_ms=20)
            again = await anext(deliveries)
            assert (again.message.text, again.attempt) == ("m1", 2)
            for delivery in (again, *others):  # all acks go out together
                await delivery.ack()
            await bob.call("network.info")
        bob = await stack.enter_async_context(await network.join("bob"))
        await ann.send_text("bob", "marker")
        assert (await anext(bob.deliveries())).message.text == "marker"
