"""Results of earlier reactions: the next message's model reads what the last one looked up.

Run it: python examples/prompts/keep_results.py

It prints:

    looked up order 12
    ann: a blue teapot
    ann: As I saw: a blue teapot
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents.features.keep_results import KeepResults
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(idempotent=True)
def find_order(number: int) -> str:
    """Look up an order."""
    print(f"looked up order {number}")
    return "a blue teapot"


def answer(request: ModelRequest) -> Action:
    results = read_prompt(request).tool_results
    if "<earlier_results>" in str(request.messages[1].content):
        return say("As I saw: a blue teapot")
    return say(results[-1].content) if results else call("find_order", number=12)


ann = SimpleAgentRunner(
    "ann",
    instruction="You look orders up.",
    model=ScriptedModel(answer),
    tools=[find_order],
    middleware=[KeepResults()],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        for text in ("What is order 12?", "And again?"):
            await mia.send_text("ann", text)
            async with mia.receive() as message:
                print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
