"""One batch: its entries see each other, nothing of it is answered or delivered before it is durable, and when its commit fails, repeats
settle what happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.clock import random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.errors import LedgerError
from roundelay.network.hub import Hub
from roundelay.network.ledger import Row
from roundelay.network.ledger_memory import MemoryLedger
from roundelay.network.local import LocalConnection, LocalTransport
from roundelay.network.tables import Put


class MoodyLedger(MemoryLedger):
    """A ledger whose `append` waits while ``is_free`` is clear, and fails once when ``fails`` says so: before or after it has stored."""

    def __init__(self) -> None:
        super().__init__(epoch="e", name="moody")
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.is_reached = asyncio.Event()
        self.fails: str | None = None

    async def append(self, rows: Sequence[Row], puts: Sequence[Put]) -> None:
        self.is_reached.set()
        await self.is_free.wait()
        fails, self.fails = self.fails, None
        if fails == "before":
            raise LedgerError("the disk is full")
        await super().append(rows, puts)
        if fails == "after":
            raise LedgerError("the disk did not answer")


class Place:
    """A hub over a moody ledger, with ann and bob in it."""

    def __init__(self) -> None:
        self.ledger = MoodyLedger()
        self.hub = Hub(self.ledger, limits=Limits(), clock=system_clock, new_id=random_id)
        self.ann, self.bob = (NetworkClient(name, transport=LocalTransport(self.hub)) for name in ("ann", "bob"))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    await place.hub.start()
    async with place.ann, place.bob:
        yield place
        place.ledger.is_free.set()
    await place.hub.close()


async def test_nothing_is_answered_or_delivered_before_the_commit_has_returned(place: Place) -> None:
    heard = place.bob.__aiter__()
    arriving = asyncio.ensure_future(anext(heard))
    place.ledger.is_free.clear()
    place.ledger.is_reached.clear()
    sending = asyncio.create_task(place.ann.send_text("bob", "hi"))
    await place.ledger.is_reached.wait()
    for client in (place.ann, place.bob):
        await client.call("network.info")  # a read waits for no commit: whatever was written before it has arrived
    assert (sending.done(), arriving.done()) == (False, False)
    place.ledger.is_free.set()
    assert (await sending).seq == (await arriving).seq


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_commit_that_failed_is_settled_by_the_senders_repeat(
    place: Place, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = place.bob.__aiter__()
    first_seq = (await place.ann.send_text("bob", "first")).seq
    place.ledger.fails = fails
    async with asyncio.timeout(5):
        stored = await place.ann.send_text("bob", "second")  # the client meets 4503 and sends it again
    assert stored.duplicate is (fails == "after")
    last = await place.ann.send_text("bob", "last")
    assert [(await anext(heard)).text for _ in range(3)] == ["first", "second", "last"]
    assert first_seq < stored.seq < last.seq
    assert place.hub.counts["recoveries"] == 1
    assert "the ledger failed; reopening it" in caplog.text


def hello(agent_id: str) -> bytes:
    frame = {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": "agent", "role": "reactor"}
    return json.dumps(frame).encode()


async def find_frame(connection: LocalConnection, type_: str) -> dict[str, object]:
    """The next frame of this type; those before it are passed over."""
    async for data in connection.frames():
        frame: dict[str, object] = json.loads(data)
        if frame["type"] == type_:
            return frame
    raise AssertionError(f"no {type_} came")


async def test_what_an_older_reactor_sends_in_the_batch_of_a_newer_ones_hello_is_not_stored(place: Place) -> None:
    older, newer = LocalConnection(place.hub), LocalConnection(place.hub)
    older.send(hello("bot"))
    await find_frame(older, "welcome")
    frames = (
        {"type": "send", "message_id": "late", "to": "agent:ann", "content": "too late"},
        {"type": "record", "record_id": "late", "reaction": "r", "kind": "note", "body": {}},
    )
    newer.send(hello("bot"))
    for frame in frames:
        older.send(json.dumps(frame).encode())
    await find_frame(newer, "welcome")
    for frame in frames:
        newer.send(json.dumps(frame).encode())
        assert (await find_frame(newer, "stored"))["duplicate"] is False
