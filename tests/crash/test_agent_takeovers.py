"""Tests of promises P5, P6 and P7 when the hub dies together with the agent. The processes of hub and agent are
killed at any point of a reaction, another node takes over the network, and another process of the agent continues.
docs/promises.md, docs/cluster.md.

The nodes share a log in a NATS server. The agent's traffic passes through the test (`agent_lives`), which kills at
exactly the intended point.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from tests.crash.agent_evidence import Evidence
from tests.crash.agent_lives import Stage
from tests.crash.test_agent_kills import (
    ASK,
    ASK_ANSWERED,
    ASKED_AGAIN,
    ERRAND,
    NOT_RUNG,
    UNKNOWN,
    asked_again,
    brief,
    check,
    check_all,
    is_unknown,
    plan_asking,
)
from tests.crash.test_exactly_once import booked, read_booking, start_shop
from tests.crash.test_takeovers import OWNER, ClusterNode, cluster, find_leader, follows, join, pause, resume, says
from tests.integration.test_up import children
from tests.support.counts import Note
from tests.support.nats import nats_server
from tests.support.node import Node, ProcessNode

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


class Nodes(Node):
    """Two nodes of one network, addressed as one: the leader."""

    def __init__(self, nodes: Sequence[ClusterNode], leader: ClusterNode) -> None:
        super().__init__(leader.url, OWNER)
        self.nodes, self.leader, self.takeovers = list(nodes), leader, 0

    @property
    def db(self) -> Path:
        return self.leader.db

    @property
    def urls(self) -> str:
        return ",".join(it.url for it in self.nodes)

    async def kill_leader(self) -> None:
        await self.leader.end()

    async def replace_leader(self) -> None:
        """Wait until the other node leads, and then start the killed one. If it started at once, it might win the
        election.
        """
        gone = self.leader
        self.leader = await find_leader([it for it in self.nodes if it is not gone])
        await gone.start()
        self.url = self.leader.url
        self.takeovers += 1


class ClusterStage(Stage):
    """A `Stage` on which the leader is killed together with the agent."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        super().__init__(folder, cast(ProcessNode, nodes))
        self._nodes = nodes

    @property
    def _urls(self) -> str:
        return self._nodes.urls

    async def _end(self) -> None:
        self._act.is_ending = True
        await asyncio.gather(self.alive.kill(), self._nodes.kill_leader())
        await self._nodes.replace_leader()
        self._act.has_ended = True
        self._news.set()


@asynccontextmanager
async def cluster_stage(folder: Path) -> AsyncIterator[ClusterStage]:
    async with cluster(folder, "a", "b") as (_, nodes), AsyncExitStack() as stack:
        made = ClusterStage(folder, Nodes(nodes, await find_leader(nodes)))
        await made.open(stack)
        yield made


async def test_an_agent_killed_with_its_hub_at_every_boundary_goes_on_at_another_node(
    tmp_path: Path, note: Note
) -> None:
    course: list[Evidence] = []
    async with cluster_stage(tmp_path) as ground:
        for point in ERRAND:
            print(f"killed at {point}")
            evidence = await ground.react(f"errand {point.what} {point.when}", [point])
            check(evidence)
            assert asked_again(evidence) == (point in ASKED_AGAIN)
            assert evidence.rings == (point not in NOT_RUNG)
            assert is_unknown(evidence) == (point in UNKNOWN)
            course.append(evidence)
        course.append(await ground.react("errand undisturbed"))
        note(points=len(ERRAND), takeovers=ground._nodes.takeovers, **check_all(ground, course))


async def test_an_agent_killed_with_its_hub_while_it_asks_another_asks_once(tmp_path: Path, note: Note) -> None:
    course: list[Evidence] = []
    async with cluster_stage(tmp_path) as ground:
        for points, replies in plan_asking(ASK, brief(ASK_ANSWERED)):
            print(f"killed at {points}, the reply comes {replies}")
            course.append(await ground.react(f"ask {points} {replies}", points, replies=replies))
            check(course[-1])
        counts = check_all(ground, course)
        note(
            takeovers=ground._nodes.takeovers,
            **{name: counts[name] for name in ("reactions", "kills", "sends", "stored", "asked_again", "finished")},
        )


SHOP_KILLS = 20


async def kill_shop(shop: asyncio.subprocess.Process) -> list[int]:
    """Kill the shop. Return the orders in its unread output."""
    shop.send_signal(signal.SIGKILL)
    assert shop.stdout is not None
    lines = (await shop.stdout.read()).splitlines(keepends=True)
    await shop.wait()
    return [int(line.split()[1]) for line in lines if line.endswith(b"\n")]


async def test_each_message_takes_effect_once_where_its_program_and_the_hub_are_killed_together(
    tmp_path: Path, note: Note
) -> None:
    chance, sent, runs = random.Random(5), list[int](), list[int]()
    shops = list[asyncio.subprocess.Process]()
    try:
        async with cluster(tmp_path, "a", "b") as (_, nodes):
            network = Nodes(nodes, await find_leader(nodes))
            everywhere = Node(network.urls, OWNER)
            shops.append(await start_shop(everywhere, tmp_path))
            async with join(nodes, "customer") as customer, asyncio.timeout(1200):
                while "'shop'" not in str(await customer.call("network.list_agents")):  # noqa: ASYNC110 (asking is the event)
                    await asyncio.sleep(0.05)
                for _ in range(SHOP_KILLS):
                    for number in range(6):
                        sent.append((await customer.send_text("shop", f"order {number}")).seq)
                    for _ in range(chance.randint(1, 4)):
                        runs.append(await read_booking(shops[-1]))
                    began, _ = await asyncio.gather(kill_shop(shops[-1]), network.kill_leader())
                    runs += began
                    await network.replace_leader()
                    shops.append(await start_shop(everywhere, tmp_path))
                while len(booked(tmp_path)) < len(sent):  # noqa: ASYNC110 (the program tells that it begins, not that it is done)
                    await asyncio.sleep(0.05)
                runs += await kill_shop(shops[-1])
    finally:
        if shops and shops[-1].returncode is None:
            await kill_shop(shops[-1])
    found = booked(tmp_path)
    note(
        kills=SHOP_KILLS, takeovers=network.takeovers, orders=len(sent), runs_of_the_handler=len(runs), rows=len(found)
    )
    assert sorted(found) == sorted(sent)
    assert len(runs) > len(sent), "no kill hit an uncommitted effect: this run proves nothing"


async def test_a_nodes_agents_stay_at_it_while_another_one_leads_and_work_when_it_leads_again(tmp_path: Path) -> None:
    """A node's agents are its own processes. The agents of a follower neither work nor end."""
    async with nats_server(tmp_path / "nats") as server:
        made = [ClusterNode(tmp_path / "nodes", name, server.url("lab")) for name in "ab"]
        (tmp_path / "nodes" / "desk.yaml").write_text(
            "id: desk\ninstruction: x\nmodel: {rules: [{do: [{say: hello}]}]}\n"
        )
        (tmp_path / "nodes" / "node.yaml").write_text("agents: [desk.yaml]\n")
        try:
            for node in made:
                await node.start("node.yaml", "--no-web")
                await (find_leader([node]) if node is made[0] else follows(node))
            first, second = made
            async with join(made, "mia") as mia, asyncio.timeout(60):
                answers = mia.deliveries()

                async def ask(text: str) -> str | None:
                    await mia.send_text("desk", text)
                    async for delivery in answers:
                        if delivery.message.sender_id == "desk":
                            return delivery.message.text
                    return None

                assert await ask("by the first node's") == "hello"
                pause(first)
                await find_leader([second])
                resume(first)
                await says(second, "agents desk)")
                assert await ask("by the second node's") == "hello"
                assert "worked while the node was away" not in first.db.with_suffix(".out").read_text()
                assert first.process is not None
                agents = children(first.process.pid)
                assert agents
                for pid in agents.values():
                    os.kill(pid, signal.SIGKILL)  # an agent that has already ended is not started without need
                assert await ask("by the second node's, once more") == "hello"
                while children(first.process.pid):  # noqa: ASYNC110 (nobody tells)
                    await asyncio.sleep(0.05)
                await second.end()
                await find_leader([first])
                assert await ask("by the first node's again") == "hello"
            said = first.db.with_suffix(".out").read_text()
            assert "has ended.\n" not in said
            assert "starts again" not in said
        finally:
            for node in made:
                await node.end()
