"""Tests of the mods for teams that share files: reservations end by the hub's stamps, and an answer is announced
once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from roundelay import InvalidArguments, Network
from roundelay.mods.reservations import overlaps
from roundelay.network.core.tables import OpenReaction
from roundelay.network.errors import UnknownRecipient
from roundelay.network.mod import Change, Mod
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
        ("ab*ba.c", "aba.c", False),
        ("src", "src/a.py", True),
        ("src", "srcs/a.py", False),
        ("src", "src/*.py", True),
        ("src/x.d", "src/x.d/*.py", True),
        ("*", "x", True),
    ],
)
def test_two_patterns_overlap_where_one_file_could_be_of_both(one: str, other: str, meet: bool) -> None:
    assert (overlaps(one, other), overlaps(other, one)) == (meet, meet)


SPELLINGS = ("src//a", "./././src/a", "src/b/../a", "src/./a/", "src\\a", " src/a ")


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_however_a_path_is_spelled_it_is_the_same_one(spelling: str) -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        await ann.call("reservations.reserve", {"paths": [spelling]})
        assert [it["agent_id"] for it in (await bob.call("reservations.reserve", {"paths": ["src/a"]}))["taken"]] == [
            "ann"
        ]
        assert (await bob.call("reservations.reserve", {"paths": ["."]}))["reserved"] == []  # the whole project
        for outside in ("/etc/passwd", "../a", "src/../../a", "~/a", "C:\\a", "s*/../a"):
            with pytest.raises(InvalidArguments, match="project"):
                await bob.call("reservations.reserve", {"paths": [outside]})
        assert len((await ann.call("reservations.release", {"paths": ["src/a/.", "src/a"]}))["released"]) == 1


async def test_who_prolongs_is_not_told_again_of_who_had_come() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        for _ in range(3):
            await ann.call("reservations.reserve", {"paths": ["a.py"]})
            await bob.call("reservations.reserve", {"paths": ["a.py"]})
        assert len((await ann.call("network.receive", {}))["messages"]) == 1


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
        # Bob releases no reservation of another agent.
        assert (await bob.call("reservations.release", {}))["released"] == []
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
            await eve.call("notify_when.answered", {"seq": seq})  # eve may not read the message
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


async def test_failed_work_on_a_message_is_notified_once() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        seq = (await ann.send_text("bob", "Sum it up.")).seq
        await ann.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
        for _ in range(5):
            delivery = await anext(bob.deliveries())
            await delivery.nack("No.", retry_after_ms=0)
        async with ann.receive() as message:
            assert message.text == f"bob failed too often at #{seq}."


async def test_what_is_asked_to_be_told_has_bounds_ends_and_is_taken_back_as_a_whole() -> None:
    now = [1_000_000]
    async with Network.open(mods=MODS, clock=lambda: now[0]) as network:
        ann, bob, _ = await network.join("ann"), await network.join("bob"), await network.join("eve")
        seqs = [(await ann.send("agent:bob", f"{it}?")).seq for it in range(51)]
        for op in ("answered", "finished"):
            with pytest.raises(UnknownRecipient, match="nobody"):
                await ann.call(f"notify_when.{op}", {"seq": seqs[0], "agent_id": "nobody"})
            with pytest.raises(InvalidArguments):
                await ann.call(f"notify_when.{op}", {"seq": seqs[0], "agent_id": "x" * 65})
        for seq in [*seqs[:50], seqs[0]]:  # a repeated request does not count twice
            await ann.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
        with pytest.raises(InvalidArguments, match="cancel"):
            await ann.call("notify_when.answered", {"seq": seqs[50]})
        await bob.call("notify_when.answered", {"seq": seqs[0]})  # bob's own request
        assert (await ann.call("notify_when.cancel", {"seq": seqs[0]}))["is_cancelled"]
        assert not (await ann.call("notify_when.cancel", {"seq": seqs[0]}))["is_cancelled"]
        await ann.call("notify_when.answered", {"seq": seqs[50], "agent_id": "bob"})
        state = network.hub.state
        kept = [key for key, _ in state.items("mod") if key.startswith("notify_when/")]
        assert len(kept) == 52  # 49 ends, two answers, and their list
        now[0] += 8 * 86_400_000
        await ann.call("notify_when.answered", {"seq": seqs[0]})
        kept = [key for key, _ in state.items("mod") if key.startswith("notify_when/")]
        assert sorted(kept) == sorted([f"notify_when/{seqs[0]}", "notify_when/asked"])
        await bob.send("agent:ann", "0!", reply_to=seqs[0])
        told = [it["content"] for it in (await ann.call("network.receive", {}))["messages"] if it["kind"] == "mod"]
        assert [it.partition(":")[0] for it in told] == [f"bob has answered #{seqs[0]}"]
        assert not [key for key, _ in state.items("mod") if key.startswith("notify_when/")]


class Careless(Mod):
    """Mod that fails at the end of each reaction, after a write."""

    id = "careless"

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        change.put("seen", reaction.trigger)
        change.answer("ann", "half of it")
        change.put("\ud800", 1) if reaction.trigger % 2 else change.post("agent:nobody", "?")


class Unwilling(Mod):
    """Mod that fails when a participant is removed."""

    id = "unwilling"

    def removed(self, change: Change, agent_id: str) -> None:
        change.put("seen", agent_id)
        raise InvalidArguments("No.")


async def test_a_mod_that_fails_at_a_removal_cannot_prevent_it() -> None:
    async with Network.open(mods=[*MODS, Unwilling()]) as network:
        root, bob = await network.join("root", kind="human"), await network.join("bob")
        await root.call("network.remove", {"agent_id": bob.agent_id})
        assert network.hub.state.present("bob") is None
        assert not [key for key, _ in network.hub.state.items("mod") if key.startswith("unwilling/")]


async def test_a_mod_that_fails_at_the_end_of_a_reaction_keeps_nobody_from_ending_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Network.open(mods=[*MODS, Careless()]) as network:
        ann, bob = await network.join("ann"), await network.join("bob", role="reactor")
        for number in range(2):
            seq = (await ann.send("agent:bob", "Sum it up.")).seq
            await ann.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
            await bob.record(f"r{number}", "started", {"trigger": seq, "manifest": [seq]}, record_id=f"{number}begin")
            await bob.record(f"r{number}", "finished", {"status": "finished"}, record_id=f"{number}end")
        told = [it["content"] for it in (await ann.call("network.receive", {}))["messages"]]
        assert [it.partition(" its")[0] for it in told] == ["bob has finished"] * 2
        assert not [key for key, _ in network.hub.state.items("mod") if key.startswith("careless/")]
    assert caplog.text.count("a mod's ended hook failed") == 2


async def test_removed_participant_ends_the_requests_that_wait_for_it() -> None:
    async with Network.open(mods=MODS) as network:
        root, ann, bob = await network.join("root", kind="human"), await network.join("ann"), await network.join("bob")
        seq = (await ann.send("agent:bob", "Ready?")).seq
        await ann.call("notify_when.finished", {"seq": seq, "agent_id": "bob"})
        await ann.call("notify_when.answered", {"seq": seq, "agent_id": "bob"})
        await ann.call("notify_when.answered", {"seq": seq})
        await bob.call("notify_when.answered", {"seq": seq})
        await root.call("network.remove", {"agent_id": "bob"})
        told = [it["content"] for it in (await ann.call("network.receive", {}))["messages"]]
        assert told == [f"bob was removed, so wait no longer for its work on #{seq}."] * 2
        [left] = [value for key, value in network.hub.state.items("mod") if key == "notify_when/asked"]
        assert [it[1] for it in msgspec.json.decode(left)] == [["ann", ""]]
