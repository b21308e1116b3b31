"""Tests of few-shot examples for the models that need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.attachments import Attachments
from roundelay.agents.features.few_shot import Example, ExampleCall, FewShot
from roundelay.agents.features.prompts import Prompts
from roundelay.agents.models.model import Model, ModelRequest
from roundelay.agents.models.prompt_view import EXAMPLE_MARK as MARK
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, ScriptedModel, call, say
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.team import MiddlewareChoice, build_middleware
from roundelay.agents.tools import tool
from tests.support import loops
from tests.support.agents import Provider
from tests.support.loops import by_turn, survives_kills, use


@tool(idempotent=True)
def look(at: str = "it") -> str:
    """Look at something."""
    return f"saw {at}"


EXAMPLES = [
    Example("What is at the door?", "A cat.", [ExampleCall("look", {"at": "the door"}, "a cat")]),
    Example("Paint it.", "Done.", [ExampleCall("paint", {}, "painted")]),
]
SHOWN = [
    {"role": "user", "content": f"{MARK}\nWhat is at the door?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "example_0_0", "type": "function", "function": {"name": "look", "arguments": '{"at": "the door"}'}},
    ]},
    {"role": "tool", "tool_call_id": "example_0_0", "content": "a cat"},
    {"role": "assistant", "content": "A cat."},
]  # fmt: skip


def tidy(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without their empty fields."""
    return [{name: value for name, value in it.items() if value or name == "content"} for it in messages]


async def test_examples_stand_before_the_conversation_in_every_turn_and_after_a_kill() -> None:
    def make(model: Model) -> Agent:
        return Agent("bob", "Help.", model, [look], middleware=[FewShot(EXAMPLES)])

    async with Provider(by_turn(use(("look", {})), "Done.")) as provider:
        whole = await survives_kills(provider, make)
    for body in whole.requests:
        roles = [it["role"] for it in body["messages"][:6]]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert tidy(body["messages"][1:5]) == SHOWN
    assert "paint" not in str(whole.requests)  # the agent has no such tool


@pytest.mark.parametrize(("patterns", "given"), [(["m"], True), (["gpt-4*", "m*"], True), (["gpt-4*"], False)])
async def test_only_the_models_that_need_examples_get_them(patterns: list[str], given: bool) -> None:
    async with Provider(by_turn("Done.")) as provider:
        whole = await survives_kills(
            provider,
            lambda model: Agent("bob", "Help.", model, [look], middleware=[FewShot(EXAMPLES, models=patterns)]),
        )
    assert (MARK in str(whole.requests[0])) is given


async def test_a_turn_on_another_model_has_the_examples_of_that_one() -> None:
    async with Provider(by_turn(use(("look", {})), "Done.")) as provider:
        other = provider.model()
        other.name = "small"

        def make(model: Model) -> Agent:
            policy = AgentPolicy(choose_model=lambda state: other if state.turn == 2 else None)
            return Agent("bob", "Help.", model, [look], policy, middleware=[FewShot(EXAMPLES, models=["small"])])

        whole = await survives_kills(provider, make)
    assert [MARK in str(body) for body in whole.requests] == [False, True]


async def test_examples_stand_in_an_agents_file() -> None:
    given = {"models": ["m*"], "examples": [{"user": "What is at the door?", "answer": "A cat.", "calls": [
        {"tool": "look", "arguments": {"at": "the door"}, "result": "a cat"},
    ]}]}  # fmt: skip
    choice = MiddlewareChoice.model_validate({"few_shot": given})
    async with Provider(by_turn("Done.")) as provider:
        whole = await survives_kills(
            provider, lambda model: Agent("bob", "Help.", model, [look], middleware=[build_middleware(choice, Path())])
        )
    assert tidy(whole.requests[0]["messages"][1:5]) == SHOWN
    with pytest.raises(ValidationError):
        MiddlewareChoice.model_validate({"few_shot": {"examples": []}})


async def test_what_belongs_to_the_prompt_goes_to_the_prompt_and_not_to_an_example(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images of the incoming message, and the text after the conversation, belong to the prompt and not to an
    example.
    """
    pixel = "data:image/png;base64,iVBORw0KGgo="
    monkeypatch.setattr(
        loops, "TRIGGER", loops.TRIGGER.model_copy(update={"content": {"text": "?", "images": [pixel]}})
    )

    def make(model: Model) -> Agent:
        layers = [FewShot(EXAMPLES), Prompts(system="", user="Mind the gap."), Attachments(["image"])]
        return Agent("bob", "Help.", model, [look], middleware=layers)

    async with Provider(by_turn(use(("look", {})), "Done.")) as provider:
        whole = await survives_kills(provider, make)
    for body in whole.requests:
        assert tidy(body["messages"][1:5]) == SHOWN
        told, shown = body["messages"][5]["content"]
        assert told["text"].startswith("<conversation/>\n\nMind the gap.")
        assert shown == {"type": "image_url", "image_url": {"url": pixel}}


@pytest.mark.parametrize("prompt", ["<conversation></conversation>", "Look at the cat."])
async def test_a_scripted_model_does_not_take_examples_for_its_own_turns(prompt: str) -> None:
    """A scripted model also ignores the calls in examples, and reads the real message."""
    seen: list[tuple[int, str, list[str]]] = []

    def script(request: ModelRequest) -> Action:
        view = read_prompt(request)
        seen.append((view.turn, view.incoming_text.partition("\n")[0], [it.content for it in view.tool_results]))
        return call("look", at="the cat") if view.turn == 1 else say("Done.")

    agent = Agent("bob", "", ScriptedModel(script), [look], middleware=[FewShot(EXAMPLES)])
    outer = Agent(
        "amy",
        "",
        ScriptedModel(lambda request: call("bob", task=prompt) if request.turn == 1 else say("So.")),
        [agent_tool(agent)],
    )
    await loops.Loop(outer).drive()
    said = prompt if prompt.startswith("Look") else ""
    assert seen == [(1, said, []), (2, said, ["saw the cat"])]
