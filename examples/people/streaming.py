"""An answer that grows on a screen: a client that watches gets the text while the model writes it.

Run it: python examples/people/streaming.py

It prints:

    Thinking: She asks about bees.
    Writing: Bees eat
    Writing:  nectar.
    Message: Bees eat nectar.
"""

import asyncio

from roundelay import Network, NetworkClient, SimpleAgentRunner
from roundelay.agents.models.model import Model, ModelDelta, ModelReply, ModelRequest, OnDelta, Usage
from roundelay.network.client import Signal


class Typist(Model):
    """A model that streams, as `OpenAIModel` does with a real server."""

    name = "typist"

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        pieces = [ModelDelta(reasoning="She asks about bees."), ModelDelta("Bees eat"), ModelDelta(" nectar.")]
        for piece in pieces:
            if on_delta is not None:
                on_delta(piece)
            await asyncio.sleep(0.2)  # at most ten signals are sent per second
        return ModelReply("Bees eat nectar.", (), Usage(20, 5), "stop", self.name)


async def show_growth(mia: NetworkClient) -> None:
    async for event in mia.events():
        if isinstance(event, Signal) and event.kind == "delta":
            for piece in event.body["pieces"]:
                print("Thinking:" if piece["kind"] == "reasoning" else "Writing:", piece["text"])


async def main() -> None:
    ann = SimpleAgentRunner("ann", instruction="You know bees.", model=Typist())
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.call("network.watch", {"signals": True})
        showing = asyncio.create_task(show_growth(mia))
        await mia.send_text("ann", "What do bees eat?")
        async with mia.receive() as message:
            print(f"Message: {message.text}")
        showing.cancel()


asyncio.run(main())
