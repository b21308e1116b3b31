"""An agent that books each order in its own database exactly once, however often it or the hub is killed.

    python examples/exactly_once/shop.py [ws://HOST:PORT/]

Then: roundelay send agent:shop "3 apples"
"""

import asyncio
import sys

import aiosqlite

from roundelay import handle_exactly_once


async def book(db: aiosqlite.Connection, message) -> None:
    """The effect: one row. It is committed together with the note that this message was handled."""
    await db.execute("CREATE TABLE IF NOT EXISTS orders (seq INTEGER, customer TEXT, what TEXT)")
    print("booking", message.seq, message.text, flush=True)
    await db.execute("INSERT INTO orders VALUES (?, ?, ?)", (message.seq, message.sender_id, message.text))


asyncio.run(handle_exactly_once("shop.db", "shop", book, url=sys.argv[1] if len(sys.argv) > 1 else None))
