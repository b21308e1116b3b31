"""Tests of timers on a real node that is killed repeatedly, and on a simulated one with kills at random moments: each
timer fires once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cronsim")
from roundelay.network.client import NetworkClient
from roundelay.simulation.network import Simulation, simulate
from tests.crash.test_takeovers import cluster, find_leader, join
from tests.support.processes import hub_up

NODE = "mods: [channels, timers]\n"
OWNERS = [f"p{number}" for number in range(10)]


def count_texts(contents: list[Any]) -> Counter[str]:
    return Counter(str(content).rpartition(": ")[2] for content in contents)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_thousand_timers_fire_once_across_fifty_kills() -> None:
    async def main(simulation: Simulation) -> None:
        chance = simulation.chance("timers")
        clients = [(await simulation.join_person(name)).client for name in OWNERS]
        for number in range(1000):
            args = {"text": f"t{number}", "in_minutes": chance.uniform(0.5, 8), "to": chance.choice(OWNERS)}
            await clients[number % 10].call("timers.create", args)
        for _ in range(50):
            await asyncio.sleep(chance.uniform(0.1, 10))
            await simulation.kill_hub()
            await asyncio.sleep(chance.uniform(0, 5))
            await simulation.restart_hub()
        await asyncio.sleep(600)
        fired = [message.content for message in simulation.messages if message.sender_id == "timers"]
        assert count_texts(fired) == Counter(f"t{number}" for number in range(1000))

    simulate(main, mods=["channels", "timers"], seed=3)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_timers_of_a_real_node_fire_once_across_kills(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").write_text(NODE, encoding="utf-8")
    chance = random.Random(4)
    async with hub_up(tmp_path) as hub:

        async def disturb() -> None:
            for _ in range(12):
                await asyncio.sleep(chance.uniform(0.5, 3))
                await hub.restart()

        await check_timers(NetworkClient("ann", url=hub.url, kind="human"), chance, disturb)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_timers_of_a_cluster_fire_once_across_twenty_takeovers(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    (tmp_path / "nodes" / "roundelay.yaml").write_text(NODE, encoding="utf-8")
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        await find_leader(nodes)

        async def disturb() -> None:
            for _ in range(20):
                leader = await find_leader(nodes)
                await leader.end()
                await leader.start()

        await check_timers(join(nodes, "ann"), random.Random(5), disturb)


async def check_timers(client: NetworkClient, chance: random.Random, disturb: Callable[[], Awaitable[None]]) -> None:
    """Create 100 timers within the next minute, disturb the network meanwhile, and check that each one fires once."""
    async with client:
        heard: set[str] = set()
        is_complete = asyncio.Event()
        listening = asyncio.create_task(listen(client, heard, is_complete))
        for number in range(100):
            await client.call("timers.create", {"text": f"t{number}", "in_minutes": chance.uniform(0.02, 1)})
        await disturb()
        await asyncio.wait_for(is_complete.wait(), 120)
        await asyncio.sleep(2)
        listening.cancel()
        contents: list[Any] = []
        after, has_more = 0, True
        while has_more:
            page = await client.call("network.receive", {"after": after})
            contents += [it["content"] for it in page["messages"]]
            after, has_more = page["next"], page["has_more"]
        assert count_texts(contents) == Counter(f"t{number}" for number in range(100))


async def listen(client: NetworkClient, heard: set[str], is_complete: asyncio.Event) -> None:
    async for message in client:
        heard.add(message.text)
        if len(heard) == 100:
            is_complete.set()
