"""Roundelay with its default settings, in one process (`Network.open`) or as `roundelay up` with agent files.

Only the number of parallel reactions differs from the default. Durability `full` syncs every commit, and reactions
resume after a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from peer import Ask, Job, run
from workloads import conversation, has_adder, instruction, model_name, target

from roundelay import Network, NetworkClient
from roundelay.agents.team import build_runner, load_agents

TOOLS = f"""\
import sys
sys.path.append({sys.path[0]!r})
from roundelay import tool
from workloads import add as plain
add = tool(read_only=True)(plain)
"""


def describe_agent(job: Job, agent: str) -> dict[str, Any]:
    """Return one agent in the form of an agent file."""
    described: dict[str, Any] = {
        "id": agent,
        "instruction": instruction(agent),
        "description": "answers",
        "model": {"openai": {"name": model_name(job.work, agent), "base_url": job.base_url}},
        "limits": {"max_parallel_reactions": 40},
    }
    if has_adder(job.work, agent):
        described["tools"] = ["bench_tools:add"]
    if job.work == "w3":
        described |= {"channels": ["room"], "react_to": "mentions_only"}
    return described


class Person:
    """Sends questions, and passes each answer to the question that waits for it."""

    def __init__(self, client: NetworkClient, work: str) -> None:
        self._client = client
        self._work = work
        self._answers: dict[int, asyncio.Future[str]] = {}

    async def listen(self) -> None:
        async for message in self._client:
            if message.reply_to is not None:
                self._wait_for(message.reply_to).set_result(message.text)

    async def ask(self, number: int, text: str) -> str:
        if self._work == "w3":
            stored = await self._client.post("room", text)
        else:
            agent = target(self._work, number)
            name = conversation(self._work, number)
            stored = await self._client.send_text(agent, text, conversation=None if name == agent else name)
        return await self._wait_for(stored.seq)

    def _wait_for(self, seq: int) -> asyncio.Future[str]:
        return self._answers.setdefault(seq, asyncio.get_running_loop().create_future())


@contextlib.asynccontextmanager
async def talk(client: NetworkClient, work: str) -> AsyncIterator[Ask]:
    if work == "w3":
        await client.join_channel("room")
    person = Person(client, work)
    listening = asyncio.create_task(person.listen())
    yield person.ask
    listening.cancel()


@contextlib.asynccontextmanager
async def open_one_process(job: Job, durability: str, agents: list[dict[str, Any]]) -> AsyncIterator[Ask]:
    file = job.folder / "agents.yaml"
    file.write_text(json.dumps({"agents": agents}))
    path = None if durability == "memory" else job.folder / "node.db"
    async with (
        Network.open(path) as network,
        network.run(*map(build_runner, load_agents(file))),
        talk(await network.join("zoe", kind="human"), job.work) as ask,
    ):
        yield ask


@contextlib.asynccontextmanager
async def open_node(job: Job, durability: str, agents: list[dict[str, Any]]) -> AsyncIterator[Ask]:
    node = {"name": "team", "db": "node.db", "port": 0, "durability": durability, "agents": agents}
    (job.folder / "roundelay.yaml").write_text(json.dumps(node))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "roundelay", "up", "--no-open", cwd=job.folder, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        ready = b""
        while b" is ready at " not in ready:
            ready = await process.stdout.readline()
            if not ready:
                raise RuntimeError("roundelay up ended")
        url = ready.decode().split(" is ready at ")[1].split()[0]
        async with NetworkClient("zoe", url, kind="human") as client, talk(client, job.work) as ask:
            yield ask
    finally:
        process.terminate()
        await process.wait()


def open_system(job: Job) -> contextlib.AbstractAsyncContextManager[Ask]:
    way, durability = job.mode.split()
    (job.folder / "bench_tools.py").write_text(TOOLS)
    agents = [describe_agent(job, agent) for agent in job.workload.agents]
    return (open_node if way == "up" else open_one_process)(job, durability, agents)


run(open_system)
