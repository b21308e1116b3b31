"""Tests of a hub process that is killed during everything that an agent does: all work continues, and no question,
message or payment is repeated.

The agents run in the test's own process and connect over WebSockets. The agents' actions kill the hub, so that each
kill happens at the intended point.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents import AgentPolicy
from roundelay.agents.agent_tools import remote_handoff
from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest, OnDelta
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, call, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, tool
from roundelay.network.client import NetworkClient
from tests.support.agents import Heard, Person, until_recorded
from tests.support.processes import Hub, hub_up

PATIENCE_S = 60.0
PLACES = ["model", "streaming", "once tool", "tool", "ask", "approval", "handoff"]


class World:
    """An agent that looks, pays, asks, needs an approval and hands over. At some points, the hub is restarted once."""

    def __init__(self, restarts: dict[str, Callable[[], Awaitable[None]]]) -> None:
        self.restarts = restarts
        self.turn = asyncio.Lock()
        self.seen: Counter[str] = Counter()
        self.asked: Counter[tuple[str, int]] = Counter()

    async def be_at(self, place: str) -> None:
        self.seen[place] += 1
        if (restart := self.restarts.pop(place, None)) is not None:
            async with self.turn:  # calls of one turn run at the same time
                await restart()

    def tools(self) -> list[Tool]:
        @tool(idempotent=True)
        async def look() -> str:
            """Look."""
            await self.be_at("tool")
            return "a cat"

        @tool(once=True)
        async def pay() -> str:
            """Pay."""
            await self.be_at("once tool")
            return "paid"

        @tool(once=True, needs_approval=True)
        async def sign() -> str:
            """Sign."""
            self.seen["sign"] += 1
            return "signed"

        return [look, pay, sign, remote_handoff("lawyer")]

    async def desk(self, request: ModelRequest) -> Any:
        self.asked["desk", request.turn] += 1
        match request.turn:
            case 1:
                await self.be_at("model")
                return [call("look"), call("pay"), send("clerk", "I pay")]
            case 2:
                return call("ask", agent_ids=["clerk", "lawyer"], text="how many?", timeout_s=60)
            case 3:
                return call("sign")
            case _:
                return call("hand_over_to_lawyer", note="take it")

    async def other(self, request: ModelRequest) -> Any:
        text = read_prompt(request).incoming_text
        self.asked[f"{request.agent_id}: {text}", request.turn] += 1
        if text == "how many?":
            await self.be_at("ask")
            return f"{request.agent_id} has two"
        if text.startswith("take it"):
            await self.be_at("handoff")
            return "All is well."
        return None if request.turn < 2 else call("finish", reason="seen")


class StreamingModel(ScriptedModel):
    """A model that pauses in the middle of its second turn's stream."""

    def __init__(self, world: World) -> None:
        super().__init__(world.desk)
        self.world = world

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        if request.turn == 2 and on_delta is not None:
            on_delta(ModelDelta("I "))
            await self.world.be_at("streaming")
            on_delta(ModelDelta("ask."))
        return await super().complete(request)


@asynccontextmanager
async def at_work(*runners: SimpleAgentRunner) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(runner.run()) for runner in runners]
    await asyncio.gather(*(runner.ready() for runner in runners))
    yield
    for runner in runners:
        await runner.stop()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("killed", "stopped"),
    [
        (["once tool", "approval"], ["streaming"]),
        pytest.param(PLACES, [], marks=pytest.mark.full),
        pytest.param([], PLACES, marks=pytest.mark.full),
    ],
    ids=["in some places", "killed everywhere", "stopped in good order everywhere"],
)
async def test_all_that_an_agent_does_goes_on_when_its_hub_is_restarted_in_the_middle(
    tmp_path: Path, killed: list[str], stopped: list[str]
) -> None:
    async with asyncio.timeout(PATIENCE_S), hub_up(tmp_path) as hub:
        world = World({**dict.fromkeys(killed, hub.restart), **dict.fromkeys(stopped, partial(renew, hub))})
        heard = Heard()
        desk = SimpleAgentRunner(
            "desk", instruction="x", model=StreamingModel(world), tools=world.tools(), url=hub.url, on_event=heard,
            policy=AgentPolicy(tool_timeout_s=30, model_timeout_s=30),
        )  # fmt: skip
        others = [
            SimpleAgentRunner(agent_id, instruction="x", model=ScriptedModel(world.other), url=hub.url)
            for agent_id in ("clerk", "lawyer")
        ]
        async with NetworkClient("mia", hub.url, kind="human") as client, at_work(desk, *others):
            mia = Person(client)
            await client.send_text("desk", "go")
            request = await mia.hear()
            await world.be_at("approval")
            await client.send_text("desk", "/approve", reply_to=request.seq)
            answer = await mia.hear()
            [ended] = await heard.finished()
            said = [it async for it in listen(client)]
            await until_recorded(mia, ended.reaction, "finished")
            records = Counter(it["kind"] for it in await mia.records(ended.reaction))
    assert world.restarts == {}
    assert answer.text == "All is well."
    assert ended.status == "finished"
    assert said == [
        ("direct:desk~mia", "mia", "go"), ("direct:desk~mia", "desk", request.text), ("direct:desk~mia", "mia", "/approve"),
        ("direct:desk~mia", "desk", "All is well."),
    ]  # fmt: skip
    assert world.seen == {**dict.fromkeys(PLACES, 1), "ask": 2, "approval": 1, "sign": 1}, "nothing was done twice"
    assert set(world.asked.values()) == {1}, "no model was asked twice"
    assert records == {
        "started": 1, "model_reply": 4, "tool_started": 6, "asking": 2, "waiting": 3, "approval": 1, "tool_result": 6, "finished": 1,
    }  # fmt: skip


async def renew(hub: Hub) -> None:
    await hub.end()
    await hub.start()


async def listen(client: NetworkClient) -> AsyncIterator[tuple[str, str, str]]:
    for message in (await client.history("direct:desk~mia")).messages:
        yield message.thread_id, message.sender_id, message.text
