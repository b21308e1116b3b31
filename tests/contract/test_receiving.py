"""Tests of `network.receive`: it returns the messages that a session would get, and acknowledged messages never
return.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from tests.support.node import Node, node_process, running_node
from tests.support.wire import WireSession, contents


async def receive_all(session: WireSession, **args: Any) -> list[dict[str, Any]]:
    """Return the messages of all pages after a seq."""
    found: list[dict[str, Any]] = []
    after = args.pop("after", 0)
    while True:
        page = await session.call("network.receive", {"after": after, "limit": 7, **args})
        found += page["messages"]
        after = page["next"]
        if not page["has_more"]:
            return found


async def state_of(sender: WireSession, seq: int) -> str:
    [recipient] = (await sender.call("network.message_status", {"seq": seq}))["recipients"]
    return str(recipient["state"])


async def test_who_asks_is_given_what_a_session_is_delivered(node: Node) -> None:
    rng = random.Random(7)
    rounds = given = 0
    writers = [await node.agent(name) for name in ("ann", "bob", "cat")]
    for number in range(4):
        reader = await node.agent(f"reader{number}")
        for name in (f"one{number}", f"two{number}"):
            await writers[0].call("channels.create", {"name": name, "history": rng.choice(["since_join", "members"])})
            for writer in writers[1:]:
                await writer.call("channels.join", {"name": name})
        inside: set[str] = set()
        for step in range(60):
            writer, channel = rng.choice(writers), rng.choice([f"one{number}", f"two{number}"])
            match rng.randrange(6):
                case 0:
                    await writer.send(f"agent:reader{number}", f"direct {step}")
                case 1:
                    await writer.send("agent:ann", f"for another {step}")
                case 2:
                    left_out = [f"reader{number}"] if rng.random() < 0.5 else []
                    await writer.send("broadcast", f"all {step}", exclude_agent_ids=left_out)
                case 3:
                    await writer.send(f"channel:{channel}", f"channel {step}")
                case 4:
                    await reader.call(f"channels.{'leave' if channel in inside else 'join'}", {"name": channel})
                    inside ^= {channel}
                case _:
                    await reader.send("agent:bob", f"its own {step}")
        await writers[0].send(f"agent:reader{number}", "the last")
        asked = await receive_all(reader)
        again = await node.agent(f"reader{number}")
        delivered = [frame["message"] for frame in await again.deliveries_until("the last")]
        assert asked.pop()["content"] == "the last"
        assert asked == delivered
        unhandled = (await reader.call("network.receive", {"limit": 500}))["messages"]
        assert asked == unhandled[:-1]
        rounds, given = rounds + 1, given + len(asked)
    print(f"{rounds} readers, {given} messages")
    assert given > 40


async def test_what_was_acknowledged_never_comes_again_and_its_sender_sees_how_far_it_got(tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        seqs = [(await mia.send("agent:bob", number))["seq"] for number in range(5)]
        assert await state_of(mia, seqs[0]) == "queued"
        assert len((await bob.call("network.receive", {"peek": True}))["messages"]) == 5
        assert await state_of(mia, seqs[0]) == "queued"
        page = await bob.call("network.receive", {"limit": 3})
        assert (contents(page["messages"]), page["has_more"]) == ([0, 1, 2], True)
        assert [await state_of(mia, seq) for seq in seqs[2:4]] == ["delivered", "queued"]
        assert contents((await bob.call("network.receive", {"after": page["next"]}))["messages"]) == [3, 4]
        assert await bob.call("network.acknowledge", {"seqs": [seqs[0], seqs[3]]}) == {"acknowledged": 2}
        await node.kill9()
        await node.restart()
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        assert [await state_of(mia, seq) for seq in seqs] == ["handled", "queued", "queued", "handled", "queued"]
        assert contents((await bob.call("network.receive"))["messages"]) == [1, 2, 4]
        assert await bob.call("network.acknowledge", {"seqs": [seqs[0], seqs[1]]}) == {"acknowledged": 1}


async def test_of_thousands_those_acknowledged_never_come_again_and_the_other_one_does(tmp_path: Path) -> None:
    async with running_node(db=tmp_path / "node.db", durability="normal") as node:
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        kept = (await mia.send("agent:bob", "kept"))["seq"]
        for _ in range(10):
            seqs = [(await mia.send("agent:bob", "x"))["seq"] for _ in range(150)]
            page = await bob.call("network.receive", {"limit": 150})
            assert page["messages"][0]["seq"] == kept
            await bob.call("network.acknowledge", {"seqs": seqs})
        bobs_token = node.tokens["bob"]
    async with running_node(db=tmp_path / "node.db", durability="normal") as node:
        node.tokens["bob"] = bobs_token
        bob = await node.agent("bob", deliver=False)
        assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [kept]


async def test_an_answer_waits_for_a_message_to_the_caller_alone(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    await node.agent("ann")
    asked = asyncio.create_task(bob.call("network.receive", {"wait_ms": 30_000}))
    for number in range(3):
        await mia.send("agent:ann", number)
    assert not asked.done()
    seq = (await mia.send("agent:bob", "now"))["seq"]
    page = await asked
    assert (contents(page["messages"]), page["next"]) == (["now"], seq)
    page = await bob.call("network.receive", {"after": page["next"], "wait_ms": 1})
    assert page["messages"] == []


async def test_nothing_but_what_was_delivered_to_the_caller_is_acknowledged(node: Node) -> None:
    mia, bob, ann = await node.person("mia"), await node.agent("bob"), await node.agent("ann")
    own, others = (await bob.send("agent:ann", "x"))["seq"], (await mia.send("agent:ann", "x"))["seq"]
    good = (await mia.send("agent:bob", "x"))["seq"]
    for seq in (own, others, good + 100):
        error = await bob.call_refused("unknown_message", "network.acknowledge", {"seqs": [good, seq]})
        assert f"no message {seq} that was delivered to bob" in error["message"]
    await bob.call_refused("invalid_arguments", "network.acknowledge", {"seqs": []})
    assert len((await bob.call("network.receive"))["messages"]) == 1
    assert len((await ann.call("network.receive"))["messages"]) == 2


async def test_a_session_and_who_asks_share_what_is_handled(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    first, second = [(await mia.send("agent:bob", text))["seq"] for text in ("first", "second")]
    await bob.message("first")
    await bob.ack(first)
    await bob.settle()
    assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [second]
    await bob.call("network.acknowledge", {"seqs": [second]})
    again = await node.agent("bob")
    await mia.send("agent:bob", "third")
    assert await again.contents_until("third") == []


async def test_a_session_that_wants_no_deliveries_gets_none_and_asks_for_what_failed_elsewhere(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob")
    silent = await node.agent("bob", deliver=False)
    seq = (await mia.send("agent:bob", "try"))["seq"]
    await bob.message("try")
    await bob.nack(seq, retry_after_ms=1)
    await bob.drop()
    while not (page := await silent.call("network.receive"))["messages"]:  # the message is not due yet
        pass
    assert contents(page["messages"]) == ["try"]
    assert await silent.call("network.acknowledge", {"seqs": [seq]}) == {"acknowledged": 1}
    assert await state_of(mia, seq) == "handled"
    await silent.send_frame({"type": "bye"})
    assert [frame for frame in await silent.rest() if frame["type"] == "deliver"] == []


async def test_what_was_left_far_below_is_given_first_and_costs_no_look_at_all_that_is_handled(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
    kept = [(await mia.send("agent:bob", "kept"))["seq"] for _ in range(3)]
    done = [(await mia.send("agent:bob", "done"))["seq"] for _ in range(400)]
    await bob.call("network.receive", {"limit": 500})
    await bob.call("network.acknowledge", {"seqs": done})
    new = (await mia.send("agent:bob", "new"))["seq"]
    assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [*kept, new]
    page = await bob.call("network.receive", {"limit": 2})
    assert ([it["seq"] for it in page["messages"]], page["next"], page["has_more"]) == (kept[:2], kept[1], True)
    await bob.call("network.acknowledge", {"seqs": kept[:2]})
    assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [kept[2], new]


async def test_what_whoever_asks_says_has_failed_comes_again_and_at_the_fifth_failure_is_a_dead_letter(
    tmp_path: Path,
) -> None:
    async with node_process(tmp_path / "node.db") as node:
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        first, second = [(await mia.send("agent:bob", text))["seq"] for text in ("poison", "good")]
        value = await bob.call("network.nack", {"seq": first, "reason": "no", "retry_after_ms": 60_000})
        assert value == {"attempts": 1, "is_dead": False}
        # The other message is not due.
        assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [second]
        await node.kill9()
        await node.restart()
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [second]
        for attempt in range(2, 6):
            value = await bob.call("network.nack", {"seq": first, "reason": "still no", "retry_after_ms": 0})
            assert value == {"attempts": attempt, "is_dead": attempt == 5}
        assert await state_of(mia, first) == "dead"
        [letter] = (await bob.call("network.dead_letters"))["dead_letters"]
        assert (letter["seq"], letter["reason"], letter["attempts"]) == (first, "still no", 5)
        assert await bob.call("network.nack", {"seq": first, "reason": "x"}) == {"attempts": 0, "is_dead": False}
        await bob.call("network.retry_dead_letter", {"seq": first})
        while len(page := (await bob.call("network.receive"))["messages"]) < 2:  # due in a moment
            pass
        assert [it["seq"] for it in page] == [first, second]
        assert await bob.call("network.acknowledge", {"seqs": [first]}) == {"acknowledged": 1}
        assert await state_of(mia, first) == "handled"
        assert [it["seq"] for it in (await bob.call("network.receive"))["messages"]] == [second]
        await bob.call_refused("unknown_message", "network.nack", {"seq": first + 100, "reason": "x"})


async def test_only_so_many_of_one_may_have_failed_and_not_be_handled() -> None:
    async with running_node(limits={"max_put_off": 2}) as node:
        mia, bob = await node.person("mia"), await node.agent("bob", deliver=False)
        seqs = [(await mia.send("agent:bob", "x"))["seq"] for _ in range(3)]
        for seq in seqs[:2]:
            await bob.call("network.nack", {"seq": seq, "reason": "no"})
        await bob.call_refused("rate_limited", "network.nack", {"seq": seqs[2], "reason": "no"})
        await bob.call("network.acknowledge", {"seqs": seqs[:1]})
        await bob.call("network.nack", {"seq": seqs[2], "reason": "no"})
