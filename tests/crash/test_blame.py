"""Tests that only the message at fault becomes a dead letter: real processes of an agent lose their connection, or
one of their messages kills them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from roundelay.network.client import NetworkClient, Notice
from tests.crash.agent_evidence import tool_result
from tests.crash.agent_process import AgentProcess, AgentProcesses, agent_processes
from tests.crash.agent_proxy import AgentProxy, Frame, Way
from tests.support.fake_openai import FakeOpenAI, Reply, calls, text
from tests.support.node import ProcessNode, node_process
from tests.support.openai_rules import Body
from tests.support.processes import Asked

KILLS = 5
AGENT = """\
id: ann
instruction: Do what you are told.
model: {{openai: {{name: fake, base_url: "{base_url}"}}}}
limits: {{max_parallel_reactions: 1}}
tools: ["tests.crash.agent_tools:die"]
"""


class _Onlooker:
    """A watcher of the proxy, which counts the forwarded welcomes and changes nothing."""

    def __init__(self) -> None:
        self.welcomes = 0
        self.news = asyncio.Condition()

    def admit(self, size: int) -> int:
        return size

    async def spent(self) -> None:
        raise AssertionError("nothing is cut off by its bytes")

    async def before(self, way: Way, frame: Frame) -> None:
        pass

    async def after(self, way: Way, frame: Frame) -> None:
        if frame.get("type") == "welcome":
            async with self.news:
                self.welcomes += 1
                self.news.notify_all()

    async def until_welcomes(self, count: int) -> None:
        async with asyncio.timeout(30), self.news:
            await self.news.wait_for(lambda: self.welcomes >= count)


class _Stage:
    """A hub, the agent's processes behind a proxy, its model, and clients."""

    def __init__(self, node: ProcessNode, stack: AsyncExitStack) -> None:
        self.node = node
        self.onlooker = _Onlooker()
        self.proxy = AgentProxy(self.onlooker)
        self.processes: AgentProcesses
        self.file: Path
        self.url = ""
        self._stack = stack

    async def launch(self) -> AgentProcess:
        return await self.processes.launch(self.file, self.url)

    async def person(self, name: str) -> NetworkClient:
        client = NetworkClient(name, self.node.url, kind="human", token=self.node.owner_token)
        return await self._stack.enter_async_context(client)

    async def agent(self, name: str) -> NetworkClient:
        client = NetworkClient(name, self.node.url, token=self.node.token_of(name))
        return await self._stack.enter_async_context(client)


@asynccontextmanager
async def _stage(folder: Path, answer: Callable[[Body], Reply | Awaitable[Reply]]) -> AsyncIterator[_Stage]:
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(node_process(folder / "team.db"))
        model = await stack.enter_async_context(FakeOpenAI(answer))
        made = _Stage(node, stack)
        stack.push_async_callback(made.proxy.close)
        parts = urlsplit(node.url)
        port = await made.proxy.listen(lambda: (parts.hostname or "", parts.port or 0), has_frames=True)
        made.url, made.file = f"ws://127.0.0.1:{port}/", folder / "ann.yaml"
        made.file.write_text(AGENT.format(base_url=model.base_url), encoding="utf-8")
        made.processes = await stack.enter_async_context(agent_processes(folder))
        yield made


async def _state(client: NetworkClient, seq: int) -> tuple[str, int]:
    (recipient,) = (await client.call("network.message_status", {"seq": seq}))["recipients"]
    return recipient["state"], recipient["attempts"]


async def _letters(stage: _Stage) -> list[int]:
    mia = await stage.person("auditor")
    return [it["seq"] for it in (await mia.call("network.dead_letters"))["dead_letters"]]


def _dead_letters(client: NetworkClient) -> list[Any]:
    return [it.body for it in client._events if isinstance(it, Notice) and it.kind == "dead_letter"]


@pytest.mark.full
async def test_connections_lost_under_a_process_that_works_are_nobodys_fault(tmp_path: Path) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(body: Body) -> Reply:
        asked.set()
        await may_answer.wait()
        return text("it took a while")

    async with _stage(tmp_path, answer) as stage:
        mia = await stage.person("mia")
        await stage.launch()
        await stage.onlooker.until_welcomes(1)
        seq = (await mia.send_text("ann", "take your time")).seq
        await asyncio.wait_for(asked.wait(), 30)
        for lost in range(KILLS):
            stage.proxy.cut()
            await stage.onlooker.until_welcomes(lost + 2)
        assert await _state(mia, seq) == ("in_prompt", 1)
        may_answer.set()
        async with asyncio.timeout(30):
            assert (await anext(mia.__aiter__())).text == "it took a while"
        assert _dead_letters(mia) == []
        assert await _letters(stage) == []


async def test_a_message_that_kills_its_process_is_given_up_alone(tmp_path: Path) -> None:
    def answer(body: Body) -> Reply:
        asked = Asked.read(body)
        if asked.turn > 1:
            return text(f"{asked.incoming}: {tool_result(body)}")
        if asked.incoming == "ask bob":
            return calls([("ask", {"agent_ids": ["bob"], "text": "well?", "timeout_s": 600})])
        return calls([("die", {})]) if asked.incoming == "poison" else text(asked.incoming)

    async with _stage(tmp_path, answer) as stage:
        mia, leo, eve = [await stage.person(name) for name in ("mia", "leo", "eve")]
        bob = await stage.agent("bob")
        alive = await stage.launch()
        await stage.onlooker.until_welcomes(1)
        asking = (await mia.send_text("ann", "ask bob")).seq
        async with asyncio.timeout(30):
            question = await anext(bob.deliveries())
        poison = (await leo.send_text("ann", "poison")).seq
        # Waits behind the poison message, because the agent works on one at a time.
        waiting = (await eve.send_text("ann", "hello")).seq
        async with asyncio.timeout(60):
            for _ in range(KILLS):
                assert await asyncio.shield(alive.ended) == -9
                alive = await stage.launch()
            assert (await anext(eve.__aiter__())).text == "hello"
        assert await _state(leo, poison) == ("dead", KILLS)
        assert await _state(mia, asking) == ("in_prompt", 1)
        assert (await _state(eve, waiting))[0] == "in_prompt"
        # An operator sees the reason.
        assert [(it["seq"], "reason" in it) for it in _dead_letters(leo)] == [(poison, True)]
        await bob.reply(question.message, "fine")
        async with asyncio.timeout(30):
            assert (await anext(mia.__aiter__())).text == 'ask bob: <answer sender="bob">fine</answer>'
        assert await _letters(stage) == [poison]
