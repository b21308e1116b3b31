"""A hub in this process over SQLite files that a test watches, and people who keep what they were answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

from roundelay.app import OWN_MODS, Network
from roundelay.network.clock import Clock, random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.hub import Hub
from roundelay.network.ledger_sqlite import Durability, SQLiteLedger
from roundelay.network.mod import load_mods
from roundelay.network.told import Stored

Key = tuple[str, str]
"""Who sent it, and its ``message_id``."""


@asynccontextmanager
async def open_network(
    db: Path, *, durability: Durability = "full", clock: Clock = system_clock, checkpoint_pages: int | None = None
) -> AsyncIterator[Network]:
    """`Network.open`, but "memory" is a file too: one that is never synced. ``checkpoint_pages`` brings checkpoints sooner."""
    ledger = SQLiteLedger(db, new_epoch=random_id, durability=durability)
    hub = Hub(
        ledger,
        limits=Limits(root_messages_per_s=1_000_000, sends_per_s=1_000_000),
        mods=load_mods(["channels", "discovery"], OWN_MODS),
        clock=clock,
        new_id=random_id,
    )
    await hub.start()
    if checkpoint_pages is not None:
        sql = f"PRAGMA wal_autocheckpoint = {checkpoint_pages}"
        await ledger._run(ledger._writer, lambda db: db.execute(sql).fetchall())
    network = Network(hub)
    try:
        yield network
    finally:
        await asyncio.gather(*(client.close() for client in network._clients))
        await hub.close()


async def say_all(
    network: Network,
    sender: str,
    sayings: dict[str, str],
    random: Random,
    on_stored: Callable[[Key, Stored], None],
    *,
    max_pause_s: float = 0.0,
) -> None:
    """Send these texts (by message_id) to everyone, one after the other."""
    client = await network.join(sender)
    for message_id, text in sayings.items():
        stored = await client.send("broadcast", text, message_id=message_id)
        on_stored((sender, message_id), stored)
        if max_pause_s:
            await asyncio.sleep(random.random() * max_pause_s)
    await client.close()
