"""Tests of the configuration hash of an agent: the changes that affect it, and the changes that do not."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import pytest

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.config_hash import describe_middleware, describe_value, hash_config
from roundelay.agents.events import Resumed
from roundelay.agents.features.budget import Budget, MoneyLimits, TokenLimits
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Grounding, Rule
from roundelay.agents.features.few_shot import Example, FewShot
from roundelay.agents.features.prompts import PromptFacts, Prompts
from roundelay.agents.features.registry import ToolRegistry, ToolSet
from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.policy import AgentPolicy, MessageFilter
from roundelay.agents.tools import tool
from roundelay.agents.values import TurnState
from roundelay.app import Network
from tests.support.agents import Heard, Person, make_runner, running


@tool(idempotent=True)
def look(at: str) -> str:
    """Look at something."""
    return at


MODEL = ScriptedModel(lambda request: "hello", name="m")
BOB = Agent("bob", "Help.", MODEL, [look], AgentPolicy(uncounted_tools={"look", "send", "ask"}))


def hash_of(agent: Agent) -> str:
    return hash_config(agent, describe_middleware([agent]), "template", "people")


def never(state: TurnState) -> bool:
    return False


@pytest.mark.parametrize(
    "changed",
    [
        replace(BOB, instruction="Help a lot."),
        replace(BOB, model=ScriptedModel(lambda request: "hello", name="other")),
        replace(BOB, tools=()),
        replace(BOB, policy=AgentPolicy(max_turns=3)),
        replace(BOB, policy=replace(BOB.policy, should_continue=never)),
        replace(BOB, policy=replace(BOB.policy, message_filter=MessageFilter(exclude_senders=("zoe",)))),
        replace(BOB, handoffs=[Handoff(Agent("amy", "Go on.", MODEL))]),
        replace(BOB, middleware=[DataPolicy()]),
    ],
)
def test_what_shapes_an_agent_changes_its_hash(changed: Agent) -> None:
    assert hash_of(changed) != hash_of(BOB)


def test_the_settings_of_a_model_count() -> None:
    warm, cold = ScriptedModel(lambda request: "hello", name="m"), ScriptedModel(lambda request: "hello", name="m")
    warm.settings, cold.settings = {"temperature": 1}, {"temperature": 0}  # type: ignore[attr-defined]
    assert hash_of(replace(BOB, model=warm)) != hash_of(replace(BOB, model=cold))


OPTIONS: list[tuple[Callable[[], Middleware], Callable[[], Middleware]]] = [
    (lambda: Budget(TokenLimits(day=5000)), lambda: Budget(TokenLimits(day=6000))),
    (
        lambda: Budget(usd=MoneyLimits(day=Decimal(1)), prices=Prices({"m": Price(input=Decimal(1), output=Decimal(1))})),
        lambda: Budget(usd=MoneyLimits(day=Decimal(1)), prices=Prices({"m": Price(input=Decimal(2), output=Decimal(1))})),
    ),
    (lambda: ContextEngine(5000), lambda: ContextEngine(6000)),
    (lambda: DataPolicy(redact=["a+"]), lambda: DataPolicy(redact=["b+"])),
    (lambda: DataPolicy(results=["look"]), lambda: DataPolicy(results=["ask"])),
    (lambda: Evaluations([Rule("r", "a", "No a.")]), lambda: Evaluations([Rule("r", "b", "No a.")])),
    (lambda: Evaluations([Grounding(max_chars=1000)]), lambda: Evaluations([Grounding(max_chars=2000)])),
    (lambda: FewShot([Example("a", "b")]), lambda: FewShot([Example("a", "c")])),
    (lambda: Prompts(system="a"), lambda: Prompts(system="b")),
    (lambda: Prompts(facts=PromptFacts("French")), lambda: Prompts(facts=PromptFacts("Dutch"))),
    (lambda: ToolRegistry([look]), lambda: ToolRegistry(sets={"more": ToolSet([look])})),
]  # fmt: skip


@pytest.mark.parametrize(("make", "make_other"), OPTIONS)
def test_options_of_middleware_count_and_are_the_same_when_it_is_made_anew(
    make: Callable[[], Middleware], make_other: Callable[[], Middleware]
) -> None:
    first, again, other = (hash_of(replace(BOB, middleware=[it()])) for it in (make, make, make_other))
    assert first == again
    assert first != other


def test_what_middleware_is_at_does_not_count() -> None:
    registry = ToolRegistry([look])
    agent = replace(BOB, middleware=[registry])
    described = describe_middleware([agent])
    before = hash_config(agent, described)
    registry.clear()
    assert hash_config(agent, described) == before


def test_middleware_may_say_by_itself_what_it_is_set_to() -> None:
    class Timed(Middleware):
        def __init__(self, name: str) -> None:
            self.name = name
            self.made_at = os.urandom(8).hex()

        def describe(self) -> object:
            return self.name

    first, again, other = (hash_of(replace(BOB, middleware=[Timed(it)])) for it in ("a", "a", "b"))
    assert first == again != other


def test_a_value_of_no_end_is_described() -> None:
    endless: list[object] = [re.compile("a")]
    endless.append(endless)
    assert describe_value(endless)


def test_another_process_gives_the_same_hash() -> None:
    code = "from tests.unit.test_config_hash import BOB, OPTIONS, hash_of, replace; print(hash_of(replace(BOB, middleware=[it[0]() for it in OPTIONS])))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert told.strip() == hash_of(replace(BOB, middleware=[it[0]() for it in OPTIONS]))


async def test_a_resumed_reaction_says_that_the_options_of_its_middleware_are_others() -> None:
    changed = []
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        for at, most in enumerate((5000, 5000, 6000)):
            asked = asyncio.Event()

            async def hang(request: ModelRequest, asked: asyncio.Event = asked) -> str:
                asked.set()
                await asyncio.Event().wait()
                return "never"

            heard = Heard()
            runner = make_runner("bob", hang, middleware=[ContextEngine(most)], on_event=heard)
            async with running(network, runner):
                if not at:
                    await mia.client.send_text("bob", "hello")
                await asked.wait()
            changed += [it.config_changed for it in heard.events if isinstance(it, Resumed)]
    assert changed == [False, True]
