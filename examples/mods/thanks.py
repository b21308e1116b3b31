"""A mod of your own: it counts thanks in the commit of each message, refuses self-praise, and gives agents a tool.

Run it: python examples/mods/thanks.py

It prints:

    refused: Thank somebody else.
    {'agent_id': 'bob', 'count': 2}
"""

import asyncio
import re

import msgspec

from roundelay import InvalidArguments, Network
from roundelay.network.ledger import Row
from roundelay.network.mod import Change, Incoming, Mod, operation


def find_thanked(content: object) -> list[str]:
    return re.findall(r"thanks @([a-z0-9_-]+)", content) if isinstance(content, str) else []


class Thanks(Mod):
    """Counts who was thanked."""

    id = "thanks"

    def before(self, incoming: Incoming) -> None:
        if incoming.origin.agent_id in find_thanked(msgspec.json.decode(incoming.frame.content)):
            raise InvalidArguments("Thank somebody else.")

    def apply(self, change: Change, message: Row) -> None:
        for name in find_thanked(msgspec.json.decode(message.data)["content"]):
            change.put(name, (change.get(name) or 0) + 1)

    @operation("change")
    def count(self, change: Change, *, agent_id: str) -> dict[str, object]:
        """Return how often a participant was thanked."""
        return {"agent_id": agent_id, "count": change.get(agent_id) or 0}


async def main() -> None:
    async with Network.open(mods=["channels", Thanks()]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        await ann.broadcast("thanks @bob")
        await ann.send_text("bob", "thanks @bob, again")
        try:
            await bob.broadcast("thanks @bob")
        except InvalidArguments as error:
            print(f"refused: {error}")
        print(await bob.call("thanks.count", {"agent_id": "bob"}))


asyncio.run(main())
