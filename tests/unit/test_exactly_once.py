"""Tests of exactly-once handling where deliveries come out of order: restored dead letters, attempts that another
process began, a replaced history. tests/crash/test_exactly_once.py covers kills.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiosqlite
import pytest

from roundelay.app import Network
from roundelay.network.client import AnyMessage, NetworkClient, Stored
from roundelay.network.client.exactly_once import HistoryReplaced, handle_exactly_once
from roundelay.network.core import failures
from roundelay.network.hub.local import LocalConnection, LocalTransport


class Shop:
    """Handler that records handled messages in its database, and fails while ``is_broken``."""

    def __init__(self, database: Path) -> None:
        self.database = database
        self.is_broken = False
        self.runs: asyncio.Queue[str] = asyncio.Queue()

    async def handle(self, db: aiosqlite.Connection, message: AnyMessage) -> None:
        await db.execute("CREATE TABLE IF NOT EXISTS orders (text TEXT)")
        await db.execute("INSERT INTO orders VALUES (?)", (message.text,))
        self.runs.put_nowait(message.text)
        if self.is_broken:
            raise ValueError("broken")

    async def run_of(self, text: str) -> None:
        """Wait until the handler has run for this message. The handler's transaction may not be committed yet."""
        while await self.runs.get() != text:
            pass

    async def settle(self, mia: NetworkClient) -> None:
        """Wait until the handling of all earlier messages is committed."""
        for text in ("settled", "settled"):
            await mia.send_text("shop", text)
            await self.run_of(text)

    def orders(self) -> list[str]:
        with closing(sqlite3.connect(self.database)) as db:
            return [text for (text,) in db.execute("SELECT text FROM orders ORDER BY rowid")]

    @asynccontextmanager
    async def open(self, network: Network) -> AsyncIterator[asyncio.Task[None]]:
        transport = LocalTransport(network.hub)
        work = handle_exactly_once(self.database, "shop", self.handle, transport=transport)
        task = asyncio.create_task(work)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    monkeypatch.setattr(failures, "FIRST_RETRY_MS", 1)
    async with Network.open() as opened:
        yield opened


async def until_handled(mia: NetworkClient, stored: Stored) -> None:
    """Poll until the handling of a message is committed. Each poll is a round trip, so the event loop keeps running."""
    while True:
        status = await mia.call("network.message_status", {"seq": stored.seq})
        if status["recipients"][0]["state"] == "handled":
            return


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "shop.db")


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_dead_letter_that_is_taken_back_is_handled(network: Network, shop: Shop, *, is_restarted: bool) -> None:
    await (await network.join("shop")).close()
    mia = await network.join("mia", kind="human")

    async def take_back() -> None:
        await mia.call("network.retry_dead_letter", {"seq": seq, "agent_id": "shop"})
        await shop.run_of("dead")
        await mia.send_text("shop", "last")
        await shop.run_of("last")

    async with asyncio.timeout(10):
        shop.is_broken = True
        async with shop.open(network):
            seq = (await mia.send_text("shop", "dead")).seq
            async for event in mia.events():
                if getattr(event, "kind", "") == "dead_letter":
                    break
            shop.is_broken = False
            await mia.send_text("shop", "next")
            await shop.run_of("next")
            if not is_restarted:
                await take_back()
        async with shop.open(network):
            if is_restarted:
                await take_back()
            await shop.settle(mia)
    assert sorted(shop.orders()) == ["dead", "last", "next", "settled"]


async def test_a_dead_letter_that_cannot_be_noted_is_told_and_changes_no_end(
    network: Network, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    mia = await network.join("mia", kind="human")
    await (await network.join("shop")).close()
    async with asyncio.timeout(10), shop.open(network) as task:
        await until_handled(mia, await mia.send_text("shop", "first"))
        with closing(sqlite3.connect(shop.database)) as db, db:
            db.execute(
                "CREATE TRIGGER broken BEFORE INSERT ON roundelay_open WHEN new.dead BEGIN SELECT raise(ABORT, 'no room'); END"
            )
        shop.is_broken = True
        await mia.send_text("shop", "dead")
        async for event in mia.events():
            if getattr(event, "kind", "") == "dead_letter":
                break
        shop.is_broken = False
        while "no room" not in caplog.text:
            await mia.call("network.info")
        await mia.send_text("shop", "next")
        await shop.run_of("next")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_what_waited_for_another_attempt_at_the_first_start_is_handled(
    network: Network, shop: Shop, *, is_restarted: bool
) -> None:
    before = await network.join("shop")
    mia = await network.join("mia", kind="human")
    refused = await mia.send_text("shop", "refused before")
    async for delivery in before.deliveries():
        await delivery.nack("not now", retry_after_ms=300)
        break
    await before.call("network.info")
    await before.close()
    await mia.send_text("shop", "new")
    async with asyncio.timeout(10):
        async with shop.open(network):
            await shop.run_of("new")
            if not is_restarted:
                await until_handled(mia, refused)
        async with shop.open(network):
            # The message may be handled already: the order of the two is not guaranteed.
            await until_handled(mia, refused)
            await shop.settle(mia)
    assert sorted(shop.orders()) == ["new", "refused before", "settled"]


async def test_a_history_that_is_replaced_while_the_handler_runs_ends_it(network: Network, shop: Shop) -> None:
    mia = await network.join("mia", kind="human")
    await (await network.join("shop")).close()
    async with asyncio.timeout(10), Network.open() as other:
        transport = LocalTransport(network.hub)
        connections: list[LocalConnection] = []

        class Watched(LocalTransport):
            async def connect(self) -> LocalConnection:
                connections.append(await transport.connect())
                return connections[-1]

        task = asyncio.create_task(
            handle_exactly_once(shop.database, "shop", shop.handle, transport=Watched(network.hub))
        )
        await mia.send_text("shop", "old")
        await shop.runs.get()
        zoe = await other.join("zoe", kind="human")
        await (await other.join("shop")).close()
        transport._hub = other.hub
        connections[-1].end(1006, "lost")
        await zoe.send_text("shop", "of another history")
        with pytest.raises(HistoryReplaced):
            await task
    assert shop.orders() == ["old"]


async def test_a_database_of_an_earlier_version_is_taken_as_it_is(network: Network, shop: Shop) -> None:
    mia = await network.join("mia", kind="human")
    await (await network.join("shop")).close()
    seq = (await mia.send_text("shop", "handled by the earlier version")).seq
    with closing(sqlite3.connect(shop.database)) as db, db:
        db.execute(
            "CREATE TABLE roundelay_cursor (agent_id TEXT PRIMARY KEY, epoch TEXT NOT NULL, seq INTEGER NOT NULL)"
        )
        db.execute(
            "CREATE TABLE roundelay_open (agent_id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (agent_id, seq))"
        )
        db.execute("INSERT INTO roundelay_cursor VALUES ('shop', ?, ?)", (network.hub.epoch, seq))
    async with asyncio.timeout(10), shop.open(network):
        await mia.send_text("shop", "new")
        assert await shop.runs.get() == "new"
