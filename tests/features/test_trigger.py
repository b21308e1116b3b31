"""Tests of the information about the trigger in hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.middleware import CallModel, Middleware
from roundelay.agents.models.model import Model
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, tool
from roundelay.agents.values import TurnState
from roundelay.app import Network
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, text
from tests.support.loops import Body, by_turn, results_of, system_of, tools_of, use


class Tells(Middleware):
    """Middleware that writes its information about the message into the request."""

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        it = state.trigger
        assert it is not None
        return step.tell(f"[{it.seq > 0} {it.sender_id} {it.sender_kind} {it.text!r} {dict(it.metadata)}]")


def last_of(body: Body) -> str:
    return str(body["messages"][-1]["content"]).rpartition("\n")[2]


async def test_hooks_know_who_wrote_what_with_which_metadata() -> None:
    async with Provider(by_turn("Yes.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[Tells()])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "Well?", metadata={"mode": "careful"})
            await mia.hear()
    assert last_of(provider.requests[0]) == "[True mia human 'Well?' {'mode': 'careful'}]"


async def test_an_agent_inside_of_a_call_gets_its_task_from_its_caller_and_one_that_takes_over_the_message() -> None:
    def script(body: Body) -> Reply:
        if "helper" in system_of(body):
            return text("helped")
        if "expert" in system_of(body):
            return text("done")
        return use(("hand_over_to_cas", {"note": "go on"})) if results_of(body) else use(("helper", {"task": "count"}))

    async with Provider(script) as provider, Network.open() as network:
        model = provider.model()
        helper = agent_tool(Agent("helper", "You are the helper.", model, middleware=[Tells()]))
        cas = Agent("cas", "You are the expert.", model, middleware=[Tells()])
        bob = SimpleAgentRunner("bob", instruction="x", model=model, tools=[helper], handoffs=[Handoff(cas)])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "Well?")).text == "done"
    told = [last_of(body) for body in provider.requests if last_of(body).startswith("[")]
    assert told == ["[True bob agent 'count' {}]", "[True mia human 'Well?' {}]"]


@pytest.mark.parametrize(("asker", "offered"), [("mia", True), ("joe", False)])
async def test_tools_may_depend_on_who_asks(asker: str, offered: bool) -> None:
    @tool(idempotent=True)
    def pay() -> str:
        """Pay."""
        return "paid"

    class ForMia(Middleware):
        def list_tools(self, state: TurnState) -> Sequence[Tool]:
            return (pay,) if state.trigger is not None and state.trigger.sender_id == "mia" else ()

    async with Provider(by_turn("Yes.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[ForMia()])
        async with running(network, bob):
            person = await Person.join(network, asker)
            await person.ask("bob", "Pay!")
    assert ("pay" in tools_of(provider.requests[0])) is offered


async def test_a_resumed_reaction_has_the_same_message_before_it() -> None:
    """The choice that depends on the message is the same."""

    def choose(state: TurnState) -> str | None:
        return "look" if state.trigger is not None and "look" in state.trigger.text and state.turn == 1 else None

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "a cat"

    def script(body: Body) -> Reply:
        is_forced = isinstance(body.get("tool_choice"), dict)
        return use(("look", {})) if is_forced else text("A cat.") if results_of(body) else text("Nothing.")

    def make(model: Model, **options: Any) -> SimpleAgentRunner:
        policy = AgentPolicy(choose_tool=choose)
        return SimpleAgentRunner("bob", instruction="x", model=model, tools=[look], policy=policy, **options)

    async with (
        Provider([Reply(fault="silence"), use(("look", {})), text("A cat.")]) as provider,
        Network.open() as network,
    ):
        mia = await Person.join(network, "mia")
        task = asyncio.create_task(make(provider.model()).run(await network.join("bob", role="reactor")))
        await mia.client.send_text("bob", "look!")
        await provider.wait_for_requests(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with running(network, make(provider.model())):
            assert (await mia.hear()).text == "A cat."
    first, second, _ = provider.requests
    assert first["tool_choice"] == second["tool_choice"] == {"type": "function", "function": {"name": "look"}}
