"""An agent of Pydantic AI in a network. Beside `roundelay up`, with OPENAI_API_KEY set: python pydantic_ai_agent.py

`adder.yaml` has it run by Roundelay instead.
"""

import asyncio
from functools import partial

from pydantic_ai import Agent

from roundelay.adapters.pydantic_ai import PydanticAIAgent

agent = Agent("openai-chat:gpt-4o-mini", instructions="You add numbers, with your tool only.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


adder = partial(PydanticAIAgent, agent=agent)

if __name__ == "__main__":
    asyncio.run(adder("adder", description="Adds numbers").run())
