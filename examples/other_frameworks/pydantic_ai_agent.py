"""An agent of Pydantic AI in a network. Beside `roundelay up`, with OPENAI_API_KEY set: python pydantic_ai_agent.py"""

import asyncio

from pydantic_ai import Agent

from roundelay.adapters.pydantic_ai import PydanticAIAgent

agent = Agent("openai-chat:gpt-4o-mini", instructions="You add numbers, with your tool only.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


asyncio.run(PydanticAIAgent("adder", agent, description="Adds numbers").run())
