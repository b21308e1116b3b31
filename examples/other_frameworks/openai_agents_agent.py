"""An agent of the OpenAI Agents SDK in a network. Beside `roundelay up`, with OPENAI_API_KEY set:
python openai_agents_agent.py"""

import asyncio

from agents import Agent, ModelSettings, function_tool, set_default_openai_api, set_tracing_disabled
from roundelay.adapters.openai_agents import OpenAIAgentsAgent


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


set_tracing_disabled(True)  # traces go to OpenAI and contain messages of other participants
set_default_openai_api("chat_completions")
agent = Agent(
    name="adder",
    instructions="You add numbers, with your tool only.",
    tools=[add],
    model="gpt-4o-mini",
    model_settings=ModelSettings(include_usage=True),  # otherwise streamed replies report no usage
)
asyncio.run(OpenAIAgentsAgent("adder", agent, description="Adds numbers").run())
