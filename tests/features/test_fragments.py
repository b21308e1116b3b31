"""Tests of context fragments, which tools gather: they are ranked, shown before the next turn, and cited like
references.
"""

from __future__ import annotations

from typing import Any

from roundelay.agents.agent import Agent
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.references import References
from roundelay.agents.models.model import Model
from roundelay.agents.tools import Output, Tool, tool
from tests.support.agents import Provider
from tests.support.loops import Body, Loop, by_turn, results_of, survives_kills, use


def gathers(name: str, *fragments: dict[str, Any]) -> Tool:
    def look() -> Output:
        """Look something up."""
        return Output(f"{len(fragments)} found", {"fragments": list(fragments)})

    return tool(name=name, idempotent=True)(look)


TOOLS = [
    gathers("search", {"id": "a", "text": "The Rhine is long.", "score": 0.4}, {"id": "b", "text": "It floods.", "score": 0.9}),
    gathers("archive", {"id": "a", "text": "The Rhine is 1,233 km long.", "score": 0.7}, {"id": "c", "text": "Old.", "score": 0.1}),
]  # fmt: skip
SCRIPT = by_turn(use(("search", {})), use(("archive", {})), "1,233 km [1], and it floods [2] [7].")


def make_agent(model: Model) -> Agent:
    return Agent("bob", "", model, TOOLS, middleware=[References(), Fragments(limit=2)])


def last_of(body: Body) -> str:
    return str(body["messages"][-1]["content"])


async def test_fragments_gathered_by_tools_are_ranked_and_shown_in_the_next_turns_instructions() -> None:
    """The best fragments of all turns are only in the trailing message. The result itself stays short."""
    async with Provider(SCRIPT) as provider:
        await Loop(make_agent(provider.model())).drive()
    first, second, third = provider.requests
    assert "gathered" not in str(first)
    assert last_of(second).endswith(
        "right after the statement that it supports:\n[2] b\nIt floods.\n\n[1] a\nThe Rhine is long."
    )
    assert last_of(third).endswith("[2] b\nIt floods.\n\n[1] a\nThe Rhine is 1,233 km long.")
    assert results_of(third) == ["2 found", "2 found"]
    assert "gathered" not in str(third["messages"][:-1])


async def test_fragments_are_cited_like_references() -> None:
    async with Provider(SCRIPT) as provider:
        end = await Loop(make_agent(provider.model())).drive()
    assert end.answer == "1,233 km [1], and it floods [2]."
    sources: Any = end.metadata["sources"]
    assert [(it["n"], it["id"]) for it in sources] == [(1, "a"), (2, "b")]


async def test_fragments_are_the_same_after_a_kill() -> None:
    async with Provider(SCRIPT) as provider:
        whole = await survives_kills(provider, make_agent)
    assert len(whole.requests) == 3


async def test_a_ranking_of_ones_own() -> None:
    shortest = Fragments(limit=1, rank=lambda fragments, state: sorted(fragments, key=lambda it: len(it.text)))
    async with Provider(SCRIPT) as provider:
        await Loop(Agent("bob", "", provider.model(), TOOLS, middleware=[References(), shortest])).drive()
    assert last_of(provider.requests[2]).endswith("\n[3] c\nOld.")
