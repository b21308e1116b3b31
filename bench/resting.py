"""Memory of waiting agents. Hundreds of agents run in one process, and their node runs in another.

    python bench/resting.py URL COUNT

As a program, this module runs the agents. The program prints the memory per agent when all agents are connected, and
again after each agent has reacted to a message. The memory per agent is the growth of the resident size of the process
by COUNT more agents, divided by COUNT. The first agents, which also load code and fill caches, do not count. The node
and the model server are separate processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from loops import INSTRUCTION, look_up
from servers import Bench, Subject, read_memory_kb
from table import Line
from turn_cost import start_chat_server
from wire import LoadError, make_token

from roundelay import NetworkClient
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.simple import SimpleAgentRunner

HUB = Subject("hub normal", "normal")
FIRST = 20
TOGETHER = 10
TIMEOUT_S = 300.0


class RestingAgents:
    """Measures the KiB per waiting agent in one process, before its first message and after one reaction."""

    name = "resting"

    def __init__(self, bench: Bench, agents: int) -> None:
        self._bench = bench
        self._agents = agents
        self._kb: dict[str, list[float]] = {"fresh": [], "reacted": []}

    def run_round(self, number: int) -> str:
        with start_chat_server(self._bench) as base_url, self._bench.start(HUB) as (url, _pid):
            command = [sys.executable, str(Path(__file__).resolve()), url, base_url, str(self._agents)]
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
            except (subprocess.SubprocessError, OSError) as error:
                raise LoadError(f"{self._agents} agents could not be run: {error}") from error
        found: dict[str, float] = json.loads(done.stdout)
        for name, kb in found.items():
            self._kb[name].append(kb)
        return f"{self._agents} agents: {found['fresh']:.1f} KiB each, {found['reacted']:.1f} after a reaction"

    def lines(self) -> list[Line]:
        title = f"memory per resting agent, {self._agents} in a process"
        return [
            Line("resting_agent", title, self._kb["fresh"], 100.0, None, True, "KiB"),
            Line("rested_agent", "the same after each has reacted once", self._kb["reacted"], 100.0, None, True, "KiB"),
        ]

    def details(self) -> dict[str, Any]:
        return {"agents": self._agents, "kib_per_agent": self._kb}


async def hold(url: str, base_url: str, count: int) -> dict[str, float]:
    """Run agents and measure their memory. Each agent has its own connection and its own model. The agents stop when
    the block ends.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with NetworkClient("asker", url, token=make_token("asker")) as asker, asyncio.TaskGroup() as group:
        first = await _start(url, base_url, 0, FIRST, group)
        await _ask(asker, first)
        empty_kb = _read_settled_kb()
        others = await _start(url, base_url, FIRST, count, group)
        fresh_kb = _read_settled_kb()
        await _ask(asker, others)
        reacted_kb = _read_settled_kb()
        for runner in (*first, *others):
            await runner.stop()
    return {"fresh": (fresh_kb - empty_kb) / count, "reacted": (reacted_kb - empty_kb) / count}


async def _start(url: str, base_url: str, begin: int, count: int, group: asyncio.TaskGroup) -> list[SimpleAgentRunner]:
    runners = [
        SimpleAgentRunner(
            f"agent-{number:04d}",
            instruction=INSTRUCTION,
            model=OpenAIModel("bench", base_url=base_url),
            tools=[look_up],
            description="Keeps the stock of a shop.",
            url=url,
            token=make_token(f"agent-{number:04d}"),
            owns_model=True,
        )
        for number in range(begin, begin + count)
    ]
    for start in range(0, count, TOGETHER):
        some = runners[start : start + TOGETHER]
        for runner in some:
            group.create_task(runner.run())
        for runner in some:
            await runner.ready()
    return runners


async def _ask(asker: NetworkClient, runners: list[SimpleAgentRunner]) -> None:
    """Send each agent a question, a few at a time, and wait for the answers."""
    answers = asker.deliveries()
    for start in range(0, len(runners), TOGETHER):
        some = runners[start : start + TOGETHER]
        for runner in some:
            await asker.send_text(runner.agent_id, "Are A-0001 to A-0005 in stock?", requires_response=True)
        for _ in some:
            await (await anext(answers)).ack()


def _read_settled_kb() -> float:
    gc.collect()
    return read_memory_kb(os.getpid())


def main() -> None:
    url, base_url, count = sys.argv[1:4]
    print(json.dumps(asyncio.run(hold(url, base_url, int(count)))))


if __name__ == "__main__":
    main()
