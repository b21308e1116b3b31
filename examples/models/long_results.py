"""A long result: the model reads its beginning, and a tool reads on.

Run it: python examples/models/long_results.py

It prints:

    [cut here: the first 100 of 3000 characters; read_result(call="1.0", offset=100) reads on]
    ann: The last word is amen.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

BOOK = "word " * 599 + "amen."


@tool(idempotent=True)
def read_book() -> str:
    """Read the book."""
    return BOOK


def answer(request: ModelRequest) -> Action:
    view = read_prompt(request)
    if view.turn == 1:
        return call("read_book")
    last = view.tool_results[-1]
    if view.turn == 2:
        print(last.content.splitlines()[-1])
        return call("read_result", call="1.0", offset=2900)
    return say("The last word is amen." if "amen" in last.content else "I do not know.")


ann = SimpleAgentRunner(
    "ann",
    instruction="You read books.",
    model=ScriptedModel(answer),
    tools=[read_book],
    middleware=[LongResults(100)],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "What is the last word?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
