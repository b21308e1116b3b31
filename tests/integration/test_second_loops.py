"""Tests of objects that are used in a second event loop of one process: two calls of `asyncio.run`, notebooks, and
test suites with one loop per test.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from roundelay.agents.events import Event, ToolCallEnd
from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.models.model import ModelRequest, UserMessage
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.models.scripted import ScriptedModel, call
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network, Node, serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.errors import ConnectError
from tests.support.agents import Person, running
from tests.support.fake_openai import FakeOpenAI, text

T = TypeVar("T")


@contextmanager
def elsewhere(enter: Callable[[], Any]) -> Iterator[Any]:
    """Run a server in a thread with its own event loop, which outlives the loops of the test."""
    opened: list[Any] = []
    is_open, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def stay() -> None:
        try:
            async with enter() as server:
                opened.append(server)
                is_open.set()
                await over.wait()
        finally:
            is_open.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(stay(),))
    thread.start()
    is_open.wait()
    try:
        yield opened[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    with elsewhere(lambda: serve(config)) as started:
        yield started


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine in a new loop, as a user does. The garbage collector handles everything that it leaves open."""

    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await work()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return asyncio.run(bounded())
        finally:
            gc.collect()


def test_a_model_that_was_not_closed_answers_in_the_next_loop() -> None:
    with elsewhere(lambda: FakeOpenAI(lambda body: text("Fine."))) as provider:
        model = OpenAIModel("m", base_url=provider.base_url)

        async def ask() -> str | None:
            return (await model.complete(ModelRequest((UserMessage("How is it?"),)))).text

        assert [run(ask) for _ in range(3)] == ["Fine."] * 3

        async def ask_and_close() -> str | None:
            async with model:
                return await ask()

        assert run(ask_and_close) == "Fine."


async def ask_in_memory(runner: AgentRunner) -> str:
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        async with running(network, runner):
            return (await mia.ask("bob", "How is it?")).text


def test_a_runner_works_in_the_next_loop_with_the_model_that_it_was_given() -> None:
    with elsewhere(lambda: FakeOpenAI(lambda body: text("Fine."))) as provider:
        model = OpenAIModel("m", base_url=provider.base_url)
        runner = SimpleAgentRunner("bob", instruction="You are under test.", model=model)
        assert [run(lambda: ask_in_memory(runner)) for _ in range(2)] == ["Fine.", "Fine."]


def test_a_network_is_used_in_the_loop_in_which_it_was_opened() -> None:
    loop = asyncio.new_event_loop()
    opening = Network.open()
    network = loop.run_until_complete(opening.__aenter__())
    with pytest.raises(ConnectError, match="opened in another event loop"):
        run(lambda: network.join("mia", kind="human"))
    assert loop.run_until_complete(network.join("mia", kind="human")).is_connected
    loop.run_until_complete(opening.__aexit__(None, None, None))
    loop.close()


@pytest.mark.full
def test_sessions_of_mcp_are_opened_anew() -> None:
    layer = McpServers({"time": ServerOptions(command=sys.executable, args=("-m", "mcp_server_time"))})
    model = ScriptedModel(lambda it: "Fine." if it.turn == 2 else call("time_get_current_time", timezone="UTC"))
    told: list[Event] = []
    runner = SimpleAgentRunner("bob", instruction="Say.", model=model, middleware=[layer], on_event=told.append)
    assert [run(lambda: ask_in_memory(runner)) for _ in range(2)] == ["Fine.", "Fine."]
    assert ["UTC" in it.content for it in told if isinstance(it, ToolCallEnd)] == [True, True]


def test_a_client_connects_again_in_the_next_loop_and_loses_nothing(node: Node) -> None:
    mia = NetworkClient("mia", node.url, kind="human", token=node.owner_token)
    bob = NetworkClient("bob", node.url, token="t" * 32)

    async def write(*texts: str) -> None:
        async with mia, bob:
            for it in texts:
                await mia.send_text("bob", it)

    async def read(count: int) -> list[str]:
        async with bob:
            seen = []
            for _ in range(count):
                async with bob.receive() as message:
                    seen.append(message.text)
            return seen

    async def leave_open() -> None:
        await bob.connect()
        async with bob.receive() as message:
            assert message.text == "three"

    run(lambda: write("one", "two"))
    assert run(lambda: read(2)) == ["one", "two"]
    run(lambda: write("three", "four"))
    run(leave_open)
    with pytest.raises(ConnectError, match=r"another event loop, which has ended.* connect\(\)"):
        run(lambda: bob.call("network.list_threads"))
    assert run(lambda: read(1)) in (["four"], ["three"])


def test_a_client_is_used_in_one_thread(node: Node) -> None:
    mia = NetworkClient("mia", node.url, kind="human", token=node.owner_token)

    async def use() -> None:
        async with mia:
            with pytest.raises(ConnectError, match="another thread"):
                await asyncio.to_thread(asyncio.run, mia.call("network.list_threads"))
            assert await mia.call("network.list_threads") is not None

    run(use)
