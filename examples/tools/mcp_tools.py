"""An agent with the tools of an MCP server, which it starts as a process. Needs: pip install 'roundelay[mcp]'

Run it: python examples/tools/mcp_tools.py

It prints:

    offered: shop_price
    ann: A pear costs 3 EUR.
"""

import asyncio
import sys
from pathlib import Path

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

SERVER = Path(__file__).with_name("price_server.py")


def choose(request: ModelRequest) -> Action:
    view = read_prompt(request)
    if view.turn == 1:
        print("offered:", *(it.name for it in request.tools if it.name == "shop_price"))
        return call("shop_price", article="pear")
    return say(view.tool_results[-1].content)


ann = SimpleAgentRunner(
    "ann",
    instruction="You sell fruit.",
    model=ScriptedModel(choose),
    middleware=[McpServers({"shop": ServerOptions(command=sys.executable, args=(str(SERVER),))})],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "What is a pear?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
