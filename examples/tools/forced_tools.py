"""An agent that must call two tools in its first turn, and chooses freely later.

Run it: python examples/tools/forced_tools.py

It prints:

    turn 1 must call ['archive']
    turn 1 must call ['search']
    turn 2 may choose
    ann: archive knows tides, search knows tides
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents import NamedTool
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(idempotent=True)
def search(topic: str) -> str:
    """Search the web."""
    return f"search knows {topic}"


@tool(idempotent=True)
def archive(topic: str) -> str:
    """Search the archive."""
    return f"archive knows {topic}"


def choose(request: ModelRequest) -> Action:
    view = read_prompt(request)
    if isinstance(request.tool_choice, NamedTool):
        print(f"turn {view.turn} must call {[request.tool_choice.name]}")
        return call(request.tool_choice.name, topic="tides")
    print(f"turn {view.turn} may choose")
    return say(", ".join(result.content for result in view.tool_results))


ann = SimpleAgentRunner(
    "ann",
    instruction="You look everything up.",
    model=ScriptedModel(choose),
    tools=[search, archive],
    middleware=[ForcedTools("archive", "search")],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "What do you know about tides?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
