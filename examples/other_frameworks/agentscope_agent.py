"""An agent of AgentScope in a network. Beside `roundelay up`, with OPENAI_API_KEY set: python agentscope_agent.py"""

import asyncio
import os

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from roundelay.adapters.agentscope import AgentScopeAgent

credential = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ.get("OPENAI_BASE_URL"))
model = OpenAIChatModel(credential, "gpt-4o-mini")
always = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="It only adds.")


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def make_agent() -> Agent:
    toolkit = Toolkit([FunctionTool(add, permission=always)])
    return Agent("adder", "You add numbers, with your tool only.", model, toolkit)


asyncio.run(AgentScopeAgent("adder", make_agent, description="Adds numbers").run())
