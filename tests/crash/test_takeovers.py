"""Several nodes on one shared log: who is killed, paused or cut off, and what the others then hold. docs/cluster.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, RoundelayError
from roundelay.nodes.hub_http import get_from_hub, read_readiness
from tests.support.command import run
from tests.support.counts import Note
from tests.support.nats import Cable, NatsServer, free_port, nats_server, nats_servers

OWNER = "an-owner-token-that-both-nodes-are-given-by-their-operator"
SENDERS = 6
SERVER_KILLS = 9


class ClusterNode:
    """`roundelay up --log` as a process; it may wait for its turn."""

    def __init__(self, folder: Path, name: str, log: str) -> None:
        self.name, self.db, self.port = name, folder / f"{name}.db", free_port()
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        folder.mkdir(exist_ok=True)
        owner = self.db.with_name(f"{self.db.name}.owner")
        owner.write_text(f"{OWNER}\n")
        owner.chmod(0o600)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    async def start(self) -> None:
        command = [
            "up",
            "--port",
            str(self.port),
            "--db",
            str(self.db),
            "--log",
            self.log,
            "--no-web",
            "--name",
            "lab",
        ]
        with self.db.with_suffix(".out").open("ab") as out:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "roundelay", *command, stdout=out, stderr=out, cwd=self.db.parent
            )

    def tell(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.process.wait()

    async def is_leading(self) -> bool:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
                return b" 200 " in status
        return False


@contextlib.asynccontextmanager
async def cluster(tmp_path: Path, *names: str) -> AsyncIterator[tuple[NatsServer, list[ClusterNode]]]:
    async with (
        nats_server(tmp_path / "nats") as server,
        running(ClusterNode(tmp_path / "nodes", name, server.url("lab")) for name in names) as nodes,
    ):
        yield server, nodes


@contextlib.asynccontextmanager
async def running(made: Iterable[ClusterNode]) -> AsyncIterator[list[ClusterNode]]:
    nodes = list(made)
    try:
        for node in nodes:
            await node.start()
        yield nodes
    finally:
        for node in nodes:
            if node.process is not None and node.process.returncode is None:
                await node.end()


async def find_leader(nodes: list[ClusterNode]) -> ClusterNode:
    async with asyncio.timeout(60):
        while True:
            for node in nodes:
                if node.process is not None and node.process.returncode is None and await node.is_leading():
                    return node
            await asyncio.sleep(0.05)


def join(nodes: list[ClusterNode], agent_id: str, kind: Any = "human") -> NetworkClient:
    return NetworkClient(agent_id, ",".join(it.url for it in nodes), kind=kind, token=OWNER)


async def all_rows(client: NetworkClient) -> list[str]:
    rows: list[str] = []
    after = 0
    while True:
        page = await client.call("network.rows", {"after": after, "limit": 500})
        rows += page["rows"]
        if page["next"] == after or page["next"] >= page["head"]:
            return rows
        after = page["next"]


class Traffic:
    """People who send one message after the other to a reader, whichever node serves."""

    def __init__(self, nodes: list[ClusterNode]) -> None:
        self.nodes = nodes
        self.stored: dict[str, int] = {}
        """Acknowledged messages: their text, and the seq."""
        self.delivered: Counter[int] = Counter()
        self.order: list[int] = []
        self.stopping = asyncio.Event()
        self.moved = asyncio.Event()

    async def send(self, name: str) -> None:
        async with join(self.nodes, name) as client:
            number = 0
            while not self.stopping.is_set():
                text = f"{name} {number}"
                stored = await client.send_text("reader", text, message_id=f"{name}-{number}")
                assert text not in self.stored
                self.stored[text] = stored.seq
                number += 1
                self.moved.set()

    async def read(self, ready: asyncio.Event) -> None:
        async with join(self.nodes, "reader") as client:
            ready.set()
            async for delivery in client.deliveries():
                self.delivered[delivery.message.seq] += 1
                self.order.append(delivery.message.seq)
                await delivery.ack()
                self.moved.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(90):
            while len(self.stored) < count:
                self.moved.clear()
                await self.moved.wait()

    async def wait_until_read(self) -> None:
        async with asyncio.timeout(90):
            while not set(self.stored.values()) <= set(self.delivered):
                self.moved.clear()
                await self.moved.wait()


@contextlib.asynccontextmanager
async def traffic(nodes: list[ClusterNode]) -> AsyncIterator[Traffic]:
    it, ready = Traffic(nodes), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(it.read(ready))
        await ready.wait()
        sending = [group.create_task(it.send(f"sender-{number}")) for number in range(SENDERS)]
        try:
            yield it
        finally:
            it.stopping.set()
            await asyncio.wait(sending, timeout=60)
            with contextlib.suppress(TimeoutError):  # what is missing is told by who compares
                await it.wait_until_read()
            reading.cancel()


async def compare(nodes: list[ClusterNode], it: Traffic, note: Note, **counts: int) -> None:
    """What was acknowledged stands once in the log, was delivered, and is the same on the node that followed."""
    leader = await find_leader(nodes)
    async with join(nodes, "auditor") as auditor:
        rows = await all_rows(auditor)
    texts = Counter(text for text in it.stored for row in rows if f'"content":"{text}"' in row)
    await leader.end(signal.SIGTERM)
    other = await find_leader([it for it in nodes if it is not leader])
    async with join(nodes, "auditor") as auditor:
        follower_rows = await all_rows(auditor)
    assert follower_rows[: len(rows)] == rows, "the index of the one that followed is the leader's"
    assert other is not leader
    for node in nodes:  # also of the one that is stopped
        await run("cluster", "verify", "--log", node.log, "--db", node.db)
    note(
        **counts, acknowledged=len(it.stored), lost=len(it.stored) - len(texts),
        stored_twice=sum(count > 1 for count in texts.values()), delivered=len(it.delivered),
    )  # fmt: skip
    assert set(texts) == set(it.stored)
    assert set(texts.values()) == {1}
    assert set(it.stored.values()) <= set(it.delivered)


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
async def test_of_killed_leaders_nothing_acknowledged_is_lost_or_doubled(
    tmp_path: Path, rounds: int, note: Note
) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        await find_leader(nodes)
        async with traffic(nodes) as it:
            for number in range(rounds):
                await it.wait_for(len(it.stored) + 30)
                victim = await find_leader(nodes) if number % 3 < 2 else nodes[number % 2]
                await victim.end()
                await victim.start()
            await it.wait_for(len(it.stored) + 30)
        await compare(nodes, it, note, rounds=rounds)


@pytest.mark.full
async def test_of_a_server_that_is_killed_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, note: Note) -> None:
    async with cluster(tmp_path, "a", "b") as (server, nodes):
        await find_leader(nodes)
        async with traffic(nodes) as it:
            for _ in range(SERVER_KILLS):
                await it.wait_for(len(it.stored) + 30)
                await server.kill9()
                await server.start()
            await it.wait_for(len(it.stored) + 30)
        await compare(nodes, it, note, server_kills=SERVER_KILLS)


@pytest.mark.full
async def test_of_three_servers_one_may_be_killed(tmp_path: Path, note: Note) -> None:
    async with nats_servers(tmp_path / "nats") as servers:
        log = f"nats://{','.join(server.hosts for server in servers)}/lab?replicas=3"
        async with running(ClusterNode(tmp_path / "nodes", name, log) for name in "ab") as nodes:
            await find_leader(nodes)
            async with traffic(nodes) as it:
                for number in range(SERVER_KILLS):
                    await it.wait_for(len(it.stored) + 30)
                    victim = servers[number % 3]
                    await victim.kill9()
                    await it.wait_for(len(it.stored) + 30)
                    await victim.start()
            await compare(nodes, it, note, server_kills=SERVER_KILLS)


@pytest.mark.full
async def test_a_leader_that_was_cut_off_acknowledges_nothing_after_another_one_has_claimed(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        cable = Cable(server.port)
        async with cable.laid() as port:
            old = ClusterNode(tmp_path / "nodes", "a", f"nats://127.0.0.1:{port}/lab")
            new = ClusterNode(tmp_path / "nodes", "b", server.url("lab"))
            async with running([old]), running([]) as later:
                await find_leader([old])
                await new.start()
                later.append(new)
                async with NetworkClient("mia", old.url, kind="human", token=OWNER) as mia:
                    await mia.send_text("mia", "before")
                    cable.cut()
                    late = asyncio.create_task(mia.send_text("mia", "late", message_id="late"))
                    await find_leader([new])
                    async with NetworkClient("zoe", new.url, kind="human", token=OWNER) as zoe:
                        stored = await zoe.send_text("mia", "from the new leader")
                    async with asyncio.timeout(30):
                        while await old.is_leading():  # noqa: ASYNC110 (a process tells nobody)
                            await asyncio.sleep(0.05)
                    cable.mend()
                    done, _ = await asyncio.wait((late,), timeout=5)
                    assert not done or late.exception() is not None
                    assert not await old.is_leading()
                    async with NetworkClient("mia", new.url, kind="human", token=OWNER) as elsewhere:
                        again = await elsewhere.send_text("mia", "late", message_id="late")
                    assert (again.duplicate, again.seq > stored.seq) == (False, True), "nothing of it was stored"
                    late.cancel()
                    await asyncio.gather(late, return_exceptions=True)


async def test_a_leader_that_slept_acknowledges_nothing_after_another_one_has_claimed(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        old = await find_leader(nodes)
        [new] = [it for it in nodes if it is not old]
        async with NetworkClient("mia", old.url, kind="human", token=OWNER) as mia:
            await mia.send_text("mia", "before")
            old.tell(signal.SIGSTOP)
            try:
                await find_leader([new])
                late = asyncio.create_task(mia.send_text("mia", "late", message_id="late"))
                async with NetworkClient("zoe", new.url, kind="human", token=OWNER) as zoe:
                    stored = await zoe.send_text("mia", "from the new leader")
            finally:
                old.tell(signal.SIGCONT)
            with pytest.raises((TimeoutError, ConnectError, RoundelayError)):
                async with asyncio.timeout(5):
                    await asyncio.shield(late)
            assert not await old.is_leading()
            async with NetworkClient("mia", new.url, kind="human", token=OWNER) as elsewhere:
                again = await elsewhere.send_text("mia", "late", message_id="late")
            assert (again.duplicate, again.seq > stored.seq) == (False, True), "nothing of it was stored"
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            assert await old.end(signal.SIGTERM) == 0, "who waits for its turn can be stopped"


async def test_who_waits_for_its_turn_can_be_stopped_and_says_what_it_waits_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        [waiting] = [it for it in nodes if it is not leader]
        async with asyncio.timeout(30):
            while "this one follows" not in waiting.db.with_suffix(".out").read_text():  # noqa: ASYNC110 (a file tells nobody)
                await asyncio.sleep(0.05)
        answer = await asyncio.to_thread(get_from_hub, waiting.url, "/readyz")
        assert (answer.status, answer.body.strip()) == (503, "following, 0 records behind")
        assert await asyncio.to_thread(read_readiness, waiting.url) is False
        with pytest.raises(ConnectError, match="another one leads"):
            async with NetworkClient("mia", waiting.url, kind="human", token=OWNER, reconnect=False):
                pass
        async with asyncio.timeout(10):
            assert await waiting.end(signal.SIGTERM) == 0
        async with join(nodes, "mia") as mia:
            await mia.send_text("mia", "the leader goes on")


async def test_a_node_without_its_file_is_made_anew_from_the_log(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a") as (_, [node]):
        await find_leader([node])
        async with join([node], "mia") as mia:
            for number in range(50):
                await mia.send_text("mia", f"message {number}")
            before = await all_rows(mia)
            epoch = mia.welcome.network.epoch
        assert await node.end(signal.SIGTERM) == 0
        for path in node.db.parent.glob("a.db*"):
            if path.suffix != ".owner":
                path.unlink()
        await node.start()
        await find_leader([node])
        async with join([node], "mia") as mia:
            assert (await all_rows(mia))[: len(before)] == before
            assert mia.welcome.network.epoch == epoch
