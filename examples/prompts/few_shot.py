"""Examples in the prompt, for models that need them.

Run it: python examples/prompts/few_shot.py

It prints:

    system: You are the watchman.
    user: What is at the door?
    assistant: calls look
    tool: a cat
    assistant: A cat.
    ann: A dog.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents.features.few_shot import Example, ExampleCall, FewShot
from roundelay.agents.models import ModelRequest, ScriptedModel
from roundelay.agents.models.scripted import Action, say


@tool(idempotent=True)
def look(at: str) -> str:
    """Look at something."""
    return "a dog"


def watch(request: ModelRequest) -> Action:
    for message in request.messages[:5]:
        role = type(message).__name__.removesuffix("Message").lower()
        calls = ", ".join(f"calls {it.name}" for it in getattr(message, "tool_calls", ()))
        text = (message.content or "").splitlines()
        print(f"{role}: {calls or (text[0] if role == 'system' else text[-1])}")
    return say("A dog.")


example = Example(
    user="What is at the door?",
    calls=[ExampleCall("look", {"at": "the door"}, "a cat")],
    answer="A cat.",
)
ann = SimpleAgentRunner(
    "ann",
    instruction="You are the watchman.",
    model=ScriptedModel(watch, name="small-1"),
    tools=[look],
    middleware=[FewShot([example], models=["small*"])],
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        await mia.send_text("ann", "And now?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
