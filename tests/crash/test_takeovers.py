"""Tests of several nodes on one shared log: nodes are killed, paused or cut off, and the data of the others is
checked. docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from roundelay.app import make_shared_log
from roundelay.network.client import NetworkClient
from roundelay.network.errors import LedgerError
from roundelay.nodes.hub_http import get_from_hub, is_hub_ready
from tests.support.command import run
from tests.support.counts import Note
from tests.support.forks import Process, start_roundelay
from tests.support.nats import Cable, NatsServer, free_port, nats_server, nats_servers
from tests.support.wire import WireSession

OWNER = "an-owner-token-that-both-nodes-are-given-by-their-operator"
SERVER_KILLS = 9
SERVER_KILLS_OF_THREE = 50
STOPS = 30
ENGINE_LEADER_LOST_S = 10


class ClusterNode:
    """`roundelay up --log` as a process. The node may wait as a follower."""

    def __init__(self, folder: Path, name: str, log: str) -> None:
        self.name, self.db, self.port = name, folder / f"{name}.db", free_port()
        self.log = log
        self.environment = dict[str, str]()
        self.process: Process | None = None
        folder.mkdir(exist_ok=True)
        owner = self.db.with_name(f"{self.db.name}.owner")
        owner.write_text(f"{OWNER}\n")
        owner.chmod(0o600)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/"

    async def start(self, *more: str) -> None:
        command = [
            "up",
            "--port",
            str(self.port),
            "--db",
            str(self.db),
            "--log",
            self.log,
            "--name",
            "lab",
            *(more or ["--no-web"]),
        ]
        with self.db.with_suffix(".out").open("ab") as out:
            env = {**os.environ, **self.environment}
            self.process = await start_roundelay(*command, stdout=out, stderr=out, cwd=self.db.parent, env=env)

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


@dataclass(frozen=True)
class Load:
    """Numbers of senders and readers, and the maximum messages per second of each sender (0: no limit)."""

    senders: int = 6
    readers: int = 1
    per_s: float = 0

    def counts(self) -> dict[str, Any]:
        return {"senders": self.senders, "readers": self.readers, "per_s": round(self.per_s * self.senders)}


HEAVY = Load(senders=20, readers=20, per_s=15)


class CountingClient(NetworkClient):
    """Client that counts the deliveries of each session before it skips known messages."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sessions = 0
        self.frames: Counter[tuple[int, int]] = Counter()

    def begin_session(self, welcome: Any, wire: Any) -> None:
        self.sessions += 1
        super().begin_session(welcome, wire)

    def take_frame(self, frame: dict[str, Any]) -> None:
        if frame["type"] == "deliver":
            self.frames[self.sessions, frame["message"]["seq"]] += 1
        super().take_frame(frame)


class Traffic:
    """People who send messages to a reader one after the other, through whichever node serves."""

    def __init__(self, nodes: list[ClusterNode], load: Load) -> None:
        self.nodes, self.load = nodes, load
        self.stored: dict[str, int] = {}
        """Seq of each acknowledged message, by text."""
        self.delivered: set[int] = set()
        self.twice = self.sessions = 0
        """Number of repeated deliveries within one session, and of the readers' sessions."""
        self.stopping = asyncio.Event()
        self.moved = asyncio.Event()
        self.times: list[float] = []
        """Times of acknowledgements."""

    async def send(self, number: int) -> None:
        loop, name = asyncio.get_running_loop(), f"sender-{number}"
        async with join(self.nodes, name) as client:
            due_at = loop.time()
            for count in itertools.count():
                if self.stopping.is_set():
                    return
                text = f"{name} {count}"
                to = f"reader-{number % self.load.readers}"
                stored = await client.send_text(to, text, message_id=f"{name}-{count}")
                assert text not in self.stored
                self.stored[text] = stored.seq
                self.times.append(loop.time())
                self.moved.set()
                if self.load.per_s:
                    due_at = max(due_at + 1 / self.load.per_s, loop.time() - 1)
                    await asyncio.sleep(due_at - loop.time())

    async def read(self, number: int, ready: asyncio.Barrier) -> None:
        urls = ",".join(it.url for it in self.nodes)
        client = CountingClient(f"reader-{number}", urls, kind="human", token=OWNER)
        try:
            async with client:
                await ready.wait()
                async for delivery in client.deliveries():
                    self.delivered.add(delivery.message.seq)
                    await delivery.ack()
                    self.moved.set()
        finally:
            self.twice += sum(client.frames.values()) - len(client.frames)
            self.sessions += client.sessions

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(90):
            while len(self.stored) < count:
                self.moved.clear()
                await self.moved.wait()

    def longest_wait_since(self, moment: float) -> float:
        """Return the longest time without an acknowledgement."""
        times = [moment, *self.times[bisect.bisect(self.times, moment) :]]
        return max((after - before for before, after in itertools.pairwise(times)), default=0.0)

    async def wait_until_read(self) -> None:
        async with asyncio.timeout(90):
            while not self.delivered.issuperset(self.stored.values()):
                self.moved.clear()
                await self.moved.wait()


@contextlib.asynccontextmanager
async def traffic(nodes: list[ClusterNode], load: Load = Load()) -> AsyncIterator[Traffic]:
    it, ready = Traffic(nodes, load), asyncio.Barrier(load.readers + 1)
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(it.read(number, ready)) for number in range(load.readers)]
        await ready.wait()
        sending = [group.create_task(it.send(number)) for number in range(load.senders)]
        try:
            yield it
        finally:
            it.stopping.set()
            await asyncio.wait(sending, timeout=60)
            with contextlib.suppress(TimeoutError):  # the comparison reports missing messages
                await it.wait_until_read()
            for task in reading:
                task.cancel()


async def verify(node: ClusterNode) -> None:
    """Check that the node's database equals the log. During an election of the servers, the log may not answer."""
    for is_last in (False, False, True):
        try:
            await run("cluster", "verify", "--log", node.log, "--db", node.db)
        except AssertionError as error:
            if is_last or "timeout" not in str(error):
                raise
        else:
            return


async def compare(nodes: list[ClusterNode], it: Traffic, note: Note, **counts: Any) -> None:
    """Check that each acknowledged message is stored once under its seq, was delivered, and is the same on the follower."""
    leader = await find_leader(nodes)
    async with join(nodes, "auditor") as auditor:
        rows = await all_rows(auditor)
    places = [
        (row["data"]["content"], row["seq"])
        for row in map(json.loads, rows)
        if row["type"] == "message" and row["actor"].startswith("sender-")
    ]
    texts = Counter(text for text, _ in places)
    await leader.end(signal.SIGTERM)
    other = await find_leader([it for it in nodes if it is not leader])
    async with join(nodes, "auditor") as auditor:
        follower_rows = await all_rows(auditor)
    assert follower_rows[: len(rows)] == rows, "the index of the one that followed is the leader's"
    assert other is not leader
    for node in nodes:  # the stopped node has an index too
        await verify(node)
    lost = set(it.stored.items()) - set(places)
    note(
        **counts, **it.load.counts(), acknowledged=len(it.stored), lost=len(lost),
        stored_twice=sum(count > 1 for count in texts.values()), delivered=len(it.delivered),
        sessions_of_readers=it.sessions, doubled_in_a_session=it.twice,
    )  # fmt: skip
    assert not lost
    assert set(texts.values()) == {1}
    assert it.delivered.issuperset(it.stored.values())
    assert it.twice == 0


@pytest.mark.parametrize(
    ("rounds", "load"),
    [(3, Load()), pytest.param(100, HEAVY, marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
)
async def test_of_killed_nodes_nothing_acknowledged_is_lost_or_doubled(
    tmp_path: Path, rounds: int, load: Load, note: Note
) -> None:
    gaps, leaders = list[float](), 0
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        async with traffic(nodes, load) as it:
            for number in range(rounds):
                await it.wait_for(len(it.stored) + 5 * load.senders)
                leader = await find_leader(nodes)
                victim = leader if number % 3 < 2 else next(node for node in nodes if node is not leader)
                killed_at = asyncio.get_running_loop().time()
                await victim.end()
                if load is HEAVY:
                    await verify(victim)
                if victim is leader:
                    leaders += 1
                    await it.wait_for(len(it.stored) + load.senders)
                    gaps.append(it.longest_wait_since(killed_at))
                await victim.start()
            await it.wait_for(len(it.stored) + 5 * load.senders)
        await compare(nodes, it, note, kills=rounds, of_leaders=leaders, nothing_stored_for_s=tell_waits(gaps))


def tell_waits(waits: list[float]) -> str:
    return f"{statistics.median(waits):.1f} (median), {max(waits):.1f} (most)" if waits else "-"


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


async def find_stream_leader(log: str, servers: list[NatsServer]) -> NatsServer:
    """Return the server that leads the stream."""
    async with asyncio.timeout(60):
        while True:
            shared = make_shared_log(log)
            try:
                await shared.open(create=False)
                found = [it["name"] for it in (await shared.describe())["servers"] if it["leads"]]
                if found and found[0]:
                    return next(server for server in servers if server.folder.name == found[0])
            except LedgerError:
                pass
            finally:
                await shared.close()
            await asyncio.sleep(0.1)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_of_three_servers_one_may_be_killed(tmp_path: Path, note: Note) -> None:
    """In two of three rounds, the killed server is the leader of the stream."""
    waits, verified, led = list[float](), 0, 0
    async with nats_servers(tmp_path / "nats") as servers:
        log = f"nats://{','.join(server.hosts for server in servers)}/lab?replicas=3"
        async with running(ClusterNode(tmp_path / "nodes", name, log) for name in "ab") as nodes:
            await find_leader(nodes)
            async with traffic(nodes, HEAVY) as it:
                for number in range(SERVER_KILLS_OF_THREE):
                    await it.wait_for(len(it.stored) + 100)
                    decides = await find_stream_leader(log, servers)
                    victim = decides if number % 3 < 2 else servers[(servers.index(decides) + 1) % 3]
                    led += victim is decides
                    await victim.kill9()
                    killed_at = asyncio.get_running_loop().time()
                    await it.wait_for(len(it.stored) + 100)
                    if victim is decides:
                        waits.append(it.longest_wait_since(killed_at))
                    await victim.start()
                    if number % 5 == 4:
                        await asyncio.gather(*map(verify, nodes))
                        verified += len(nodes)
            await compare(
                nodes, it, note, server_kills=SERVER_KILLS_OF_THREE, of_the_one_that_decides=led, verified=verified,
                nothing_stored_for_s=tell_waits(waits),
            )  # fmt: skip
    assert (
        statistics.quantiles(waits, n=20)[-1] <= ENGINE_LEADER_LOST_S
    )  # NATS adds a random delay: four to nine seconds


@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.full)])
async def test_what_was_sent_through_one_node_is_a_repeat_at_the_other(tmp_path: Path, count: int, note: Note) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        await follows(next(it for it in nodes if it is not leader))
        async with join(nodes, "mia") as mia:

            async def send(number: int) -> Any:
                return await mia.send_text("mia", f"message {number}", message_id=f"m-{number}")

            first = await asyncio.gather(*map(send, range(count)))
            await leader.end()
            again = await asyncio.gather(*map(send, range(count)))
            rows = await all_rows(mia)
        stored = sum(json.loads(row)["type"] == "message" for row in rows)
        note(sends=count, repeated_through_another_node=sum(it.duplicate for it in again), stored=stored)
        assert [it.seq for it in again] == [it.seq for it in first]
        assert all(it.duplicate for it in again)
        assert stored == count


async def follows(node: ClusterNode) -> None:
    """Wait until a node reports that it follows."""
    await says(node, "this one follows")


async def says(node: ClusterNode, what: str, times: int = 1) -> None:
    async with asyncio.timeout(30):
        while node.db.with_suffix(".out").read_text().count(what) < times:  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(0.05)


class Witness:
    """A client of the old leader. The witness sends messages there that must not be acknowledged after another node
    has claimed the leadership.
    """

    def __init__(self, old: ClusterNode, name: str) -> None:
        self.name = name
        self._client = NetworkClient(name, old.url, kind="human", token=OWNER, reconnect=False)
        self._late: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Witness:
        await self._client.__aenter__()
        await self._client.send_text(self.name, "before")
        return self

    def send_late(self) -> None:
        self._late = asyncio.create_task(self._client.send_text(self.name, "late", message_id="late"))

    async def is_acknowledged(self) -> bool:
        assert self._late is not None
        done, _ = await asyncio.wait((self._late,), timeout=0.5)
        return bool(done) and self._late.exception() is None

    async def __aexit__(self, *_: object) -> None:
        if self._late is not None:
            self._late.cancel()
            await asyncio.gather(self._late, return_exceptions=True)
        await self._client.close()


async def overtake(
    nodes: list[ClusterNode], name: str, stop: Callable[[ClusterNode], None], go_on: Callable[[ClusterNode], None]
) -> bool:
    """Stop the leader, or its connection to the log, until another node leads, and send messages to it meanwhile.
    Return whether it acknowledged one. The ledger must not contain any of these messages.
    """
    old = await find_leader(nodes)
    others = [it for it in nodes if it is not old]
    async with Witness(old, name) as witness:
        stop(old)
        try:
            new = await find_leader(others)
            witness.send_late()  # another node leads now, so the old one may acknowledge nothing more
            async with NetworkClient(f"{name}-elsewhere", new.url, kind="human", token=OWNER) as other:
                stored = await other.send_text(name, "from the new leader")
        finally:
            go_on(old)
        async with asyncio.timeout(30):
            while await old.is_leading():  # noqa: ASYNC110 (a process tells nobody)
                await asyncio.sleep(0.05)
        is_acknowledged = await witness.is_acknowledged()
        async with NetworkClient(name, new.url, kind="human", token=OWNER) as elsewhere:
            again = await elsewhere.send_text(name, "late", message_id="late")
        assert (again.duplicate, again.seq > stored.seq) == (False, True), "nothing of it was stored"
        return is_acknowledged


async def test_a_leader_that_slept_acknowledges_nothing_after_another_one_has_claimed(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        old = await find_leader(nodes)
        assert not await overtake(nodes, "mia", pause, resume)
        assert await old.end(signal.SIGTERM) == 0, "who waits for its turn can be stopped"


async def test_a_leader_that_slept_names_the_one_that_leads_now(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        old = await find_leader(nodes)
        [new] = [it for it in nodes if it is not old]
        plain = await WireSession.open(old.url)
        await plain.hello("ann", kind="human", token=OWNER)
        async with NetworkClient("mia", old.url, kind="human", token=OWNER) as mia:
            await mia.send_text("mia", "before")
            pause(old)
            await find_leader([new])
            resume(old)
            assert await plain.closed() == 4503
            assert plain.socket.close_reason == f"Another node leads now. Roundelay-Leader: 127.0.0.1:{new.port}"
            await old.end()  # clients that reconnect get no answer
            assert await mia.send_text("mia", "by a node of which it was told there")


def pause(node: ClusterNode) -> None:
    node.tell(signal.SIGSTOP)


def resume(node: ClusterNode) -> None:
    node.tell(signal.SIGCONT)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_of_30_leaders_that_slept_and_30_that_were_cut_off_none_acknowledges_anything_late(
    tmp_path: Path, note: Note
) -> None:
    """Each node has its own connection to the server. All clients send continuously."""
    acknowledged = 0
    async with nats_server(tmp_path / "nats") as server:
        cables = {name: Cable(server.port) for name in "ab"}
        async with cables["a"].laid() as port_a, cables["b"].laid() as port_b:
            logs = {"a": f"nats://127.0.0.1:{port_a}/lab", "b": f"nats://127.0.0.1:{port_b}/lab"}
            made = (ClusterNode(tmp_path / "nodes", name, log) for name, log in logs.items())
            async with running(made) as nodes:
                await find_leader(nodes)
                async with traffic(nodes, HEAVY) as it:
                    for number in range(STOPS):
                        await it.wait_for(len(it.stored) + 100)
                        acknowledged += await overtake(nodes, f"sleeps-{number}", pause, resume)
                        await it.wait_for(len(it.stored) + 100)
                        acknowledged += await overtake(
                            nodes, f"cut-{number}", lambda node: cables[node.name].cut(), lambda node: cables[node.name].mend()
                        )  # fmt: skip
                await compare(nodes, it, note, pauses=STOPS, cuts=STOPS, acknowledged_late=acknowledged)
    assert acknowledged == 0


async def test_who_waits_for_its_turn_can_be_stopped_and_says_what_it_waits_for(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        [waiting] = [it for it in nodes if it is not leader]
        await follows(waiting)
        answer = await asyncio.to_thread(get_from_hub, waiting.url, "/readyz")
        assert answer.status == 503
        assert re.fullmatch(
            r"following( 127.0.0.1:\d+)?, 0 records behind, log lab, durability replicated", answer.body.strip()
        )
        assert await asyncio.to_thread(is_hub_ready, waiting.url) is False
        with pytest.raises(InvalidStatus) as refused:
            await connect(waiting.url, subprotocols=[Subprotocol("roundelay.v1")])
        assert b"another node leads" in (refused.value.response.body or b"")
        async with asyncio.timeout(5):  # known after one heartbeat of the leader
            while refused.value.response.headers.get("Roundelay-Leader") is None:
                with pytest.raises(InvalidStatus) as refused:
                    await connect(waiting.url, subprotocols=[Subprotocol("roundelay.v1")])
        assert refused.value.response.headers["Roundelay-Leader"] == f"127.0.0.1:{leader.port}"
        async with NetworkClient("mia", waiting.url, kind="human", token=OWNER, reconnect=False) as mia:
            assert await mia.send_text("mia", "by the node that does not serve")
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
