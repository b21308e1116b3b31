"""Tests of citations in combination with structured answers, long results, several asked agents, corrections, a
handoff and a kill.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, JsonValue

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.features.references import (
    MAX_SOURCES_CHARS,
    References,
    find_citations,
    fit_sources,
    map_citations,
    merge_sources,
)
from roundelay.agents.features.registry import ToolRegistry
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import Model
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Output, Tool, tool
from roundelay.app import Network
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, text
from tests.support.loops import Body, Loop, by_turn, results_of, survives_kills, system_of, turn_of, use

RHINE: dict[str, Any] = {"id": "1", "title": "Rhine", "url": "https://rivers.example/rhine"}
ELBE: dict[str, Any] = {"id": "2", "title": "Elbe", "url": "https://rivers.example/elbe"}
NOTE: dict[str, Any] = {"id": "n7", "title": "Field notes"}


class Lengths(BaseModel):
    said: str
    km: list[int]


def finds(name: str, *references: Any, content: str = "Found.") -> Tool:
    def look() -> Output:
        """Look something up."""
        return Output(content, {"references": list(references)})

    return tool(name=name, idempotent=True)(look)


SEARCH = finds("search", RHINE, ELBE)


def titles(metadata: Any) -> list[tuple[int, str]]:
    return [(it["n"], it["title"]) for it in metadata["sources"]]


# --- with structured answers

GIVEN = {"said": "The Rhine [1], not [7]", "km": [10, 20]}


@pytest.mark.parametrize("in_text", [False, True])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_structured_answer_cites_in_its_texts_and_stays_the_value_that_it_is(
    is_first: bool, in_text: bool
) -> None:
    """Numbers in the value are not citations. Nothing is added to the text, and invalid citations are also removed
    from the value.
    """
    middleware: list[Middleware] = [References(in_text=in_text), StructuredAnswer(Lengths)]
    middleware = middleware if is_first else middleware[::-1]
    async with Provider(by_turn(use(("search", {})), use(("give_answer", {"answer": GIVEN})))) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [SEARCH], middleware=middleware)).drive()
    value = {"said": "The Rhine [1], not", "km": [10, 20]}
    assert end.status == "finished"
    assert json.loads(end.answer or "") == value
    assert titles(end.metadata) == [(1, "Rhine")]
    assert end.metadata["structured"] == value


async def test_a_structured_answer_of_numbers_alone_cites_nothing() -> None:
    middleware: list[Middleware] = [References(), StructuredAnswer(list[int])]
    async with Provider(by_turn(use(("search", {})), use(("give_answer", {"answer": [1, 2, 300]})))) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [SEARCH], middleware=middleware)).drive()
    assert (end.answer, end.metadata) == ("[1,2,300]", {"structured": [1, 2, 300]})


async def test_a_structured_answer_of_an_agent_inside_is_cited_anew_in_its_texts() -> None:
    def script(body: Body) -> Reply:
        if "reader" in system_of(body):
            answer = {"said": "May [1].", "km": [1, 2]}
            return use(("give_answer", {"answer": answer})) if results_of(body) else use(("archive", {}))
        return text("So [3].") if results_of(body) else use(("search", {}), ("reader", {"task": "When?"}))

    async with Provider(script) as provider:
        model = provider.model()
        inner: list[Middleware] = [References(), StructuredAnswer(Lengths)]
        reader = Agent("reader", "You are the reader.", model, [finds("archive", NOTE)], middleware=inner)
        end = await Loop(Agent("bob", "", model, [SEARCH, agent_tool(reader)], middleware=[References()])).drive()
    assert results_of(provider.requests[-1])[1].startswith('{"said":"May [3].","km":[1,2]}\n')
    assert titles(end.metadata) == [(3, "Field notes")]


async def test_a_disabled_tool_is_told_beside_a_structured_answer() -> None:
    @tool(idempotent=True, should_use=lambda context: False)
    def plot() -> str:
        """Draw."""
        return "drawn"

    middleware: list[Middleware] = [ToolRegistry([plot]), StructuredAnswer(Lengths)]
    async with Provider(by_turn(use(("plot", {})), use(("give_answer", {"answer": GIVEN})))) as provider:
        end = await Loop(Agent("bob", "", provider.model(), middleware=middleware)).drive()
    assert json.loads(end.answer or "") == GIVEN
    assert end.metadata == {"structured": GIVEN, "disabled_tools": ["plot"]}


# --- parts of long results


async def test_what_is_read_on_cites_in_the_callers_numbers() -> None:
    """The tool reads a further part of another agent's long answer. The [2] of that answer is the caller's [3]."""

    def script(body: Body) -> Reply:
        results = results_of(body)
        if "reader" in system_of(body):
            return text("A" * 150 + " says [2], not [1].") if results else use(("archive", {}))
        match turn_of(body):
            case 1:
                return use(("search", {}), ("reader", {"task": "What?"}))
            case 2:
                return use(("read_result", {"call": "1.1", "offset": 100}))
            case _:
                return text("It says [4], and [3].")

    def make(model: Model) -> Agent:
        reader = Agent("reader", "You are the reader.", model, [finds("archive", NOTE, {"id": "n8", "title": "Map"})], middleware=[References()])  # fmt: skip
        tools = [SEARCH, agent_tool(reader)]
        return Agent("bob", "", model, tools, middleware=[References(), LongResults(100)])

    async with Provider(script) as provider:
        whole = await survives_kills(provider, make, answered=lambda records: len(records.bodies("model_reply")))
    rest = results_of(provider.requests[-1])[2]
    assert rest.startswith("A" * 50 + " says [3], not [4].\n[end of the result: 169 characters]")
    assert "[3] Map" in rest
    assert titles(whole.end.metadata) == [(4, "Field notes"), (3, "Map")]


# --- citations of asked agents


async def test_what_several_asked_agents_cite_is_one_numbering() -> None:
    """Each agent cites its own [1]. The caller reads and cites [1] and [2], and its answer lists both."""

    def script(body: Body) -> Reply:
        results = results_of(body)
        if "rivers" in system_of(body):
            return text("1,233 km [1].") if results else use(("search", {}))
        if "notes" in system_of(body):
            return text("In May [1], or [5].") if results else use(("archive", {}))
        if results:
            return text("Measured in May [2]: 1,233 km [1].")
        return use(("ask", {"agent_ids": ["ann", "cas"], "text": "What do you have?", "timeout_s": 30}))

    async with Provider(script) as provider, Network.open() as network:
        model = provider.model()
        ann = SimpleAgentRunner(
            "ann",
            instruction="You know rivers.",
            model=model,
            tools=[finds("search", RHINE)],
            middleware=[References()],
        )
        cas = SimpleAgentRunner(
            "cas", instruction="You keep notes.", model=model, tools=[finds("archive", NOTE)], middleware=[References()]
        )
        bob = SimpleAgentRunner("bob", instruction="You ask.", model=model, middleware=[References()])
        async with running(network, ann, cas, bob):
            mia = await Person.join(network, "mia")
            heard = await mia.ask("bob", "How long, and since when?")
    told = results_of(provider.requests[-1])[0]
    assert told.startswith(
        '<answer sender="ann">1,233 km [1].</answer>\n\n<answer sender="cas">In May [2], or.</answer>\n'
    )
    assert "[1] Rhine (https://rivers.example/rhine)" in told
    assert "[2] Field notes" in told
    assert heard.text == "Measured in May [2]: 1,233 km [1]."
    assert titles(heard.metadata) == [(2, "Field notes"), (1, "Rhine")]


@pytest.mark.parametrize("sources", [None, "x", 5, [], [5], [{"title": "a"}], [{"n": True}], [{"n": "1"}]])
def test_answers_without_sources_are_left_as_they_are(sources: JsonValue) -> None:
    assert merge_sources([("see [1]", sources), ("and [2]", None)]) == (["see [1]", "and [2]"], [])


def test_a_number_that_another_answers_source_would_get_is_taken_out() -> None:
    given: list[tuple[str, JsonValue]] = [("a [4], [2]", [{"n": 2, "id": "x"}, {"n": 2, "id": "y"}]), ("b [1]", None)]
    assert merge_sources(given) == (["a, [1]", "b"], [{"n": 1, "id": "x"}])


# --- corrections, handoffs and kills


def check(model: Model) -> Agent:
    polite = Rule("polite", "please", "Say please.")
    expert = Agent(
        "cas", "You are the expert.", model, [finds("archive", NOTE, RHINE)], middleware=[References(), Evaluations([polite])]
    )  # fmt: skip
    return Agent("bob", "You hand over.", model, [SEARCH], handoffs=[Handoff(expert)], middleware=[References()])


def hand_over(body: Body) -> Reply:
    match turn_of(body):
        case 1:
            return use(("search", {}))
        case 2:
            return use(("hand_over_to_cas", {"note": "go on"}))
        case 3:
            return use(("archive", {}))
        case 4:
            return text("Look at [2], [3] and [4].")
        case _:
            return text("Look at [3] and [1], please. Not [9].")


async def test_numbering_goes_on_over_a_handoff_a_correction_and_a_kill() -> None:
    async with Provider(hand_over) as provider:
        whole = await survives_kills(provider, check)
    assert whole.end.answer == "Look at [3] and [1], please. Not."
    assert titles(whole.end.metadata) == [(3, "Field notes"), (1, "Rhine")]
    first, second = whole.records.bodies("review")
    assert (first["correction"], second["correction"]) == ("Say please.", None)
    assert first["answer"] == "Look at [2], [3] and."


async def test_one_source_of_an_odd_shape_does_not_cost_the_others() -> None:
    """Otherwise, the text would cite numbers that mean other sources here."""
    odd = finds("search", {"n": 4, "title": ["a", "list"]}, {"n": 5, **ELBE}, 7, None, content="Elbe [5], odd [4].")
    async with Provider(by_turn(use(("archive", {})), use(("search", {})), "Elbe [2].")) as provider:
        agent = Agent("bob", "", provider.model(), [finds("archive", NOTE), odd], middleware=[References()])
        end = await Loop(agent).drive()
    assert results_of(provider.requests[2])[1].startswith("Elbe [2], odd.\n")
    assert titles(end.metadata) == [(2, "Elbe")]


@pytest.mark.parametrize(
    ("said", "cited"),
    [
        ('{"a": [1, 2], "b": "x [3]", "c": {"d": ["[4]", 5]}}', [3, 4]),
        ('["x [2]", [7]]', [2]),
        ("[1, 2]", [1, 2]),
        ("[1] is not JSON", [1]),
        ('{"broken": [1', []),
        ('{"broken": [1]', [1]),
        ("[" * 100_000, []),
        ('{"[5]": 1}', []),
    ],
)
def test_json_cites_in_its_texts_alone(said: str, cited: list[int]) -> None:
    assert find_citations(said) == cited
    assert map_citations(said, lambda number: number) == said


async def test_sources_with_long_texts_are_kept_and_passed_on_with_shorter_ones() -> None:
    """A call may store data of a quarter of a record next to its result. Without its sources, its text would cite
    wrong sources.
    """
    long = [{"id": f"d{it}", "title": f"Page {it}", "text": "word " * 1600} for it in range(20)]
    cited = " ".join(f"[{it}]" for it in range(1, 21))

    def script(body: Body) -> Reply:
        results = results_of(body)
        if "reader" in system_of(body):
            return text(f"All of it {cited}.") if results else use(("archive", {}))
        return text("So [3], and [22]. Not [23].") if results else use(("search", {}), ("reader", {"task": "read"}))

    async with Provider(script) as provider:
        model = provider.model()
        reader = Agent("reader", "You are the reader.", model, [finds("archive", *long)], middleware=[References()])
        agent = Agent("bob", "", model, [SEARCH, agent_tool(reader)], middleware=[References()])
        end = await Loop(agent).drive()
    assert titles(end.metadata) == [(3, "Page 0"), (22, "Page 19")]
    assert end.answer == "So [3], and [22]. Not."


@pytest.mark.parametrize(("count", "chars"), [(5, 20_000), (50, 3_000), (400, 300), (3000, 10)])
def test_what_is_passed_on_of_sources_fits(count: int, chars: int) -> None:
    sources: list[JsonValue] = [{"n": it, "id": f"d{it}", "text": "x" * chars} for it in range(1, count + 1)]
    kept: list[Any] = fit_sources(sources)
    assert len(json.dumps(kept)) <= MAX_SOURCES_CHARS
    assert [it["n"] for it in kept] == list(range(1, len(kept) + 1))
    texts, merged = merge_sources([(f"see [1] and [{min(count, 999)}]", sources)])
    assert find_citations(texts[0]) == ([1, min(count, 999)] if len(merged) >= min(count, 999) else [1])
