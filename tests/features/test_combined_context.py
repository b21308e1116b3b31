"""Tests of features that keep requests small, in combination with forced tools, examples, long results, references, a
data policy and kills.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Grounding, Rule
from roundelay.agents.features.few_shot import Example, ExampleCall, FewShot
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.features.many_results import ManyResults
from roundelay.agents.features.postprocessors import Postprocessors
from roundelay.agents.features.references import References
from roundelay.agents.features.registry import ToolRegistry, ToolSet
from roundelay.agents.features.shown_results import ShownResults
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import AssistantMessage, Model, ToolCall, Usage
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.tools import Output, Tool, tool
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from tests.support.agents import Provider
from tests.support.fake_openai import Reply, text
from tests.support.loops import (
    Body,
    Killed,
    Loop,
    Records,
    by_turn,
    results_of,
    survives_kills,
    system_of,
    turn_of,
    use,
)


def gives(name: str, content: str, summary: str | None = None) -> Tool:
    def look() -> Output:
        """Look something up."""
        return Output(content, summary=summary)

    return tool(name=name, idempotent=True)(look)


# --- forced tools


@pytest.mark.parametrize("is_first", [True, False])
async def test_several_forced_requests_are_not_taken_for_one_large_one(is_first: bool) -> None:
    """Each request has 400 tokens by the provider's count, and all have 1,200 together. The later turns have room for
    everything.
    """
    names = ["first", "second", "third"]

    def script(body: Body) -> Reply:
        choice = body.get("tool_choice")
        if isinstance(choice, dict):
            return use((choice["function"]["name"], {}), usage=(400, 10))
        return by_turn("", use(("first", {}), usage=(500, 10)), text("Done.", usage=(600, 10)))(body)

    middleware: list[Middleware] = [ForcedTools(*names), ContextEngine(1100, reserve_tokens=100)]
    tools = [gives(name, f"{name} result " + "word " * 60, summary="short") for name in names]
    async with Provider(script) as provider:
        given = middleware if is_first else middleware[::-1]
        end = await Loop(Agent("bob", "You look. " * 120, provider.model(), tools, middleware=given)).drive()
    assert (end.status, len(provider.requests)) == ("finished", 5)
    assert [len(it) for it in results_of(provider.requests[-1])] == [313, 314, 313, 313]


async def test_one_forced_request_is_counted() -> None:
    """The provider's count of the forced request applies, so the larger second turn is shortened."""

    def script(body: Body) -> Reply:
        is_forced = isinstance(body.get("tool_choice"), dict)
        return use(("first", {}), usage=(900, 10)) if is_forced else by_turn("", use(("first", {})), "Done.")(body)

    middleware: list[Middleware] = [ForcedTools("first"), ContextEngine(1100, reserve_tokens=100)]
    tools = [gives("first", "word " * 100, summary="a summary")]
    instruction = "You look. " * 200  # about 600 tokens by the estimate
    async with Provider(script) as provider:
        await Loop(Agent("bob", instruction, provider.model(), tools, middleware=middleware)).drive()
    assert results_of(provider.requests[-1])[0] == "[summary of 500 characters] a summary"


# --- examples


async def test_examples_are_never_summed_up_as_turns_even_if_a_hook_left_an_empty_one() -> None:
    """A hook returns a history with an empty turn. No provider receives the empty turn, and no example replaces it."""

    class Odd(Middleware):
        def after_tool(self, state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
            kept = [*state.history[1:-1], AssistantMessage(None), AssistantMessage("")]
            return AfterTool(messages=kept) if state.turn == 1 else None

    def script(body: Body) -> Reply:
        if "Summarize the earlier turns" in system_of(body):
            return text("A summary.")
        return use(("look", {})) if turn_of(body) < 4 else text("Done.")

    example = Example("What is there?", "A cat.", [ExampleCall("look", {}, "an example's result")])
    middleware: list[Middleware] = [
        FewShot([example]),
        Odd(),
        ContextEngine(700, reserve_tokens=100, summary_tokens=50),
    ]
    async with Provider(script) as provider:
        agent = Agent("bob", "", provider.model(), [gives("look", "word " * 300)], middleware=middleware)
        end = await Loop(agent).drive()
    assert end.answer == "Done."
    own = [body for body in provider.requests if "Summarize the earlier turns" not in system_of(body)]
    summed = [body for body in provider.requests if body not in own]
    assert summed
    assert all("example" not in str(body["messages"]) for body in summed)
    assert all(results_of(body)[0] == "an example's result" for body in own)


async def test_examples_do_without_a_system_message() -> None:
    class Bare(Middleware):
        def prepare(self, state: TurnState, step: Any) -> Any:
            from dataclasses import replace

            return replace(step, messages=step.messages[1:])

    async with Provider(by_turn("Done.")) as provider:
        agent = Agent("bob", "x", provider.model(), middleware=[Bare(), FewShot([Example("a", "b")])])
        end = await Loop(agent).drive()
    assert end.answer == "Done."
    assert [it["role"] for it in provider.requests[0]["messages"]] == ["user", "assistant", "user"]


# --- long results


def read(place: str) -> tuple[str, dict[str, Any]]:
    return "read_result", {"call": place, "offset": 100}


async def test_what_is_kept_of_long_results_is_bounded_and_the_model_is_told() -> None:
    """The newest result replaces the oldest one, and this also holds after a kill."""
    tools = [gives(name, letter * 400) for name, letter in (("one", "A"), ("two", "B"), ("three", "C"))]
    script = by_turn(
        use(("one", {})), use(("two", {})), use(read("1.0")), use(("three", {})), use(read("1.0"), read("2.0"), read("4.0")), "Done."
    )  # fmt: skip

    def make(model: Model) -> Agent:
        return Agent("bob", "", model, tools, middleware=[LongResults(100, max_kept_chars=400, max_total_chars=1000)])

    async with Provider(script) as provider:
        await survives_kills(provider, make)
    results = results_of(provider.requests[-1])
    assert results[2].startswith("A" * 100)
    assert results[3].endswith('\n[the rest of call "1.0" was dropped to make room for this result]')
    assert results[4] == (
        'The rest of call "1.0" was dropped: only the newest 1000 characters of long results are kept. '
        "Call the tool again if you need it."
    )
    assert [it[:100] for it in results[5:]] == ["B" * 100, "C" * 100]


async def test_no_result_is_cut_by_the_policy_without_a_way_to_read_on() -> None:
    """The result is shorter than the shown part of a long one, but longer than the policy allows."""
    script = by_turn(use(("look", {})), use(("read_result", {"call": "1.0", "offset": 300})), "Done.")
    async with Provider(script) as provider:
        policy = AgentPolicy(max_result_chars=300)
        agent = Agent(
            "bob", "", provider.model(), [gives("look", "A" * 300 + "B" * 200)], policy, middleware=[LongResults(4000)]
        )
        await Loop(agent).drive()
    first, second = results_of(provider.requests[-1])
    assert first.endswith('[cut here: the first 300 of 500 characters; read_result(call="1.0", offset=300) reads on]')
    assert second == "B" * 200 + "\n[end of the result: 500 characters]"


# --- data that is not stored


async def test_an_answer_that_was_not_kept_is_reviewed_again_and_never_replaced_by_a_sentence() -> None:
    """The tool has returned the answer. The record of its review has only the part that the data policy keeps."""
    given = {"name": "zoe", "total": 12}

    def make(model: Model) -> Agent:
        return Agent("bob", "", model, middleware=[DataPolicy(text=False), StructuredAnswer(dict[str, Any])])

    async with Provider(by_turn(use(("give_answer", {"answer": given})))) as provider:
        model = provider.model()
        first = Loop(make(model))
        whole = await first.drive()
        assert first.records.bodies("review")[0]["answer"].startswith(
            "[This agent's data policy did not keep the answer"
        )
        for last in range(1, first.records.writes + 1):
            loop = Loop(make(model), Records(kill_after=last))
            with pytest.raises(Killed):
                await loop.drive()
            loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
            assert await Loop(make(model), loop.records).drive() == whole, f"killed after record {last}"
            assert loop.records.kept == first.records.kept
    assert (whole.answer, whole.metadata) == ('{"name":"zoe","total":12}', {"structured": given})


# --- all features together


@tool(idempotent=True)
def search(topic: str) -> Output:
    """Search."""
    found = [{"id": "1", "title": "Rhine"}, {"id": "2", "title": "Elbe"}]
    return Output("S" * 900, {"references": found, "use_sets": ["more"]}, summary="found rivers")  # type: ignore[dict-item]


@tool(idempotent=True)
def archive() -> Output:
    """Look into the archive."""
    data: dict[str, Any] = {
        "references": [{"id": "n7", "title": "Notes"}], "fragments": [{"id": "f1", "text": "a fragment"}], "shown": True,
    }  # fmt: skip
    return Output("old " * 100, data, summary="old notes")


def work(body: Body) -> Reply:
    system = system_of(body)
    if "Summarize the earlier turns" in system:
        return text("Rivers were found.", usage=(50, 5))
    if "You check an answer" in system:
        return use(("verdict", {"is_grounded": True}), usage=(30, 3))
    turn = turn_of(body)
    if "reader" in system:
        answers = [use(("archive", {}), usage=(100, 10)), text("bad [1]", usage=(100, 10))]
        return answers[turn - 1] if turn < 3 else text("good [1] " + "x" * 500, usage=(100, 10))
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return use((name, {"topic": "rivers"} if name == "search" else {"task": "read"}), usage=(100, 10))
    match turn:
        case 2:
            return use(("archive", {}), ("read_result", {"call": "1.0", "offset": 200}), usage=(100, 10))
        case 3:
            return use(("reader", {"task": "again"}), usage=(100, 10))
        case 4:
            return use(("archive", {}), ("search", {"topic": "more"}), usage=(100, 10))
        case 5:
            return text("bad [1] [3] [9]", usage=(100, 10))
        case _:
            return text("good [2] [3] [77]", usage=(100, 10))


def make_worker(model: Model) -> Agent:
    no_bad = Rule("no_bad", "bad", "Say nothing bad.", forbids=True)
    reader = Agent("reader", "You are the reader.", model, [archive], middleware=[References(), Evaluations([no_bad])])
    middleware: list[Middleware] = [
        FewShot([Example("q", "a", [ExampleCall("search", {"topic": "x"}, "r" * 300)])]),
        ToolRegistry(sets={"default": ToolSet([search]), "more": ToolSet([archive])}),
        ForcedTools("search", "reader"), References(max_chars=300), Fragments(), LongResults(200), ShownResults(), ManyResults(1),
        ContextEngine(1200, reserve_tokens=100, summary_tokens=60), Evaluations([no_bad], {"search": [Grounding()]}),
        Postprocessors(lambda answer, around: f"{answer} (checked)"),
    ]  # fmt: skip
    return Agent("bob", "You work.", model, [agent_tool(reader)], AgentPolicy(max_turns=9), middleware=middleware)


async def test_all_features_together_go_on_after_any_kill_as_if_there_had_been_none() -> None:
    """The end, the sources, the records and each request equal those of a run without a kill. The strict provider
    checks that every call has a result.
    """
    async with Provider(work) as provider:
        model = provider.model()
        first = Loop(make_worker(model))
        whole = await first.drive()
        requests = list(provider.requests)
        assert all(it.status == 200 for it in provider.received)
        for last in range(1, first.records.writes + 1, 5):
            loop = Loop(make_worker(model), Records(kill_after=last))
            with pytest.raises(Killed):
                await loop.drive()
            loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
            before = len(provider.requests)
            end = await Loop(make_worker(model), loop.records).drive()
            assert (end.answer, end.metadata, end.turns) == (whole.answer, whole.metadata, whole.turns), last
            assert all(body in requests for body in provider.requests[before:]), f"killed after {last}, another request"
        assert all(it.status == 200 for it in provider.received)
    assert whole.answer == "good [2] [3] (checked)"
    assert [(it["n"], it["title"]) for it in whole.metadata["sources"]] == [(2, "Elbe"), (3, "Notes")]  # type: ignore[union-attr, index, call-overload]
    summed = sum("Summarize the earlier turns" in system_of(body) for body in requests)
    assert summed == 1


async def test_what_everything_used_counts_exactly_once() -> None:
    """The run has forced requests, a summary, judges and inner agents. The sum over the records equals the total in
    the end record and the provider's total.
    """
    async with Provider(work) as provider:
        loop = Loop(make_worker(provider.model()))
        end = await loop.drive()
    told = [it["reply"]["usage"] for it in loop.records.bodies("model_reply")]
    told += [it["usage"] for it in loop.records.bodies("review")]
    assert sum((Usage(**it) for it in told), Usage()) == end.usage
    asked = len(provider.requests)
    judged = sum("You check an answer" in system_of(body) for body in provider.requests)
    assert end.usage.prompt_tokens == 100 * (asked - judged - 1) + 30 * judged + 50
