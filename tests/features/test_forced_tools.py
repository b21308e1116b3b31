"""Tests of forced tools, which the first turn must call: one request per tool, merged into one reply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent, Handoff, Returns
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.registry import ToolRegistry
from roundelay.agents.models.model import Model
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.text import handoff_name
from roundelay.agents.tools import Tool, tool
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, server_error, text
from tests.support.loops import Body, Loop, Records, results_of, survives_kills, tools_of, turn_of, use


def make(name: str) -> Tool:
    def act(topic: str) -> str:
        """Look something up."""
        return f"{name} knows {topic}"

    return tool(name=name, idempotent=True)(act)


SEARCH, ARCHIVE = make("search"), make("archive")


def script(body: Body) -> Reply:
    """Model script that calls the required tool, or else answers."""
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return use((name, {"topic": "tides"}), text=f"First {name}.", usage=(10, 2))
    return text("Twice a day.", usage=(30, 3))


def name_choice(body: Body) -> str:
    choice = body.get("tool_choice", "auto" if body.get("tools") else "none")
    return str(choice["function"]["name"] if isinstance(choice, dict) else choice)


def make_agent(model: Model) -> Agent:
    return Agent("bob", "", model, [SEARCH, ARCHIVE], middleware=[ForcedTools("archive", "search")])


async def test_forced_tools_on_the_first_turn_only() -> None:
    """Each forced tool is one model request. The merged reply has the calls, texts and results in order and the total
    usage, and is recorded once.
    """
    async with Provider(script) as provider:
        loop = Loop(make_agent(provider.model()))
        end = await loop.drive()
    asked = [(turn_of(body), body.get("tool_choice", "auto")) for body in provider.requests]
    forced: list[Any] = [{"type": "function", "function": {"name": name}} for name in ("archive", "search")]
    assert sorted(asked[:2], key=str) == [(1, forced[0]), (1, forced[1])]
    assert asked[2:] == [(2, "auto")]
    assert [tools_of(body) for body in provider.requests] == [["search", "archive"]] * 3
    assert (end.answer, end.turns, end.tool_calls) == ("Twice a day.", 2, 2)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (50, 7)
    said = provider.requests[2]["messages"][2]
    assert said["content"] == "First archive.\n\nFirst search."
    assert [it["function"]["name"] for it in said["tool_calls"]] == ["archive", "search"]
    assert results_of(provider.requests[2]) == ["archive knows tides", "search knows tides"]
    [first, _] = loop.records.bodies("model_reply")
    assert [it["name"] for it in first["reply"]["tool_calls"]] == ["archive", "search"]
    assert first["reply"]["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize("returns", ["to_person", "to_caller"])
async def test_who_is_handed_the_conversation_has_its_forced_tools_in_its_own_first_turn(returns: Returns) -> None:
    def act(body: Body) -> Reply:
        if turn_of(body) <= 2 and handoff_name("ann") in tools_of(body) and body.get("tool_choice", "auto") == "auto":
            return use((handoff_name("ann"), {"note": "tides"}))
        return script(body)

    async with Provider(act) as provider:
        ann = replace(make_agent(provider.model()), id="ann")
        forced = [ForcedTools("search")] if returns == "to_caller" else []
        handoffs = [Handoff(ann, returns=returns)]
        end = await Loop(Agent("bob", "", provider.model(), [SEARCH], handoffs=handoffs, middleware=forced)).drive()
    asked = [(turn_of(body), body.get("tool_choice", "auto")) for body in provider.requests]
    choices = [(turn, it["function"]["name"] if isinstance(it, dict) else it) for turn, it in asked]
    assert end.answer == "Twice a day."
    if returns == "to_person":
        assert sorted(choices) == [(1, "auto"), (2, "archive"), (2, "search"), (3, "auto")]
    else:  # bob has already had his first turn
        own, others = [(1, "search"), (2, "auto")], [(3, "archive"), (3, "search"), (4, "auto")]
        assert sorted(choices) == [*own, *others, (5, "auto")]


async def test_forced_tools_are_asked_for_again_only_if_their_reply_was_not_recorded() -> None:
    def answered(records: Records) -> int:
        replies = len(records.bodies("model_reply"))
        return replies + 1 if replies else 0  # the first reply replaces two requests

    async with Provider(script) as provider:
        whole = await survives_kills(provider, make_agent, answered=answered)
    assert whole.end.answer == "Twice a day."


async def test_a_forced_tool_that_the_agent_does_not_have_is_named() -> None:
    async with Provider(script) as provider:
        agent = Agent("bob", "", provider.model(), [SEARCH], middleware=[ForcedTools("search", "oracle")])
        end = await Loop(agent).drive()
    assert provider.requests == []
    assert (end.status, end.answer) == ("failed", "I could not answer: my model is not set up right.")
    assert end.reason == 'The agent bob does not have the forced tool "oracle". Its tools: search.'


async def test_forced_tools_have_a_turn_beside_the_last_one_or_the_agent_is_refused() -> None:
    async with Provider(script) as provider, Network.open() as network:
        options: dict[str, Any] = {"instruction": "x", "model": provider.model(), "tools": [SEARCH]}
        forced = [ForcedTools("search")]
        with pytest.raises(ConfigError, match="ForcedTools needs 2 turns, and max_turns is 1"):
            SimpleAgentRunner("bob", policy=AgentPolicy(max_turns=1), middleware=forced, **options)
        async with running(network, SimpleAgentRunner("bob", middleware=forced, **options)):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "Tides?", metadata={"limits": {"max_turns": 1}})
            assert (await mia.hear()).text == "Twice a day."
    assert [name_choice(body) for body in provider.requests] == ["search", "none"]


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        (["search"], ["search", "auto"]),
        (["search", "finish", "oracle", ["search"], 5], ["search", "auto"]),
        ("search", ["auto"]),
        (None, ["auto"]),
    ],
)
async def test_a_message_forces_those_that_the_author_lets_messages_force(named: object, asked: list[str]) -> None:
    async with Provider(script) as provider, Network.open() as network:
        forced = ForcedTools(by_message=("search", "archive"))
        options: dict[str, Any] = {"model": provider.model(), "tools": [SEARCH, ARCHIVE], "middleware": [forced]}
        async with running(network, SimpleAgentRunner("bob", instruction="x", **options)):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "Tides?", metadata={"forced_tools": named})
            assert (await mia.hear()).text == "Twice a day."
    assert [name_choice(body) for body in provider.requests] == asked


async def test_the_failure_of_one_forced_call_is_the_failure_of_the_turn() -> None:
    def fail(body: Body) -> Reply:
        is_search = body["tool_choice"]["function"]["name"] == "search"
        return server_error() if is_search else script(body)

    async with Provider(fail) as provider:
        policy = AgentPolicy(model_attempts=1)
        agent = Agent(
            "bob", "", provider.model(), [SEARCH, ARCHIVE], policy, middleware=[ForcedTools("archive", "search")]
        )
        loop = Loop(agent)
        end = await loop.drive()
    assert (end.status, end.answer) == ("failed", "I could not answer: my model failed.")
    assert loop.records.bodies("model_reply") == []


def test_forced_tools_are_named_in_the_agents_file(tmp_path: Path) -> None:
    path = tmp_path / "bob.yaml"
    path.write_text("{id: bob, instruction: x, model: {rules: []}, middleware: [{forced_tools: {tools: [search]}}]}")
    [spec] = load_agents(path)
    [made] = build_runner(spec).agent.middleware
    assert isinstance(made, ForcedTools)
    path.write_text("{id: bob, instruction: x, model: {rules: []}, middleware: [{forced_tools: {tools: []}}]}")
    with pytest.raises(ConfigError, match="forces nothing: name tools, or set by_message to"):
        load_agents(path)
    path.write_text(
        "{id: bob, instruction: x, model: {rules: []}, middleware: [{forced_tools: {by_message: [search]}}]}"
    )
    load_agents(path)


async def test_a_forced_tool_of_a_registry_may_be_disabled_and_counts_in_the_limits() -> None:
    """The first turn calls both tools despite the limit of calls. The person is notified of the disabled one."""

    @tool(idempotent=True, should_use=lambda context: False)
    def plot(topic: str) -> str:
        """Draw."""
        return "drawn"

    async with Provider(script) as provider:
        middleware = [ForcedTools("plot", "search"), ToolRegistry([SEARCH, plot])]
        agent = Agent("bob", "", provider.model(), [], AgentPolicy(max_tool_calls=1), middleware=middleware)
        end = await Loop(agent).drive()
    assert end.answer == "Twice a day.\n\n(plot is not enabled here, so it was not used.)"
    assert results_of(provider.requests[-1]) == ["Not run: plot is not enabled here.", "search knows tides"]
    assert tools_of(provider.requests[-1]) == []  # the call that ran has reached the limit
    assert end.tool_calls == 1


async def test_a_forced_tool_that_was_taken_away_is_named() -> None:
    registry = ToolRegistry([SEARCH, ARCHIVE])
    registry.unregister("archive")
    async with Provider(script) as provider:
        middleware = [ForcedTools("search", "archive"), registry]
        end = await Loop(Agent("bob", "", provider.model(), middleware=middleware)).drive()
    assert provider.requests == []
    assert end.reason == 'The agent bob does not have the forced tool "archive". Its tools: search.'


async def test_forced_replies_that_were_cut_withheld_or_say_nothing_do_not_cost_the_others() -> None:
    odd = {"archive": Reply("", finish_reason="content_filter"), "clock": Reply(None, finish_reason="stop")}

    def answer(body: Body) -> Reply:
        choice = body.get("tool_choice")
        return odd.get(choice["function"]["name"]) or script(body) if isinstance(choice, dict) else script(body)

    async with Provider(answer) as provider:
        tools = [SEARCH, ARCHIVE, make("clock")]
        middleware = [ForcedTools("archive", "clock", "search")]
        end = await Loop(Agent("bob", "", provider.model(), tools, middleware=middleware)).drive()
    assert end.answer == "Twice a day."
    assert results_of(provider.requests[-1]) == ["search knows tides"]
