"""Test of kills of the node, the gateway and the stdio server while MCP hosts send, check and acknowledge. Every
confirmed message exists once, and exactly the acknowledged messages are handled.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from roundelay.network.client import NetworkClient
from tests.interop.test_openai_kills import gateway_process
from tests.support.asked import invite
from tests.support.counts import Note
from tests.support.node import node_process

Connect = Callable[[], AbstractAsyncContextManager[Client]]
VICTIMS = ("gateway", "stdio", "node")


class KilledHost:
    """An MCP host that repeats a call until it gets an answer. If its server has died, it uses a new client."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._begun, self._answered = asyncio.Event(), asyncio.Event()
        self.repeats = 0
        self.acknowledged: dict[str, int] = {}
        """The returned seq by message ID."""
        self.asked_to_ack: set[int] = set()
        self.acked: set[int] = set()

    async def work(self, sender: str | None, stopping: asyncio.Event) -> None:
        """Send under this name, or check and acknowledge, until ``stopping`` is set. The last call of the client
        always has an answer.
        """
        number = 0
        while not stopping.is_set():
            try:
                async with self._connect() as client:
                    while not stopping.is_set():
                        if sender is not None:
                            await self._send(client, sender, number)
                            number += 1
                        else:
                            await self._settle(client)
            except Exception as error:  # the SDK raises groups of its transport's errors
                if not is_lost(error):
                    raise
                self.repeats += 1

    async def begins(self, count: int) -> None:
        """Wait until ``count`` further calls have started."""
        for _ in range(count):
            self._begun.clear()
            await self._begun.wait()

    async def is_answered(self) -> None:
        """Wait until a further message is confirmed."""
        self._answered.clear()
        await self._answered.wait()

    async def _use(self, client: Client, tool: str, **arguments: object) -> str:
        self._begun.set()
        async with asyncio.timeout(20):
            result = await client.call_tool(tool, arguments)
        text = str(getattr(result.content[0], "text", ""))
        if result.is_error:
            raise ConnectionError(text)  # the node is down
        return text

    async def _send(self, client: Client, sender: str, number: int) -> None:
        key = f"{sender}-{number}"
        told = await self._use(client, "send", to="agent:desk", text=key, message_id=key)
        self.acknowledged[key] = int(re.findall(r"Stored as #(\d+)", told)[0])
        self._answered.set()

    async def _settle(self, client: Client) -> None:
        told = await self._use(client, "wait", wait_s=1, limit=10)
        if seqs := [int(it) for it in re.findall(r'<message seq="(\d+)"', told)]:
            self.asked_to_ack |= set(seqs)
            await self._use(client, "ack", seqs=seqs)
            self.acked |= set(seqs)


def is_lost(error: BaseException) -> bool:
    """Whether only the end of a server or of the node caused the error."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_lost(it) for it in error.exceptions)
    return isinstance(error, (OSError, httpx2.HTTPError, MCPError, TimeoutError)) or "Closed" in type(error).__name__


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.timeout(580)
async def test_what_a_killed_host_was_told_is_true(rounds: int, tmp_path: Path, note: Note) -> None:
    random, pids = Random(11), tmp_path / "stdio.pid"
    async with node_process(tmp_path / "node.db") as node:
        node.keeps_port = True
        tokens = {name: await invite(node, name, "agent") for name in ("web", "term", "desk")}
        async with gateway_process(node.url) as gateway:

            def by_http(name: str) -> Connect:
                @asynccontextmanager
                async def connect() -> AsyncIterator[Client]:
                    headers = {"Authorization": f"Bearer {tokens[name]}"}
                    url = f"http://127.0.0.1:{gateway.port}/mcp"
                    async with (
                        httpx2.AsyncClient(headers=headers, timeout=30) as http,
                        Client(streamable_http_client(url, http_client=http)) as client,
                    ):
                        yield client

                return connect

            @asynccontextmanager
            async def by_stdio() -> AsyncIterator[Client]:
                python = f"echo $$ > {pids}; exec {sys.executable} -m roundelay mcp --as term --url {node.url}"
                token = tokens["term"].partition(":")[2]
                server = StdioServerParameters(
                    command="sh", args=["-c", python], env={**os.environ, "ROUNDELAY_TOKEN": token}
                )
                async with Client(stdio_client(server)) as client:
                    yield client

            web, term, desk = KilledHost(by_http("web")), KilledHost(by_stdio), KilledHost(by_http("desk"))
            stopping, killed = asyncio.Event(), Counter[str]()
            async with asyncio.TaskGroup() as tasks:
                for host, sender in ((web, "web"), (term, "term"), (desk, None)):
                    tasks.create_task(host.work(sender, stopping))
                for number in range(rounds):
                    victim = VICTIMS[number % 3]
                    busy = term if victim == "stdio" else random.choice((web, desk, term)) if victim == "node" else web
                    await busy.begins(random.randint(1, 4))
                    await asyncio.sleep(random.random() / 50)  # at any moment of a call
                    match victim:
                        case "gateway":
                            await gateway.kill()
                            await gateway.start()
                        case "stdio":
                            os.kill(int(pids.read_text()), signal.SIGKILL)
                        case _:
                            await node.kill9()
                            await node.restart()
                    killed[victim] += 1
                for host in (web, term):  # both hosts get answers again
                    await host.is_answered()
                stopping.set()
        token = tokens["desk"].partition(":")[2]
        async with NetworkClient("desk", node.url, kind=None, token=token, deliver=False) as client:
            stored: dict[str, list[int]] = {}
            waiting = await settle_rest(client)
            for thread in ("direct:desk~web", "direct:desk~term"):
                async for message in messages_of(client, thread):
                    stored.setdefault(message["message_id"], []).append(message["seq"])
    told = web.acknowledged | term.acknowledged
    twice = {key for key, seqs in stored.items() if len(seqs) > 1}
    lost = {key for key, seq in told.items() if stored.get(key) != [seq]}
    handled = {seq for seqs in stored.values() for seq in seqs} - waiting
    assert (lost, twice) == (set(), set())
    assert handled <= desk.asked_to_ack
    assert desk.acked <= handled
    note(
        kills=sum(killed.values()),
        **killed,
        acknowledged=len(told),
        lost=len(lost),
        twice=len(twice),
        stored=len(stored),
        handled=len(handled),
        acked=len(desk.acked),
        clients_begun_anew=web.repeats + term.repeats + desk.repeats,
    )


async def settle_rest(client: NetworkClient) -> set[int]:
    """Acknowledge all open messages, and return their seqs."""
    found: set[int] = set()
    while seqs := [
        it["seq"] for it in (await client.call("network.receive", {"limit": 500, "peek": True}))["messages"]
    ]:
        found |= set(seqs)
        await client.call("network.acknowledge", {"seqs": seqs})
    return found


async def messages_of(client: NetworkClient, thread: str) -> AsyncIterator[dict[str, Any]]:
    before, has_more = None, True
    while has_more:
        page = await client.call("network.history", {"thread_id": thread, "before": before, "limit": 500})
        for it in page["messages"]:
            yield it
        has_more, before = page["has_more"], page["messages"][0]["seq"] if page["messages"] else None
