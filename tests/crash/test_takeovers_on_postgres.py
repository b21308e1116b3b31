"""Tests of several nodes on a log in PostgreSQL: nodes are killed, paused or cut off, and the data of the others is
checked. docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, RoundelayError
from roundelay.nodes.hub_http import get_from_hub
from tests.crash.test_takeovers import (
    HEAVY,
    OWNER,
    ClusterNode,
    compare,
    find_leader,
    running,
    tell_waits,
    traffic,
    verify,
)
from tests.support.command import run
from tests.support.counts import Note
from tests.support.nats import Cable
from tests.support.postgres import PostgresServer, postgres_server

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
KILLS = 36
MORE = 5 * HEAVY.senders
"""Number of messages between two kills."""
PAUSES = 30
CUTS = 30
FAILED = "the ledger failed; reopening it"


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, **settings: str) -> AsyncIterator[tuple[PostgresServer, list[ClusterNode]]]:
    async with (
        postgres_server(**settings) as server,
        running(ClusterNode(tmp_path / "nodes", name, server.url("lab")) for name in "ab") as nodes,
    ):
        await find_leader(nodes)
        yield server, nodes


async def wait_until_following(node: ClusterNode) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(ConnectError, OSError):
                if "following" in (await asyncio.to_thread(get_from_hub, node.url, "/readyz")).body:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_of_killed_nodes_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, victim: str, note: Note) -> None:
    gaps = list[float]()
    async with cluster(tmp_path) as (_, nodes):
        async with traffic(nodes, HEAVY) as it:
            for _ in range(KILLS):
                await it.wait_for(len(it.stored) + MORE)
                leader = await find_leader(nodes)
                [other] = [node for node in nodes if node is not leader]
                await wait_until_following(other)
                killed, killed_at = leader if victim == "leader" else other, asyncio.get_running_loop().time()
                await killed.end()
                await verify(killed)
                await it.wait_for(len(it.stored) + HEAVY.senders)
                gaps.append(it.longest_wait_since(killed_at))
                await killed.start()
            await it.wait_for(len(it.stored) + MORE)
        await compare(nodes, it, note, kills=KILLS, nothing_stored_for_s=tell_waits(gaps))


@pytest.mark.parametrize("synchronous_commit", ["on", "off"])
async def test_of_a_server_that_is_killed_nothing_acknowledged_is_lost_or_doubled(
    tmp_path: Path, synchronous_commit: str, note: Note
) -> None:
    """Nodes demand synced commits, even if the server acknowledges earlier by default."""
    kills, gaps = KILLS if synchronous_commit == "on" else KILLS // 3, list[float]()
    async with cluster(tmp_path, synchronous_commit=synchronous_commit) as (server, nodes):
        async with traffic(nodes, HEAVY) as it:
            for number in range(kills):
                await it.wait_for(len(it.stored) + MORE)
                killed_at = asyncio.get_running_loop().time()
                await server.kill9()
                await server.start()
                await it.wait_for(len(it.stored) + HEAVY.senders)
                gaps.append(it.longest_wait_since(killed_at))
                if number % 6 == 5:
                    await asyncio.gather(*map(verify, nodes))
        await compare(nodes, it, note, server_kills=kills, nothing_stored_for_s=tell_waits(gaps))


async def acknowledges_nothing_late(
    old: ClusterNode, new: ClusterNode, number: int, late: asyncio.Task[object]
) -> None:
    """Check that messages sent to a deposed leader are neither acknowledged nor stored."""
    with pytest.raises((TimeoutError, ConnectError, RoundelayError)):
        async with asyncio.timeout(2):
            await asyncio.shield(late)
    assert not await old.is_leading()
    async with NetworkClient("mia", new.url, kind="human", token=OWNER) as elsewhere:
        again = await elsewhere.send_text("mia", "late", message_id=f"late-{number}")
    assert not again.duplicate, "nothing of it was stored"
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


async def test_a_leader_that_slept_acknowledges_nothing_after_another_one_has_claimed(
    tmp_path: Path, note: Note
) -> None:
    async with cluster(tmp_path) as (_, nodes):
        for number in range(PAUSES):
            old = await find_leader(nodes)
            [new] = [it for it in nodes if it is not old]
            async with NetworkClient("mia", old.url, kind="human", token=OWNER, reconnect=False) as mia:
                await mia.send_text("mia", "before")
                old.tell(signal.SIGSTOP)
                try:
                    await find_leader([new])
                    late = asyncio.create_task(mia.send_text("mia", "late", message_id=f"late-{number}"))
                    async with NetworkClient("zoe", new.url, kind="human", token=OWNER) as zoe:
                        await zoe.send_text("mia", "from the new leader")
                finally:
                    old.tell(signal.SIGCONT)
                await acknowledges_nothing_late(old, new, number, late)
        for node in nodes:
            await node.end(signal.SIGTERM)
            await run("cluster", "verify", "--log", node.log, "--db", node.db)
        note(pauses=PAUSES, acknowledged_late=0)


async def test_a_leader_that_was_cut_off_acknowledges_nothing_after_another_one_has_claimed(
    tmp_path: Path, note: Note
) -> None:
    async with postgres_server() as server, contextlib.AsyncExitStack() as stack:
        cables = [Cable(server.port), Cable(server.port)]
        ports = [await stack.enter_async_context(cable.laid()) for cable in cables]
        made = [
            ClusterNode(tmp_path / "nodes", name, server.url("lab", port=port))
            for name, port in zip("ab", ports, strict=True)
        ]
        nodes = await stack.enter_async_context(running(made))
        for number in range(CUTS):
            old = await find_leader(nodes)
            [new] = [it for it in nodes if it is not old]
            cable = cables[nodes.index(old)]
            async with NetworkClient("mia", old.url, kind="human", token=OWNER, reconnect=False) as mia:
                await mia.send_text("mia", "before")
                said = old.db.with_suffix(".out")
                failures = said.read_text().count(FAILED)
                cable.cut()
                late = asyncio.create_task(mia.send_text("mia", "late", message_id=f"late-{number}"))
                await find_leader([new])
                async with NetworkClient("zoe", new.url, kind="human", token=OWNER) as zoe:
                    await zoe.send_text("mia", "from the new leader")
                async with asyncio.timeout(30):
                    while await old.is_leading():  # noqa: ASYNC110 (a process tells nobody)
                        await asyncio.sleep(0.05)
                    while number % 5 == 0 and said.read_text().count(FAILED) == failures:  # noqa: ASYNC110 (nor does a file)
                        await asyncio.sleep(0.05)  # until the deposed leader has given up
                cable.mend()
                await acknowledges_nothing_late(old, new, number, late)
        for node in nodes:
            await node.end(signal.SIGTERM)
            await run("cluster", "verify", "--log", server.url("lab"), "--db", node.db)
        note(cuts=CUTS, acknowledged_late=0)
