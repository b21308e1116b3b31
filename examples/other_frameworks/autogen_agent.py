"""An agent of AutoGen in a network. Beside `roundelay up`, with OPENAI_API_KEY set: python autogen_agent.py"""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

from roundelay.adapters.autogen import AutoGenAgent

MODEL = "gpt-4o-mini"
client = OpenAIChatCompletionClient(model=MODEL, stream_options={"include_usage": True})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def make_agent() -> AssistantAgent:
    return AssistantAgent(
        "adder",
        client,
        tools=[add],
        system_message="You add numbers, with your tool only.",
        reflect_on_tool_use=True,
        model_client_stream=True,
    )


asyncio.run(AutoGenAgent("adder", make_agent, model=MODEL, description="Adds numbers").run())
