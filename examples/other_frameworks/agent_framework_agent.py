"""An agent of Microsoft Agent Framework in a network. Beside `roundelay up`, with OPENAI_API_KEY set:
python agent_framework_agent.py"""

import asyncio

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient

from roundelay.adapters.agent_framework import AgentFrameworkAgent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


client = OpenAIChatCompletionClient(model="gpt-4o-mini")
agent = Agent(client, "You add numbers, with your tool only.", tools=[add])
asyncio.run(AgentFrameworkAgent("adder", agent, description="Adds numbers").run())
