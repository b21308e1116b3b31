"""Three participants vote in secret. Nobody sees a vote, and the sums appear after the end.

Run it: python examples/notes/vote.py

It prints:

    You have voted in the secret poll 4. A secret vote is final.
    3 votes: [{'choice': 'ann'}, {'choice': 'bob'}]
    3 votes: [{'choice': 'ann', 'votes': 1}, {'choice': 'bob', 'votes': 2}]
"""

from __future__ import annotations

import asyncio

from roundelay import InvalidArguments, Network


async def main() -> None:
    async with Network.open(mods=["channels", "discovery", "polls"]) as network:
        voters = [await network.join(name) for name in ("ann", "bob", "cleo")]
        ann, bob, _ = voters
        question = {"question": "Who leads?", "choices": ["ann", "bob"], "thread_id": "broadcast", "secret": True}
        poll = await ann.call("polls.create", question)
        for voter, choice in zip(voters, ("bob", "bob", "ann"), strict=True):
            await voter.call("polls.vote", {**poll, "choice": choice})
        try:
            await bob.call("polls.vote", {**poll, "choice": "ann"})
        except InvalidArguments as error:
            print(error)
        before = await bob.call("polls.results", poll)
        print(f"{before['voters']} votes: {before['choices']}")
        after = await ann.call("polls.close", poll)
        print(f"{after['voters']} votes: {after['choices']}")


asyncio.run(main())
