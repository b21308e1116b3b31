"""Tests of cause, root and hops, and of budgets and rates: docs/protocol/conversations.md and
docs/protocol/errors.md.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.node import Node, running_node
from tests.support.wire import Frame, WireSession, expect_error


@pytest.fixture
async def alice(node: Node) -> WireSession:
    return await node.agent("alice")


@pytest.fixture
async def bob(node: Node) -> WireSession:
    return await node.agent("bob")


async def test_root_and_hops_follow_the_cause(node: Node, alice: WireSession, bob: WireSession) -> None:
    carol = await node.agent("carol")
    first = await alice.send("agent:bob", "first")
    second = await bob.send("agent:carol", "second", cause=first["seq"])
    third = await carol.send("broadcast", "third", cause=second["seq"])
    got = [await bob.message("first"), await carol.message("second"), await alice.message("third")]
    assert [message["root"] for message in got] == [first["seq"]] * 3
    assert [message["hops"] for message in got] == [0, 1, 2]
    assert ["cause" in message for message in got] == [False, True, True]
    assert third["seq"] == got[2]["seq"]


async def test_a_reply_without_cause_is_its_own_root(alice: WireSession, bob: WireSession) -> None:
    first = await alice.send("agent:bob", "first")
    await bob.send("agent:alice", "reply", reply_to=first["seq"])
    reply = await alice.message("reply")
    assert (reply["root"], reply["hops"]) == (reply["seq"], 0)


async def test_a_cause_may_be_in_any_thread_that_one_reads(alice: WireSession, bob: WireSession) -> None:
    public = await alice.send("broadcast", "public")
    await bob.send("agent:alice", "private", cause=public["seq"])
    assert (await alice.message("private"))["root"] == public["seq"]


async def test_every_thread_of_a_root_draws_on_one_budget() -> None:
    async with running_node(limits={"max_root_messages": 4}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        await node.agent("carol")
        root = await alice.send("agent:bob", "root")
        await alice.send("agent:carol", "1", cause=root["seq"])
        await alice.send("broadcast", "2", cause=root["seq"])
        await bob.send("agent:carol", "3", cause=root["seq"])
        await bob.refused("loop_stopped", "agent:alice", "4", cause=root["seq"])


async def test_another_root_has_a_budget_of_its_own() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        alice = await node.agent("alice")
        await node.agent("bob")
        root = await alice.send("agent:bob", "root")
        await alice.send("agent:bob", "1", cause=root["seq"])
        await alice.refused("loop_stopped", "agent:bob", "2", cause=root["seq"])
        fresh = await alice.send("agent:bob", "fresh")
        await alice.send("agent:bob", "1", cause=fresh["seq"])


async def test_a_budget_counts_for_people_too_and_repeats_are_still_answered() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        mia = await node.person("mia")
        await node.agent("bob")
        root = await mia.send("agent:bob", "root")
        first = await mia.send("agent:bob", "1", cause=root["seq"], message_id="m1")
        await mia.refused("loop_stopped", "agent:bob", "2", cause=root["seq"])
        again = await mia.send("agent:bob", "1", cause=root["seq"], message_id="m1")
        assert again == first | {"duplicate": True}


async def test_the_readers_of_the_thread_get_one_notice() -> None:
    async with running_node(limits={"max_root_messages": 3}) as node:
        alice, bob, carol = await node.agent("alice"), await node.agent("bob"), await node.agent("carol")
        root = await alice.send("agent:bob", "root")
        await bob.send("agent:alice", "1", cause=root["seq"])
        last = await alice.send("agent:bob", "2", cause=root["seq"])
        for number in range(3):
            await bob.refused("loop_stopped", "agent:alice", f"too many {number}", cause=last["seq"])
            await alice.refused("loop_stopped", "agent:bob", f"too many {number}", cause=last["seq"])
        await carol.send("broadcast", "marker")
        for session in (alice, bob):
            await session.deliveries_until("marker")
            notices = [frame for frame in session.unread if frame["type"] == "notice"]
            assert len(notices) == 1
            (notice,) = notices
            assert (notice["kind"], notice["thread_id"]) == ("loop_stopped", "direct:alice~bob")
            assert set(notice["body"]) >= {"root", "seq", "reason"}
            assert (notice["body"]["root"], notice["body"]["seq"]) == (root["seq"], last["seq"])
        await carol.settle()
        assert carol.unread == []


async def test_each_thread_that_a_stopped_root_would_reach_gets_one_notice() -> None:
    async with running_node(limits={"max_root_messages": 2}) as node:
        alice, bob, carol = await node.agent("alice"), await node.agent("bob"), await node.agent("carol")
        root = await alice.send("agent:bob", "root")
        last = await bob.send("agent:alice", "1", cause=root["seq"])
        for number in range(3):
            await alice.refused("loop_stopped", "agent:bob", number, cause=last["seq"])
            await alice.refused("loop_stopped", "agent:carol", number, cause=last["seq"])
        for session in (alice, bob, carol):
            await session.settle()
        threads = {"alice": ["direct:alice~bob", "direct:alice~carol"], "bob": ["direct:alice~bob"]}
        threads["carol"] = ["direct:alice~carol"]
        for session in (alice, bob, carol):
            told = [frame["thread_id"] for frame in session.unread if frame["type"] == "notice"]
            assert told == threads[session.welcome["agent_id"]]


@pytest.mark.parametrize("limits", [{"max_root_messages": 2}, {"max_hops": 1}], ids=["messages", "hops"])
async def test_a_person_in_the_thread_resumes_a_stopped_root_and_nobody_else(limits: dict[str, int]) -> None:
    async with running_node(limits=limits) as node:
        host, bob = await node.person("host"), await node.agent("bob")
        mia, eve = await node.invite(host, "mia"), await node.invite(host, "eve")
        root = (await mia.send("agent:bob", "root"))["seq"]
        last = (await bob.send("agent:mia", "1", cause=root))["seq"]
        await bob.refused("loop_stopped", "agent:mia", "2", cause=last, message_id="m2")
        await bob.call_refused("forbidden", "network.resume_root", {"root": root})
        await eve.call_refused("unknown_message", "network.resume_root", {"root": root})
        await mia.call_refused("unknown_message", "network.resume_root", {"root": 2**50})
        await bob.refused("loop_stopped", "agent:mia", "2", cause=last, message_id="m2")
        assert await mia.call("network.resume_root", {"root": root}) == {"was_stopped": True}
        assert await mia.call("network.resume_root", {"root": root}) == {"was_stopped": False}
        assert (await bob.send("agent:mia", "2", cause=last, message_id="m2"))["duplicate"] is False


async def test_a_resumed_root_stops_again_at_its_next_limit() -> None:
    async with running_node(limits={"max_root_messages": 2, "max_hops": 1000, "root_messages_per_s": 1000}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        root = await mia.send("agent:bob", "root")
        for _ in range(2):
            for number in range(100):
                answer = await bob.submit("agent:mia", f"again {number}", cause=root["seq"])
                if answer["type"] == "error":
                    break
            expect_error(answer, "loop_stopped")
            await mia.call("network.resume_root", {"root": root["seq"]})
            await mia.expect("notice", kind="loop_stopped")


# -- rates and loads


async def test_a_full_writer_refuses_with_overloaded_and_takes_the_same_frame_later() -> None:
    async with running_node(limits={"max_pending_bytes": 2000, "root_messages_per_s": 100_000}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        frames = [
            {"type": "send", "message_id": f"m{n}", "to": "agent:bob", "content": f"{n} {'x' * 500}"} for n in range(40)
        ]
        for frame in frames:
            await alice.send_frame(frame)
        answers = [await alice.next_frame() for _ in frames]
        assert [answer["message_id"] for answer in answers] == [frame["message_id"] for frame in frames]
        refused = [answer for answer in answers if answer["type"] == "error"]
        assert refused
        for error in refused:
            expect_error(error, "overloaded")
        again = [frame for frame, answer in zip(frames, answers, strict=True) if answer["type"] == "error"]
        for frame in again:
            await alice.send_frame(frame)
            stored = await alice.answer(str(frame["message_id"]))
            assert (stored["type"], stored["duplicate"]) == ("stored", False)
        read = sorted([(await bob.delivery())["message"]["message_id"] for _ in frames])
        assert read == sorted(str(frame["message_id"]) for frame in frames)


async def send_at_once(*sessions: WireSession) -> list[Frame]:
    """Send one message from each session at once, and return the answers. No message waits for another one's answer,
    so all arrive at the same time even on a slow machine.
    """
    for number, session in enumerate(sessions):
        await session.send_frame({"type": "send", "message_id": f"m{number}", "to": "agent:bob", "content": "hello"})
    return [await session.answer(f"m{number}") for number, session in enumerate(sessions)]


async def test_causeless_messages_of_an_agent_are_rate_limited() -> None:
    async with running_node(limits={"root_messages_per_s": 3}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        answers = await send_at_once(*[alice] * 12)
        refused = expect_error(answers[-1], "rate_limited")
        assert 0 < refused["retry_after_ms"] <= 2000
        incoming = await bob.send("agent:alice", "a question")
        await alice.send("agent:bob", "an answer is not limited", cause=incoming["seq"])
        repeated = await alice.send("agent:bob", "hello", message_id=answers[0]["message_id"])
        assert repeated == answers[0] | {"duplicate": True}
        await asyncio.sleep(refused["retry_after_ms"] / 1000)  # the delay that the hub named
        stored = await alice.send("agent:bob", "hello", message_id=refused["message_id"])
        assert stored["duplicate"] is False


async def test_causeless_messages_of_people_are_not_rate_limited_as_an_agents() -> None:
    async with running_node(limits={"root_messages_per_s": 2}) as node:
        mia = await node.person("mia")
        await node.agent("bob")
        for number in range(20):
            await mia.send("agent:bob", number)


WRONG = {
    "malformed": '{"type":"send","message_id":"%s","to":"agent:bob","content":tru}',
    "unlisted_field": '{"type":"send","message_id":"%s","to":"agent:bob","content":1,"seq":5}',
    "no_address": '{"type":"send","message_id":"%s","to":"bob","content":1}',
    "nobody": '{"type":"send","message_id":"%s","to":"agent:nobody","content":1}',
    "no_cause": '{"type":"send","message_id":"%s","to":"agent:bob","content":1,"cause":99999}',
    "no_operation": '{"type":"call","call_id":"%s","op":"network.explode","args":{}}',
    "no_channel": '{"type":"call","call_id":"%s","op":"channels.join","args":{"name":"none"}}',
    "no_trigger": '{"type":"record","record_id":"%s","reaction":"r","kind":"started","body":{}}',
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG.keys())
async def test_what_is_refused_counts_in_its_senders_rate(raw: str) -> None:
    async with running_node(limits={"sends_per_s": 4, "root_messages_per_s": 1000}) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        for number in range(30):
            await alice.send_raw(raw % f"wrong{number}")
        await alice.send_frame({"type": "send", "message_id": "right", "to": "agent:bob", "content": "a right one"})
        answers = [await alice.answer(f"wrong{number}") for number in range(30)]
        codes = [answer["code"] for answer in answers]
        assert codes[0] != "rate_limited"
        assert codes.count("rate_limited") >= 15
        assert expect_error(answers[-1], "rate_limited")["retry_after_ms"] > 0
        expect_error(await alice.answer("right"), "rate_limited")
        await bob.send("agent:alice", "the others are not limited")


@pytest.mark.parametrize("kind", ["agent", "human", "service"])
async def test_sends_are_rate_limited_for_every_kind_and_all_its_sessions(kind: str) -> None:
    async with running_node(limits={"sends_per_s": 4, "root_messages_per_s": 1000}) as node:
        token = node.token_of("alice") if kind == "agent" else node.owner_token
        sessions = [await node.join("alice", kind=kind, token=token) for _ in range(3)]
        bob = await node.agent("bob")
        answers = await send_at_once(*sessions * 10)
        codes = [answer.get("code", "stored") for answer in answers]
        assert codes.count("rate_limited") >= 15
        assert codes.count("stored") >= 1
        expect_error(next(answer for answer in answers if answer["type"] == "error"), "rate_limited")
        await bob.send("agent:alice", "the others are not limited")
