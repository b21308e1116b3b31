"""Tests of an agent that is killed during its work and restarted with another configuration: it continues the started
work and ends.

Tools may be missing, renamed or have other arguments, and limits, models, middleware and handoffs may differ. In all
cases, providers accept every request, a once tool runs at most once, and existing records do not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from roundelay.agents import AfterTool, Agent, AgentPolicy, Around, Correction, Handoff, Middleware, agent_tool
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.references import References
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.models.model import AssistantMessage, ModelRequest, ToolCall, ToolMessage, UserMessage
from roundelay.agents.models.scripted import Script, ScriptedModel, call, finish, say
from roundelay.agents.tools import Output, Tool, tool
from roundelay.agents.values import Finish, ToolResult, TurnState
from tests.support.loops import Killed, Loop, Records


class Shop:
    """Effects of the agents' tools, in all processes."""

    def __init__(self) -> None:
        self.paid = 0

    def make_tools(self, kind: str) -> list[Tool]:
        look_name, pay_name = ("view", "transfer") if kind == "renamed" else ("look", "pay")

        @tool(name=look_name, idempotent=True)
        async def look(at: str = "it") -> Output:
            """Look."""
            return Output(f"saw {at}", {"references": [{"id": at, "title": at, "text": at}]}, summary="seen")

        @tool(name=look_name, idempotent=True)
        async def look_by_number(number: int) -> str:
            """Look."""
            return f"saw {number}"

        @tool(
            name=pay_name,
            idempotent=kind == "idempotent",
            answers=kind == "answers",
            needs_approval=kind == "needs approval",
        )
        async def pay() -> str:
            """Pay."""
            self.paid += 1
            await asyncio.sleep(0)
            return "paid"

        return [look_by_number if kind == "retyped" else look, pay]

    def make_agent(
        self,
        *,
        script: Script,
        tools: str = "plain",
        policy: AgentPolicy | None = None,
        middleware: list[Middleware] | None = None,
        handoff: Any = "to_caller",
        agent_id: str = "bob",
    ) -> Agent:
        model = ScriptedModel(script)
        inner = Agent("child", "You look.", model, self.make_tools("plain")[:1])
        billing = Agent("billing", "You bill.", model, self.make_tools("plain")[:1])
        own = [*self.make_tools(tools), agent_tool(inner, name="helper")] if tools != "none" else []
        handoffs = [Handoff(billing, returns=handoff)] if handoff is not None else []
        layers = [Polite()] if middleware is None else middleware
        return Agent(agent_id, "Help.", model, own, policy or AgentPolicy(), "", handoffs, layers)


class Polite(Middleware):
    async def review(self, around: Around, answer: str) -> str | Correction:
        return answer if "please" in answer else Correction("Say please.", "polite")


class Forgetting(Middleware):
    def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool:
        return AfterTool(content="seen", messages=[UserMessage("It was long.")], next_tool="look")


class Bill(BaseModel):
    total: int


def work(request: ModelRequest) -> Any:
    """Script that looks, pays, asks a helper, hands over and gets the conversation back, is corrected, and ends."""
    check(request)
    match request.agent_id, request.turn:
        case "child", turn:
            return call("look", at="c") if turn == 1 else "helped"
        case "billing", turn:
            return call("look", at="b") if turn == 3 else "billed"
        case _, 1:
            return [say("At it."), call("look", at="a"), call("pay"), call("helper", task="help")]
        case _, 2:
            return call("hand_over_to_billing", note="bill it")
        case _, 5:
            return "Done."
        case _:
            return "Done, please."


def ramble(request: ModelRequest) -> Any:
    """Script of another model that calls missing tools, and existing tools with wrong arguments."""
    check(request)
    return [call("nope"), call("look", at=5), finish("enough")] if request.tools else None


def check(request: ModelRequest) -> None:
    """Check the rules of providers: each call has one result right after it, and IDs and names are unique."""
    open_calls: list[str] = []
    seen: set[str] = set()
    for message in request.messages:
        match message:
            case ToolMessage():
                open_calls.remove(message.tool_call_id)
            case AssistantMessage():
                assert not open_calls
                open_calls = [it.id for it in message.tool_calls]
                assert seen.isdisjoint(open_calls)
                seen.update(open_calls)
            case _:
                assert not open_calls
    assert not open_calls
    assert len({it.name for it in request.tools}) == len(request.tools)


OTHERS: Mapping[str, Callable[[Shop], Agent]] = {
    "no tools": lambda shop: shop.make_agent(script=work, tools="none"),
    **{
        f"tools {kind}": partial(Shop.make_agent, script=work, tools=kind)
        for kind in ("renamed", "retyped", "idempotent", "answers", "needs approval")
    },
    **{
        f"{turns} turns": partial(Shop.make_agent, script=work, policy=AgentPolicy(max_turns=turns))
        for turns in (1, 3, 5)
    },
    "one call": lambda shop: shop.make_agent(
        script=work, policy=AgentPolicy(max_tool_calls=1, max_tool_calls_per_turn=1, max_same_calls=1, max_depth=1)
    ),
    "text is recorded": lambda shop: shop.make_agent(script=work, policy=AgentPolicy(on_text="record")),
    "text is nudged": lambda shop: shop.make_agent(script=work, policy=AgentPolicy(on_text="nudge")),
    "another model": lambda shop: shop.make_agent(script=ramble),
    "no middleware": lambda shop: shop.make_agent(script=work, middleware=[]),
    "structured": lambda shop: shop.make_agent(script=work, middleware=[StructuredAnswer(Bill)]),
    "references": lambda shop: shop.make_agent(script=work, middleware=[References(), Polite()]),
    "keeps nothing": lambda shop: shop.make_agent(script=work, middleware=[DataPolicy(calls=False, results=False, text=False)]),
    "short context": lambda shop: shop.make_agent(script=work, middleware=[ContextEngine(300, reserve_tokens=50)]),
    "forced": lambda shop: shop.make_agent(script=work, middleware=[ForcedTools("look")]),
    "forgetting": lambda shop: shop.make_agent(script=work, middleware=[Forgetting()]),
    "nobody to hand over to": lambda shop: shop.make_agent(script=work, handoff=None),
    "handed over for good": lambda shop: shop.make_agent(script=work, handoff="never"),
    "another id": lambda shop: shop.make_agent(script=work, agent_id="rob"),
}  # fmt: skip
WRITES = 21
"""Number of records of the whole reaction, without the last one."""


async def be_killed(shop: Shop, after: int) -> Records:
    loop = Loop(shop.make_agent(script=work), Records(kill_after=after))
    with pytest.raises(Killed):
        await loop.drive()
    loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
    return loop.records


async def test_the_work_that_is_interrupted() -> None:
    shop = Shop()
    loop = Loop(shop.make_agent(script=work))
    end = await loop.drive()
    assert (end.status, end.answer, end.turns, shop.paid, loop.records.writes) == (
        "finished",
        "Done, please.",
        6,
        1,
        WRITES,
    )


@pytest.mark.full
@pytest.mark.parametrize("other", OTHERS)
async def test_a_reaction_goes_on_under_any_other_configuration_and_ends(other: str) -> None:
    for after in range(1 + list(OTHERS).index(other) % 2, WRITES, 2):  # every other place, half of them in each test
        shop = Shop()
        records = await be_killed(shop, after)
        kept = dict(records.kept)
        end = await Loop(OTHERS[other](shop), records).drive()
        assert isinstance(end, Finish)
        assert end.status in ("finished", "stopped"), f"killed after record {after}: {end.reason}"
        assert shop.paid <= 1, f"killed after record {after}"
        assert records.kept.items() >= kept.items()
        assert end.turns <= AgentPolicy().max_turns


async def test_a_once_tool_that_is_called_idempotent_later_is_not_run_again() -> None:
    """The tool was declared idempotent only after the call had started."""
    shop = Shop()
    records = await be_killed(shop, 5)
    begun = records.bodies("tool_started")
    assert [(it["tool"], it.get("once", False)) for it in begun] == [("look", False), ("pay", True), ("helper", False)]
    await Loop(OTHERS["tools idempotent"](shop), records).drive()
    [told] = [it["content"] for it in records.bodies("tool_result") if it["tool"] == "pay"]
    assert shop.paid <= 1
    assert "was not repeated" in told
