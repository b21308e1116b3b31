"""Tests that a participant can make the hub hold only a bounded amount of data, and that a failing hub reports it.
The hub runs in this process.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from roundelay.agents.recorded import fetch_records
from roundelay.app import Node, serve
from roundelay.mods.channels import Channels
from roundelay.network.client import Event, NetworkClient, Signal
from roundelay.network.clock import random_id, system_clock
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.core import change
from roundelay.network.core.tables import DeadLetter, Member, TableWrite
from roundelay.network.errors import Closed, Forbidden, InvalidArguments, LedgerError
from roundelay.network.hub import Hub
from roundelay.network.hub import connection as connections
from roundelay.network.hub.connection import HubConnection
from roundelay.network.hub.local import LocalConnection, LocalTransport
from roundelay.network.hub.pages import RecentRows
from roundelay.network.ledger import MAX_PAGE_BYTES, Page
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.support.wire import WireSession, get_http, hello_frame, make_token

TIMEOUT_S = 20.0
DAY_MS = 24 * 3600 * 1000
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: roundelay.v1\r\n\r\n"
)
HELLO = json.dumps({"type": "hello", "protocol": 1, "agent_id": "ann", "kind": "agent", "token": "t" * 43}).encode()


class WatchedLedger(MemoryLedger):
    """Ledger that records its concurrent reads, and whose appends wait while ``may_append`` is not set."""

    def __init__(self) -> None:
        super().__init__(epoch="e1")
        self.pages: list[int] = []
        self.thread_rows: list[int] = []
        self.under_way = self.most_under_way = 0
        self.pages_at_once = self.most_pages_at_once = 0
        self.may_append = asyncio.Event()
        self.may_append.set()

    async def append(self, rows: Any, puts: Any) -> None:
        await self.may_append.wait()
        await super().append(rows, puts)

    async def inbox(
        self, spans: Any, sender: str, after: int, until: int, limit: int, *, newest: bool = False,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:  # fmt: skip
        self.pages_at_once += 1
        self.most_pages_at_once = max(self.pages_at_once, self.most_pages_at_once)
        await asyncio.sleep(0)
        self.pages_at_once -= 1
        page = await super().inbox(spans, sender, after, until, limit, newest=newest, max_bytes=max_bytes)
        self.pages.append(sum(len(row.data) for row in page.rows))
        return page

    async def thread(
        self, stream: str, *, after: int = 0, before: int | None = None, limit: int, newest: bool = True,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> Page:  # fmt: skip
        self.under_way += 1
        self.most_under_way = max(self.under_way, self.most_under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        page = await super().thread(stream, after=after, before=before, limit=limit, newest=newest, max_bytes=max_bytes)
        self.thread_rows.append(len(page.rows))
        return page


@asynccontextmanager
async def running_hub(ledger: Any, **limits: int) -> AsyncIterator[Hub]:
    """Run a hub over a ledger, with rates for fast participants."""
    settings = Limits(**{"root_messages_per_s": 10**6, "sends_per_s": 10**6, "max_root_messages": 10**6, **limits})
    hub = Hub(ledger, limits=settings, mods=[Channels()], clock=system_clock, new_id=random_id)
    await hub.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield hub
    finally:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await hub.close()
        finally:
            await ledger.close()  # the ledger's threads would keep the process alive


@asynccontextmanager
async def joined(hub: Hub, agent_id: str, **options: Any) -> AsyncIterator[NetworkClient]:
    async with NetworkClient(agent_id, transport=LocalTransport(hub), **options) as client:
        yield client


class Peer:
    """A participant that sends exactly the frames of a test."""

    def __init__(self, hub: Hub) -> None:
        self._connection = LocalConnection(hub)
        self._frames = self._connection.frames()

    def say(self, **frame: Any) -> None:
        self._connection.send(json.dumps(frame).encode())

    def say_raw(self, data: bytes) -> None:
        self._connection.send(data)

    async def hear(self) -> dict[str, Any]:
        frame: dict[str, Any] = json.loads(await anext(self._frames))
        return frame

    async def join(self, agent_id: str, **hello: Any) -> dict[str, Any]:
        self.say(type="hello", protocol=1, agent_id=agent_id, kind="agent", **hello)
        welcome = await self.hear()
        assert welcome["type"] == "welcome", welcome
        return welcome

    async def closed(self) -> int:
        while True:
            try:
                await self.hear()
            except Closed as end:
                return end.code


# -- reads that wait for a message


async def test_who_waits_for_a_message_costs_nothing_while_others_talk_and_nothing_once_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, all_wait = 0, asyncio.Event()
    may_have_come = RecentRows.may_have_new

    def count(self: RecentRows, agent_id: str, after: int) -> bool:
        nonlocal looked
        looked += 1
        if looked == 20 * 50:
            all_wait.set()
        return may_have_come(self, agent_id, after)

    monkeypatch.setattr(RecentRows, "may_have_new", count)
    async with running_hub(MemoryLedger(epoch="e1")) as hub, AsyncExitStack() as here:
        clients = [await here.enter_async_context(joined(hub, f"bob{number}", deliver=False)) for number in range(20)]
        waits = [
            asyncio.create_task(it.call("network.receive", {"wait_ms": 30_000})) for it in clients for _ in range(50)
        ]
        ann = await here.enter_async_context(joined(hub, "ann"))
        await here.enter_async_context(joined(hub, "cat"))
        await clients[-1].call("network.receive")
        await all_wait.wait()
        waiting, looked = len(hub.registry._tasks), 0
        for number in range(100):
            await ann.send("agent:cat", number)
        assert looked == 0
        await ann.send("agent:bob0", "now")
        for wait in waits[:50]:
            assert [it["content"] for it in (await wait)["messages"]] == ["now"]
        for wait in waits[50:]:
            wait.cancel()
        for it in clients:
            await it.close()
        while left := [it for it in hub.registry._tasks if not it.done()]:
            async with asyncio.timeout(5):
                await asyncio.wait(left)
        assert waiting >= len(waits)


# -- the hub's own tasks


async def test_a_hub_stops_while_frames_keep_coming(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "team.db", new_epoch=random_id)
    async with running_hub(ledger, max_pending_bytes=256 * 1024) as hub:
        senders = [Peer(hub) for _ in range(3)]
        for number, sender in enumerate(senders):
            await sender.join(f"ann{number}")

        async def send_without_end(sender: Peer) -> None:
            for number in range(10**9):
                sender.say(type="send", message_id=f"m{number}", to="broadcast", content=number)
                await asyncio.sleep(0)

        sending = [asyncio.create_task(send_without_end(sender)) for sender in senders]
        closed = [asyncio.create_task(sender.closed()) for sender in senders]  # these tasks also read from the sockets
        while hub.state.head < 100:
            await hub.wait_beyond(hub.state.head, TIMEOUT_S)
        await hub.close()
        for task in sending:
            with pytest.raises(Closed):
                await task
        assert await asyncio.gather(*closed) == [4503] * 3


async def test_a_ledger_that_fails_in_every_way_is_reopened() -> None:
    class Failing(MemoryLedger):
        fails = False

        async def append(self, rows: Any, puts: Any) -> None:
            if self.fails:
                raise LedgerError("the disk is gone")
            await super().append(rows, puts)

        async def close(self) -> None:
            if self.fails:
                self.fails = False
                raise OSError("the disk is gone at the close too")
            await super().close()

    ledger = Failing(epoch="e1")
    async with running_hub(ledger) as hub, joined(hub, "ann") as ann:
        ledger.fails = True
        assert (await ann.broadcast("it comes through")).seq > 0
        assert hub.is_ready


async def test_a_defect_in_a_task_of_the_hub_ends_its_sessions_and_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub:
        ann = Peer(hub)
        await ann.join("ann")
        monkeypatch.setattr(hub.registry.participants, "list_changed", lambda: 1 / 0)
        await hub.status.failed.wait()
        assert await ann.closed() == 4503
        assert not hub.is_ready
        assert [record.levelname for record in caplog.records] == ["CRITICAL"]
        monkeypatch.undo()


# -- reads


async def test_a_session_that_is_far_behind_reads_pages_of_its_queues_size() -> None:
    ledger = WatchedLedger()
    async with running_hub(ledger, session_queue_bytes=64 * 1024) as hub, joined(hub, "ann") as ann:
        async with joined(hub, "bob"):
            pass
        sent = [f"{number} {'x' * 10_000}" for number in range(50)]
        await asyncio.gather(*(ann.send_text("bob", text) for text in sent))
        ledger.pages.clear()
        async with joined(hub, "bob") as bob:
            read = []
            async for delivery in bob.deliveries():
                async with delivery as message:
                    read.append(message.text)
                if len(read) == len(sent):
                    break
        assert read == sent
        assert 0 < max(ledger.pages) <= 64 * 1024


async def test_many_that_come_back_at_once_are_read_for_in_turn() -> None:
    ledger = WatchedLedger()
    async with running_hub(ledger) as hub, joined(hub, "ann") as ann:
        names = [f"bob{number}" for number in range(40)]
        for name in names:
            async with joined(hub, name):
                pass
        await ann.broadcast("what they missed")
        ledger.most_pages_at_once = 0
        peers = [Peer(hub) for _ in names]
        for peer, name in zip(peers, names, strict=True):
            peer.say(type="hello", protocol=1, agent_id=name, kind="agent")
        for peer in peers:
            while (await peer.hear())["type"] != "deliver":
                pass
        assert 0 < ledger.most_pages_at_once <= 16


async def test_a_short_history_reads_little() -> None:
    ledger = WatchedLedger()
    async with running_hub(ledger) as hub, joined(hub, "ann") as ann:
        for number in range(100):
            await ann.broadcast(str(number))
        newest = await ann.history("broadcast", limit=1)
        assert ([message.text for message in newest.messages], newest.has_more) == (["99"], True)
        assert ledger.thread_rows == [2]


async def test_a_history_finds_what_is_readable_among_much_that_is_not() -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        await ann.call("channels.create", {"name": "dev"})
        await bob.call("channels.join", {"name": "dev"})
        await ann.post("dev", "heard")
        await bob.call("channels.leave", {"name": "dev"})
        for number in range(600):
            await ann.post("dev", f"unheard {number}")
        found = await bob.history("channel:dev", limit=1)
        assert ([message.text for message in found.messages], found.has_more) == (["heard"], False)


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryLedger | SQLiteLedger:
    if request.param == "memory":
        return MemoryLedger(epoch="e1")
    return SQLiteLedger(tmp_path / "team.db", new_epoch=random_id, durability="normal")


async def test_one_message_beyond_the_bound_is_still_a_result(ledger: Any) -> None:
    async with running_hub(ledger, max_result_bytes=1024) as hub, joined(hub, "ann") as ann:
        for number in range(3):
            await ann.broadcast(f"{number} {'x' * 5000}")
        page = await ann.history("broadcast")
        assert ([message.text[0] for message in page.messages], page.has_more) == (["2"], True)
        page = await ann.history("broadcast", before=page.messages[0].seq - 1)
        assert ([message.text[0] for message in page.messages], page.has_more) == (["0"], False)


async def test_a_window_is_cut_from_its_oldest_and_says_so(ledger: Any) -> None:
    async with (
        running_hub(ledger, max_result_bytes=4096) as hub,
        joined(hub, "ann") as ann,
        joined(hub, "bob") as bob,
    ):
        for number in range(6):
            stored = await ann.send_text("bob", f"{number} {'x' * 1000}")
        [thread] = (await bob.window(stored.seq)).threads
        assert ([message.text[0] for message in thread.messages], thread.omitted) == (["3", "4", "5"], 3)


async def test_the_count_of_a_long_threads_messages_grows_with_each_of_them(ledger: Any) -> None:
    """The hub checks only the newest 500 messages. If the count started at the oldest of these, it would never grow."""
    async with running_hub(ledger) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        seqs = sorted(it.seq for it in await asyncio.gather(*(ann.send_text("bob", str(it)) for it in range(560))))
        counts = []
        for seq in seqs[480:]:
            [thread] = (await bob.window(seq, per_thread=3)).threads
            counts.append(thread.omitted + len(thread.messages))
    steps = [after - before for before, after in pairwise(counts)]
    assert counts[0] == 481
    assert min(counts) >= 250
    assert len([step for step in steps if step != 1]) <= 2
    assert max(steps) == 1


async def test_a_chain_of_causes_is_cut_and_says_so(ledger: Any) -> None:
    async with running_hub(ledger, max_result_bytes=4096) as hub, joined(hub, "ann") as ann:
        seq = (await ann.broadcast("x" * 1000)).seq
        for _ in range(5):
            seq = (await ann.broadcast("x" * 1000, cause=seq)).seq
        value = await ann.call("network.why", {"seq": seq})
        assert (len(value["chain"]), value["has_more"]) == (3, True)


async def test_records_named_like_a_thread_hide_none_of_it(ledger: Any) -> None:
    async with (
        running_hub(ledger) as hub,
        joined(hub, "ann") as ann,
        joined(hub, "bob") as bob,
        joined(hub, "eve") as eve,
    ):
        await ann.send_text("bob", "before")
        for number in range(520):
            await eve.record("direct:ann~bob", "x", {}, record_id=f"r{number}")
        stored = await ann.send_text("bob", "now")
        [thread] = (await bob.window(stored.seq)).threads
        assert [message.text for message in thread.messages] == ["before", "now"]


# -- lists


class Listed(NamedTuple):
    """A list that is read page by page."""

    op: str
    under: str
    expected: list[Any]
    id_of: Callable[[Any], Any]
    """Function that returns the ID of an entry."""
    go_on: Callable[[Any], dict[str, Any]]
    """Function that returns the arguments for the page after an entry."""
    args: dict[str, Any] | None = None
    is_backwards: bool = False
    """Whether the next page comes before this one. Each page itself is in order."""


NUMBERS = [f"{number:02}" for number in range(20)]
BOTS = [f"helper-{number}" for number in NUMBERS]
LETTERS = [("ann", 9), ("ann", 10), ("bob", 1), ("bob", 9), ("bob", 10)]


def behind(field: str, name: str = "after") -> Callable[[Any], dict[str, Any]]:
    return lambda it: {name: it[field]}


def behind_letter(it: Any) -> dict[str, Any]:
    return {"after": f"{it['agent_id']}/{it['seq']}"}


LISTS = [
    Listed("network.list_agents", "agents", [*BOTS, "mia"], itemgetter("agent_id"), behind("agent_id")),
    Listed(
        "network.list_threads",
        "threads",
        ["broadcast", *(f"direct:{bot}~mia" for bot in BOTS[::-1])],
        itemgetter("thread_id"),
        behind("last_seq", "before"),
    ),
    Listed(
        "network.history",
        "messages",
        [f"m{number}" for number in NUMBERS],
        itemgetter("message_id"),
        behind("seq", "before"),
        {"thread_id": "broadcast"},
        is_backwards=True,
    ),
    Listed("network.message_status", "recipients", BOTS, itemgetter("agent_id"), behind("agent_id"), {"seq": "of m00"}),
    Listed("network.records", "records", NUMBERS, lambda it: it["body"]["number"], behind("seq"), {"reaction": "r"}),
    Listed("channels.list", "channels", [f"c{number}" for number in NUMBERS], itemgetter("name"), behind("name")),
    Listed("channels.members", "members", [*BOTS, "mia"], str, lambda it: {"after": it}, {"name": "c00"}),
    Listed("network.dead_letters", "dead_letters", LETTERS, itemgetter("agent_id", "seq"), behind_letter),
    Listed("network.dead_letters", "dead_letters", [1, 9, 10], itemgetter("seq"), behind_letter, {"agent_id": "bob"}),
    Listed(
        "network.list_tokens",
        "tokens",
        [number.ljust(12, "0") for number in NUMBERS],
        itemgetter("hash"),
        behind("hash"),
    ),
]


async def fill(hub: Hub, mia: NetworkClient) -> int:
    """Create twenty entries for each list, in mixed order and large if possible. Return the seq of a broadcast."""
    large = "x" * 250
    for number in sorted(NUMBERS, key=lambda it: it[::-1]):
        await mia.call("channels.create", {"name": f"c{number}", "topic": large})
        made = {"agent_id": f"made{number}", "kind": "agent", "token_hash": number.ljust(64, "0")}
        await mia.call("network.create_token", made)
    for bot in BOTS:
        async with joined(hub, bot, card={"description": large}) as client:
            await client.call("channels.join", {"name": "c00"})
        await mia.send_text(bot, "hello")
    sent = [await mia.broadcast(large, message_id=f"m{number}") for number in NUMBERS]
    for number in NUMBERS:
        await mia.record("r", "note", {"number": number, "text": large}, record_id=f"r{number}")
    letters = [DeadLetter(name, seq, "why", 5, 1) for name, seq in LETTERS]
    await hub.ledger.append([], [TableWrite("dead", f"{it.agent_id}/{it.seq:016d}", it) for it in letters])
    return sent[0].seq


@pytest.mark.parametrize("limit", [2, 500])
async def test_lists_are_read_page_by_page(ledger: Any, limit: int) -> None:
    async with running_hub(ledger, max_result_bytes=1024) as hub, joined(hub, "mia", kind="human") as mia:
        public = await fill(hub, mia)
        for listed in LISTS:
            args = {**(listed.args or {}), "limit": limit}
            if listed.under == "recipients":
                args["seq"] = public
            page, read = await mia.call(listed.op, args), list[Any]()
            while True:
                entries = page[listed.under]
                assert 0 < len(entries) <= limit, listed.op
                assert len(json.dumps(entries, separators=(",", ":"))) <= 1024, listed.op
                found = [listed.id_of(it) for it in entries]
                read = found + read if listed.is_backwards else read + found
                if not page["has_more"]:
                    break
                page = await mia.call(listed.op, {**args, **listed.go_on(entries[0 if listed.is_backwards else -1])})
            assert read == listed.expected, listed.op
        with pytest.raises(InvalidArguments):
            await mia.call("network.list_tokens", {"after": "nothing"})
        assert [it["body"]["number"] for it in await fetch_records(mia.call, "r", "mia")] == NUMBERS


async def test_the_log_is_read_in_several_results(ledger: Any) -> None:
    async with running_hub(ledger, max_result_bytes=1024) as hub, joined(hub, "mia", kind="human") as mia:
        await fill(hub, mia)
        read: list[str] = []
        value: dict[str, Any] = {"next": 0, "head": 1}
        while value["next"] < value["head"]:
            value = await mia.call("network.log", {"after": value["next"], "limit": 500})
            assert len(json.dumps(value["messages"])) < 2048
            read += [message["message_id"] for message in value["messages"] if message["to"] == "broadcast"]
        assert read == [f"m{number}" for number in NUMBERS]


# -- queues


@pytest.fixture
async def node(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """Run a node whose hub the test can inspect. An indirect parameter sets ``limits``."""
    limits = Limits(**getattr(request, "param", {}))
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory", limits=limits)
    async with serve(config) as running:
        yield running


async def test_frames_that_count_nothing_do_not_pile_up_before_a_writer_that_stands() -> None:
    ledger = WatchedLedger()
    async with running_hub(ledger, max_pending_bytes=16 * 1024) as hub:
        ann = Peer(hub)
        await ann.join("ann")
        ledger.may_append.clear()
        ann.say(type="send", message_id="first", to="broadcast", content=1)
        await asyncio.sleep(0)  # the ledger has received the message's batch
        for _ in range(1000):
            ann.say_raw(b"{}")
        assert hub.pending <= 33
        ledger.may_append.set()
        assert (await ann.hear())["type"] == "stored"
        assert [(await ann.hear())["code"] for _ in range(1000)] == ["invalid_frame"] * 1000


@pytest.mark.parametrize(
    "node", [{"max_pending_bytes": 16 * 1024, "ping_interval_ms": 100, "stall_timeout_ms": 200}], indirect=True
)
@pytest.mark.parametrize("is_early", [False, True], ids=["after the handshake", "with the handshake"])
async def test_a_session_that_is_not_read_for_a_while_lives_on(node: Node, is_early: bool) -> None:
    may_append = asyncio.Event()
    append = node.hub.ledger.append

    async def append_later(rows: Any, puts: Any) -> None:
        await may_append.wait()
        await append(rows, puts)

    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(HANDSHAKE + (masked(HELLO) if is_early else b""))
    await reader.readuntil(b"\r\n\r\n")
    if not is_early:
        writer.write(masked(HELLO))
    assert b'"welcome"' in await read_frame(reader)
    node.hub.ledger.append = append_later  # type: ignore[method-assign]
    send = {"type": "send", "message_id": "m", "to": "broadcast", "content": 1}
    writer.write(masked(json.dumps(send).encode()))
    writer.write(masked(b"{}") * 3000)
    await asyncio.sleep(0.6)  # a plain delay: the test checks that neither pings nor stalls count
    assert node.hub.pending <= 33 + 1
    may_append.set()
    answers = [json.loads(await read_frame(reader)) for _ in range(3001)]
    assert [answer["type"] for answer in answers] == ["stored"] + ["error"] * 3000
    writer.close()


async def test_notices_to_a_session_that_reads_nothing_do_not_pile_up() -> None:
    async with running_hub(MemoryLedger(epoch="e1"), session_queue_bytes=64 * 1024) as hub, joined(hub, "ann") as ann:
        slow = Peer(hub)
        await slow.join("slow")
        async with joined(hub, "bob", role="reactor") as bob:
            trigger = (await ann.broadcast("go")).seq
            await bob.record("r", "started", {"trigger": trigger}, record_id="started")
            spent = {"failure": "budget", "reason": "x" * 2000}
            for number in range(1200):
                await bob.record("r", "model_failed", spent, record_id=f"r{number}")
        waiting = [sum(map(len, session.outgoing)) for session in hub.registry.sessions.values()]
        assert max(waiting) < 80 * 1024
        slow.say(type="call", call_id="c", op="network.info", args={})
        while (await slow.hear())["type"] != "result":
            pass


@pytest.mark.parametrize("node", [{"hello_timeout_ms": 200}], indirect=True)
async def test_who_said_hello_in_time_is_not_closed_for_a_slow_writer(node: Node) -> None:
    may_append, append = asyncio.Event(), node.hub.ledger.append

    async def append_later(rows: Any, puts: Any) -> None:
        await may_append.wait()
        await append(rows, puts)

    node.hub.ledger.append = append_later  # type: ignore[method-assign]
    session = await WireSession.open(node.url)
    await session.send_frame(hello_frame("ann", token=make_token()))
    silent = await WireSession.open(node.url)
    assert await silent.closed() == 4408  # the timeout of this connection, which began later, has expired
    may_append.set()
    await session.expect("welcome")
    await session.close()


async def next_signal(events: AsyncIterator[Event]) -> Signal:
    event = await anext(events)
    assert isinstance(event, Signal)
    return event


async def test_signals_by_their_thread_are_dropped_when_too_many_wait() -> None:
    ledger = WatchedLedger()
    async with running_hub(ledger, max_reads=4) as hub, joined(hub, "bob") as bob:
        await bob.call("network.watch", {"signals": True})
        ann = Peer(hub)
        await ann.join("ann")
        ann.say(type="send", message_id="m", to="agent:bob", content="hello")
        await ann.hear()
        signal = {"type": "signal", "kind": "typing", "thread_id": "direct:ann~bob"}
        for number in range(500):
            ann.say(**signal, body=number)
        events = bob.events()
        for number in range(4):
            assert (await next_signal(events)).body == number
        assert ledger.most_under_way <= 4
        ann.say(**signal, body="still there")
        assert (await next_signal(events)).body == "still there"


def masked(data: bytes, first: int = 0x81) -> bytes:
    """Return a client's frame (RFC 6455, 5.2) with a mask of zeros."""
    size = len(data)
    head = struct.pack("!BB", first, 0x80 | size) if size < 126 else struct.pack("!BBH", first, 0xFE, size)
    return head + bytes(4) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the payload of the hub's next text frame."""
    while True:
        first, size = await reader.readexactly(2)
        if size == 126:
            (size,) = struct.unpack("!H", await reader.readexactly(2))
        payload = await reader.readexactly(size)
        if first == 0x81:
            return payload


@asynccontextmanager
async def plain_connection(
    node: Node,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, HubConnection]]:
    """Open a WebSocket whose frames a test writes byte by byte. Yield the socket's streams and the hub's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port, limit=1024)
    try:
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(masked(b"ready?", 0x89))
        await reader.readexactly(8)
        [session] = node.hub.registry.sessions.values()
        assert isinstance(session.connection, HubConnection)
        yield reader, writer, session.connection
    finally:
        writer.close()


async def test_pongs_that_nobody_reads_do_not_pile_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES", 64 * 1024)
    async with plain_connection(node) as (reader, writer, connection):
        pings = masked(b"p" * 120, 0x89) * 500
        sent = 0
        try:
            while sent < 40_000_000:
                writer.write(pings)
                sent += len(pings)
                async with asyncio.timeout(0.5):
                    await writer.drain()
        except TimeoutError:
            pass  # the hub has stopped reading
        assert sent < 40_000_000
        assert connection.transport.get_write_buffer_size() < 512 * 1024
        writer.write(masked(HELLO))
        assert b'"welcome"' in await read_frame(reader)


async def test_empty_pieces_of_a_message_take_no_room(node: Node) -> None:
    async with plain_connection(node) as (reader, writer, connection):
        writer.write(masked(b"", 0x01) + masked(b"", 0x00) * 20_000)
        writer.write(masked(b"heard?", 0x89))
        await reader.readexactly(8)
        assert connection._message.is_text
        assert connection._message.size == 0
        writer.write(masked(HELLO[:9], 0x00) + masked(b"", 0x00) + masked(HELLO[9:], 0x80))
        assert b'"welcome"' in await read_frame(reader)


async def test_a_message_within_the_pieces_of_another_ends_the_connection(node: Node) -> None:
    async with plain_connection(node) as (reader, writer, _):
        writer.write(masked(b"", 0x01) + masked(HELLO))
        first, size = await reader.readexactly(2)
        (code,) = struct.unpack("!H", (await reader.readexactly(size))[:2])
        assert (first, code) == (0x88, 1002)


@pytest.mark.parametrize(
    "node", [{"max_connections": 5, "max_unauthenticated": 5, "hello_timeout_ms": 60_000}], indirect=True
)
async def test_connections_that_never_ask_for_anything_are_bounded(node: Node) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(40)]
    ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
    async with asyncio.timeout(TIMEOUT_S):
        while sum(task.done() for task in ends) < 35:
            await asyncio.wait([task for task in ends if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    assert sum(not task.done() for task in ends) == 5
    for _, writer in silent:
        writer.close()
    await asyncio.gather(*ends, return_exceptions=True)
    assert await get_http(node.url, "/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    "node", [{"max_connections": 5, "max_unauthenticated": 5, "hello_timeout_ms": 60_000}], indirect=True
)
async def test_health_is_told_when_all_places_are_taken(node: Node) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(60)]
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await get_http(node.url, path))[0] == 200
    for _, writer in silent:
        writer.close()


# -- delayed messages


async def test_a_message_is_put_off_by_a_day_at_most() -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        stored = await ann.send_text("bob", "not now")
        await (await anext(bob.deliveries())).nack("never", retry_after_ms=2**50)
        await bob.send_text("ann", "later")  # written after the nack
        attempt = hub.state.get("attempt", f"bob/{stored.seq}")
        assert attempt.due_at <= system_clock() + DAY_MS


async def test_attempts_count_what_was_handed_over() -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann:
        async with joined(hub, "bob"):
            pass
        later, soon = [(await ann.send_text("bob", text)).seq for text in ("later", "soon")]

        async def attempts(seq: int) -> tuple[str, int]:
            [status] = (await ann.call("network.message_status", {"seq": seq}))["recipients"]
            return status["state"], status["attempts"]

        assert await attempts(soon) == ("queued", 0)
        async with joined(hub, "bob") as bob:
            deliveries = bob.deliveries()
            first, second = await anext(deliveries), await anext(deliveries)
            assert await attempts(later) == await attempts(soon) == ("delivered", 1)
            await first.nack("not before tomorrow", retry_after_ms=DAY_MS)
            await second.nack("once more", retry_after_ms=1)
            third = await anext(deliveries)
            assert (third.message.seq, third.attempt) == (soon, 2)
            assert (await attempts(later))[1] == 1  # the message waits, and the nack before it is stored
            assert (await attempts(soon))[1] == 2
            await third.ack()
            await bob.call("network.info")
            assert await attempts(soon) == ("handled", 2)


async def test_a_dead_letter_is_found_among_many(ledger: Any) -> None:
    async with running_hub(ledger) as hub, joined(hub, "ann") as ann, joined(hub, "zoe") as zoe:
        many = [DeadLetter("ann", seq, "old", 5, 1) for seq in range(10**6, 10**6 + 10_001)]
        await ledger.append([], [TableWrite("dead", f"ann/{letter.seq:016d}", letter) for letter in many])
        stored = await ann.send_text("zoe", "cannot be handled")
        deliveries = zoe.deliveries()
        for _ in range(5):
            await (await anext(deliveries)).nack("no", retry_after_ms=1)
        await zoe.send_text("ann", "given up")  # the hub stores this message together with the last nack, or later
        [status] = (await ann.call("network.message_status", {"seq": stored.seq}))["recipients"]
        assert (status["state"], status["attempts"]) == ("dead", 5)


async def test_a_late_reaction_with_a_message_is_found() -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        early = await ann.send_text("bob", "remembered later")
        for number in range(7):
            stored = await ann.send_text("bob", f"trigger {number}")
            manifest = [early.seq, stored.seq] if number == 6 else [stored.seq]
            body = {"trigger": stored.seq, "manifest": manifest}
            await bob.record(f"reaction{number}", "started", body, record_id=f"r{number}")
        [status] = (await ann.call("network.message_status", {"seq": early.seq}))["recipients"]
        assert (status["state"], status["reaction"]) == ("in_prompt", "reaction6")


# -- stored data of members


async def test_a_member_that_comes_and_goes_leaves_no_list_behind() -> None:
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        await ann.call("channels.create", {"name": "dev"})
        for _ in range(100):
            await bob.call("channels.join", {"name": "dev"})
            await bob.call("channels.leave", {"name": "dev"})
        assert len(hub.state.member("dev", "bob").spans) == 1
        await ann.post("dev", "while he is away")
        await bob.call("channels.join", {"name": "dev"})
        await ann.post("dev", "while he is here")
        for _ in range(100):
            await bob.call("channels.leave", {"name": "dev"})
            await bob.call("channels.join", {"name": "dev"})
        await ann.post("dev", "here again")
        assert len(hub.state.member("dev", "bob").spans) <= 2
        said = [message.content for message in (await bob.history("channel:dev")).messages]
        assert said == ["while he is here", "here again"]
        deliveries = bob.deliveries()
        assert [(await anext(deliveries)).message.content for _ in said] == said


async def test_who_comes_and_goes_between_messages_is_not_let_in_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "MAX_SPANS", 3)
    async with running_hub(MemoryLedger(epoch="e1")) as hub, joined(hub, "ann") as ann, joined(hub, "bob") as bob:
        await ann.call("channels.create", {"name": "dev"})
        for number in range(3):
            await ann.post("dev", f"away {number}")
            await bob.call("channels.join", {"name": "dev"})
            await ann.post("dev", f"here {number}")
            await bob.call("channels.leave", {"name": "dev"})
        # Bob missed nothing, so his membership continues without a gap.
        await bob.call("channels.join", {"name": "dev"})
        await bob.call("channels.leave", {"name": "dev"})
        await ann.post("dev", "away again")
        with pytest.raises(Forbidden, match=r"joined the channel 'dev' 3 times.*stay in it"):
            await bob.call("channels.join", {"name": "dev"})
        member = hub.state.member("dev", "bob")
        assert len(member.spans) == 3
        assert not member.is_in
        said = [message.content for message in (await bob.history("channel:dev")).messages]
        assert said == ["here 0", "here 1", "here 2"]
        await bob.call("channels.create", {"name": "other"})  # bob may still create other channels


@pytest.mark.parametrize("seq", range(12))
def test_a_member_was_in_between_the_ends_of_its_spans(seq: int) -> None:
    member = Member(((2, 4), (6, 9), (9, None)))
    assert member.was_in(seq) == (seq in (3, 7, 8, 10, 11))
    assert not Member().was_in(seq)


def test_spans_that_are_merged_say_the_same() -> None:
    for seed in range(300):
        chance, member, naive, messages = Random(seed), Member(), list[tuple[int, int | None]](), list[int]()
        for seq in range(1, 60):
            if chance.random() < 0.3:
                messages.append(seq)
            elif member.is_in:
                member = member.left(seq)
                naive[-1] = (naive[-1][0], seq)
            else:
                member = member.joined(seq)
                naive.append((seq, None))
            assert member.is_in == (naive != [] and naive[-1][1] is None)
        plain = Member(tuple(naive))
        assert [member.was_in(seq) for seq in messages] == [plain.was_in(seq) for seq in messages]
        assert len(member.spans) <= len(messages) + 1
