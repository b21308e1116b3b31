"""A budget of tokens for each day. The call that would exceed it is not made, and the person reads why.

Run it: python examples/models/budget.py

It prints:

    ann: Bees eat nectar.
    ann: I could not answer: the budget for this is used up.
    the inbox of the operator: budget of ann
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.features.budget import Budget
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, say


def answer(request: ModelRequest) -> Action:
    return say("Bees eat nectar.")


ann = SimpleAgentRunner(
    "ann",
    instruction="You know bees.",
    model=ScriptedModel(answer),
    middleware=[Budget(tokens={"day": 300}, reserve=100)],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        for text in ("What do bees eat?", "And what else? " * 60):
            await mia.send_text("ann", text)
            async with mia.receive() as message:
                print(f"{message.sender_id}: {message.text}")
        for item in (await mia.call("network.inbox"))["items"]:
            print(f"the inbox of the operator: {item['kind']} of {item['agent_id']}")


asyncio.run(main())
