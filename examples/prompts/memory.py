"""Memory: messages that left the prompt's window are summarized once, and the summary stays in the prompt.

Run it: python examples/prompts/memory.py

It prints:

    summarized: ['My cat is called Tom.', 'noted', 'Filler 1']
    ann: Your cat is called Tom.
"""

import asyncio
import re
from collections.abc import Sequence

from roundelay import AgentPolicy, BaseMessage, Network, SimpleAgentRunner
from roundelay.agents.features.memory import Memory
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, say
from roundelay.agents.policy import GrowingWindow


def summarize(before: str, messages: Sequence[BaseMessage]) -> str:
    """Summarize as a model would: keep the sentences about cats."""
    if not before:
        print("summarized:", [it.text for it in messages])
    return " ".join([before, *(it.text for it in messages if "cat" in it.text)]).strip()


def answer(request: ModelRequest) -> Action:
    memory = request.messages[1].content.partition("<memory>")[2]
    name = re.search(r"cat is called (\w+)", memory)
    is_asked = "What is" in read_prompt(request).incoming_text
    return say(f"Your cat is called {name[1]}." if is_asked and name else "noted")


ann = SimpleAgentRunner(
    "ann",
    instruction="You keep in mind what people tell you.",
    model=ScriptedModel(answer),
    policy=AgentPolicy(per_thread=GrowingWindow(2, 4)),
    middleware=[Memory(write=summarize)],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        for text in ("My cat is called Tom.", "Filler 1", "Filler 2", "Filler 3", "What is my cat called?"):
            await mia.send_text("ann", text)
            async with mia.receive() as message:
                last = message
        print(f"{last.sender_id}: {last.text}")


asyncio.run(main())
