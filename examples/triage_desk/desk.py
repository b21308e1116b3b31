"""A desk that hands a conversation over to a specialist agent.

Both agents are scripted, so the example needs no model. Replace `ScriptedModel(...)` by `OpenAIModel(...)` for a real
one.

Run it: python examples/triage_desk/desk.py

It prints:

    desk: You are right, order 7 was paid twice. You get one payment back.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents import Agent, Handoff
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(idempotent=True)
def find_payments(order: int) -> str:
    """Find the payments of an order."""
    return f"order {order} was paid twice"


def triage(request: ModelRequest) -> Action:
    return call("hand_over_to_billing", note="She says that she paid twice.")


def bill(request: ModelRequest) -> Action:
    results = read_prompt(request).tool_results
    if results and results[-1].tool == "find_payments":
        return say(f"You are right, {results[-1].content}. You get one payment back.")
    return call("find_payments", order=7)


billing = Agent(
    "billing", "You look after bills.", ScriptedModel(bill), [find_payments], description="Knows the bills."
)
desk = SimpleAgentRunner(
    "desk",
    instruction="You find out who can help, and hand over.",
    model=ScriptedModel(triage),
    handoffs=[Handoff(billing, returns="to_person")],
)


async def main() -> None:
    async with Network.open() as network, network.run(desk):
        zoe = await network.join("zoe", kind="human")
        await zoe.send_text("desk", "I paid order 7 twice!")
        async with zoe.receive() as message:
            print(f"{message.sender_id}: {message.text}")


asyncio.run(main())
