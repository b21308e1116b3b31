"""An agent of LangChain, which is a graph of LangGraph, in a network. Beside `roundelay up`, with OPENAI_API_KEY set:
python langgraph_agent.py"""

import asyncio

from langchain.agents import create_agent
from langchain.chat_models import init_chat_model

from roundelay.adapters.langgraph import LangGraphAgent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = init_chat_model("openai:gpt-4o-mini", stream_usage=True)
graph = create_agent(model, [add], system_prompt="You add numbers, with your tool only.")
asyncio.run(LangGraphAgent("adder", graph, description="Adds numbers").run())
