"""Checks of an answer before it is sent. A failed check goes back to the model, which writes again.

Run it: python examples/answers/evaluations.py

It prints:

    draft: It costs 12 EUR.
    draft: It is cheap.
    ann: It is cheap. (passed: no_prices, is_short)
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents import Around
from roundelay.agents.features.evaluations import Evaluations, Evidence, Rule
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, say


def is_short(answer: str, evidence: Evidence, around: Around) -> str | None:
    """Return what the model should improve, or None."""
    return "Write one short sentence." if len(answer) > 100 else None


def write(request: ModelRequest) -> Action:
    draft = "It costs 12 EUR." if read_prompt(request).turn == 1 else "It is cheap."
    print(f"draft: {draft}")
    return say(draft)


no_prices = Rule("no_prices", r"\d+ EUR", "Leave out prices.", forbids=True)
ann = SimpleAgentRunner(
    "ann",
    instruction="You praise what the shop sells.",
    model=ScriptedModel(write),
    middleware=[Evaluations(always=[no_prices, is_short])],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "What about this teapot?")
        async with mia.receive() as message:
            passed = ", ".join(message.metadata["passed_checks"])
            print(f"{message.sender_id}: {message.text} (passed: {passed})")


asyncio.run(main())
