"""Two coding agents reserve files, so that they do not edit the same one.

Run it: python examples/mods/reservations.py

It prints:

    ann has src/shop.py
    bob may not have src: ann has src/shop.py (I rename total().)
    bob waits at place 1
    bob hears: You have reserved src for 60 minutes.
"""

import asyncio

from roundelay import Network


async def main() -> None:
    async with Network.open(mods=["channels", "reservations"]) as network:
        ann, bob = await network.join("ann"), await network.join("bob")
        got = await ann.call("reservations.reserve", {"paths": ["src/shop.py"], "note": "I rename total()."})
        print("ann has", *(it["path"] for it in got["reserved"]))
        refused = await bob.call("reservations.reserve", {"paths": ["src"]})
        for it in refused["taken"]:
            print(f"bob may not have src: {it['agent_id']} has {it['path']} ({it['note']})")
        waiting = await bob.call("reservations.reserve_all", {"paths": ["src"]})
        print(f"bob waits at place {waiting['position']}")
        await ann.call("reservations.release")
        async with bob.receive() as message:
            print(f"bob hears: {message.text}")


asyncio.run(main())
