"""Tests of the activity of agents in `network.list_agents`, which the hub derives only from sessions and open
reactions.
"""

from __future__ import annotations

from typing import Any

from tests.support.node import Node, running_node
from tests.support.wire import WireSession


async def look(reader: WireSession, agent_id: str = "bob") -> dict[str, Any]:
    [found] = [it for it in (await reader.call("network.list_agents"))["agents"] if it["agent_id"] == agent_id]
    return {name: found[name] for name in ("activity", "open_reactions", "work") if name in found}


async def test_an_agent_works_waits_is_held_stops_is_gone_and_comes_back(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor", instance="one")
    await node.agent("ann")
    assert await look(mia) == {"activity": "idle"}
    asked = await mia.send("agent:bob", "work")
    seq, thread_id = asked["seq"], asked["thread_id"]
    begun = (await bob.record("r1", "started", {"trigger": seq, "manifest": [seq]}))["seq"]

    async def now() -> tuple[str, dict[str, Any]]:
        told = await look(mia)
        [work] = told["work"]
        place = {name: work.pop(name) for name in ("reaction", "thread_id", "trigger", "seq")}
        assert place == {"reaction": "r1", "thread_id": thread_id, "trigger": seq, "seq": begun}
        assert work.pop("at") > 0
        assert told["open_reactions"] == 1
        return told["activity"], work

    call = {"turn": 1, "call": 0}
    assert await now() == ("works", {"activity": "works"})
    await bob.record("r1", "tool_started", {**call, "tool": "ask"})
    assert (await now())[0] == "works"
    await bob.record(
        "r1", "waiting", {**call, "questions": {"ann": 3, "Not an id": 4}, "until": 1, "is_approval": False}
    )
    assert await now() == ("waits", {"activity": "waits", "waits_for": ["ann"]})
    await bob.record("r1", "tool_result", {**call, "content": "x", "ok": True})
    assert (await now())[0] == "works"
    await bob.record("r1", "waiting", {"turn": 2, "call": 0, "questions": {"a person": 7}, "is_approval": True})
    assert await now() == ("waits", {"activity": "waits", "decisions": [7]})
    await mia.call("network.take", {"thread_id": thread_id})
    assert await now() == ("held", {"activity": "held"})
    await mia.call("network.give", {"thread_id": thread_id})
    assert await now() == ("queued", {"activity": "queued"})

    other = (await mia.send("agent:bob", "more"))["seq"]
    await bob.record("r1", "finished", {"status": "cancelled"})
    begun = (await bob.record("r1", "started", {"trigger": other}, record_id="again"))["seq"]
    seq = other
    await mia.call("network.cancel", {"reaction": "r1"})
    assert await now() == ("stopping", {"activity": "stopping"})
    await bob.drop()
    await mia.call("network.watch", {"presence": True})
    while (await look(mia))["activity"] != "gone":
        pass
    assert await now() == ("gone", {"activity": "interrupted"})
    bob = await node.agent("bob", role="reactor", instance="two")
    await bob.record("r1", "finished", {"status": "cancelled"}, record_id="end")
    assert await look(mia) == {"activity": "idle"}


async def test_a_reaction_that_a_new_process_has_not_come_to_is_queued(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    seq = (await mia.send("agent:bob", "work"))["seq"]
    await bob.record("r1", "started", {"trigger": seq})
    await node.agent("bob", role="reactor")
    assert (await look(mia))["activity"] == "queued"


async def test_an_agent_that_answered_without_causes_until_it_was_stopped_is_told_as_that() -> None:
    async with running_node(limits={"max_uncaused_answers": 1}) as node:
        mia, ann, bob = await node.person("mia"), await node.agent("ann"), await node.agent("bob")
        for _ in range(3):
            await ann.submit("agent:bob", "hello")
            await bob.delivery()
            answer = await bob.submit("agent:ann", "hello yourself")
        assert answer["code"] == "loop_stopped"
        assert await look(mia) == {"activity": "stopped"}


async def test_what_an_agent_does_is_told_to_people_of_what_they_may_read_and_to_no_agent(node: Node) -> None:
    host, bob = await node.person("host"), await node.agent("bob", role="reactor")
    mia, zoe, ann = await node.invite(host, "mia"), await node.invite(host, "zoe"), await node.agent("ann")
    seq = (await mia.send("agent:bob", "between us"))["seq"]
    await bob.record("r1", "started", {"trigger": seq})
    assert [(await look(it))["activity"] for it in (mia, host)] == ["works", "works"]
    assert await look(zoe) == {"activity": "idle"}
    assert await look(ann) == await look(bob) == {}
    assert "activity" not in await look(mia, "zoe")


async def test_of_an_agent_with_any_number_of_open_reactions_the_oldest_are_told(node: Node) -> None:
    mia, bob = await node.person("mia"), await node.agent("bob", role="reactor")
    for number in range(1040):
        if number % 16 == 0:  # the limit for one message
            note = (await bob.send("broadcast", f"note {number}"))["seq"]
        record = {"reaction": f"r{number:04}", "kind": "started", "body": {"trigger": note}}
        await bob.send_frame({"type": "record", "record_id": f"begun-{number}", **record})
    await bob.settle()
    told = await look(mia)
    assert told["open_reactions"] == 1000
    assert [it["reaction"] for it in told["work"]] == [f"r{number:04}" for number in range(16)]
