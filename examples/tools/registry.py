"""Tools that come and go: sets of tools, a tool that turns a set on, and rules about which tool to choose.

Run it: python examples/tools/registry.py

It prints:

    turn 1 offers ['open_tables', 'search']
    turn 2 offers ['open_tables', 'plot', 'search']
    ann: drawn: tides
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents import Output
from roundelay.agents.features.registry import ToolRegistry
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(idempotent=True, selection_rule="For what happened lately.")
def search(topic: str) -> str:
    """Search the web."""
    return f"nothing about {topic}"


@tool(idempotent=True)
def open_tables() -> Output:
    """Turn the tools for tables on."""
    return Output("The tools for tables are there now.", {"use_sets": ["data"]})


@tool(idempotent=True, should_use=lambda context: context.trigger.sender_kind == "human")
def plot(table: str) -> str:
    """Draw a table."""
    return f"drawn: {table}"


def choose(request: ModelRequest) -> Action:
    view = read_prompt(request)
    offered = sorted(it.name for it in request.tools if it.name in ("search", "open_tables", "plot"))
    if view.turn <= 2:
        print(f"turn {view.turn} offers {offered}")
    if view.turn == 1:
        return call("open_tables")
    return call("plot", table="tides") if view.turn == 2 else say(view.tool_results[-1].content)


ann = SimpleAgentRunner(
    "ann",
    instruction="You draw.",
    model=ScriptedModel(choose),
    middleware=[ToolRegistry(sets={"default": [search, open_tables], "data": [plot]})],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "Draw the tides.")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
