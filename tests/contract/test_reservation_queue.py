"""Tests of reservations of several paths at once with a fair queue: first come, first served, without starvation and
deadlock.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from roundelay import InvalidArguments, Network
from roundelay.network.client import NetworkClient
from roundelay.simulation.network import Simulation, simulate

MODS = ["channels", "reservations"]


async def reserve_all(client: NetworkClient, *paths: str, **args: Any) -> dict[str, Any]:
    value: dict[str, Any] = await client.call("reservations.reserve_all", {"paths": paths, **args})
    return value


async def holders(client: NetworkClient) -> dict[str, str]:
    listed = await client.call("reservations.list", {})
    return {it["path"]: it["agent_id"] for it in listed["reservations"]}


async def test_all_paths_are_granted_at_once_when_the_last_one_is_free() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
        await reserve_all(ann, "a.py")
        await reserve_all(bob, "b.py")
        waits = await reserve_all(eve, "a.py", "b.py", "c.py")
        assert (waits["reserved"], waits["position"]) == ([], 1)
        assert {it["agent_id"] for it in waits["taken"]} == {"ann", "bob"}
        await ann.call("reservations.release", {})
        assert await holders(ann) == {"b.py": "bob"}
        await bob.call("reservations.release", {})
        assert await holders(ann) == dict.fromkeys(("a.py", "b.py", "c.py"), "eve")
        [notice] = (await eve.call("network.receive", {}))["messages"]
        assert notice["content"] == "You have reserved a.py, b.py, c.py for 60 minutes."
        wanted = (await ann.call("network.receive", {}))["messages"]
        assert [it["content"] for it in wanted] == ["eve wants what you have reserved: a.py."]


async def test_nobody_passes_or_prolongs_paths_that_somebody_waits_for() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
        first = await reserve_all(ann, "a.py", minutes=5)
        await reserve_all(bob, "a.py", "b.py")
        assert (await reserve_all(eve, "b.py"))["position"] == 2
        for client, path in ((eve, "b.py"), (ann, "a.py")):
            refused = await client.call("reservations.reserve", {"paths": [path]})
            assert (refused["reserved"], refused["taken"][-1]["agent_id"]) == ([], "bob")
        [held] = (await eve.call("reservations.list", {}))["reservations"]
        assert held["until"] == first["reserved"][0]["until"]
        assert (await reserve_all(bob, "b.py", "a.py"))["position"] == 1  # a repeat keeps its position
        await ann.call("reservations.release", {})
        assert await holders(ann) == {"a.py": "bob", "b.py": "bob"}
        await bob.call("reservations.release", {})
        assert await holders(ann) == {"b.py": "eve"}


async def test_circle_of_waiting_participants_is_refused_and_named() -> None:
    async with Network.open(mods=MODS) as network:
        ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
        for client, path in ((ann, "a.py"), (bob, "b.py"), (eve, "c.py")):
            await reserve_all(client, path)
        await reserve_all(ann, "b.py")
        await reserve_all(bob, "c.py")
        with pytest.raises(InvalidArguments, match="eve -> ann -> bob -> eve"):
            await reserve_all(eve, "a.py")
        await eve.call("reservations.release", {})
        assert (await holders(ann))["c.py"] == "bob"


def test_waiting_request_is_granted_when_reservations_expire_or_ends_itself() -> None:
    async def main(simulation: Simulation) -> None:
        ann, bob, eve = [(await simulation.join_person(name)).client for name in ("ann", "bob", "eve")]
        await reserve_all(ann, "a.py", minutes=10)
        await reserve_all(bob, "a.py", minutes=5)
        await reserve_all(eve, "a.py", wait_minutes=12)
        await asyncio.sleep(605)
        assert await holders(ann) == {"a.py": "bob"}
        await simulation.kill_hub()
        await simulation.restart_hub()
        await asyncio.sleep(150)
        ended = [it.content for it in simulation.messages if it.to == "agent:eve"]
        assert ended == ["You no longer wait for a.py, because others held the reservations for all that time."]
        assert "waiting" not in await ann.call("reservations.list", {})

    simulate(main, mods=MODS)


@pytest.mark.parametrize("seed", range(5))
async def test_random_requests_never_overlap_and_all_come_to_their_turn(seed: int) -> None:
    chance = random.Random(seed)
    paths = ["a.py", "b.py", "src", "src/c.py", "*.md"]
    async with Network.open(mods=MODS) as network:
        clients = {name: await network.join(name) for name in ("ann", "bob", "eve", "dan")}
        waiting: list[str] = []
        granted = 0
        for _ in range(120):
            name = chance.choice(list(clients))
            if chance.random() < 0.5:
                wanted = chance.sample(paths, chance.randint(1, 3))
                try:
                    answer = await reserve_all(clients[name], *wanted)
                except InvalidArguments:  # a circle
                    await clients[name].call("reservations.release", {})
                else:
                    granted += answer["position"] == 0
            else:
                await clients[name].call("reservations.release", {})
            listed = await clients["ann"].call("reservations.list", {})
            held = [(it["agent_id"], it["path"]) for it in listed["reservations"]]
            for one, path in held:
                for other, second in held:
                    assert one == other or not {path, second} <= {"src", "src/c.py"}
                    assert one == other or path != second
            waiting = [it["agent_id"] for it in listed.get("waiting", [])]
            assert len(waiting) == len(set(waiting))
        # Each release serves a waiting request, so nobody waits at the end.
        for _ in range(20):
            for client in clients.values():
                if client.agent_id not in waiting:
                    await client.call("reservations.release", {})
            waiting = [it["agent_id"] for it in (await clients["ann"].call("reservations.list", {})).get("waiting", [])]
            if not waiting:
                break
        assert not waiting
        assert granted


async def test_paths_of_a_removed_participant_go_to_the_next() -> None:
    async with Network.open(mods=MODS) as network:
        root, ann, bob = await network.join("root", kind="human"), await network.join("ann"), await network.join("bob")
        await reserve_all(ann, "a.py")
        await reserve_all(bob, "a.py")
        await root.call("network.remove", {"agent_id": "ann"})
        assert await holders(bob) == {"a.py": "bob"}
