"""The mods for teams that share files: reservations end by the hub's stamps, and an answer is told of once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay import Network
from roundelay.mods.reservations import overlaps
from tests.support.node import node_process

MODS = ["channels", "discovery", "reservations", "notify_when"]


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("src/a.py", "src/a.py", True),
        ("src/a.py", "src/b.py", False),
        ("src/*", "src/deep/b.py", True),
        ("src/*.py", "src/a.md", False),
        ("src/*.py", "src/a*", True),
        ("src/*.py", "test/*.py", False),
        ("ab*ba", "aba", False),
        ("*", "x", True),
    ],
)
def test_two_patterns_overlap_where_one_file_could_be_of_both(one: str, other: str, meet: bool) -> None:
    assert (overlaps(one, other), overlaps(other, one)) == (meet, meet)


async def test_what_is_reserved_is_refused_to_others_until_it_ends_and_its_holder_is_told_once() -> None:
    now = [1_000_000]
    async with Network.open(mods=MODS, clock=lambda: now[0]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        mine = await ann.call("reservations.reserve", {"paths": ["./src/", "a.py"], "minutes": 5, "note": "refactor"})
        assert [it["path"] for it in mine["reserved"]] == ["src/*", "a.py"]
        for _ in range(2):
            refused = await bob.call("reservations.reserve", {"paths": ["src/deep/x.py", "b.py"]})
            assert (refused["reserved"], [it["agent_id"] for it in refused["taken"]]) == ([], ["ann"])
        told = (await ann.call("network.receive", {}))["messages"]
        assert [it["content"] for it in told] == ["bob wants what you have reserved: src/*."]
        assert (await bob.call("reservations.release", {}))["released"] == []  # not another's
        assert (await ann.call("reservations.release", {"paths": ["src/"]}))["released"] == ["src/*"]
        assert (await bob.call("reservations.reserve", {"paths": ["src/deep/x.py"]}))["taken"] == []
        now[0] = mine["reserved"][0]["until"]
        listed = (await ann.call("reservations.list", {}))["reservations"]
        assert [it["path"] for it in listed] == ["src/deep/x.py"]


async def test_an_answer_is_told_of_once_whatever_is_killed(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db", env={"ROUNDELAY_MODS": ",".join(MODS)}) as node:
        ann, bob, eve = [await node.agent(it) for it in ("ann", "bob", "eve")]
        seq = (await ann.send("agent:bob", "Ready?"))["seq"]
        await ann.call("notify_when.answered", {"seq": seq, "agent_id": "bob"})
        with pytest.raises(Exception, match="unknown_message"):
            await eve.call("notify_when.answered", {"seq": seq})  # she may not read it
        await ann.call("reservations.reserve", {"paths": ["x"]})
        await node.kill9()
        await node.restart()
        ann, bob = [await node.agent(it) for it in ("ann", "bob")]
        assert [it["path"] for it in (await bob.call("reservations.list", {}))["reservations"]] == ["x"]
        answer = (await bob.send("agent:ann", "Yes.", reply_to=seq))["seq"]
        await node.kill9()
        await node.restart()
        ann, bob = [await node.agent(it) for it in ("ann", "bob")]
        again = (await bob.send("agent:ann", "Yes!", reply_to=seq))["seq"]
        page: dict[str, Any] = await ann.call("network.receive", {"after": 0})
        told = [it["content"] for it in page["messages"] if it["kind"] == "mod"]
        assert told == [f"bob has answered #{seq}: #{answer}."]
        assert again > answer


async def test_the_end_of_an_agents_work_is_told_once_to_who_may_read_what_it_works_on(tmp_path: Path) -> None:
    async with node_process(tmp_path / "team.db", env={"ROUNDELAY_MODS": ",".join(MODS)}) as node:
        ann, bob, eve = await node.agent("ann"), await node.agent("bob", role="reactor"), await node.agent("eve")
        seq = (await ann.send("agent:bob", "Sum it up."))["seq"]
        await ann.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
        with pytest.raises(Exception, match="unknown_message"):
            await eve.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
        await bob.record("r1", "started", {"trigger": seq, "manifest": [seq]})
        await node.kill9()
        await node.restart()
        ann, bob = await node.agent("ann"), await node.agent("bob", role="reactor")
        assert not (await ann.call("network.receive", {}))["messages"]
        await bob.record("r1", "finished", {"status": "finished"}, record_id="end")
        await bob.record("r1", "finished", {"status": "finished"}, record_id="end")
        page = await ann.call("network.receive", {"after": 0})
        assert [it["content"] for it in page["messages"]] == [f"bob has finished its work on #{seq}."]
