"""Tests of budgets for a reaction, a conversation and a day: their effects, the messages to waiting people, and the
end of loops.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.budget import Budget, MoneyLimits, TokenLimits
from roundelay.agents.models.fallback import FallbackModel
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta, ToolCall, Usage
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network, serve
from roundelay.network.client import NetworkClient, Notice
from roundelay.network.config import NodeConfig
from tests.support.agents import Heard, Person, Provider, running
from tests.support.fake_openai import Reply, calls, text
from tests.support.fake_openai import call as ask_for
from tests.support.wire import make_token

SPENT = "I could not answer: the budget for this is used up."


@tool(idempotent=True)
def look(page: int) -> str:
    """Look."""
    return f"page {page}"


def used(reply: Reply, prompt: int, completion: int) -> Reply:
    from dataclasses import replace

    return replace(reply, usage=(prompt, completion))


def look_at(page: int, prompt: int = 1000, completion: int = 100) -> Reply:
    return used(calls([ask_for("look", {"page": page})]), prompt, completion)


def ann(provider: Provider, budget: Budget, agent_id: str = "ann", **options: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner(
        agent_id, instruction="You look.", model=provider.model(), tools=[look], middleware=[budget],
        policy=AgentPolicy(max_turns=30, prompt="full"), **options,
    )  # fmt: skip


def tokens(reserve: int = 100, **limits: int) -> Budget:
    return Budget(TokenLimits(**limits), reserve=reserve, count=lambda written: 0 if len(written) < 2000 else 10)


async def kinds(mia: Person, reaction: str) -> list[str]:
    return [it["kind"] for it in await mia.records(reaction)]


# --- each kind of budget


async def test_a_reaction_stops_before_the_call_that_would_exceed_it(network: Network) -> None:
    heard = Heard()
    async with Provider(lambda body: look_at(len(body["messages"]))) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, ann(provider, tokens(reaction=3500), on_event=heard)):
            answer = await mia.ask("ann", "look at all")
            [end] = await heard.finished()
        assert len(provider.requests) == 3  # 3,300 tokens are used, and the next call would exceed 3,400
    assert answer.text == SPENT
    assert (end.status, end.turns) == ("stopped", 4)
    assert "Budget for this reaction exceeded: 3,300 tokens of 3,500 tokens were used" in end.reason
    records = await mia.records(end.reaction)
    [failed] = [it["body"] for it in records if it["kind"] == "model_failed"]
    assert failed["failure"] == "budget"
    assert records[-1]["body"]["status"] == "stopped"


async def test_a_resumed_reaction_has_spent_what_it_had(network: Network) -> None:
    hanging = True

    def script(body: Any) -> Reply:
        return Reply(fault="silence") if hanging and len(provider.requests) == 3 else look_at(len(body["messages"]))

    async with Provider(script) as provider:
        mia = await Person.join(network, "mia")
        runner = ann(provider, tokens(reaction=3500))
        task = asyncio.create_task(runner.run(await network.join("ann", role="reactor")))
        await runner.ready()
        await mia.client.send_text("ann", "look at all")
        await provider.wait_for_requests(3)
        await runner.stop()
        await task
        hanging = False
        async with running(network, ann(provider, tokens(reaction=3500))):
            assert (await mia.hear()).text == SPENT
        assert len(provider.requests) == 4  # two before, the interrupted one, and the last one that fits


async def test_a_call_that_does_not_fit_into_its_turn_is_not_made(network: Network) -> None:
    async with Provider([text("never")]) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, ann(provider, tokens(turn=101))):
            assert (await mia.ask("ann", "hello")).text == SPENT
        assert provider.requests == []


async def test_a_day_holds_over_reactions_and_restarts(tmp_path: Path) -> None:
    config = NodeConfig.model_validate({"host": "127.0.0.1", "port": 0, "db": str(tmp_path / "node.db")})
    token = make_token()
    async with Provider(lambda body: used(text("ok"), 1000, 0)) as provider:
        answers = []
        for person in ("mia", "joe"):  # hub and agent restart each time
            async with serve(config) as served:
                client = NetworkClient(person, served.url, kind="human", token=served.owner_token)
                async with client:
                    someone, runner = Person(client), ann(provider, tokens(day=3050), url=served.url, token=token)
                    task = asyncio.create_task(runner.run())
                    await runner.ready()
                    answers += [(await someone.ask("ann", "hello")).text for _ in range(2)]
                    await runner.stop()
                    await task
    assert answers == ["ok", "ok", "ok", SPENT]


async def test_a_root_is_one_budget_for_agents_that_share_it(network: Network) -> None:
    """Ann asks bob. Ann's usage counts when bob is asked, and bob's usage counts for ann."""
    replies = {
        "ann": iter([used(calls([ask_for("ask", {"agent_ids": ["bob"], "text": "and?"})]), 2000, 0), text("never")]),
        "bob": iter([used(text("I say"), 900, 0)]),
    }

    async with Provider(
        lambda body: next(replies["bob" if '"bob"' in str(body["messages"][0]) else "ann"])
    ) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, ann(provider, tokens(root=3000)), ann(provider, tokens(root=3000), "bob")):
            sent = await mia.client.send_text("ann", "hello")
            assert (await mia.hear()).text == SPENT
            spent = await mia.client.call("network.spent", {"seq": sent.seq})
            assert sum(it["prompt_tokens"] for it in spent["of_root"].values()) == 2900
            # Another conversation has its own budget, and this one continues after it is resumed.
            replies["ann"] = iter([text("fresh"), text("again")])
            assert (await mia.ask("ann", "hello")).text == "fresh"
            await mia.client.call("network.resume_root", {"root": sent.seq})
            await mia.client.send("agent:ann", "go on", cause=sent.seq)
            assert (await mia.hear()).text == "again"


async def test_who_claims_too_much_stops_itself_and_not_the_conversation(network: Network) -> None:
    """The agent "liar" receives mia's broadcasts and ann's questions. Ann answers, whatever its records claim."""
    replies = iter([used(text("fine"), 900, 0), used(text("still fine"), 900, 0)])
    async with Provider(lambda body: next(replies)) as provider:
        mia, liar = await Person.join(network, "mia"), await network.join("liar", role="reactor")
        async with running(network, ann(provider, tokens(root=10_000))):
            root = await mia.client.send("broadcast", "hello", requires_response=["ann"])
            await mia.hear()
            await liar.record("r", "started", {"trigger": root.seq}, record_id="1")
            usage = {"prompt_tokens": 10**12, "completion_tokens": 0}
            await liar.record("r", "model_reply", {"reply": {"usage": usage, "model": "m"}}, record_id="2")
            await mia.client.send("agent:ann", "and now?", cause=root.seq)
            assert (await mia.hear()).text == "still fine"
            spent = await liar.call("network.spent", {"seq": root.seq})
            assert spent["by_agent"]["liar"]["m"]["prompt_tokens"] == network.hub.limits.max_record_tokens


async def test_calls_under_way_are_reserved(network: Network) -> None:
    """Two reactions of one agent run at the same time. The second reaction's call does not fit next to the first
    one's.
    """
    gate = asyncio.Event()

    async def script(body: Any) -> Reply:
        await gate.wait()
        return used(text("ok"), 500, 0)

    async with Provider(script) as provider:
        mia, joe = await Person.join(network, "mia"), await Person.join(network, "joe")
        async with running(network, ann(provider, tokens(reserve=1000, day=1800))):
            await mia.client.send_text("ann", "hello")
            await provider.wait_for_requests(1)
            assert (await joe.ask("ann", "hello")).text == SPENT
            gate.set()
            assert (await mia.hear()).text == "ok"
            assert (await joe.ask("ann", "hello")).text == "ok"  # 500 of 1,800 are now counted


async def test_money_is_counted_by_prices_of_ones_own(network: Network) -> None:
    prices = Prices({"m": Price(input=Decimal(100), output=Decimal(200))})  # dollars per million tokens
    async with Provider(lambda body: look_at(len(body["messages"]), 1000, 100)) as provider:  # 0.12 each
        mia = await Person.join(network, "mia")
        budget = Budget(usd=MoneyLimits(reaction=Decimal("0.37")), reserve=100, prices=prices, count=lambda written: 0)
        heard = Heard()
        async with running(network, ann(provider, budget, on_event=heard)):
            assert (await mia.ask("ann", "hello")).text == SPENT
            [end] = await heard.finished()
        assert len(provider.requests) == 3
    assert "Budget for this reaction exceeded: $0.3600 of $0.3700 were used" in end.reason


async def test_the_price_is_that_of_the_model_that_is_asked(network: Network) -> None:
    """A turn with a cheaper model fits where a turn with the agent's own model would exceed the budget."""
    prices = Prices(
        {"m": Price(input=Decimal(100), output=Decimal(100)), "cheap": Price(input=Decimal(1), output=Decimal(1))}
    )
    async with Provider([used(text("done"), 1000, 100)]) as provider:
        mia, cheap = await Person.join(network, "mia"), provider.model()
        cheap.name = "cheap"
        budget = Budget(usd=MoneyLimits(reaction=Decimal("0.005")), reserve=100, prices=prices, count=lambda written: 0)
        runner = SimpleAgentRunner(
            "ann", instruction="You look.", model=provider.model(), middleware=[budget],
            policy=AgentPolicy(choose_model=lambda state: cheap),
        )  # fmt: skip
        async with running(network, runner):
            assert (await mia.ask("ann", "hello")).text == "done"


async def test_a_model_that_falls_back_counts_as_the_dearest_of_those_it_asks(network: Network) -> None:
    prices = Prices(
        {"m": Price(input=Decimal(1), output=Decimal(1)), "dear": Price(input=Decimal(100), output=Decimal(100))}
    )
    async with Provider([used(text("done"), 1000, 0)] * 2) as provider:
        mia, dear = await Person.join(network, "mia"), provider.model()
        dear.name = "dear"
        model = FallbackModel(provider.model(), dear)
        # The reserve alone costs 0.01.
        for agent_id, limit, answer in (("ann", "0.05", "done"), ("bob", "0.005", SPENT)):
            budget = Budget(usd=MoneyLimits(turn=Decimal(limit)), reserve=100, prices=prices, count=lambda written: 0)
            runner = SimpleAgentRunner(agent_id, instruction="You look.", model=model, middleware=[budget])
            async with running(network, runner):
                assert (await mia.ask(agent_id, "hello")).text == answer


async def test_money_without_a_price_spends_nothing(network: Network) -> None:
    async with Provider([text("never")]) as provider:
        mia, heard = await Person.join(network, "mia"), Heard()
        budget = Budget(usd=MoneyLimits(day=Decimal(1)))
        async with running(network, ann(provider, budget, on_event=heard)):
            assert (await mia.ask("ann", "hello")).text == "I could not answer: my model is not set up right."
            [end] = await heard.finished()
        assert provider.requests == []
    assert 'The price of the model "m" is unknown' in end.reason


async def test_what_an_agent_inside_of_a_call_used_counts(network: Network) -> None:
    async def cheap(body: Any) -> Reply:
        if "You help" in str(body["messages"][0]):
            return used(text("helped"), 5000, 0)
        return used(calls([ask_for("helper", {"task": "help"})]), 100, 0)

    async with Provider(cheap) as provider:
        mia = await Person.join(network, "mia")
        helper = agent_tool(Agent("helper", "You help.", provider.model()))
        runner = SimpleAgentRunner(
            "ann", instruction="You look.", model=provider.model(), tools=[helper], middleware=[tokens(reaction=4000)]
        )
        async with running(network, runner):
            assert (await mia.ask("ann", "hello")).text == SPENT
        assert len(provider.requests) == 2


# --- loops


class Chatty:
    """A model that always writes to the other agent and finishes."""

    name = "chatty"

    def __init__(self, other: str) -> None:
        self._other = other

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        usage = Usage(900, 100)
        if any("on its way" in (it.content or "") for it in request.messages[3:]):
            return ModelReply(None, (ToolCall("f", "finish", '{"reason": "said"}'),), usage, model=self.name)
        arguments = f'{{"target_agent_id": "{self._other}", "text": "and you?"}}'
        return ModelReply(None, (ToolCall("s", "send_text_message", arguments),), usage, model=self.name)


async def test_two_agents_that_talk_for_ever_stop_by_their_token_budget_visibly(network: Network) -> None:
    heard = Heard()
    mia = await Person.join(network, "mia")

    def talker(agent_id: str, other: str) -> SimpleAgentRunner:
        return SimpleAgentRunner(
            agent_id,
            instruction="You talk.",
            model=Chatty(other),
            middleware=[tokens(reserve=1000, root=20_000)],
            on_event=heard,
        )

    async def stopped() -> Notice:
        async for event in mia.client.events():
            if isinstance(event, Notice) and event.kind == "budget_exhausted":
                return event
        raise AssertionError

    async with running(network, talker("ann", "bob"), talker("bob", "ann")):
        sent = await mia.client.send_text("ann", "talk to bob")
        async with asyncio.timeout(10):
            notice = await stopped()  # an operator is notified
            count = 1
            while not (ends := [it for it in await heard.finished(count) if it.status == "stopped"]):
                count += 1
        assert notice.body["root"] == sent.seq
        assert "20,000 tokens" in notice.body["reason"]
        spent = await mia.client.call("network.spent", {"seq": sent.seq})
        used_up = sum(it["prompt_tokens"] + it["completion_tokens"] for it in spent["of_root"].values())
        assert 18_000 < used_up <= 20_000
        said = len((await mia.client.history("direct:ann~bob")).messages)
        assert 5 <= said <= 20
    assert "Budget for this conversation exceeded" in ends[0].reason
