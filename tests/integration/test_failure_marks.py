"""Tests of the mark on messages that report a missing answer, for clients, filters and screens, and of the display of
passed checks.
"""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.agents.features.evaluations import Evaluations, Grounding, Rule
from roundelay.agents.models.model import ModelError, ModelRequest
from roundelay.agents.models.scripted import Action, say
from roundelay.agents.policy import AgentPolicy, MessageFilter
from roundelay.app import Network
from roundelay.display.screen import format_message
from tests.support.agents import Person, make_runner, running


def fail(request: ModelRequest) -> Action:
    raise ModelError("The key is wrong.", reason="unauthorized")


def break_down(state: Any) -> bool:
    raise RuntimeError("no")


POLITE, LOUD = Rule("polite", "please", "Say please."), Rule("loud", "!", "Say it louder.")


async def answer_of(script: Any, **options: Any) -> Any:
    async with Network.open() as network, running(network, make_runner("bob", script, **options)):
        return await (await Person.join(network, "mia")).ask("bob", "How is it?")


@pytest.mark.parametrize(
    ("script", "options", "failure"),
    [
        (fail, {"policy": AgentPolicy(model_attempts=1)}, "unauthorized"),
        (lambda _: "Fine.", {"policy": AgentPolicy(should_continue=break_down)}, "error"),
        (lambda _: "Fine.", {"middleware": [Evaluations([POLITE], blocking=["polite"])]}, "blocked"),
        (lambda _: None, {"policy": AgentPolicy(max_turns=1)}, "limit"),
    ],
)
async def test_what_is_no_answer_says_so_in_its_metadata(script: Any, options: dict[str, Any], failure: str) -> None:
    heard = await answer_of(script, **options)
    assert (heard.metadata or {}).get("failure") == failure
    assert f"! no answer ({failure})" in format_message(heard)


async def test_an_answer_has_no_such_mark() -> None:
    heard = await answer_of(lambda _: "Fine.")
    assert "failure" not in (heard.metadata or {})
    heard = await answer_of(lambda _: "Fine.", policy=AgentPolicy(max_turns=1))
    assert "failure" not in (heard.metadata or {})


@pytest.mark.parametrize("is_shown", [True, False])
async def test_a_filter_leaves_them_out_of_prompts(is_shown: bool) -> None:
    prompts: list[str] = []

    def script(request: ModelRequest) -> str:
        prompts.append(request.prompt)
        if len(prompts) == 1:
            raise ModelError("The key is wrong.", reason="unauthorized")
        return "Fine."

    policy = AgentPolicy(model_attempts=1, message_filter=MessageFilter(failures=is_shown))
    async with Network.open() as network, running(network, make_runner("bob", script, policy=policy)):
        mia = await Person.join(network, "mia")
        for _ in range(2):
            await mia.ask("bob", "How is it?")
    assert ("I could not answer" in prompts[1]) is is_shown
    assert prompts[1].count("How is it?") == 2


async def test_checks_that_passed_are_shown_beside_those_that_did_not() -> None:
    checks = Evaluations([POLITE, LOUD, Grounding()])
    heard = await answer_of(lambda _: say("Look, please!"), middleware=[checks])
    assert (heard.metadata or {}) == {"passed_checks": ["polite", "loud"]}, "grounding was held against nothing"
    assert "✓ passed: polite, loud" in format_message(heard)
    policy = AgentPolicy(max_corrections=0)
    heard = await answer_of(lambda _: say("Look, please."), middleware=[checks], policy=policy)
    assert (heard.metadata or {}) == {"failed_checks": ["loud"], "passed_checks": ["polite"]}
    shown = format_message(heard)
    assert "! did not pass: loud" in shown
    assert "✓ passed: polite" in shown
