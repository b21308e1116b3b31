"""Tests of promise P9: readers that never read, and one that reads very slowly, cost the hub little memory, do not
affect others, and can catch up. docs/promises.md.

The hub is a separate process. The first run is quiet: broadcasts to normal readers, and small direct messages whose
latency is measured. The second run is the same with slow readers connected. A slow reader that is closed as stalled
connects again and still reads nothing. At the end, all of them read.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.chaos.bare import BareClient, resident_bytes
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process

MB = 1 << 20
HEALTHY = ("h0", "h1", "h2")
SAMPLE_S = 0.02
PING_S = 0.005
UNANSWERED = 16
NOISE_MS = 20.0
SMALL_BUFFER_BYTES = 4096
AFTER_CLOSE_S = 1.5
"""Time within which readers notice that they were closed, in seconds. Readers do not notice a close all at once,
because this process would then count its own delay as the hub's.
"""
CATCHING_UP_AT_ONCE = 8
CLOSED_WITHIN = 2.0
"""Factor of the stall deadline within which a stalled reader is closed."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells how much memory the hub holds")


@dataclass(frozen=True)
class Load:
    stalled: int
    total_bytes: int
    message_bytes: int
    bytes_per_s: int
    slow_bytes_per_s: int
    stall_timeout_ms: int
    session_queue_bytes: int
    growth_bytes: int
    """Maximum growth of the hub's memory, compared with all participants connected and no messages."""


SHORT = Load(
    stalled=10, total_bytes=12 * MB, message_bytes=16 * 1024, bytes_per_s=8 * MB, slow_bytes_per_s=16 * 1024, stall_timeout_ms=1000,
    session_queue_bytes=128 * 1024, growth_bytes=24 * MB,
)  # fmt: skip
LONG = Load(
    stalled=50, total_bytes=200 * MB, message_bytes=32 * 1024, bytes_per_s=8 * MB, slow_bytes_per_s=1024, stall_timeout_ms=8000,
    session_queue_bytes=1024 * 1024, growth_bytes=64 * MB,
)  # fmt: skip


class Memory:
    """Peak memory of the hub's process."""

    def __init__(self, pid: int) -> None:
        self.base = self.most = resident_bytes(pid)
        self._pid = pid

    @property
    def growth(self) -> int:
        return self.most - self.base

    async def watch(self) -> None:
        while True:
            self.most = max(self.most, resident_bytes(self._pid))
            await asyncio.sleep(SAMPLE_S)


class Others:
    """Normal readers: their deliveries, and the latency of each direct message."""

    def __init__(self) -> None:
        self.latencies_ms: list[float] = []
        self.offline: dict[str, asyncio.Event] = {}
        self.clients: dict[str, BareClient] = {}

    async def join(self, node: ProcessNode, at_end: AsyncExitStack) -> list[asyncio.Task[None]]:
        for name in HEALTHY:
            client = self.clients[name] = await BareClient.open(node, name)
            at_end.callback(client.close)
            client.on_frame = self._take
        await self.clients["h0"].send_frame(
            {"type": "call", "call_id": "w", "op": "network.watch", "args": {"presence": True}}
        )
        return [asyncio.create_task(client.read()) for client in self.clients.values()]

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["type"] == "deliver" and frame["message"]["kind"] == "direct":
            self.latencies_ms.append((time.monotonic() - frame["message"]["content"]) * 1000)
        elif frame["type"] == "presence" and frame["state"] == "offline" and frame["agent_id"] in self.offline:
            self.offline[frame["agent_id"]].set()

    def p99_ms(self) -> float:
        ordered = sorted(self.latencies_ms)
        self.latencies_ms.clear()
        return ordered[int(len(ordered) * 0.99)]


@dataclass
class SlowReaders:
    """Readers that never read. ``codes`` counts their close codes, and ``lives_s`` lists the seconds until each was
    closed.
    """

    node: ProcessNode
    others: Others
    names: list[str]
    random: Random
    codes: dict[int | None, int] = field(default_factory=dict)
    lives_s: list[float] = field(default_factory=list)
    joined: int = 0
    all_joined: asyncio.Event = field(default_factory=asyncio.Event)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def stall_again_and_again(self, name: str) -> None:
        """Until cancelled."""
        while True:
            offline = self.others.offline[name] = asyncio.Event()
            began_at = time.monotonic()
            client = await BareClient.open(self.node, name, receive_buffer_bytes=SMALL_BUFFER_BYTES)
            self.joined += 1
            if self.joined >= len(self.names):
                self.all_joined.set()
            try:
                await offline.wait()
                self.lives_s.append(time.monotonic() - began_at)
                await asyncio.sleep(self.random.uniform(0, AFTER_CLOSE_S))
                await client.read()
                self.codes[client.close_code] = self.codes.get(client.close_code, 0) + 1
                if sum(self.codes.values()) >= len(self.names):
                    self.all_closed.set()
            finally:
                client.close()


class Loud:
    """Sends broadcasts at a steady rate, and measures the latency of direct messages. ``seqs`` lists the broadcasts."""

    def __init__(self, load: Load) -> None:
        self.seqs: list[int] = []
        self._load = load
        self._number = 0
        self._room = asyncio.Semaphore(UNANSWERED)
        self._settled = asyncio.Event()

    async def join(self, node: ProcessNode, at_end: AsyncExitStack) -> list[asyncio.Task[None]]:
        self._speaker, self._pinger = await BareClient.open(node, "loud"), await BareClient.open(node, "pinger")
        self._speaker.on_frame = self._take
        for client in (self._speaker, self._pinger):
            at_end.callback(client.close)
        return [asyncio.create_task(client.read()) for client in (self._speaker, self._pinger)]

    def _take(self, frame: dict[str, Any]) -> None:
        assert frame["type"] != "error", frame
        if frame["type"] == "stored":
            self.seqs.append(frame["seq"])
            self._room.release()
            if len(self.seqs) == self._number:
                self._settled.set()

    async def speak(self) -> None:
        pinging = asyncio.create_task(self._ping())
        text = "x" * self._load.message_bytes
        pause_s = self._load.message_bytes / self._load.bytes_per_s
        due_at = time.monotonic()
        for _ in range(self._load.total_bytes // self._load.message_bytes):
            await self._room.acquire()
            self._number += 1
            frame = {"type": "send", "message_id": f"m{self._number}", "to": "broadcast", "content": text}
            await self._speaker.send_frame(frame)
            due_at = max(due_at + pause_s, time.monotonic() - 0.1)
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        self._settled.clear()
        if len(self.seqs) < self._number:
            await self._settled.wait()
        pinging.cancel()

    async def _ping(self) -> None:
        number = 0
        while True:
            number += 1
            await self._pinger.send_frame(
                {"type": "send", "message_id": f"p{time.monotonic_ns()}", "to": f"agent:{HEALTHY[number % len(HEALTHY)]}", "content": time.monotonic()}
            )  # fmt: skip
            await asyncio.sleep(PING_S)


async def _drip(client: BareClient, bytes_per_s: int) -> None:
    """Read at this rate until cancelled."""
    step = 1024
    while client.close_code is None:
        await client.take(step)
        await asyncio.sleep(step / bytes_per_s)


async def _prove(db: Path, note: Note, load: Load, *, judges_times: bool) -> None:
    limits = {
        "stall_timeout_ms": load.stall_timeout_ms, "session_queue_bytes": load.session_queue_bytes,
        "root_messages_per_s": 1_000_000, "max_root_messages": 1_000_000,
    }  # fmt: skip
    async with node_process(db, limits=limits) as node, AsyncExitStack() as at_end:
        others, loud = Others(), Loud(load)
        tasks = [*await others.join(node, at_end), *await loud.join(node, at_end)]
        await asyncio.sleep(0.5)  # the hub has registered the readers, and its memory holds no messages yet
        memory = Memory(node.pid)
        tasks.append(asyncio.create_task(memory.watch()))
        await loud.speak()
        quiet_ms, quiet_growth = others.p99_ms(), memory.growth

        names = [f"never{number}" for number in range(load.stalled)]
        for name in (*names, "slow"):  # the first join registers each agent
            await (await node.agent(name)).bye()
        first = len(loud.seqs)
        slow = await BareClient.open(node, "slow", receive_buffer_bytes=SMALL_BUFFER_BYTES)
        at_end.callback(slow.close)
        dripping = asyncio.create_task(_drip(slow, load.slow_bytes_per_s))
        readers = SlowReaders(node, others, names, Random(load.stalled))
        stalling = [asyncio.create_task(readers.stall_again_and_again(name)) for name in names]
        await readers.all_joined.wait()
        others.latencies_ms.clear()
        await loud.speak()
        loud_ms, loud_growth = others.p99_ms(), memory.growth
        expected = loud.seqs[first:]

        async with asyncio.timeout(
            load.stall_timeout_ms / 1000 * 4 + 10
        ):  # the last readers may have joined shortly before the end
            await readers.all_closed.wait()
        slow_is_open, slow_had = slow.close_code is None, len(slow.seqs)
        for task in (dripping, *stalling):
            task.cancel()
        await asyncio.gather(dripping, *stalling, return_exceptions=True)
        began_at = time.monotonic()
        complete, _ = await asyncio.gather(_catch_up(node, names, expected), slow.read_up_to(expected[-1]))
        seconds = time.monotonic() - began_at
        complete += slow.seqs == expected
        heard = [[seq for seq in others.clients[name].seqs if seq in set(loud.seqs)] for name in HEALTHY]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    note(
        never_reading=load.stalled, broadcast_mb=sum([load.message_bytes] * len(expected)) // MB, broadcasts=len(expected),
        quiet_p99_ms=round(quiet_ms, 1), p99_ms=round(loud_ms, 1), quiet_growth_mb=round(quiet_growth / MB, 1),
        growth_mb=round(loud_growth / MB, 1), growth_after_catching_up_mb=round(memory.growth / MB, 1), closed_by_code=readers.codes,
        closed_after_s=f"{min(readers.lives_s, default=0):.1f} to {max(readers.lives_s, default=0):.1f}", slow_one_is_open=slow_is_open,
        slow_one_had_read=slow_had, caught_up=f"{complete} of {load.stalled + 1}", catching_up_s=round(seconds, 1),
    )  # fmt: skip
    timeout_s = load.stall_timeout_ms / 1000
    assert readers.codes.keys() == {4429}
    assert readers.codes[4429] >= load.stalled
    assert all(life_s >= timeout_s * 0.9 for life_s in readers.lives_s), readers.lives_s
    assert slow_is_open, "who reads a little is not closed"
    assert complete == load.stalled + 1
    assert all(seqs == loud.seqs for seqs in heard), "the others got everything"
    assert memory.growth < load.growth_bytes
    if judges_times:
        assert max(readers.lives_s) <= timeout_s * CLOSED_WITHIN
        assert loud_ms < max(2 * quiet_ms, NOISE_MS)


async def _catch_up(node: ProcessNode, names: list[str], expected: list[int]) -> int:
    """Let everyone read at full speed. Return the number of readers that got each message once and in order."""
    room = asyncio.Semaphore(CATCHING_UP_AT_ONCE)

    async def read_all(name: str) -> bool:
        async with room:
            client = await BareClient.open(node, name)
            try:
                await client.read_up_to(expected[-1])
            finally:
                client.close()
            assert all(one < other for one, other in pairwise(client.seqs))
            return client.seqs == expected

    return sum(await asyncio.gather(*(read_all(name) for name in names)))


async def test_10_readers_that_never_read_harm_nobody(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, SHORT, judges_times=False)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_50_readers_that_never_read_harm_nobody(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path / "team.db", note, LONG, judges_times=True)
