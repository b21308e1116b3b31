"""A person takes a thread over. The agent is silent there until the person gives it back, and knows what was said.

Run it: python examples/people/takeover.py

It prints:

    during the takeover, messages of tom mia tom
    desk: I have read 3 messages, the last one of tom.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, say

HELP = {"thread_id": "channel:help"}


def answer(request: ModelRequest) -> Action:
    view = read_prompt(request)
    shown = [message for thread in view.threads for message in thread.messages]
    return say(f"I have read {len(shown) + 1} messages, the last one of {view.incoming_sender}.")


desk = SimpleAgentRunner("desk", instruction="You help.", model=ScriptedModel(answer), channels=["help"])


async def main() -> None:
    async with Network.open() as network, network.run(desk):
        tom, mia = await network.join("tom", kind="human"), await network.join("mia", kind="human")
        await tom.join_channel("help")
        await mia.join_channel("help")
        await mia.call("network.take", HELP)
        await tom.post("help", "Where is order 13?", requires_response=[])
        await mia.post("help", "It comes tomorrow.", requires_response=[])
        await tom.post("help", "And order 12?", requires_response=["desk"])
        await asyncio.sleep(0.2)  # time in which the agent would have answered
        history = await tom.history("channel:help")
        print("during the takeover, messages of", *(it.sender_id for it in history.messages))
        await mia.call("network.give", HELP)
        sender = ""
        while sender != "desk":
            async with tom.receive() as message:
                sender = message.sender_id
        print(f"desk: {message.text}")


asyncio.run(main())
