"""A limit on what the ledger stores of a reaction: no results of tools, and no card numbers. The model reads everything,
and messages are stored as they are.

Run it: python examples/models/data_policy.py

It prints:

    ann: Paid with 4111 1111 1111 1111.
    stored result: [This agent's data policy did not keep the result of find_car
    stored reply: Paid with [redacted].
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents import Event
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say

CARD = r"\b\d{4} \d{4} \d{4} \d{4}\b"
reactions: set[str] = set()


@tool(idempotent=True)
def find_card() -> str:
    """Find the card of the customer."""
    return "4111 1111 1111 1111"


def answer(request: ModelRequest) -> Action:
    results = read_prompt(request).tool_results
    return say(f"Paid with {results[-1].content}.") if results else call("find_card")


def note(event: Event) -> None:
    reactions.add(event.reaction)


ann = SimpleAgentRunner(
    "ann",
    instruction="You take payments.",
    model=ScriptedModel(answer),
    tools=[find_card],
    middleware=[DataPolicy(results=False, redact=[CARD])],
    on_event=note,
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        sent = await mia.send_text("ann", "Pay order 12.")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")
        await mia.wait_until_quiet(sent.seq)
        records = (await mia.call("network.records", {"reaction": reactions.pop()}))["records"]
        for body in (record["body"] for record in records):
            if "content" in body:
                print(f"stored result: {body['content'][:61]}")
            elif text := body.get("reply", {}).get("text"):
                print(f"stored reply: {text}")


asyncio.run(main())
