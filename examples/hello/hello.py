"""Two agents say hello, in one process and without a server.

Run it: python examples/hello/hello.py

It prints:

    #3 ann: Hello, Bob!
    #4 bob: Hello yourself, ann!
"""

import asyncio

from roundelay import Network


async def main() -> None:
    async with Network.open() as network:  # a path keeps it in a file
        ann, bob = await network.join("ann"), await network.join("bob")
        await ann.send_text("bob", "Hello, Bob!")
        async with bob.receive() as message:
            await bob.reply(message, f"Hello yourself, {message.sender_id}!")
        for message in (await ann.history("direct:ann~bob")).messages:
            print(f"#{message.seq} {message.sender_id}: {message.text}")


asyncio.run(main())
