"""A tool call that a person approves, changes or denies.

Run it: python examples/people/approval.py

It prints:

    desk asks: pay {"to": "ann", "amount": 40}
    mia writes: /edit {"to": "ann", "amount": 30}
    desk: 30 EUR paid to ann
    desk asks: pay {"to": "ann", "amount": 40}
    mia writes: /deny She was paid already.
    desk: Not paid.
"""

import asyncio

from roundelay import Network, SimpleAgentRunner, tool
from roundelay.agents.models import ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Action, call, say


@tool(needs_approval=True)
def pay(to: str, amount: int) -> str:
    """Pay somebody."""
    return f"{amount} EUR paid to {to}"


def choose(request: ModelRequest) -> Action:
    results = read_prompt(request).tool_results
    if not results:
        return call("pay", to="ann", amount=40)
    return say(results[-1].content if "paid to" in results[-1].content else "Not paid.")


desk = SimpleAgentRunner("desk", instruction="You pay bills.", model=ScriptedModel(choose), tools=[pay])


async def main() -> None:
    async with Network.open() as network, network.run(desk):
        mia = await network.join("mia", kind="human")
        for decision in ('/edit {"to": "ann", "amount": 30}', "/deny She was paid already."):
            await mia.send_text("desk", "Pay ann, please.")
            async with mia.receive() as asked:
                request = asked.metadata["approval"]
            print(f"desk asks: {request['tool']} {request['arguments']}")
            print(f"mia writes: {decision}")
            await mia.reply(asked, decision)
            async with mia.receive() as answer:
                print(f"desk: {answer.text}")


asyncio.run(main())
