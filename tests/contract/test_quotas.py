"""Tests of the quotas of one participant for messages, bytes and channels: others are not affected, and a refused
frame leaves nothing behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.config import Quota
from roundelay.network.errors import error_from_wire
from tests.support.node import node_process, running_node
from tests.support.wire import Frame, WireSession, expect_error, hello_frame

NOON_MS = 20_000 * 86_400_000 + 43_200_000
HALF_DAY_MS = 43_200_000
THREE = {"messages_per_day": 3}


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = NOON_MS

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Use a manual clock for the nodes of a test."""
    clock = Clock()
    monkeypatch.setattr("roundelay.app.system_clock", clock)
    return clock


async def store(session: WireSession, count: int, to: str = "broadcast") -> None:
    for number in range(count):
        await session.send(to, number)


def refused_for(frame: Frame, limit: str) -> Frame:
    """Check that an error names the limit, the time when it resets, and the key in the node's file."""
    expect_error(frame, "budget_exhausted")
    assert limit in frame["message"], frame
    assert f"quotas.ann.{limit} in the node's file" in frame["message"], frame
    assert 0 < frame["retry_after_ms"] <= 86_400_000
    return frame


async def use_of(session: WireSession, agent_id: str = "ann") -> dict[str, Any]:
    [use] = (await session.call("network.quotas", {"agent_id": agent_id}))["quotas"]
    value: dict[str, Any] = use
    return value


# --- messages a day


async def test_beyond_its_messages_nothing_of_a_participant_is_stored_until_the_next_day(clock: Clock) -> None:
    async with running_node(limits=THREE) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        await store(ann, 3)
        refusal = refused_for(await ann.submit("agent:bob", "one too many", message_id="m4"), "messages_per_day")
        assert refusal["retry_after_ms"] == HALF_DAY_MS
        assert "12 h 0 min" in refusal["message"]
        assert "3 messages of the 3" in refusal["message"]
        await store(bob, 3)  # other participants have their own quota
        # Only the bytes of a call count, because a call is not a message.
        await ann.call("channels.create", {"name": "den"})
        await ann.call_refused("budget_exhausted", "channels.post", {"name": "den", "text": "one too many"})
        clock.now += HALF_DAY_MS - 1
        refused_for(await ann.submit("agent:bob", "too early", message_id="m4"), "messages_per_day")
        clock.now += 1
        await ann.send("agent:bob", "the next day, under the id that is free", message_id="m4")
        assert await bob.contents_until("the next day, under the id that is free") == [0, 1, 2]


async def test_what_is_refused_does_not_count_and_a_repeat_is_answered_beyond_the_quota(clock: Clock) -> None:
    async with running_node(limits=THREE) as node:
        ann = await node.agent("ann")
        first = await ann.send("broadcast", "first", message_id="m1")
        for _ in range(5):
            await ann.refused("unknown_recipient", "agent:nobody")
        await store(ann, 2)
        refused_for(await ann.submit("broadcast", "beyond"), "messages_per_day")
        again = await ann.send("broadcast", "first", message_id="m1")
        assert (again["seq"], again["duplicate"]) == (first["seq"], True)
        await ann.refused("id_conflict", "broadcast", "another", message_id="m1")


async def test_the_count_outlives_a_restart_and_a_kill(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db", limits={**THREE, "bytes_per_day": 100_000}) as node:
        ann = await node.agent("ann")
        await ann.send("broadcast", "x" * 50_000)
        await node.kill9()
        await node.restart()
        ann = await node.agent("ann")
        refused_for(await ann.submit("broadcast", "x" * 50_000), "bytes_per_day")
        await ann.send("broadcast", 2)
        await node.restart()
        ann = await node.agent("ann")
        used = await use_of(ann)
        assert used["messages"] == 2
        await ann.send("broadcast", 3)
        refused_for(await ann.submit("broadcast", 4), "messages_per_day")


async def test_a_restart_forgets_less_than_a_ten_thousandth_of_a_large_quota(tmp_path: Path) -> None:
    limits = {"messages_per_day": 40_000}
    async with running_node(limits=limits, durability="full", db=tmp_path / "node.db") as node:
        ann = await node.agent("ann")
        await store(ann, 9)
        assert (await use_of(ann))["messages"] == 9
        tokens = node.tokens
    async with running_node(limits=limits, durability="full", db=tmp_path / "node.db") as node:
        node.tokens = tokens
        assert (await use_of(await node.agent("ann")))["messages"] == 8


# --- bytes a day


async def test_bytes_of_messages_are_counted_with_what_their_ids_take(clock: Clock) -> None:
    async with running_node(limits={"bytes_per_day": 4096}) as node:
        ann = await node.agent("ann")
        stored = await ann.send("broadcast", "x" * 1000)
        used = (await use_of(ann))["bytes"]
        [message] = (await ann.call("network.history", {"thread_id": stored["thread_id"]}))["messages"]
        assert used == len(json.dumps(message, separators=(",", ":"))) + 256
        refusal = refused_for(await ann.submit("broadcast", "x" * 3000), "bytes_per_day")
        assert f"{used} bytes" in refusal["message"]
        await ann.send("broadcast", "what is shorter goes")


async def test_records_count_in_bytes(clock: Clock) -> None:
    async with running_node(limits={"bytes_per_day": 19_000}) as node:
        ann = await node.agent("ann")
        for number in range(19):
            await ann.record("r", "note", {"text": "x" * 700}, record_id=f"r{number}")
        answer = await ann.submit_record("r", "note", {"text": "x" * 700}, record_id="r19")
        refused_for(answer, "bytes_per_day")
        again = await ann.record("r", "note", {"text": "x" * 700}, record_id="r0")
        assert again["duplicate"] is True
        page = await ann.call("network.records", {"reaction": "r"})
        assert len(page["records"]) == 19
        clock.now += HALF_DAY_MS
        await ann.record("r", "note", {"text": "under the same id"}, record_id="r19")


async def test_empty_records_count_too(clock: Clock) -> None:
    async with running_node(limits={"bytes_per_day": 2600}) as node:
        ann = await node.agent("ann")
        answers = [await ann.submit_record("r", "note", {}) for _ in range(11)]
        assert [answer["type"] for answer in answers] == [*["stored"] * 10, "error"]


async def test_calls_count_and_their_repeats_are_answered(clock: Clock) -> None:
    async with running_node(limits={"bytes_per_day": 8000}) as node:
        ann, mia = await node.agent("ann"), await node.person("mia")
        value = await ann.call("channels.create", {"name": "dev"}, call_id="c1")
        created = (await use_of(ann))["bytes"]
        assert created > 2 * 256  # the channel, its member, and the stored result
        await ann.call("channels.post", {"name": "dev", "text": "x" * 2000})
        assert (await use_of(ann))["bytes"] > created + 2000
        assert (await use_of(ann))["messages"] == 1
        while (answer := await ann.submit_call("channels.join", {"name": "dev"}))["type"] == "result":
            pass
        refused_for(answer, "bytes_per_day")
        refused_for(await ann.submit_call("channels.post", {"name": "dev", "text": "x" * 5000}), "bytes_per_day")
        assert await ann.call("channels.create", {"name": "dev"}, call_id="c1") == value
        assert (await use_of(mia, "mia"))["bytes"] == 0


async def test_an_operator_manages_the_network_beyond_its_own_quota(clock: Clock) -> None:
    async with running_node(limits={"messages_per_day": 1, "bytes_per_day": 1024}) as node:
        mia = await node.person("mia")
        await node.agent("ann")
        await mia.send("broadcast", "x" * 400)
        expect_error(await mia.submit_call("channels.create", {"name": "dev"}), "budget_exhausted")
        await mia.call("network.remove", {"agent_id": "ann"})


# --- quotas of one participant


async def test_a_participants_own_quota_goes_before_that_of_all(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    own = {"ann": Quota(messages_per_day=1), "bob": Quota(messages_per_day="unlimited", max_created_channels=0)}
    async with running_node(limits=THREE, quotas=own) as node:
        ann, bob, eve = [await node.agent(name) for name in ("ann", "bob", "eve")]
        assert [it.welcome["limits"].get("messages_per_day") for it in (ann, bob, eve)] == [1, None, 3]
        assert bob.welcome["limits"]["bytes_per_day"] == eve.welcome["limits"]["bytes_per_day"]
        await store(ann, 1)
        await store(bob, 10)
        await store(eve, 3)
        for session in (ann, eve):
            await session.refused("budget_exhausted", "broadcast")
        refusal = await bob.call_refused("forbidden", "channels.create", {"name": "dev"})
        assert "quotas.bob.max_created_channels" in refusal["message"]
        mia = await node.person("mia")
        uses = (await mia.call("network.quotas"))["quotas"]
        assert [(it["agent_id"], it["messages"], it["messages_per_day"], it["used"]) for it in uses] == [
            ("ann", 1, 1, 1.0), ("eve", 3, 3, 1.0), ("bob", 10, None, pytest.approx(0, abs=0.001)),
        ]  # fmt: skip
        assert [it["agent_id"] for it in (await mia.call("network.quotas", {"limit": 1}))["quotas"]] == ["ann"]
        assert (await mia.call("network.status"))["participants_near_quota"] == 2
        assert [it["agent_id"] for it in (await eve.call("network.quotas"))["quotas"]] == ["eve"]
        await eve.call_refused("forbidden", "network.quotas", {"agent_id": "ann"})


# --- a reaction beyond the quota of its agent


async def test_a_reaction_beyond_the_quota_ends_and_its_readers_are_told(clock: Clock) -> None:
    async with running_node(quotas={"ann": Quota(bytes_per_day=4000)}) as node:
        mia, eve, ann = await node.person("mia"), await node.person("eve"), await node.agent("ann", role="reactor")
        seq = (await mia.send("agent:ann", "a long piece of work"))["seq"]
        await ann.record("r1", "started", {"trigger": seq, "manifest": [seq]})
        refused_for(await ann.submit_record("r1", "model_reply", {"text": "x" * 5000}), "bytes_per_day")
        await ann.record("r1", "model_reply", {"text": "x" * 2500})
        refused_for(await ann.submit_record("r1", "finished", {"reason": "x" * 20_000}), "bytes_per_day")
        await ann.record("r1", "finished", {"status": "stopped", "reason": "x" * 2500})
        for session in (mia, eve):  # a reader of the thread and an operator
            notice = await session.expect("notice", kind="budget_exhausted")
            assert notice["thread_id"] == "direct:ann~mia"
            assert (notice["body"]["seq"], notice["body"]["reaction"]) == (seq, "r1")
            assert "bytes_per_day" in notice["body"]["reason"]
        assert (await ann.call("network.open_reactions"))["reactions"] == []
        refused_for(await ann.submit_record("r1", "finished", {}), "bytes_per_day")  # the reaction has ended
        second = (await mia.send("agent:ann", "and another"))["seq"]
        refused_for(await ann.submit_record("r2", "started", {"trigger": second}), "bytes_per_day")
        notice = await mia.expect("notice", kind="budget_exhausted")
        assert (notice["body"]["seq"], notice["body"]["reaction"]) == (second, "r2")
        [status] = (await mia.call("network.message_status", {"seq": second}))["recipients"]
        # Only a stored `started` acks its trigger, so the message is not yet handled.
        assert status["state"] == "delivered"


async def test_who_begins_again_and_again_beyond_its_quota_floods_nobody_with_notices(clock: Clock) -> None:
    async with running_node(quotas={"ann": Quota(bytes_per_day=0)}) as node:
        mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
        seq = (await mia.send("broadcast", "hello"))["seq"]
        for told in (60, 60):
            for number in range(200):
                await ann.submit_record(f"r{number}", "started", {"trigger": seq})
            await mia.settle()
            assert sum(frame["type"] == "notice" for frame in mia.unread) in (told, told + 1)
            mia.unread.clear()
            clock.now += 60_000


async def test_one_message_has_so_many_open_reactions_and_no_more() -> None:
    async with running_node(limits={"max_reactions_per_message": 2}) as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann"), await node.agent("bob")
        seqs = [(await mia.send("broadcast", text))["seq"] for text in ("one", "two")]
        for reaction in ("r1", "r2"):
            await ann.record(reaction, "started", {"trigger": seqs[0]})
        # The reaction is already open, so it does not count again.
        await ann.record("r1", "started", {"trigger": seqs[0], "again": True})
        refusal = expect_error(
            await ann.submit_record("r3", "started", {"trigger": seqs[0]}, record_id="third"), "forbidden"
        )
        assert "max_reactions_per_message" in refusal["message"]
        await ann.record("r3", "started", {"trigger": seqs[1]}, record_id="third")
        await bob.record("r3", "started", {"trigger": seqs[0]})
        await ann.record("r2", "finished", {})
        await ann.record("r4", "started", {"trigger": seqs[0]})


# --- channels, registrations, failures


async def test_channels_beyond_the_bound_are_refused_and_none_is_taken_away(tmp_path: Path) -> None:
    async with running_node(durability="full", db=tmp_path / "node.db") as node:
        ann = await node.agent("ann")
        for name in ("one", "two", "three"):
            await ann.call("channels.create", {"name": name})
        tokens = node.tokens
    async with running_node(limits={"max_created_channels": 3}, durability="full", db=tmp_path / "node.db") as node:
        node.tokens = tokens
        ann, bob = await node.agent("ann"), await node.agent("bob")
        refusal = await ann.call_refused("forbidden", "channels.create", {"name": "four"}, call_id="c")
        assert "max_created_channels" in refusal["message"]
        await bob.call("channels.create", {"name": "four"})
        await ann.call("channels.join", {"name": "four"}, call_id="c")
        await ann.call("channels.set_topic", {"name": "one", "topic": "still hers"})
        names = [it["name"] for it in (await ann.call("channels.list"))["channels"]]
        assert sorted(names) == ["four", "one", "three", "two"]


async def test_more_first_uses_a_minute_are_put_off_and_who_is_known_comes_in(clock: Clock) -> None:
    async with running_node(limits={"registrations_per_minute": 2}) as node:
        for name in ("a0", "a1", "a2"):  # the burst allows one minute's registrations plus the first one
            await node.agent(name)
        late = await node.connect()
        await late.send_frame(hello_frame("late", token=node.token_of("late")))
        refusal = expect_error(await late.next_frame(), "rate_limited")
        assert "registrations_per_minute" in refusal["message"]
        assert 0 < refusal["retry_after_ms"] <= 30_001
        assert await late.closed() == 4503
        mia = await node.person("mia")  # the owner's token has no limit
        agents = (await mia.call("network.list_agents"))["agents"]
        assert [it["agent_id"] for it in agents] == ["a0", "a1", "a2", "mia"]
        await node.agent("a1")
        clock.now += refusal["retry_after_ms"]
        await node.join("late", kind="agent", token="another token " * 4)


async def test_what_failed_waits_up_to_a_bound(clock: Clock) -> None:
    async with running_node(limits={"max_put_off": 2}) as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        seqs = [(await ann.send("agent:bob", number))["seq"] for number in range(3)]
        for seq in seqs[:2]:
            await bob.delivery()
            await bob.nack(seq, retry_after_ms=86_400_000)
        await bob.delivery()
        await bob.nack(seqs[2], retry_after_ms=86_400_000)
        refusal = expect_error(await bob.expect("error"), "rate_limited")
        assert "max_put_off" in refusal["message"]
        await bob.ack(seqs[2], only=True)  # the message still belongs to this session
        await bob.settle()
        states = [(await ann.call("network.message_status", {"seq": seq}))["recipients"][0]["state"] for seq in seqs]
        assert states[2] == "handled"
        assert "handled" not in states[:2]
        await bob.ack(seqs[0], only=True)
        fourth = (await ann.send("agent:bob", "there is room again"))["seq"]
        await bob.message("there is room again")
        await bob.nack(fourth, retry_after_ms=86_400_000)
        await bob.settle()
        assert [frame for frame in bob.unread if frame["type"] == "error"] == []


def test_a_client_gets_the_time_of_the_next_day() -> None:
    error = error_from_wire("budget_exhausted", "spent", 5000)
    assert getattr(error, "retry_after_ms", None) == 5000
    assert getattr(error_from_wire("budget_exhausted", "spent"), "retry_after_ms", 0) is None
