"""Tests of power losses of NATS servers: with `sync_interval: always`, no acknowledged record is lost, and without it
some are.

While a client appends records, the file operations of the servers are recorded (`traced`). Then the power fails at
many points of the recording. At each point, the folders are written as a crash may leave them (`power`) and the
servers start on them. The records of the servers are compared with those acknowledged by then. docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from roundelay.app import make_shared_log
from roundelay.network.cluster.shared_log import SharedLog
from roundelay.network.errors import LedgerError
from tests.crash.power import LOSSES, Mark, Sync, Write
from tests.crash.traced import NamedDisk, Timed, read_files, read_trace, trace_command
from tests.support.counts import Note
from tests.support.nats import NatsServer, free_port, run_together

BEFORE = 20
"""Records that are stored safely before the recording begins."""
ACKNOWLEDGED = re.compile(rb'\{"stream":"lab", ?(?:"domain":"", ?)?"seq":(\d+)')
CHOOSE_S, CHOOSES = {1: 1.0, 3: 60.0}, {1: 1, 3: 4}
"""Time until servers know a log, in seconds, and number of attempts to read missing records, by number of servers.
Three servers first elect a leader.
"""
SYNCS = {"always": "always", "default": '"2m"'}

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]


def mark_acknowledged(sent: bytes) -> int | None:
    """Return the newest position that data sent to a client acknowledges."""
    return max((int(it) for it in ACKNOWLEDGED.findall(sent)), default=None)


def make_servers(folder: Path, count: int, sync: str) -> list[NatsServer]:
    if count == 1:
        return [NatsServer(folder / "n0", sync=SYNCS[sync])]
    routes = [free_port() for _ in range(count)]
    others = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
    return [
        NatsServer(
            folder / f"n{number}",
            sync=SYNCS[sync],
            cluster=f'cluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{others}] }}',
        )
        for number, port in enumerate(routes)
    ]


async def open_log(servers: Sequence[NatsServer], *, is_made: bool) -> SharedLog | None:
    """Open the log once the servers have elected a leader. Return None if they have no such log."""
    hosts = ",".join(it.hosts for it in servers)
    log = make_shared_log(f"nats://{hosts}/lab?replicas={len(servers)}&max_bytes={64 << 20}")
    loop = asyncio.get_running_loop()
    until = loop.time() + CHOOSE_S[len(servers)]
    while True:
        try:
            await log.open(create=is_made)
            await log.end()
        except LedgerError:
            await log.close()
            if loop.time() > until:
                return None
            await asyncio.sleep(0.1)
        else:
            return log


async def append(servers: Sequence[NatsServer], after: int, records: Sequence[bytes]) -> None:
    log = await open_log(servers, is_made=after == 0)
    assert log is not None
    for number, data in enumerate(records):
        assert await log.append(data, after + number) == after + number + 1
    await log.close()


async def record(servers: Sequence[NatsServer], records: Sequence[bytes]) -> list[list[Timed]]:
    """Append records. Return the file operations of each server after the first `BEFORE` records, which are safe."""
    try:
        await asyncio.gather(*(it.start() for it in servers))
        await append(servers, 0, records[:BEFORE])
    finally:
        await asyncio.gather(*(it.stop() for it in servers))
    before = [read_files(it.folder / "store") for it in servers]
    async with run_together(servers, lambda it: trace_command(it.folder / "trace")):
        await append(servers, BEFORE, records[BEFORE:])
    return [
        read_trace(it.folder / "trace", it.folder / "store", files, mark_acknowledged)
        for it, files in zip(servers, before, strict=True)
    ]


async def read_back(servers: Sequence[NatsServer], count: int) -> dict[int, bytes]:
    """Return the records of the servers by position. Several servers may need a while to agree."""
    found: dict[int, bytes] = {}
    for _ in range(CHOOSES[len(servers)]):
        log = await open_log(servers, is_made=False)
        if log is None:
            break
        with contextlib.suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(20), aclosing(cast(Any, log.follow(0))) as stored:
                end = await log.end()
                while len(found) < end:
                    it = await anext(stored)
                    found[it.position] = it.data
        await log.close()
        if len(found) >= count:
            break
    return found


async def prove(folder: Path, note: Note, *, servers: int, sync: str, records: int, points: int) -> Counter[str]:
    """Simulate ``points`` power losses of all servers at the same moment."""
    random = Random(f"{servers} {sync}")
    texts = [random.randbytes(random.choice((40, 300, 300, 6000))) for _ in range(records)]
    made = make_servers(folder, servers, sync)
    done = await record(made, texts)
    acknowledged = sorted((at, event.what) for it in done for at, event in it if isinstance(event, Mark))
    assert len(acknowledged) >= records - BEFORE, "each acknowledgement was seen"
    disks, places = [NamedDisk() for _ in made], [0] * len(made)
    counts = Counter(points=0, acknowledged=0, lost=0, points_with_loss=0, streams_gone=0)
    counts["syncs"] = sum(at > 0 and isinstance(event, Sync) for it in done for at, event in it)
    begun_at = acknowledged[0][0]
    moments = sorted(
        random.choice([at for at, event in it if at >= begun_at and isinstance(event, Write)])
        for it in random.choices(done, k=points)
    )
    for number, moment in enumerate(moments):
        for which, events in enumerate(done):
            while places[which] < len(events) and events[places[which]][0] <= moment:
                disks[which].take(events[places[which]][1])
                places[which] += 1
        known = max((int(cast(int, it)) for at, it in acknowledged if at <= moment), default=BEFORE)
        for server, disk in zip(made, disks, strict=True):
            shutil.rmtree(server.folder / "store", ignore_errors=True)
            loss = LOSSES[number % len(LOSSES)] if servers == 1 or random.random() < 0.5 else "all_unsynced"
            lay_out(server.folder / "store", disk.after(loss, random))
        async with run_together(made):
            found = await read_back(made, known)
        lost = sum(found.get(position) != texts[position - 1] for position in range(1, known + 1))
        counts.update(
            points=1,
            acknowledged=known,
            lost=lost,
            points_with_loss=int(lost > 0),
            streams_gone=int(not found),
        )
    note(servers=servers, sync=sync, records=records, **counts)
    return counts


def lay_out(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


async def test_a_server_that_syncs_always_loses_nothing_acknowledged_with_its_power(tmp_path: Path, note: Note) -> None:
    counts = await prove(tmp_path, note, servers=1, sync="always", records=300, points=500)
    assert counts["lost"] == 0
    assert counts["acknowledged"] > 0


async def test_a_server_that_does_not_loses_some(tmp_path: Path, note: Note) -> None:
    counts = await prove(tmp_path, note, servers=1, sync="default", records=300, points=100)
    assert counts["lost"] > 0


@pytest.mark.parametrize("sync", ["always", "default"])
async def test_of_three_servers_that_lose_their_power_at_once(tmp_path: Path, note: Note, sync: str) -> None:
    counts = await prove(tmp_path, note, servers=3, sync=sync, records=200, points=12)
    assert (counts["lost"] > 0) == (sync != "always")
