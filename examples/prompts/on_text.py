"""Three ways to treat plain text: send it, only record it, or ask the model to use a tool.

Run it: python examples/prompts/on_text.py

It prints:

    on_text reply: mia reads 'Done, I think.'
    on_text record: mia reads nothing
    on_text nudge: mia reads 'Done.'
"""

import asyncio

from roundelay import AgentPolicy, Network, SimpleAgentRunner
from roundelay.agents import OnText
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, finish, say, send


def answer(request: ModelRequest) -> Action:
    """Write plain text first, and use a tool once told to."""
    view = read_prompt(request)
    if view.turn == 1:
        return say("Done, I think.")
    return finish() if view.tool_results else send("mia", "Done.")


async def try_it(on_text: OnText) -> None:
    ann = SimpleAgentRunner(
        "ann", instruction="You work.", model=ScriptedModel(answer), policy=AgentPolicy(on_text=on_text)
    )
    async with Network.open() as network, network.run(ann):
        mia = await network.join("mia", kind="human")
        sent = await mia.send_text("ann", "Are you done?")
        await mia.wait_until_quiet(sent.seq)
        texts = [it.text for it in (await mia.history("direct:ann~mia")).messages if it.sender_id == "ann"]
        print(f"on_text {on_text}: mia reads {', '.join(map(repr, texts)) or 'nothing'}")


async def main() -> None:
    for on_text in ("reply", "record", "nudge"):
        await try_it(on_text)


asyncio.run(main())
