"""Additions to an answer that passed its checks: another text, metadata, and questions that a person may ask next.

Run it: python examples/answers/postprocessors.py

It prints:

    ann: The share rose. ACME 41.20
    quotes: {'ACME': 41.2}
    ask next: Why did it rise?
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents import Answer, Around
from roundelay.agents.features.postprocessors import FollowUps, Postprocessors
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, call, say

QUOTES = {"ACME": 41.20}


def add_quotes(answer: str, around: Around) -> Answer:
    """Put the quote into the text, which later prompts show, and into the metadata, which none shows."""
    return Answer(f"{answer} ACME {QUOTES['ACME']:.2f}", {"quotes": QUOTES})


def write(request: ModelRequest) -> Action:
    return say("The share rose.")


def suggest(request: ModelRequest) -> Action:
    return call("suggest", questions=["Why did it rise?"])


ann = SimpleAgentRunner(
    "ann",
    instruction="You know shares.",
    model=ScriptedModel(write),
    middleware=[Postprocessors(add_quotes, FollowUps(ScriptedModel(suggest), count=1))],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "How is ACME?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")
            print("quotes:", message.metadata["quotes"])
            print("ask next:", *message.metadata["follow_ups"])


asyncio.run(main())
