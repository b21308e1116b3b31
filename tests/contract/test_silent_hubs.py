"""Tests of clients with a server that accepts connections but never answers, or that stops reading: a client neither
hangs nor grows.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.typing import Subprotocol

from roundelay.network.client import NetworkClient, Reconnected, Reconnecting, requests
from roundelay.network.errors import ConfigError, ConnectError, InternalError
from roundelay.nodes import doctor, hub_http
from tests.support.agents import make_runner
from tests.support.command import run

TIMEOUT_S = 20.0
SOON_S = 0.3
WELCOME = {
    "type": "welcome", "server": "s", "network": {"name": "n", "epoch": "e"}, "agent_id": "ann", "kind": "agent",
    "role": "observer", "session_id": "s", "cursor": 0, "head": 0, "resume": "new",
}  # fmt: skip


@asynccontextmanager
async def mute_server() -> AsyncIterator[int]:
    """Run a server that accepts every connection and sends nothing. Yield the server's port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@asynccontextmanager
async def fake_hub(serve: Callable[[ServerConnection], Awaitable[None]], **options: Any) -> AsyncIterator[str]:
    async with serve_websockets(serve, "127.0.0.1", 0, subprotocols=[Subprotocol("roundelay.v1")], **options) as server:
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/"


async def never_welcome(socket_: ServerConnection) -> None:
    await socket_.wait_closed()


def client_of(url: str, **options: Any) -> NetworkClient:
    return NetworkClient("ann", url, token="a" * 43, jitter=lambda: 0.0, **options)


@pytest.mark.parametrize(
    ("scheme", "missing"), [("ws", "request for a WebSocket within 0.3 s"), ("wss", "TLS handshake .* within 0.3 s")]
)
async def test_a_connection_that_is_taken_and_not_answered_is_given_up(scheme: str, missing: str) -> None:
    async with mute_server() as port, asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ConnectError, match=missing):
            await client_of(f"{scheme}://127.0.0.1:{port}/", connect_timeout_s=SOON_S).connect()


async def test_a_hub_that_cuts_who_comes_is_not_called_something_else() -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    async with server, asyncio.timeout(TIMEOUT_S):
        url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        with pytest.raises(ConnectError, match=r"closed the connection without an answer.*try again.*wss://"):
            await client_of(url, connect_timeout_s=SOON_S).connect()


async def test_a_hello_that_is_not_answered_is_given_up() -> None:
    async with fake_hub(never_welcome) as url, asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ConnectError, match=r"ann was not welcomed within 0\.3 s.*connect_timeout_s"):
            await client_of(url, connect_timeout_s=SOON_S).connect()


async def test_who_comes_back_to_a_hub_that_does_not_answer_tries_again() -> None:
    visits = 0

    async def answer(hub: ServerConnection) -> None:
        nonlocal visits
        visits += 1
        if visits == 2:
            await hub.wait_closed()
            return
        await hub.recv()
        await hub.send(json.dumps(WELCOME))
        if visits == 1:
            await hub.close(1011)
        await hub.wait_closed()

    async with fake_hub(answer) as url, client_of(url, connect_timeout_s=SOON_S) as ann, asyncio.timeout(TIMEOUT_S):
        reasons = []
        async for event in ann.events():
            if isinstance(event, Reconnecting):
                reasons.append(event.reason)
            if isinstance(event, Reconnected):
                break
    assert "not welcomed within 0.3 s" in reasons[-1]
    assert visits == 3


async def test_an_agent_says_what_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDELAY_CONNECT_TIMEOUT_S", str(SOON_S))
    async with fake_hub(never_welcome) as url, asyncio.timeout(TIMEOUT_S):
        agent = make_runner("bob", [], url=url, token="b" * 43)
        with pytest.raises(ConnectError, match="bob was not welcomed"):
            await agent.run()


async def test_commands_say_what_did_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_home = {"ROUNDELAY_HOME": str(tmp_path), "ROUNDELAY_CONNECT_TIMEOUT_S": str(SOON_S), "ROUNDELAY_TOKEN": "t" * 43}
    async with mute_server() as port:
        url = f"ws://127.0.0.1:{port}/"
        chat = await run("--url", url, "chat", "--as", "mia", code=3, cwd=tmp_path, stdin="hello\n", **at_home)
        assert "did not answer the request for a WebSocket within 0.3 s" in chat.err
        monkeypatch.setattr(hub_http, "TIMEOUT_S", SOON_S)
        async with asyncio.timeout(TIMEOUT_S):
            assert "no hub" in (await doctor.check_clock(url, None)).detail


def test_a_wrong_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("ROUNDELAY_CONNECT_TIMEOUT_S", wrong)
        with pytest.raises(ConfigError, match="ROUNDELAY_CONNECT_TIMEOUT_S"):
            client_of("ws://127.0.0.1:1/")


# -- memory of a client


class CountingHub:
    """A hub that answers only on request. A signal shows that all earlier frames were sent."""

    def __init__(self) -> None:
        self.sends: list[str] = []
        self.marked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.connections = 0

    async def __call__(self, hub: ServerConnection) -> None:
        self.connections += 1
        await hub.recv()
        await hub.send(json.dumps(WELCOME))
        async for raw in hub:
            frame = json.loads(raw)
            if frame["type"] == "bye":
                return
            if frame["type"] == "signal":
                self.marked.set()
            elif frame["type"] == "send":
                self.sends.append(frame["message_id"])
                if self.may_answer.is_set():
                    await self.answer(hub, frame["message_id"])
            if frame["type"] == "signal" and frame["body"] == "answer":
                self.may_answer.set()
                for message_id in list(self.sends):
                    await self.answer(hub, message_id)

    async def answer(self, hub: ServerConnection, message_id: str) -> None:
        seq = self.sends.index(message_id) + 1
        await hub.send(json.dumps({"type": "stored", "message_id": message_id, "seq": seq, "duplicate": False}))


@pytest.mark.parametrize(
    ("most", "most_bytes", "begun"),
    [(3, 10**6, 3), (10**6, 2500, 2), (10**6, 10, 1)],
    ids=["count", "bytes", "one at least"],
)
async def test_what_is_sent_and_not_answered_is_bounded_and_the_rest_follows_in_order(
    monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int, begun: int
) -> None:
    monkeypatch.setattr(requests, "MAX_UNANSWERED", most)
    monkeypatch.setattr(requests, "MAX_UNANSWERED_BYTES", most_bytes)
    hub = CountingHub()
    async with fake_hub(hub) as url, client_of(url) as ann, asyncio.timeout(TIMEOUT_S):
        sending = [asyncio.create_task(ann.send("agent:bob", "x" * 1000, message_id=f"m{it}")) for it in range(10)]
        await asyncio.sleep(0)  # this step lets each task start
        sending[5].cancel()
        await ann.signal("typing", "mark", to="broadcast")
        await hub.marked.wait()
        assert hub.sends == [f"m{it}" for it in range(begun)]
        await ann.signal("typing", "answer", to="broadcast")
        done = await asyncio.gather(*sending, return_exceptions=True)
        assert hub.sends == [f"m{it}" for it in range(10) if it != 5]
        assert sum(isinstance(it, asyncio.CancelledError) for it in done) == 1


async def test_what_waits_for_room_ends_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_UNANSWERED", 1)
    hub = CountingHub()
    async with fake_hub(hub) as url, asyncio.timeout(TIMEOUT_S):
        async with client_of(url) as ann:
            sending = [asyncio.create_task(ann.send("agent:bob", it)) for it in range(3)]
            await asyncio.sleep(0)  # this step lets each task start
        done = await asyncio.gather(*sending, return_exceptions=True)
    assert Counter(type(it) for it in done) == {ConnectError: 3}
    assert len(hub.sends) <= 1


async def test_signals_to_a_hub_that_does_not_read_are_dropped() -> None:
    """When the hub reads again, at most the signals in transit arrive of 64 MB, and new signals pass again."""
    may_read, kept, last = asyncio.Event(), 0, asyncio.Event()

    async def stall(hub: ServerConnection) -> None:
        nonlocal kept
        await hub.recv()
        hub.transport.pause_reading()
        await hub.send(json.dumps(WELCOME))
        await may_read.wait()
        hub.transport.resume_reading()
        async for raw in hub:
            frame = json.loads(raw)
            kept += len(raw)
            if frame["type"] == "call":
                await hub.send(json.dumps({"type": "result", "call_id": frame["call_id"], "value": 1}))
            elif frame["type"] == "bye":
                return
            elif frame["body"] == "last":
                last.set()

    async with fake_hub(stall, max_queue=1) as url, client_of(url) as ann, asyncio.timeout(TIMEOUT_S):
        for _ in range(1000):
            await ann.signal("delta", "x" * 64_000, to="broadcast")
            await asyncio.sleep(0)
        may_read.set()
        await ann.call("network.info")
        await ann.signal("delta", "last", to="broadcast")
        await last.wait()
    assert kept < 16_000_000


async def test_a_client_that_cannot_read_what_the_hub_sent_lets_go_of_the_connection() -> None:
    gone = asyncio.Event()

    async def misspeak(socket_: ServerConnection) -> None:
        await socket_.recv()
        await socket_.send(json.dumps(WELCOME))
        await socket_.send('{"type": "deliver", "attempt": 1, "message": {"seq": "seven"}}')
        await socket_.wait_closed()
        gone.set()

    async with fake_hub(misspeak) as url, asyncio.timeout(TIMEOUT_S):
        client = client_of(url)
        await client.connect()
        with pytest.raises(InternalError, match="failed on a frame of the hub"):
            await anext(client.__aiter__())
        await gone.wait()
        await client.close()
