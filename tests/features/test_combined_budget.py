"""Tests of budgets in difficult cases: odd usage counts, failed and stopped calls, forced tools, retries, and model
names with versions.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.budget import Budget, MoneyLimits, TokenLimits
from roundelay.agents.features.evaluations import Evaluations, Grounding
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.models.model import Usage
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from tests.support.agents import Heard, Person, Provider, cancel, running
from tests.support.fake_openai import Reply, server_error, text
from tests.support.loops import Body, system_of, tools_of, use

SPENT = "I could not answer: the budget for this is used up."


@tool(idempotent=True)
def look(page: int) -> str:
    """Look."""
    return f"page {page}"


def budget(reserve: int = 100, **limits: int) -> Budget:
    return Budget(TokenLimits(**limits), reserve=reserve, count=lambda written: 0)


def raw(body: Body, usage: Any, **message: Any) -> Reply:
    """Return a completion with arbitrary usage data."""
    said = {"role": "assistant", "content": "ok", **message}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    return Reply(body=whole if usage == "missing" else {**whole, "usage": usage})


# --- servers


@pytest.mark.parametrize(
    "usage",
    ["missing", None, {}, {"prompt_tokens": 0, "completion_tokens": 0}, {"prompt_tokens": "many"}, {"prompt_tokens": -7}, {"prompt_tokens": None}],
)  # fmt: skip
async def test_a_server_that_counts_nothing_is_counted_by_the_estimate(network: Network, usage: Any) -> None:
    """Otherwise, no budget would ever stop a loop with this server."""
    function = {"name": "look", "arguments": '{"page": 1}'}
    call = {"id": "a", "type": "function", "function": function}

    def script(body: Body) -> Reply:
        return raw(body, usage, content=None, tool_calls=[call])

    async with Provider(script) as provider:
        mia, heard = await Person.join(network, "mia"), Heard()
        runner = SimpleAgentRunner(
            "ann", instruction="You look.", model=provider.model(), tools=[look], on_event=heard,
            middleware=[Budget(TokenLimits(reaction=20_000), reserve=100)], policy=AgentPolicy(max_turns=60, max_idle_turns=60),
        )  # fmt: skip
        async with running(network, runner):
            assert (await mia.ask("ann", "look at all")).text == SPENT
            [end] = await heard.finished()
    assert 15_000 < end.usage.prompt_tokens <= 20_000
    assert end.usage.completion_tokens > 0
    assert 5 < len(provider.requests) < 60


@pytest.mark.parametrize("counted", [1e300, 2**70, 10**18])
async def test_a_server_that_counts_absurdly_much_stops_at_the_budget(network: Network, counted: float) -> None:
    async with Provider(lambda body: raw(body, {"prompt_tokens": counted, "completion_tokens": 1})) as provider:
        mia = await Person.join(network, "mia")
        runner = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[budget(day=5000)])
        async with running(network, runner):
            assert [(await mia.ask("ann", "hello")).text for _ in range(2)] == ["ok", SPENT]


async def test_cached_tokens_beside_the_prompt_cost_nothing_below_nothing() -> None:
    """Some servers report prompt tokens without the cached ones."""
    prices = Prices({"m": Price(input=Decimal(10), output=Decimal(20), cached=Decimal(1))})
    assert prices.cost("m", Usage(100, 10, cached_tokens=5000)) == Decimal("0.0003")
    assert prices.cost("m", Usage(1000, 10, cached_tokens=500)) == Decimal("0.0057")


@pytest.mark.parametrize("name", ["m-2024-07-18", "m-20240718", "m-0125", "m@latest", "m:latest"])
async def test_a_price_is_that_of_all_versions_of_a_model(network: Network, name: str) -> None:
    """A request names the model, and the answer names its version."""

    def script(body: Body) -> Reply:
        reply = raw(body, {"prompt_tokens": 1000, "completion_tokens": 100})
        return Reply(body={**reply.body, "model": name})

    prices = Prices({"m": Price(input=Decimal(100), output=Decimal(100))})
    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        limits = MoneyLimits(turn=Decimal(1), day=Decimal("0.22"))
        spender = Budget(usd=limits, reserve=100, prices=prices, count=lambda written: 0)
        runner = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[spender])
        async with running(network, runner):
            answers = [(await mia.ask("ann", "hello")).text for _ in range(3)]
    assert answers == ["ok", "ok", SPENT]  # 0.11 each


def test_another_model_is_no_version() -> None:
    prices = Prices({"gpt-4o": Price(input=Decimal(10), output=Decimal(20))})
    assert prices.cost("gpt-4o-mini-of-mine", Usage(100)) is None


# --- reservations


async def settles(network: Network, provider: Provider, mia: Person, *, day: int = 2000) -> None:
    """Make a call that fits only if no reservation remains."""
    runner = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[budget(1500, day=day)])
    async with running(network, runner):
        assert (await mia.ask("ann", "again")).text == "ok"


def answers(*first: Reply) -> Any:
    left = list(first)
    return lambda body: left.pop(0) if left else raw(body, {"prompt_tokens": 1, "completion_tokens": 1})


async def test_a_call_that_failed_leaves_nothing_reserved(network: Network) -> None:
    """The call fails after all attempts. A retried call is reserved once."""
    async with Provider(answers(*[server_error()] * 3)) as provider:
        mia = await Person.join(network, "mia")
        policy = AgentPolicy(model_attempts=1)
        runner = SimpleAgentRunner(
            "ann", instruction="x", model=provider.model(), middleware=[budget(1500, day=2000)], policy=policy
        )
        async with running(network, runner):
            for _ in range(3):
                assert (await mia.ask("ann", "hello")).text == "I could not answer: my model failed."
        await settles(network, provider, mia)


async def test_a_stopped_reaction_and_a_killed_agent_leave_nothing_reserved(network: Network) -> None:
    """The usage of the stopped call counts. The day's budget has room for that usage and one reservation."""
    async with Provider(answers(Reply(fault="silence"), Reply(fault="silence"))) as provider:
        mia, heard = await Person.join(network, "mia"), Heard()
        runner = SimpleAgentRunner(
            "ann", instruction="x", model=provider.model(), middleware=[budget(1500, day=4400)], on_event=heard
        )
        async with running(network, runner):
            await mia.client.send_text("ann", "hello")
            await provider.wait_for_requests(1)
            await cancel(mia.client, thread_id="direct:ann~mia")
            await heard.finished()
            assert (await mia.hear()).text == "Stopped by mia."
        again = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[budget(1500, day=4400)])
        task = asyncio.create_task(again.run(await network.join("ann", role="reactor")))
        await again.ready()
        await mia.client.send_text("ann", "hello")
        await provider.wait_for_requests(2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        other = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[budget(1500, day=4400)])
        async with running(network, other):
            assert (await mia.hear()).text == "ok"
        await settles(network, provider, mia, day=4400)


async def test_each_forced_request_is_reserved_where_the_budget_stands_behind(network: Network) -> None:
    """Two forced requests fit next to each other, three do not. The spending never exceeds the budget."""

    def script(body: Body) -> Reply:
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            return use((choice["function"]["name"], {}), usage=(400, 0))
        return text("ok", usage=(100, 0))

    tools = [tool(name=name, idempotent=True)(lambda: "found") for name in ("a", "b", "c")]

    async def ask(agent_id: str, *names: str) -> str:
        runner = SimpleAgentRunner(
            agent_id, instruction="x", model=provider.model(), tools=tools,
            middleware=[ForcedTools(*names), budget(400, reaction=1100)],
        )  # fmt: skip
        async with running(network, runner):
            return (await mia.ask(agent_id, "hello")).text

    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        assert await ask("ann", "a", "b", "c") == SPENT
        assert all("tool_choice" in body for body in provider.requests)
        provider.received.clear()
        assert await ask("bob", "a") == "ok"
        assert len(provider.requests) == 2


async def test_retries_judges_and_agents_inside_count_once_and_stop_at_the_budget(network: Network) -> None:
    """The hub's total equals the sum of the provider's own counts."""
    failed = False

    def script(body: Body) -> Reply:
        nonlocal failed
        if tools_of(body) == ["verdict"]:
            return use(("verdict", {"is_grounded": True}), usage=(10, 1))
        if "You help" in system_of(body):
            return text("helped", usage=(200, 2))
        if not failed:
            failed = True
            return server_error()
        if any(it["role"] == "tool" for it in body["messages"]):
            return text("ok", usage=(300, 3))
        return use(("helper", {"task": "a"}), ("helper", {"task": "b"}), usage=(100, 1))

    async with Provider(script) as provider:
        mia, heard = await Person.join(network, "mia"), Heard()
        helper = agent_tool(Agent("helper", "You help.", provider.model(), middleware=[budget(50, root=5000)]))
        runner = SimpleAgentRunner(
            "ann", instruction="You look.", model=provider.model(), tools=[helper], on_event=heard,
            middleware=[budget(50, reaction=5000), Evaluations(by_tool={"helper": [Grounding()]})],
        )  # fmt: skip
        async with running(network, runner):
            sent = await mia.client.send_text("ann", "hello")
            assert (await mia.hear()).text == "ok"
            [*_, end] = await heard.finished(3)
            spent = await mia.client.call("network.spent", {"seq": sent.seq})
    assert (end.path, end.usage) == ("", Usage(100 + 2 * 200 + 300 + 10, 1 + 2 * 2 + 3 + 1))
    assert sum(it["prompt_tokens"] for it in spent["of_root"].values()) == 810
    assert sum(it["completion_tokens"] for it in spent["of_root"].values()) == 9


async def test_odd_prices_leave_no_crumbs_reserved(network: Network) -> None:
    """Sums of values with more digits than are stored do not return to zero exactly."""
    third = Decimal(1) / Decimal(3)
    prices = Prices({"m": Price(input=third, output=third * 7)})
    gate = asyncio.Event()

    async def script(body: Body) -> Reply:
        await gate.wait()
        return text("ok", usage=(10, 1))

    async with Provider(script) as provider:
        people = [await Person.join(network, name) for name in ("mia", "joe", "zoe")]
        spender = Budget(usd=MoneyLimits(day=Decimal("2e-4")), reserve=11, prices=prices, count=lambda written: 0)
        heard = Heard()
        runner = SimpleAgentRunner("ann", instruction="x", model=provider.model(), middleware=[spender], on_event=heard)
        async with running(network, runner):
            for person in people:
                await person.client.send_text("ann", "hello")
            await provider.wait_for_requests(2)
            gate.set()
            said = [(await person.hear()).text for person in people]
            while (await people[0].ask("ann", "more")).text == "ok":
                pass
            last = (await heard.finished())[-1]
    assert said.count("ok") >= 2
    assert "reserved" not in last.reason
