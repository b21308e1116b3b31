"""Tests of a client whose program reads no messages: it holds a bounded number of its participant's messages from
other sessions.
"""

from __future__ import annotations

import asyncio

import pytest

from roundelay.app import Network
from roundelay.network.client import delivery_queue
from roundelay.network.config import Limits


@pytest.mark.parametrize(("waiting", "chars"), [(20, 10**9), (10**9, 4_000)])
async def test_an_idle_session_holds_few_of_its_participants_own_messages_and_all_of_others(
    monkeypatch: pytest.MonkeyPatch, waiting: int, chars: int
) -> None:
    monkeypatch.setattr(delivery_queue, "MAX_OWN_WAITING", waiting)
    monkeypatch.setattr(delivery_queue, "MAX_OWN_CHARS", chars)
    async with asyncio.timeout(30), Network.open(limits=Limits(root_messages_per_s=100_000)) as network:
        bob = await network.join("bob")
        ann, idle = await network.join("ann"), await network.join("ann")
        most = 0
        for number in range(200):
            await ann.send_text("bob", f"own {number} " + "x" * 190)
            if number % 50 == 0:
                await bob.send_text("ann", f"theirs {number}")
            most = max(most, idle._deliveries._queue.qsize())
        assert most <= 25 + 4
        assert await ann.call("network.history", {"thread_id": "direct:ann~bob", "limit": 500})
        await bob.send_text("ann", "last")
        heard: list[str] = []
        async for message in idle:
            heard.append(message.text.partition(" x")[0])
            if message.text == "last":
                break
        theirs = [it for it in heard if it.startswith(("theirs", "last"))]
        assert theirs == ["theirs 0", "theirs 50", "theirs 100", "theirs 150", "last"]
        own = [it for it in heard if it.startswith("own")]
        assert own[-1] == "own 199"
        assert own == [f"own {number}" for number in range(200 - len(own), 200)]
        assert 1 <= len(own) <= 25


async def test_who_reads_misses_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_queue, "MAX_OWN_WAITING", 5)
    async with asyncio.timeout(30), Network.open(limits=Limits(root_messages_per_s=100_000)) as network:
        await network.join("bob")
        ann, reader = await network.join("ann"), await network.join("ann")
        deliveries = reader.deliveries()
        for number in range(40):
            await ann.send_text("bob", f"own {number}")
            assert (await anext(deliveries)).message.text == f"own {number}"
        assert (len(reader._deliveries._own), reader._deliveries._own_chars) == (0, 0)
