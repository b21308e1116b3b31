"""A manager with two agents as tools, each in a separate run.

Run it: python examples/manager/manager.py

It prints:

      [manager] turn 1
      [manager] researcher
      [manager] poet
      [1.0] turn 1
      [1.1] turn 1
      [manager] turn 2
    manager: Bees eat nectar and pollen. / Small gold thunder.
"""

import asyncio
from collections.abc import Iterable

from roundelay import Network, SimpleAgentRunner
from roundelay.agents import Agent, Event, agent_tool
from roundelay.agents.events import ToolCallStart, TurnStart
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


def manage(request: ModelRequest) -> Iterable[Action]:
    results = read_prompt(request).tool_results
    if not results:
        yield call("researcher", task="What do bees eat?")
        yield call("poet", task="A line about bees.")
    else:
        yield say(" / ".join(result.content for result in results))


researcher = Agent("researcher", "You find things out.", ScriptedModel(lambda request: "Bees eat nectar and pollen."))
poet = Agent("poet", "You write.", ScriptedModel(lambda request: "Small gold thunder."))


def show(event: Event) -> None:
    if isinstance(event, TurnStart | ToolCallStart):
        what = event.tool if isinstance(event, ToolCallStart) else f"turn {event.turn}"
        print(f"  [{event.path or 'manager'}] {what}")


manager = SimpleAgentRunner(
    "manager",
    instruction="You let others work and put it together.",
    model=ScriptedModel(manage),
    tools=[agent_tool(researcher), agent_tool(poet)],
    on_event=show,
)


async def main() -> None:
    async with Network.open() as network, network.run(manager):
        zoe = await network.join("zoe", kind="human")
        await zoe.send_text("manager", "Tell me about bees.")
        async with zoe.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
