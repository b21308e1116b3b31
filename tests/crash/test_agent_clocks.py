"""Tests of wall clocks that jump by hours, on the machines of hub and agents, while reactions wait: no wait depends
on the wall clock, and none is endless.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from roundelay.agents import AgentPolicy
from roundelay.agents.events import ToolCallEnd, Waiting
from roundelay.agents.features.budget import Budget, TokenLimits
from roundelay.agents.models.model import ModelReply, ModelRequest, Usage
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import call
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from tests.crash.test_clock_jumps import HOUR_MS, NOON_MS, Clock
from tests.support.agents import Heard, Person, make_runner, running

DAY_MS = 24 * HOUR_MS
PATIENCE_S = 30.0
TIMEOUT_S = 0.3
LONG_S = 2.0
"""Timeout of waits that must not end before the agent is stopped, in seconds. Afterwards, tests wait for its expiry."""


@tool(needs_approval=True, idempotent=True)
def sign() -> str:
    """Sign."""
    return "signed"


def make_desk(heard: Heard, way: str, timeout_s: float = TIMEOUT_S) -> SimpleAgentRunner:
    """Return an agent that asks somebody or needs an approval, and reports the result."""

    def script(request: ModelRequest) -> Any:
        if results := read_prompt(request).tool_results:
            return results[-1].content
        return (
            call("sign") if way == "approval" else call("ask", agent_ids=["ann"], text="how many?", timeout_s=timeout_s)
        )

    policy = AgentPolicy(approval_timeout_s=timeout_s)
    return make_runner("desk", script, tools=[sign], policy=policy, on_event=heard)


def in_vain(way: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the result of a wait that expires."""
    if way == "approval":
        return "Not run: nobody approved it in time."
    return f"ann has not answered within {timeout_s:g} s. A later answer comes as a message."


@pytest.mark.parametrize("jump_ms", [-40 * DAY_MS, -HOUR_MS, HOUR_MS, 40 * DAY_MS])
@pytest.mark.parametrize("way", ["approval", "ask"])
async def test_a_wait_takes_its_time_however_the_clock_jumps_meanwhile(way: str, jump_ms: int) -> None:
    clock, heard = Clock(), Heard()
    async with asyncio.timeout(PATIENCE_S), Network.open(clock=clock) as network:
        mia, _ = await Person.join(network, "mia"), await network.join("ann")
        async with running(network, make_desk(heard, way)):
            began = asyncio.get_running_loop().time()
            await mia.client.send_text("desk", "go")
            await heard.first(Waiting)
            clock.now += jump_ms
            ended = await heard.first(ToolCallEnd) if way == "ask" else (await heard.finished())[0]
            took_s = asyncio.get_running_loop().time() - began
    assert took_s >= TIMEOUT_S * 0.9
    assert (ended.content if isinstance(ended, ToolCallEnd) else ended.answer) == in_vain(way)  # type: ignore[union-attr]


@asynccontextmanager
async def waiting(network: Network, mia: Person, way: str) -> AsyncIterator[None]:
    """Let a desk wait, and stop it for the duration of the context."""
    heard = Heard()
    async with running(network, make_desk(heard, way, LONG_S)):
        await mia.client.send_text("desk", "go")
        await heard.first(Waiting)
    yield


@pytest.mark.parametrize("way", ["approval", "ask"])
async def test_an_agent_that_is_restarted_after_the_clock_was_set_back_waits_no_longer_than_it_would_have(
    way: str,
) -> None:
    clock, heard = Clock(), Heard()
    async with asyncio.timeout(PATIENCE_S), Network.open(clock=clock) as network:
        mia, _ = await Person.join(network, "mia"), await network.join("ann")
        clock.now += 40 * DAY_MS
        async with waiting(network, mia, way):
            clock.now = NOON_MS
        async with running(network, make_desk(heard, way, LONG_S)):
            [ended] = await heard.finished()
    assert ended.answer == in_vain(way, LONG_S)


async def test_an_agent_that_is_restarted_after_its_time_is_over_still_finds_what_came() -> None:
    clock, heard = Clock(), Heard()
    async with asyncio.timeout(PATIENCE_S), Network.open(clock=clock) as network:
        mia, ann = await Person.join(network, "mia"), await network.join("ann")
        async with waiting(network, mia, "ask"):
            question = await anext(ann.__aiter__())
            await ann.reply(question, "three")
            clock.now += 40 * DAY_MS
        async with running(network, make_desk(heard, "ask", LONG_S)):
            [ended] = await heard.finished()
    assert ended.answer == '<answer sender="ann">three</answer>'


@pytest.mark.parametrize("jumps", [[DAY_MS], [40 * DAY_MS, -40 * DAY_MS], [-DAY_MS, DAY_MS]])
async def test_the_budget_of_a_day_is_one_whatever_day_the_clock_says_it_is(jumps: list[int]) -> None:
    """A new day has a new budget. A clock that returns from another day does not give a third budget."""
    clock = Clock()
    budget = Budget(TokenLimits(day=50_000))
    desk = make_runner("desk", lambda request: ModelReply("x", usage=Usage(50_000)), middleware=[budget])
    async with asyncio.timeout(PATIENCE_S), Network.open(clock=clock) as network, running(network, desk):
        mia = await Person.join(network, "mia")
        answered = [(await mia.ask("desk", "go")).text.startswith("x") for _ in range(4)]
        for jump_ms in jumps:
            clock.now += jump_ms
            answered += [(await mia.ask("desk", "go")).text.startswith("x") for _ in range(4)]
    print(answered)
    assert answered[:4] == [True, False, False, False]
    days = sum(1 for it in answered if it)
    assert days == (2 if max(jumps) > 0 and jumps[0] > 0 else 1)
