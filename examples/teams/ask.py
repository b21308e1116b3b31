"""An agent asks two others at once, and waits for both answers.

Run it: python examples/teams/ask.py

It prints:

    lead: ann: 3 days / bob: 5 days
"""

import asyncio
import re

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


def lead(request: ModelRequest) -> Action:
    results = read_prompt(request).tool_results
    if not results:
        return call("ask", agent_ids=["ann", "bob"], text="How long will it take?", timeout_s=60)
    answers = re.findall(r'<answer sender="(\w+)">(.*?)</answer>', results[-1].content)
    return say(" / ".join(f"{sender}: {text}" for sender, text in answers))


def make(name: str, script: object) -> SimpleAgentRunner:
    return SimpleAgentRunner(name, instruction="You plan.", model=ScriptedModel(script))


TEAM = [make("lead", lead), make("ann", lambda request: "3 days"), make("bob", lambda request: "5 days")]


async def main() -> None:
    async with Network.open() as network, network.run(*TEAM):
        mia = await network.join("mia", kind="human")
        await mia.send_text("lead", "When is it ready?")
        async with mia.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
