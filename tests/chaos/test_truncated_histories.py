"""Tests of promise P4 after old rows were deleted: a client that returns too late gets `limited` with the first seq,
and then all remaining messages. docs/promises.md.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.clock import random_id
from roundelay.network.config import Limits, Retain
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalTransport
from roundelay.network.hub.retention import enforce_retention
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.units import DAY_MS
from tests.support.counts import Note

DAY = Retain(days=1)
TIMEOUT_S = 10.0


class _Network:
    """A hub over a file. ``day`` sets its clock."""

    def __init__(self, db: Path) -> None:
        self.day = 1000.0
        self.ledger = SQLiteLedger(db, new_epoch=random_id)
        limits = Limits(root_messages_per_s=100_000, max_unacked=2)
        self.hub = Hub(self.ledger, limits=limits, clock=self.clock, new_id=random_id)

    def clock(self) -> int:
        return int(self.day * DAY_MS)

    def client(self, agent_id: str, **options: object) -> NetworkClient:
        return NetworkClient(agent_id, transport=LocalTransport(self.hub), **options)  # type: ignore[arg-type]

    async def cut(self) -> int:
        return await enforce_retention(DAY, self.hub.registry, self.ledger, self.clock, self.hub.lock)


async def _take(client: NetworkClient, count: int) -> list[int]:
    """Acknowledge the next deliveries, and wait until the hub has processed the acks. Return their seqs."""
    seqs: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for delivery in client.deliveries():
            seqs.append(delivery.message.seq)
            await delivery.ack()
            if len(seqs) == count:
                break
    await client.call("network.info")
    return seqs


async def _prove(db: Path, note: Note, *, histories: int) -> None:
    random = Random(histories)
    network = _Network(db)
    await network.hub.start()
    limited = full = wrong_start = wrong_rest = told_again = dropped = 0
    starts = set()
    try:
        async with network.client("ann") as ann:
            for number in range(histories):
                late, early = network.client(f"late{number}"), network.client(f"early{number}")
                async with late, early:
                    await ann.broadcast("read by both")
                    await _take(late, 1)
                    late_cursor = late.cursor
                    await late.close()
                    missed = [(await ann.broadcast("missed")).seq for _ in range(random.randint(1, 5))]
                    await _take(early, 1 + len(missed))
                    early_cursor = early.cursor
                network.day += 2
                kept = [(await ann.broadcast("kept")).seq for _ in range(random.randint(1, 5))]
                dropped += await network.cut()
                from_cursor = number % 2 == 0  # otherwise the sessions resume at the hub's ack cursor
                resumes = {"late": late_cursor, "early": early_cursor}
                for name, cursor in resumes.items():
                    async with network.client(f"{name}{number}", resume=cursor if from_cursor else None) as client:
                        welcome = client.welcome
                        wrong_rest += await _take(client, len(kept)) != kept
                    if name == "early":
                        full += (welcome.resume, welcome.missing_before) == ("full", None)
                    else:
                        limited += welcome.resume == "limited"
                        wrong_start += welcome.missing_before != kept[0]
                        starts.add(welcome.missing_before)
                        async with network.client(
                            f"late{number}"
                        ) as client:  # the client gets one notice: its ack cursor is now at the start of the log
                            told_again += client.welcome.resume != "full"
    finally:
        await network.hub.close()
    note(
        truncated_histories=histories, rows_dropped=dropped, limited=limited, different_starts=len(starts), wrong_missing_before=wrong_start,
        wrong_rest=wrong_rest, complete_and_told_so=full,
    )  # fmt: skip
    assert (limited, full, len(starts)) == (histories, histories, histories)
    assert (wrong_start, wrong_rest, told_again) == (0, 0, 0)


async def test_10_truncated_histories_give_10_limited(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, histories=10)


@pytest.mark.full
async def test_50_truncated_histories_give_50_limited(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, histories=50)
