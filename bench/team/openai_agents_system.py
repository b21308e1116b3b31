"""The OpenAI Agents SDK in one process. The mode sqlite stores finished messages in a file.

A team is a manager with other agents as tools, as the SDK recommends. The SDK has no channels, so all agents share a
session, and code selects the agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI
from peer import Ask, Job, run
from workloads import WORKERS, add, conversation, has_adder, instruction, model_name, target

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    set_tracing_disabled(True)
    client, config = AsyncOpenAI(base_url=job.base_url), RunConfig(tracing_disabled=True)
    path = str(job.folder / "sessions.db") if job.mode == "sqlite" else ":memory:"
    sessions: dict[str, SQLiteSession] = {}

    def make(name: str, tools: Any = ()) -> Agent[None]:
        model = OpenAIChatCompletionsModel(model_name(job.work, name), openai_client=client)
        tools = [*tools, *([function_tool(add)] if has_adder(job.work, name) else [])]
        return Agent(name=name, instructions=instruction(name), tools=tools, model=model)

    if job.work == "w2":
        workers = [make(name).as_tool(tool_name=name, tool_description=f"Ask {name}") for name in WORKERS]
        team = {"ann": make("ann", workers)}
    else:
        team = {name: make(name) for name in job.workload.agents}

    async def ask(number: int, text: str) -> str:
        key = conversation(job.work, number)
        session = sessions.get(key)
        if session is None and (job.workload.shares_thread or job.mode == "sqlite"):
            session = SQLiteSession(key, path)
            if job.workload.shares_thread:
                sessions[key] = session
        done = await Runner.run(team[target(job.work, number)], text, session=session, run_config=config)
        return done.final_output

    yield ask


run(open_system)
