"""What a send costs the hub itself, a row the SQLite ledger, and a commit the look at its database's files: in one
process, without sockets.

    python bench/send_cost.py

CPU time of the thread that does it, the least of some blocks. A row is one of the sends' own, 256 in a transaction: its
encoding and its checksum on the loop's thread, the transaction on the writer's, with its checkpoints in the mean alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from roundelay.network.clock import ordered_id, random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.core.entries import Peer
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.hub import Hub
from roundelay.network.ledger.memory import MemoryLedger

BLOCKS, BATCHES, UNDER_WAY = 12, 16, 256
LOOKS = 2000
NO_RATE = 1_000_000_000


class _Connection:
    """A client's end that takes everything at once."""

    peer = Peer(is_trusted=True)
    is_paused = False

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def write(self, payloads: list[bytes]) -> None:
        self.taken += payloads

    def end(self, code: int, reason: str) -> None: ...

    def admit(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Recorded(MemoryLedger):
    """Keeps the full batches that the hub appends."""

    def __init__(self) -> None:
        super().__init__(epoch="e")
        self.batches: list[tuple[Sequence[Row], Sequence[TableWrite]]] = []

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        if len(rows) == UNDER_WAY:
            self.batches.append((rows, puts))
        await super().append(rows, puts)


def _make_send() -> bytes:
    frame = {"type": "send", "message_id": ordered_id(), "to": "agent:bob", "content": "x" * 200}
    return json.dumps(frame).encode()


async def measure_sends(ledger: MemoryLedger) -> float:
    """Microseconds of CPU for a message of 200 bytes from one participant to another, its delivery and acknowledgement
    included."""
    limits = Limits(sends_per_s=NO_RATE, root_messages_per_s=NO_RATE)
    hub = Hub(ledger, limits=limits, clock=system_clock, new_id=random_id)
    await hub.start()
    ann, bob = _Connection(), _Connection()
    sessions = {"ann": hub.connect(ann), "bob": hub.connect(bob)}
    for (agent_id, session), connection in zip(sessions.items(), (ann, bob), strict=True):
        hub.receive(
            session, json.dumps({"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": "agent"}).encode()
        )
        while not connection.taken:  # noqa: ASYNC110 (each turn of the loop is part of the hub's work)
            await asyncio.sleep(0)
    least = float("inf")
    for _ in range(BLOCKS):
        batches = [[_make_send() for _ in range(UNDER_WAY)] for _ in range(BATCHES)]
        began = time.thread_time()
        for batch in batches:
            ann.taken.clear()
            for frame in batch:
                hub.receive(sessions["ann"], frame)
            while len(ann.taken) < UNDER_WAY:  # noqa: ASYNC110 (the same)
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            bob.taken.clear()
            hub.receive(sessions["bob"], b'{"type":"ack","seq":%d}' % hub.state.head)
            await asyncio.sleep(0)
        least = min(least, (time.thread_time() - began) / (BATCHES * UNDER_WAY))
    await hub.close()
    return least * 1e6


def measure_rows() -> tuple[float, float, float]:
    """Microseconds for a row on the loop's thread and on the writer's, and the mean of the latter."""
    from roundelay.network.ledger.sqlite import SQLiteLedger

    async def measure(path: Path) -> tuple[float, float, float]:
        recorded = _Recorded()
        await measure_sends(recorded)
        ledger = SQLiteLedger(path, new_epoch=random_id)
        await ledger.open()
        writer = ledger._writer
        assert writer is not None
        encoding: list[float] = []
        writing: list[float] = []
        for start in range(0, len(recorded.batches), BATCHES):
            block = recorded.batches[start : start + BATCHES]
            began, began_writing = time.thread_time(), await writer.run(lambda _: time.thread_time())
            for rows, puts in block:
                await ledger.append(rows, puts)
            encoding.append((time.thread_time() - began) / (len(block) * UNDER_WAY))
            ended = await writer.run(lambda _: time.thread_time())
            writing.append((ended - began_writing) / (len(block) * UNDER_WAY))
        await ledger.close()
        return min(encoding) * 1e6, min(writing) * 1e6, statistics.mean(writing) * 1e6

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Path(folder) / "bench.db"))


def measure_looks() -> float:
    """Microseconds of a commit's looks at the database's files, before and after it, with the note of what was
    stored."""
    from roundelay.network.ledger.sqlite import SQLiteLedger

    async def measure(path: Path) -> float:
        ledger = SQLiteLedger(path, new_epoch=random_id)
        await ledger.open()
        files, least = ledger._files, float("inf")
        for _ in range(BLOCKS):
            began = time.perf_counter()
            for head in range(LOOKS):
                files.check()
                files.remember()
                files.write_head("e", head)
            least = min(least, (time.perf_counter() - began) / LOOKS)
        files.write_head(ledger._epoch, 0)
        await ledger.close()
        return least * 1e6

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(measure(Path(folder) / "bench.db"))


if __name__ == "__main__":
    sys.stdout.write(f"a send: {asyncio.run(measure_sends(MemoryLedger(epoch='e'))):.1f} us of CPU\n")
    sys.stdout.write(
        "a row: {:.2f} us on the loop's thread, {:.1f} on the writer's ({:.1f} in the mean)\n".format(*measure_rows())
    )
    sys.stdout.write(f"the looks of a commit: {measure_looks():.1f} us\n")
