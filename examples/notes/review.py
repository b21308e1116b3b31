"""Two writers and a shared note: a conflict, an appended paragraph, a proposal, and who wrote what.

Run it: python examples/notes/review.py

It prints:

    bob must look again:
    --- version 2
    +++ yours
    @@ -1,5 +1,5 @@
     # Plan
    -Launch on Tuesday.
    +Launch on Friday.

     ## Risks
     None known.

    bob proposes a change of your note channel:launch/plan (proposal 1).

    ann, version 2: ['#', 'Plan', 'Launch', 'on', 'Tuesday.']
    bob, version 4: ['##', 'Risks', 'One', 'known:']
    bob, version 3: ['The', 'pump', 'leaks,', 'see', '[[pump]].']
"""

from __future__ import annotations

import asyncio

from roundelay import Network

NOTE = "channel:launch/plan"


async def main() -> None:
    async with Network.open(mods=["channels", "discovery", "notes"]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        await ann.call("channels.create", {"name": "launch"})
        await bob.call("channels.join", {"name": "launch"})
        text = "# Plan\nLaunch on Monday.\n\n## Risks\nNone known.\n"
        await ann.call("notes.create", {"name": "plan", "thread_id": "channel:launch", "text": text})

        # Both have read version 1. The second writer learns what changed, and nothing is lost.
        for writer, day in ((ann, "Tuesday"), (bob, "Friday")):
            args = {"note": NOTE, "text": text.replace("Monday", day), "expected_version": 1}
            answer = await writer.call("notes.write", args)
            if answer.get("is_conflict"):
                print(f"{writer.agent_id} must look again:\n{answer['diff']}\n")

        await bob.call("notes.append", {"note": NOTE, "heading": "Risks", "text": "The pump leaks, see [[pump]]."})
        await ann.call("notes.set_access", {"note": NOTE, "access": "owner"})
        found = await bob.call("notes.read", {"note": NOTE})
        proposed = found["text"].replace("None known.", "One known:")
        args = {"note": NOTE, "text": proposed, "expected_version": found["version"], "summary": "count risks"}
        number = (await bob.call("notes.propose", args))["proposal"]
        async with ann.receive() as message:
            print(message.text)
        await ann.call("notes.decide", {"note": NOTE, "proposal": number, "accept": True})

        print()
        for paragraph in (await ann.call("notes.read", {"note": NOTE, "sources": True}))["sources"]:
            print(f"{paragraph['by']}, version {paragraph['version']}: {paragraph['text'].split()}")


asyncio.run(main())
