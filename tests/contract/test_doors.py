"""Tests of silent and slow connections: they keep nobody out, not even clients with the same address."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.server import ServerProtocol

from roundelay.app import Node, serve
from roundelay.network.config import Limits, NodeConfig
from roundelay.network.hub.connection import HubConnection
from roundelay.network.hub.handshakes import HandshakeLimiter, source_of
from roundelay.network.hub.session import Session
from roundelay.network.tls import server_context
from tests.contract.test_bounds import HANDSHAKE, masked
from tests.support.certificates import make_certificate
from tests.support.node import running_node
from tests.support.wire import WireSession, get_http, hello_frame, make_token

TIMEOUT_S = 20.0
PLACES = 20
PATIENT = {"max_unauthenticated": PLACES, "hello_timeout_ms": 60_000}
"""Limits with a long hello timeout, so that no test passes only because a timeout made room."""


class Silent:
    """Connections that stay open at a step of the handshake. A closed connection is replaced by a new one, as an
    attacker does.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self._port = port
        self._request = request
        self.opened = 0
        self._grew = asyncio.Event()

    async def keep_one(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(self._request)
                if self._request.endswith(b"\r\n\r\n"):
                    await reader.readuntil(b"\r\n\r\n")
                self.opened += 1
                self._grew.set()
                await reader.read()
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

    async def until_opened(self, count: int) -> None:
        while self.opened < count:
            self._grew.clear()
            await self._grew.wait()


@asynccontextmanager
async def half_open(port: int, count: int, request: bytes) -> AsyncIterator[Silent]:
    silent = Silent(port, request)
    tasks = [asyncio.create_task(silent.keep_one()) for _ in range(count)]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await silent.until_opened(2 * count)
            yield silent
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def port_of(url: str) -> int:
    return int(url.rstrip("/").rpartition(":")[2])


@pytest.mark.parametrize(
    "request_bytes",
    [b"", HANDSHAKE[:40], HANDSHAKE],
    ids=["no request", "half a request", "no hello"],
)
async def test_who_is_known_and_who_is_new_get_in_past_half_open_connections_of_their_own_address(
    request_bytes: bytes,
) -> None:
    async with running_node(limits=PATIENT) as node:
        known = await node.agent("known")
        await known.bye()
        async with half_open(port_of(node.url), 2 * PLACES, request_bytes):
            for _ in range(3):
                again = await node.agent("known")
                await again.send("agent:known", "here")
                await again.bye()
            for number in range(3):
                await (await node.agent(f"new{number}")).bye()
            assert (await get_http(node.url, "/readyz"))[0] == 200


async def test_what_a_known_participant_has_begun_is_taken_by_no_newcomer(tmp_path: Path) -> None:
    """The known participant's hello waits for a blocked writer. Meanwhile, as many newcomers connect as there are
    places.
    """
    async with served(tmp_path, **PATIENT) as node:
        tokens = {"known": make_token(), "new": make_token()}
        await (await join(node, "known", tokens["known"])).bye()
        may_append, append = asyncio.Event(), node.hub.ledger.append

        async def append_later(rows: Any, puts: Any) -> None:
            await may_append.wait()
            await append(rows, puts)

        node.hub.ledger.append = append_later  # type: ignore[method-assign]
        waiting = {}
        for agent_id in ("new", "known"):  # the first hello must be written, and the second waits for it
            token = tokens[agent_id]
            waiting[agent_id] = await WireSession.open(node.url)
            await waiting[agent_id].send_frame(hello_frame(agent_id, token=token))
        newcomers = [await WireSession.open(node.url) for _ in range(2 * PLACES)]
        assert await waiting["new"].closed() == 4408  # this connection was the oldest of the unknown ones
        may_append.set()
        await waiting["known"].expect("welcome")
        await newcomers[-1].hello("late", token=make_token())
        for session in newcomers:
            await session.close()
        await waiting["known"].close()


async def test_a_known_token_for_another_participant_counts_as_unknown(tmp_path: Path) -> None:
    async with served(tmp_path, **PATIENT) as node:
        token = make_token()
        await (await join(node, "known", token)).bye()
        session = await WireSession.open(node.url)
        await session.send_frame(hello_frame("another", token=token))
        assert await session.closed() == 4401


async def test_sessions_beyond_the_bound_are_told_to_come_back(tmp_path: Path) -> None:
    """Half-open connections take no place of a session. A hello beyond the limit of sessions is refused with 4503."""
    async with served(tmp_path, max_connections=2, max_unauthenticated=8) as node:
        early = [await WireSession.open(node.url) for _ in range(4)]
        for number in range(2):
            await early[number].hello(f"agent{number}", token=make_token())
        await early[2].send_frame(hello_frame("agent2", token=make_token()))
        assert await early[2].closed() == 4503
        await early[0].bye()
        await early[3].hello("agent3", token=make_token())
        for session in early:
            await session.close()


@pytest.mark.parametrize("begun", [0, 60, len(HANDSHAKE), len(HANDSHAKE) + 30])
async def test_whatever_is_said_too_slowly_is_ended(begun: int) -> None:
    """The client sends one byte every 50 ms. One time limit covers everything from that step to the end of hello."""

    async def read_to_the_end(reader: asyncio.StreamReader) -> None:
        data = b""
        while b"\x88" not in data and (more := await reader.read(1000)):
            data += more

    async with running_node(limits={"hello_timeout_ms": 400}) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(node.url))
        spoken = HANDSHAKE + masked(json.dumps(hello_frame("slow", token=make_token())).encode())
        writer.write(spoken[:begun])
        ended = asyncio.create_task(read_to_the_end(reader))
        async with asyncio.timeout(TIMEOUT_S):
            for byte in spoken[begun:]:
                done, _ = await asyncio.wait({ended}, timeout=0.05)  # a plain delay: the speed of the client
                if done:
                    break
                writer.write(bytes([byte]))
            else:
                pytest.fail("it was heard to its end")
        writer.close()


async def test_a_request_that_never_ends_takes_little_memory(tmp_path: Path) -> None:
    async with served(tmp_path, hello_timeout_ms=60_000) as node:
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        ended = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\n")
        sent = 0
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while not ended.done():
                    writer.write(b"X-Long: " + b"x" * 4000 + b"\r\n")
                    sent += 4000
                    await writer.drain()
                    await asyncio.sleep(0)
            except OSError:
                pass
            await asyncio.wait({ended})
            assert (ended.exception() is not None) or b"101" not in ended.result()
        assert sent < 8_000_000
        writer.close()


async def test_tls_handshakes_that_never_end_make_room(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with served(tmp_path, tls=server_context(certificate, key), **PATIENT) as node:
        silent = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(3 * PLACES)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
        async with asyncio.timeout(TIMEOUT_S):
            while sum(end.done() for end in ends) < 2 * PLACES:
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
            context = ssl.create_default_context(cafile=str(certificate))
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port, ssl=context)
            writer.write(HANDSHAKE)
            assert b"101" in await reader.readuntil(b"\r\n\r\n")
        for _, other in silent:
            other.close()
        writer.transport.abort()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_node_stops_at_once_though_half_open_connections_wait(tmp_path: Path) -> None:
    async with served(tmp_path, hello_timeout_ms=60_000) as node:
        silent = [await asyncio.open_connection("127.0.0.1", node.port) for _ in range(5)]
        for _, writer in silent[:3]:
            writer.write(HANDSHAKE)
        for reader, _ in silent[:3]:
            await reader.readuntil(b"\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            await node.close()
            for reader, _ in silent:
                await asyncio.gather(reader.read(), return_exceptions=True)
        for _, writer in silent:
            writer.close()


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """Limit this process to ``count`` more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno() + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_files_newcomers_wait_and_sessions_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, hello_timeout_ms=60_000) as node:
        ann = await join(node, "ann", make_token())
        clients = [socket.socket() for _ in range(30)]
        loop = asyncio.get_running_loop()
        with few_files(8), caplog.at_level(logging.WARNING):
            for client in clients:
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", node.port))
            async with asyncio.timeout(TIMEOUT_S):
                while node.hub.handshakes.evicted < 10:
                    await ann.send("agent:ann", "it goes on")
            await ann.send("agent:ann", "still")
        told = [record for record in caplog.records if record.name.startswith(("roundelay.network", "asyncio"))]
        assert [(record.levelname, record.exc_info) for record in told] == [("WARNING", None)]
        for client in clients:
            client.close()
        await (await join(node, "bob", make_token())).close()
        await ann.close()


LONG = b"\x81\xff" + struct.pack("!Q", 200_000) + bytes(4)


@pytest.mark.parametrize(
    ("first", "then"),
    [(HANDSHAKE, LONG), (HANDSHAKE, masked(b" " * 5000, 0x01) + masked(b" " * 5000, 0x00) * 5), (HANDSHAKE + LONG + b" " * 90_000, b"")],
    ids=["said to be long", "in pieces", "at once"],
)  # fmt: skip
async def test_a_hello_is_kept_up_to_its_bound_alone(tmp_path: Path, first: bytes, then: bytes) -> None:
    """Otherwise, a thousand silent connections would hold 256 MB of hellos."""
    async with served(tmp_path, **PATIENT) as node, asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        writer.write(first)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(then)
        head = await reader.readexactly(4)
        assert (head[0], struct.unpack("!H", head[2:])) == (0x88, (4413,))
        assert b"max_card_bytes" in await reader.readexactly(head[1] - 2)
        writer.close()
        card = {"description": "x" * 16_000}
        session = await WireSession.open(node.url)
        await session.hello("ann", token=make_token(), card=card, client="c" * 4000)
        await session.submit("agent:ann", "x" * 200_000)
        await session.close()


VISITS = {
    "no request": b"",
    "half a request": HANDSHAKE[:40],
    "no hello": HANDSHAKE,
    "no handshake": b"GET /metrics HTTP/1.1\r\n\r\n",
    "no method": b"POST / HTTP/1.1\r\n\r\n",
    "no version": b"GET / SPDY\r\n\r\n",
    "welcomed": HANDSHAKE + masked(json.dumps(hello_frame("ann", token="t" * 43)).encode()),
    "refused": HANDSHAKE + masked(b"{}"),
    "not masked": HANDSHAKE + b"\x81\x02{}",
    "closed": HANDSHAKE + b"\x88\x80\x00\x00\x00\x00",
}


@pytest.mark.parametrize("said", VISITS.values(), ids=VISITS)
async def test_a_connection_that_is_over_is_gone_without_the_garbage_collector(tmp_path: Path, said: bytes) -> None:
    """A full garbage collection blocks the hub for 0.2 s after some thousand connections."""
    gc.collect()
    gc.disable()
    try:
        async with served(tmp_path, **{**PATIENT, "max_unauthenticated": 2}) as node:
            for _ in range(6):
                reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
                writer.write(said)
                if said.endswith(b"\r\n\r\n") or said.startswith(HANDSHAKE):
                    await reader.readline()
                writer.close()
            assert (await get_http(node.url, "/healthz"))[0] == 200
        assert [it for it in gc.get_objects() if issubclass(type(it), HubConnection | Session | ServerProtocol)] == []
    finally:
        gc.enable()


# -- connections that lose their place


class Visitor:
    def __init__(self, gate: HandshakeLimiter, source: str) -> None:
        self.source = source
        self.is_in = True
        gate.add(self)

    def evict(self) -> None:
        self.is_in = False


def test_the_most_crowded_address_makes_room_first() -> None:
    gate = HandshakeLimiter(10)
    quiet = [Visitor(gate, f"10.0.0.{number}") for number in range(3)]
    loud = [Visitor(gate, "10.9.9.9") for _ in range(50)]
    assert [visitor.is_in for visitor in quiet] == [True] * 3
    assert [visitor.is_in for visitor in loud] == [False] * 43 + [True] * 7


def test_who_got_on_stays_longer() -> None:
    gate = HandshakeLimiter(3)
    first, second, third = (Visitor(gate, "a") for _ in range(3))
    gate.record_progress(first)
    Visitor(gate, "a")
    assert [first.is_in, second.is_in, third.is_in] == [True, False, True]


def test_a_place_that_is_left_is_free() -> None:
    gate = HandshakeLimiter(2)
    first, second = Visitor(gate, "a"), Visitor(gate, "b")
    gate.remove(first)
    gate.remove(first)
    third = Visitor(gate, "c")
    assert [second.is_in, third.is_in] == [True, True]
    gate.evict_all()
    assert [first.is_in, second.is_in, third.is_in, gate.evict_one()] == [True, False, False, False]


def test_an_ipv6_network_counts_as_one_address() -> None:
    assert (
        source_of(("2001:db8:1:2::1", 1, 0, 0))
        == source_of(("2001:db8:1:2:ffff::9", 2, 0, 0))
        != source_of(("2001:db8:1:3::1", 1, 0, 0))
    )
    assert source_of(("::ffff:192.0.2.1", 1, 0, 0)) == source_of(("192.0.2.1", 7)) != source_of(("192.0.2.2", 7))
    assert source_of(("fe80::1%eth0", 1, 0, 2)) == source_of(("fe80::2", 1, 0, 2))


# -- nodes


@asynccontextmanager
async def served(tmp_path: Path, *, tls: ssl.SSLContext | None = None, **limits: int) -> AsyncIterator[Node]:
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory", limits=Limits(**limits))
    async with serve(config, tls=tls) as node:
        yield node


async def join(node: Node, agent_id: str, token: str) -> WireSession:
    session = await WireSession.open(node.url)
    await session.hello(agent_id, token=token)
    return session
