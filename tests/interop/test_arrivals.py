"""Tests of connections without a token at a gateway: however many there are, others get answers, and the log stays
short.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from roundelay.interop.http import connection_limit
from tests.interop.test_http_api import gateway_to, join
from tests.support.node import running_node

FLOODS = {
    "silent": b"",
    "slow head": b"GET /healthz HTTP/1.1\r\nHost: x\r\n",
    "slow body": b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "wrong token, slow body": (
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ann:wrong\r\nContent-Length: 9\r\n\r\n{"
    ),
}


@asynccontextmanager
async def flooded(http: httpx2.AsyncClient, number: int, sent: bytes, source: str = "127.0.0.1") -> AsyncIterator[None]:
    """Hold open ``number`` connections that have sent the same bytes and then stop."""
    writers = []
    for _ in range(number):
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port, local_addr=(source, 0))
        writer.write(sent)
        writers.append(writer)
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def hold(http: httpx2.AsyncClient, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection from another address, and send the beginning of a request."""
    host, port = http.base_url.host, http.base_url.port
    reader, writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    await writer.drain()
    return reader, writer


async def check_flood(sent: bytes, number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node() as node, gateway_to(node) as http:
        ann = await join(node, http, "ann")
        waiting = asyncio.create_task(ann.get("/v1/messages", wait_s=20))
        reader, writer = await hold(http, "127.0.0.2")
        await ann.get("/v1/agents")
        caplog.clear()
        async with flooded(http, number, sent):
            for _ in range(10):
                async with httpx2.AsyncClient(base_url=http.base_url, timeout=40) as other:  # a new connection
                    assert (await other.get("/healthz")).status_code == 200
                    assert (await other.get("/v1/agents", headers=ann.headers)).status_code == 200
            writer.write(b"\r\n")  # this address has few connections
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            assert not waiting.done()  # a caller with a valid token is not limited, even from a crowded address
            operator = await node.service("roundelay-test")
            await operator.send("agent:ann", "hello")
            assert (await waiting)["messages"][0]["content"] == "hello"
        writer.close()
        told = [it for it in caplog.records if it.levelno >= logging.WARNING and "refused" in it.getMessage()]
        assert len(told) <= 1, told
        assert not [it for it in caplog.records if it.exc_info or it.name.startswith("uvicorn")]


@pytest.mark.parametrize("kind", FLOODS)
async def test_who_says_nothing_shuts_nobody_out(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_limit, "MAX_UNAUTHENTICATED", 20)
    await check_flood(FLOODS[kind], 60, caplog)


@pytest.mark.full
@pytest.mark.parametrize("kind", FLOODS)
async def test_twelve_hundred_connections_shut_nobody_out(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    try:
        await check_flood(FLOODS[kind], 1200, caplog)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_is_no_http_costs_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with running_node() as node, gateway_to(node) as http:
        for _ in range(30):
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
        assert (await http.get("/healthz")).status_code == 200
        told = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
        assert told == ["connections of callers were refused: Invalid HTTP request received (1)"]
    told = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    assert told[1:] == ["connections of callers were refused: Invalid HTTP request received (29)"]


async def test_a_connection_that_was_answered_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, nothing would limit a caller's idle connections."""
    monkeypatch.setattr(connection_limit, "MAX_UNAUTHENTICATED", 5)
    async with running_node() as node, gateway_to(node) as http:
        ann = await join(node, http, "ann")
        idle = []
        head = f"GET /v1/agents HTTP/1.1\r\nHost: x\r\nAuthorization: {ann.headers['Authorization']}\r\n\r\n".encode()
        for _ in range(12):
            reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
            writer.write(head)
            assert b"200" in await reader.readline()
            idle.append((reader, writer))
        assert await read_to_cut(idle[0][0])
        for _, writer in idle:
            writer.transport.abort()


async def read_to_cut(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.read(), 4)  # uvicorn closes an idle connection after 5 s
    except ConnectionResetError:
        return True
    return reader.at_eof()
