"""Middleware of your own: it looks at each answer before it is sent, and a correction goes back to the model.

Run it: python examples/answers/own_review.py

It prints:

    refused: We guarantee it.
    ann: We expect it on Friday.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents import Around, Correction, Middleware
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt


class NoPromises(Middleware):
    """Refuses answers that promise something."""

    async def review(self, around: Around, answer: str) -> str | Correction:
        if "guarantee" not in answer:
            return answer
        print(f"refused: {answer}")
        return Correction("Promise nothing.", name="promises")


def write(request: ModelRequest) -> str:
    return "We guarantee it." if read_prompt(request).turn == 1 else "We expect it on Friday."


ann = SimpleAgentRunner(
    "ann", instruction="You answer customers.", model=ScriptedModel(write), middleware=[NoPromises()]
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "Will it come this week?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
