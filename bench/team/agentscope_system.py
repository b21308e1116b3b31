"""AgentScope 2 in one process. A team uses its `TeamPipeline`. In a channel, the other agents `observe` each
message.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.pipeline import TeamMember, TeamPipeline
from agentscope.tool import FunctionTool, Toolkit
from peer import Ask, Job, run
from workloads import WORKERS, has_adder, instruction, model_name, target


def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


@contextlib.asynccontextmanager
async def open_system(job: Job) -> AsyncIterator[Ask]:
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="Adding is safe.")
    credential = OpenAICredential(api_key="none", base_url=job.base_url)
    models = {
        name: OpenAIChatModel(credential, model_name(job.work, name), stream=False) for name in job.workload.agents
    }

    def make(name: str) -> Agent:
        tools = [FunctionTool(add, permission=allowed)] if has_adder(job.work, name) else []
        return Agent(name, instruction(name), models[name], Toolkit(tools))

    # Create a new agent for each conversation, because an agent can hold only one conversation.
    team = {name: make(name) for name in job.workload.agents} if job.workload.shares_thread else {}

    async def ask_team(text: str) -> str:
        members = [TeamMember(agent=make(name), description=f"{name} adds") for name in WORKERS]
        said = ""
        async for event in TeamPipeline(make("ann"), members).reply_stream(UserMsg("zoe", text)):
            if type(event).__name__ == "TextBlockDeltaEvent":
                said += event.delta or ""
        return said

    async def ask(number: int, text: str) -> str:
        if job.work == "w2":
            return await ask_team(text)
        name, message = target(job.work, number), UserMsg("zoe", text)
        agent = team.get(name) or make(name)
        answer = await agent.reply(message)
        if job.work == "w3":
            for other in team.values():
                if other is not agent:
                    await other.observe([message, answer])
        return answer.get_text_content()

    yield ask


run(open_system)
