"""A hub in this process over SQLite files that a test watches, and people who record their answers."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from roundelay.app import OWN_MODS, Network
from roundelay.network.client import NetworkClient
from roundelay.network.client.values import Stored
from roundelay.network.clock import Clock, random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.errors import LedgerError
from roundelay.network.hub import Hub
from roundelay.network.ledger.sqlite import Durability, SQLiteLedger
from roundelay.network.mod import load_mods

log = logging.getLogger(__name__)

_LIMITS = Limits(root_messages_per_s=1_000_000, sends_per_s=1_000_000)

Key = tuple[str, str]
"""Sender and ``message_id``."""


@dataclass(frozen=True)
class Answered:
    """Mark of a received `stored` frame."""

    key: Key
    seq: int


@dataclass
class Found:
    """Content of a ledger after a crash."""

    epoch: str
    seqs: list[int]
    by_key: dict[Key, int]
    is_intact: bool


@asynccontextmanager
async def open_network(
    db: Path,
    *,
    durability: Durability = "full",
    limits: Limits = _LIMITS,
    clock: Clock = system_clock,
    checkpoint_pages: int | None = None,
) -> AsyncIterator[Network]:
    """Open a network like `Network.open`, but with "memory" as a file that is never synced. ``checkpoint_pages``
    causes earlier checkpoints.
    """
    ledger = SQLiteLedger(db, new_epoch=random_id, durability=durability)
    hub = Hub(
        ledger,
        limits=limits,
        mods=load_mods(["channels", "discovery"], OWN_MODS),
        clock=clock,
        new_id=random_id,
    )
    network = Network(hub, random_id)
    try:  # also covers the start: a hub that fails during it has threads, which would keep the process alive
        await hub.start()
        if checkpoint_pages is not None:
            sql = f"PRAGMA wal_autocheckpoint = {checkpoint_pages}"
            await ledger._run(ledger._writer, lambda db: db.execute(sql).fetchall())
        yield network
    finally:
        await asyncio.gather(*(client.close() for client in network._clients))
        await hub.close()


async def say_all(
    client: NetworkClient,
    sayings: dict[str, str],
    random: Random,
    on_stored: Callable[[Key, Stored], None],
    *,
    max_pause_s: float = 0.0,
) -> None:
    """Broadcast these texts, by message_id, one after the other."""
    for message_id, text in sayings.items():
        stored = await client.send("broadcast", text, message_id=message_id)
        on_stored((client.agent_id, message_id), stored)
        if max_pause_s:
            await asyncio.sleep(random.random() * max_pause_s)


async def look(db: Path, durability: Durability) -> Found | None:
    """Open a ledger after a crash as a hub does. Return None if it cannot be opened."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed", durability=durability, boot="the one after the crash")
    try:
        meta, _ = await ledger.open()
        rows = await ledger.rows(0, 1_000_000)
    except LedgerError as error:
        log.warning("the ledger is not opened after the crash: %s", error)
        return None
    finally:
        await ledger.close()
    connection = sqlite3.connect(db)
    try:
        is_intact = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        is_intact = False
    finally:
        connection.close()
    messages = {(row.actor, row.key[2:]): row.seq for row in rows if row.type == "message"}
    return Found(meta.epoch, [row.seq for row in rows], messages, is_intact)
