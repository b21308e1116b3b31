"""A second model for the time when the first one is down. The log (stderr) names the failure.

Run it: python examples/models/fallback.py

It prints:

    asked: big
    asked: small
    ann: Hello from small.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents import FallbackModel, ModelError
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, say


def be_down(request: ModelRequest) -> Action:
    print("asked: big")
    raise ModelError("The server is overloaded.", reason="unavailable", retryable=True)


def answer(request: ModelRequest) -> Action:
    print("asked: small")
    return say("Hello from small.")


big, small = ScriptedModel(be_down, name="big"), ScriptedModel(answer, name="small")
ann = SimpleAgentRunner("ann", instruction="You greet.", model=FallbackModel(big, small))


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "Hello!")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
