"""AutoGen's agentchat in one process. A team is an agent with other agents as tools. A channel is a `SelectorGroupChat`
with a selector function.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import SelectorGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from peer import Ask, Job, run
from workloads import WORKERS, add, has_adder, instruction, model_name, target

MODEL_INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
}


def make_model(job: Job, name: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=model_name(job.work, name),
        base_url=job.base_url,
        api_key="none",
        include_name_in_message=False,
        model_info=MODEL_INFO,
    )


def make_assistant(job: Job, name: str, model: OpenAIChatCompletionClient, tools: Any = ()) -> AssistantAgent:
    return AssistantAgent(
        name,
        model_client=model,
        tools=[*tools, *([add] if has_adder(job.work, name) else [])],
        system_message=instruction(name),
        description=f"{name} adds",
        max_tool_iterations=5,
    )


async def answer(agent: Any, text: str) -> str:
    return (await agent.run(task=text)).messages[-1].content


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    models = {name: make_model(job, name) for name in job.workload.agents}

    def make(name: str, tools: Any = ()) -> AssistantAgent:
        return make_assistant(job, name, models[name], tools)

    team: dict[str, Any] = {}
    if job.work == "w3":
        room = SelectorGroupChat(
            [make(name) for name in job.workload.agents],
            model_client=make_model(job, "selector"),
            termination_condition=MaxMessageTermination(2),
            selector_func=lambda messages: next(iter(re.findall(r"@(\w+)", messages[-1].to_text())), None),
        )
        team = dict.fromkeys(job.workload.agents, room)
    elif job.workload.shares_thread:
        team = {name: make(name) for name in job.workload.agents}

    async def ask(number: int, text: str) -> str:
        name = target(job.work, number)
        # Create a new agent for each conversation, because an agent can hold only one conversation.
        tools = [AgentTool(make(worker)) for worker in WORKERS] if job.work == "w2" else []
        return await answer(team.get(name) or make(name, tools), text)

    yield ask


if __name__ == "__main__":
    run(open_system)
