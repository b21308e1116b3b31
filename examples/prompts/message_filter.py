"""A filter of the prompt: messages of build agents stay out, and a broadcast does not show at all.

Run it: python examples/prompts/message_filter.py

It prints:

    the prompt shows ['ann is in the team', 'Is the build green?']
    ann: I do not read the build's messages.
"""

import asyncio

from roundelay import AgentPolicy, Network, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, say
from roundelay.agents.policy import MessageFilter


def answer(request: ModelRequest) -> Action:
    view = read_prompt(request)
    shown = [message.text for thread in view.threads for message in thread.messages]
    print(f"the prompt shows {[*shown, view.incoming_text]}")
    return say("I do not read the build's messages.")


ann = SimpleAgentRunner(
    "ann",
    instruction="You answer in the channel.",
    model=ScriptedModel(answer),
    channels=["dev"],
    policy=AgentPolicy(
        prompt="full",
        message_filter=MessageFilter(exclude_senders=["build-*"], per_thread={"broadcast": 0}),
    ),
)


async def main() -> None:
    async with Network.open() as network, network.run(ann):
        build, mia = await network.join("build-7"), await network.join("mia", kind="human")
        await build.join_channel("dev")
        await mia.join_channel("dev")
        await build.post("dev", "build 1041 failed")
        await build.broadcast("build 1042 runs")
        await mia.post("dev", "ann is in the team", requires_response=[])
        await mia.post("dev", "Is the build green?", requires_response=["ann"])
        sender = ""
        while sender != "ann":
            async with mia.receive() as message:
                sender = message.sender_id
        print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
