"""Sources of an answer: results are numbered across tools, citations are checked, and the sources go with the message.

Run it: python examples/answers/references.py

It prints:

    ann: The Rhine is 1,233 km long [1].
    [1] Rivers of Europe
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents import Output
from roundelay.agents.features.references import References
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(idempotent=True)
def search(topic: str) -> Output:
    """Search the library."""
    found = {"id": "b12", "title": "Rivers of Europe", "text": "The Rhine is 1,233 km long."}
    return Output(f"One book on {topic}.", {"references": [found], "debug": {"took_ms": 12}})


def write(request: ModelRequest) -> Action:
    if read_prompt(request).turn == 1:
        return call("search", topic="rivers")
    return say("The Rhine is 1,233 km long [1]. [7]")  # nobody found a source 7: it is removed


ann = SimpleAgentRunner(
    "ann",
    instruction="You answer from the library.",
    model=ScriptedModel(write),
    tools=[search],
    middleware=[References()],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "How long is the Rhine?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")
            for source in message.metadata["sources"]:
                print(f"[{source['n']}] {source['title']}")


asyncio.run(main())
