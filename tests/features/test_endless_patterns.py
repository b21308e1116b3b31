"""Tests of regular expressions of operators that would never end on a stranger's text: the call ends, and the agent
continues.
"""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.agents import patterns
from roundelay.agents.features.data_policy import NOT_KEPT, DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.models.scripted import RuleSet, ScriptedModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from tests.support.agents import Heard, Person, Provider, running
from tests.support.fake_openai import text

ENDLESS, LURE = "(a+)+b", "a" * 5000 + "!"


@pytest.fixture(autouse=True)
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SEARCH_S", 0.05)


@tool(idempotent=True)
def find() -> str:
    """Find what a stranger wrote."""
    return LURE


def make_runner(rules: list[dict[str, Any]], heard: Heard | None = None) -> SimpleAgentRunner:
    model = ScriptedModel(RuleSet.model_validate({"rules": rules}).answer, name="rules")
    return SimpleAgentRunner("ann", instruction="x", model=model, tools=[find], on_event=heard)


@pytest.mark.parametrize("key", ["regex", "result_regex"])
async def test_a_rules_pattern_ends_its_reaction_and_the_next_message_is_answered(network: Network, key: str) -> None:
    rules: list[dict[str, Any]] = [
        {"when": {key: ENDLESS}, "do": [{"say": "found"}]},
        {"when": {"contains": "hello"}, "do": [{"say": "hi"}]},
    ]
    if key == "result_regex":
        rules.append({"when": {"contains": LURE}, "do": [{"tool": "find"}]})
    mia, heard = await Person.join(network, "mia"), Heard()
    async with running(network, make_runner(rules, heard)):
        answer = await mia.ask("ann", LURE)
        [failed] = [
            it["body"] for it in await mia.records((await heard.finished())[0].reaction) if it["kind"] == "model_failed"
        ]
        assert failed["failure"] == "misconfigured"
        assert "Rule 1 of the script cannot be evaluated: The regular expression" in failed["reason"]
        assert answer.sender_id == "ann"
        assert (await mia.ask("ann", "hello")).text == "hi"


async def test_a_templates_power_of_a_strangers_numbers_ends_its_reaction(network: Network) -> None:
    rules = [
        {"when": {"regex": r"(\d+) to the (\d+)"}, "do": [{"say": "{{ match[1] | int ** match[2] | int }}"}]},
        {"when": {"regex": r"count to (\d+)"}, "do": [
            {"say": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"}
        ]},
    ]  # fmt: skip
    mia = await Person.join(network, "mia")
    async with running(network, make_runner(rules)):
        for lure in ("99999999 to the 99999999", "count to 9"):
            assert (await mia.ask("ann", lure)).sender_id == "ann"
        assert (await mia.ask("ann", "2 to the 10")).text == "1024"


def test_a_data_policy_keeps_nothing_of_a_text_that_it_cannot_search_in_time() -> None:
    policy = DataPolicy(redact=[ENDLESS, "secret"])
    body = {"turn": 1, "call": 0, "tool": "look", "content": LURE, "ok": True}
    assert policy.store("tool_result", body)["content"] == NOT_KEPT
    kept = policy.store("tool_result", {**body, "content": "a secret!"})
    assert kept["content"] == "a [redacted]!"


@pytest.mark.parametrize("forbids", [True, False])
async def test_an_answer_that_cannot_be_searched_in_time_does_not_pass_its_check(
    network: Network, forbids: bool
) -> None:
    check = Rule("codes", ENDLESS, "No codes.", forbids=forbids)
    async with Provider([text(LURE), text("Fine!") if forbids else text("aab")]) as provider:
        mia = await Person.join(network, "mia")
        ann = SimpleAgentRunner(
            "ann", instruction="x", model=provider.model(), middleware=[Evaluations([check], blocking=["codes"])],
            policy=AgentPolicy(max_turns=4),
        )  # fmt: skip
        async with running(network, ann):
            assert (await mia.ask("ann", "hello")).text != LURE
        told = provider.requests[1]["messages"][-1]["content"]
    assert "The check codes could not search your answer in time" in told
