"""Microsoft Agent Framework in one process. A team is an agent with other agents as tools. In a channel, all agents
share a session.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient
from peer import Ask, Job, run
from workloads import WORKERS, add, conversation, has_adder, instruction, model_name, target


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    def make(name: str, tools: Any = ()) -> Agent:
        client = OpenAIChatCompletionClient(model=model_name(job.work, name), base_url=job.base_url, api_key="none")
        tools = [*tools, *([add] if has_adder(job.work, name) else [])]
        return Agent(client, instruction(name), name=name, tools=tools)

    if job.work == "w2":
        team = {"ann": make("ann", [make(name).as_tool(name=name, description=f"Ask {name}") for name in WORKERS])}
    else:
        team = {name: make(name) for name in job.workload.agents}
    sessions: dict[str, Any] = {}

    async def ask(number: int, text: str) -> str:
        agent, key, session = team[target(job.work, number)], conversation(job.work, number), None
        if job.workload.shares_thread:
            session = sessions.get(key) or sessions.setdefault(key, agent.create_session())
        return (await agent.run(text, session=session)).text

    yield ask


run(open_system)
