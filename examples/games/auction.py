"""A sealed auction: one agent takes every bid in private. Run it: python examples/games/auction.py

Three people bid for a lamp, each in a separate thread with the agent `hammer`. Its tool books a bid under the message's
sender, which nobody can forge. A bidder who asks for other bids gets only the own bid, with any model: no prompt for
one bidder contains texts of another. At the end everybody learns the winner and the second highest bid, which is the
price. The model is scripted.
"""

import asyncio
from collections.abc import Callable

from roundelay import AgentPolicy, Network, SimpleAgentRunner, ToolContext, tool
from roundelay.agents.models import Model, ModelRequest, ScriptedModel, read_prompt
from roundelay.agents.models.scripted import Answer, broadcast, call, finish
from roundelay.agents.tools import Tool
from roundelay.network.client import NetworkClient
from roundelay.network.visibility import Visibility

BIDS = {"amy": 410, "ben": 570, "cat": 630}


def keep_book(book: dict[str, int]) -> list[Tool]:
    """The tools of the auction, over one book."""

    @tool(idempotent=True)
    def bid(context: ToolContext, amount: int) -> str:
        """Book the bid of the message's sender."""
        book[context.trigger.sender_id] = amount
        return f"booked {amount}"

    @tool(idempotent=True)
    def close_auction(context: ToolContext) -> str:
        """End the auction; the seller may."""
        if context.trigger.sender_id != "seller":
            return "Only the seller ends the auction."
        (winner, _), (_, price), *_ = sorted(book.items(), key=lambda it: -it[1])
        return f"Sold to {winner} for {price}"

    return [bid, close_auction]


def sell(request: ModelRequest) -> Answer:
    """A model that reveals everything it knows to anybody."""
    view = read_prompt(request)
    told = view.incoming_text
    if view.tool_results:
        result = view.tool_results[-1]
        if result.tool == "close_auction" and result.content.startswith("Sold"):
            return [broadcast(result.content), finish()]
        return finish("told everybody") if result.tool == "broadcast_text_message" else result.content
    if told.startswith("I bid"):
        return call("bid", amount=int(told.split()[2]))
    if told == "Close it.":
        return call("close_auction")
    said = [it.text for thread in view.threads for it in thread.messages if it.text.startswith("I bid")]
    return f"All that I know: {', '.join(said) or 'nothing'}."


async def run_auction(model: Model, say: Callable[[str], None], visibility: Visibility = "people") -> None:
    """One auction, in this process."""
    book: dict[str, int] = {}
    hammer = SimpleAgentRunner(
        "hammer",
        instruction="You run a sealed auction.",
        model=model,
        tools=keep_book(book),
        visibility=visibility,
        policy=AgentPolicy(prompt="full"),  # its prompt shows all threads
    )
    async with Network.open(visibility=visibility) as network, network.run(hammer):
        people = {name: await network.join(name, kind="human") for name in (*BIDS, "seller")}
        for name, amount in BIDS.items():
            await ask(people[name], f"I bid {amount} for the lamp.")
        for name in (*BIDS, "seller"):
            say(f"{name} hears: {await ask(people[name], 'What have the others bid?')}")
        await people["seller"].send_text("hammer", "Close it.")
        say(f"everybody hears: {await hear(people['amy'])}")


async def ask(person: NetworkClient, text: str) -> str:
    await person.send_text("hammer", text)
    return await hear(person)


async def hear(person: NetworkClient) -> str:
    async with person.receive() as message:
        return message.text


if __name__ == "__main__":
    asyncio.run(run_auction(ScriptedModel(sell), print))
