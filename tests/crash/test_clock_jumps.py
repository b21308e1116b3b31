"""Tests of the effects of a jumping system clock on a hub, one by one: times on the wire never go back, and no wait
depends on the clock.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.errors import RateLimited
from tests.crash.lives import open_network
from tests.support.counts import Note

HOUR_MS = 3_600_000
NOON_MS = 1_800_000_000_000
PATIENCE_S = 5.0


class Clock:
    """A manual clock."""

    def __init__(self) -> None:
        self.now = NOON_MS

    def __call__(self) -> int:
        return self.now


async def _receive(client: NetworkClient, count: int) -> list[int]:
    """Acknowledge the next messages, and return their ``sent_at``."""
    stamps: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for delivery in client.deliveries():
            stamps.append(delivery.message.sent_at)
            await delivery.ack()
            if len(stamps) == count:
                break
    return stamps


async def test_stamps_never_go_back_however_the_clock_jumps(tmp_path: Path, note: Note) -> None:
    clock, random = Clock(), Random(0)
    seqs: list[int] = []
    stamps: list[int] = []
    for _ in range(4):
        async with open_network(tmp_path / "team.db", clock=clock) as network:
            alice, bob = await network.join("alice"), await network.join("bob")
            for _ in range(50):
                clock.now += random.choice((-HOUR_MS, -1, 0, 1, 10, HOUR_MS))
                seqs.append((await alice.broadcast("tick")).seq)
            stamps += await _receive(bob, 50)
        clock.now -= 2 * HOUR_MS  # set back while the hub was down
    note(jumps=200, messages=len(stamps))
    assert seqs == sorted(set(seqs))
    assert stamps == sorted(stamps)
    assert len(stamps) == 200


async def _spend_the_rate(client: NetworkClient) -> None:
    answers = await asyncio.gather(*(client.broadcast("more") for _ in range(20)), return_exceptions=True)
    assert any(isinstance(answer, RateLimited) for answer in answers)


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
async def test_a_clock_that_was_ahead_for_a_moment_silences_nobody(tmp_path: Path, restarts: bool) -> None:
    clock, limits = Clock(), Limits(root_messages_per_s=5)

    async def jump(network: Network) -> NetworkClient:
        alice = await network.join("alice")
        clock.now += HOUR_MS
        await alice.broadcast("an hour ahead")
        clock.now -= HOUR_MS
        return alice

    async def be_heard(alice: NetworkClient) -> None:
        await _spend_the_rate(alice)
        clock.now += 4000
        await alice.broadcast("four seconds later")

    async with open_network(tmp_path / "team.db", clock=clock, limits=limits) as network:
        alice = await jump(network)
        if not restarts:
            await be_heard(alice)
    if restarts:
        async with open_network(tmp_path / "team.db", clock=clock, limits=limits) as network:
            await be_heard(await network.join("alice"))


async def test_a_clock_that_is_set_back_delays_no_redelivery(tmp_path: Path) -> None:
    clock = Clock()
    async with open_network(tmp_path / "team.db", clock=clock) as network:
        alice, bot = await network.join("alice"), await network.join("bot", role="reactor")
        await alice.send_text("bot", "hard")
        deliveries = bot.deliveries()
        for attempt in range(1, 5):
            async with asyncio.timeout(PATIENCE_S):
                delivery = await anext(deliveries)
            assert delivery.attempt == attempt
            clock.now -= HOUR_MS
            await delivery.nack("not now", retry_after_ms=5)
        async with asyncio.timeout(PATIENCE_S):
            delivery = await anext(deliveries)
        await delivery.ack()
        assert delivery.attempt == 5
