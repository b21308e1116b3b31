"""Tests of the hub's token budget for a conversation: all its agents stop within it, and prompts show the rest."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents import record_queue
from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.budget import Budget
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta, ToolCall, Usage
from roundelay.agents.models.scripted import ScriptedModel, call
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import Notice
from roundelay.network.config import Limits
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from roundelay.runs.replay import replay
from roundelay.simulation import Simulation, simulate
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, calls, text
from tests.support.fake_openai import call as ask_for

SPENT = "I could not answer: the budget for this is used up."
LIMIT = 10_000


def used(reply: Reply, prompt: int) -> Reply:
    return dataclasses.replace(reply, usage=(prompt, 0))


@tool(read_only=True)
def look(page: int) -> str:
    """Look."""
    return f"page {page}"


def make(provider: Provider, agent_id: str = "ann", **options: Any) -> SimpleAgentRunner:
    policy = AgentPolicy(max_turns=30)
    return SimpleAgentRunner(
        agent_id, instruction="You look.", model=provider.model(), policy=policy, **{"tools": [look], **options}
    )


@asynccontextmanager
async def limited(limit: int | None = LIMIT) -> AsyncIterator[Network]:
    async with Network.open(limits=Limits(max_root_tokens=limit)) as network:
        yield network


async def read_tokens(mia: Person, seq: int) -> int:
    spent = await mia.client.call("network.spent", {"seq": seq})
    return sum(it["prompt_tokens"] + it["completion_tokens"] for it in spent["of_root"].values())


async def read_notice(mia: Person) -> Notice:
    async with asyncio.timeout(10):
        async for event in mia.client.events():
            if isinstance(event, Notice) and event.kind == "budget_exhausted":
                return event
    raise AssertionError("the client has closed")


async def test_agents_of_a_conversation_stop_within_its_token_budget() -> None:
    """Bob uses most of the budget, and all of it counts when ann asks her model again. Ann may not see what bob does."""
    replies = {
        "ann": iter([used(calls([ask_for("ask", {"agent_ids": ["bob"], "text": "and?"})]), 1000), text("never")]),
        "bob": iter([used(text("I say"), 8000)]),
    }

    def script(body: Any) -> Reply:
        return next(replies["bob" if '"bob"' in str(body["messages"][0]) else "ann"])

    async with limited() as network, Provider(script) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, make(provider), make(provider, "bob")):
            sent = await mia.client.send_text("ann", "hello")
            notice = await read_notice(mia)
            assert (await mia.hear()).text == SPENT
            assert await read_tokens(mia, sent.seq) == 9000
            assert notice.body["root"] == sent.seq
            assert "9,000 tokens of 10,000 tokens were used, most of them by another agent" in notice.body["reason"]
            assert f"Type /resume {sent.seq} in chat" in notice.body["reason"]
            # A new conversation has its own budget, and a resumed conversation gets the same budget again.
            replies["ann"] = iter([used(text("fresh"), 500), used(text("again"), 500)])
            assert (await mia.ask("ann", "hello")).text == "fresh"
            await mia.client.call("network.resume_root", {"root": sent.seq})
            await mia.client.send("agent:ann", "go on", cause=sent.seq)
            assert (await mia.hear()).text == "again"


async def test_requests_of_inner_agents_stop_within_the_token_budget() -> None:
    def script(body: Any) -> Reply:
        if "You help" in str(body["messages"][0]):
            return used(calls([ask_for("look", {"page": len(body["messages"])})]), 3000)
        return used(calls([ask_for("helper", {"task": "help"})]), 1000)

    async with limited() as network, Provider(script) as provider:
        mia = await Person.join(network, "mia")
        helper = agent_tool(Agent("helper", "You help.", provider.model(), tools=[look]))
        async with running(network, make(provider, tools=[helper])):
            sent = await mia.client.send_text("ann", "hello")
            assert (await mia.hear()).text == SPENT
            assert await read_tokens(mia, sent.seq) == LIMIT
        assert len(provider.requests) == 4  # one by ann and three by the helper


@tool(read_only=True)
async def look_long(page: int) -> str:
    """Look."""
    await asyncio.sleep(0.05)
    return f"page {page}"


class Crowd:
    """A model in this process, which lets ten agents look at the same time."""

    name = "crowd"

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        await asyncio.sleep(0.01)
        if request.agent_id != "lead":
            return ModelReply(None, (ToolCall(f"c{request.turn}", "look_long", '{"page": 1}'),), Usage(1300, 0))
        names = json.dumps({"agent_ids": [f"a{number}" for number in range(10)], "text": "go"})
        return ModelReply(None, (ToolCall("c", "ask", names),), Usage(100, 0))


async def test_ten_agents_at_once_stay_within_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others ask their models while a tool runs and records could wait. Each request counts as reserved or as recorded."""
    monkeypatch.setattr(record_queue, "MAX_DELAY_S", 0.5)
    async with limited(15_000) as network, AsyncExitStack() as stack:
        mia = await Person.join(network, "mia")
        for name in ("lead", *(f"a{number}" for number in range(10))):
            runner = SimpleAgentRunner(name, instruction="You look.", model=Crowd(), tools=[look_long])
            await stack.enter_async_context(running(network, runner))
        sent = await mia.client.send_text("lead", "go")
        assert (await mia.hear()).text == SPENT
        await mia.client.wait_until_quiet(sent.seq, timeout_s=10)
        assert 10_000 < await read_tokens(mia, sent.seq) <= 15_000


async def test_agents_own_budget_and_the_network_budget_count_a_request_once_each() -> None:
    async with limited(3000) as network, Provider([used(text("ok"), 1000)]) as provider:
        mia = await Person.join(network, "mia")
        # The agent's own budget and the hub's budget each reserve about 1,000 tokens. Together in one account, the
        # two reservations would not fit.
        async with running(network, make(provider, middleware=[Budget({"root": 3000}, reserve=1500)])):
            assert (await mia.ask("ann", "hello")).text == "ok"


async def test_prompt_names_the_messages_and_tokens_left() -> None:
    async def play(limit: int | None) -> list[str]:
        async with limited(limit) as network, Provider([used(text("ok"), 4000)] * 3) as provider:
            mia = await Person.join(network, "mia")
            async with running(network, make(provider)):
                sent = await mia.client.send_text("ann", "hello")
                await mia.hear()
                for _ in range(2):
                    await mia.client.send("agent:ann", "go on", cause=sent.seq)
                    await mia.hear()
            return [str(it["messages"]) for it in provider.requests]

    first, second, third = await play(LIMIT)
    assert "<standing>" not in first + second  # 10,000 and 6,000 tokens are left
    assert "This conversation has 1,019 messages and 2,000 tokens left." in third
    assert "<standing>" not in "".join(await play(None))


def test_replay_of_a_stopped_conversation_has_no_differences(tmp_path: Path) -> None:
    def build() -> SimpleAgentRunner:
        model = ScriptedModel(lambda request: call("look", page=len(request.messages)))
        return SimpleAgentRunner("desk", instruction="x", model=model, tools=[look])

    async def main(simulation: Simulation) -> tuple[str, int, bytes]:
        await simulation.start_agent(build)
        mia = await simulation.join_person("mia")
        await mia.client.send_text("desk", "look at all")
        await simulation.idle()
        return mia.heard[0].text, len(simulation.asked), simulation.export()

    answer, asked, log = simulate(main, limits=Limits(max_root_tokens=2000))
    assert answer == SPENT
    file = tmp_path / "run.jsonl"
    file.write_bytes(log)
    report = replay(Recording(*read_log(file)), [build()])
    assert report.differences == ()
    assert report.turns == asked + 1  # the refused request is a turn too
