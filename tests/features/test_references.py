"""Tests of references: sources of tools are numbered across tools and turns, cited in the answer, and shown to the
person.
"""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.references import HOW_TO_CITE, References, find_citations
from roundelay.agents.models.model import Model
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Output, Tool, tool
from roundelay.app import Network
from roundelay.display.screen import Screen
from roundelay.network.errors import ConfigError
from roundelay.network.messages import DirectMessage
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, text
from tests.support.loops import Body, Loop, by_turn, results_of, survives_kills, use

RHINE = {
    "id": 1,
    "title": "Rivers of Europe",
    "url": "https://rivers.example/rhine",
    "text": "The Rhine is 1,233 km long.",
}
ELBE = {"id": 2, "title": "Elbe", "url": "https://rivers.example/elbe", "text": "The Elbe is 1,094 km long."}
NOTE = {"id": "n7", "title": "Field notes", "text": "Measured in May."}


def finds(name: str, *references: Any, content: str = "Found.") -> Tool:
    def look() -> Output:
        """Look something up."""
        return Output(content, {"references": list(references)})

    return tool(name=name, idempotent=True)(look)


TOOLS = [finds("search", RHINE, ELBE), finds("archive", NOTE), finds("again", ELBE, {"id": "n7", "text": "In June."})]


def make_agent(model: Model) -> Agent:
    return Agent("bob", "", model, TOOLS, middleware=[References()])


ANSWER = "The Rhine is longer [1], as measured [3, 9]. See `list[7]` and [4](https://x.example) [8]."
SCRIPT = by_turn(use(("search", {}), ("archive", {})), use(("again", {})), ANSWER)


async def test_references_are_numbered_across_tools_and_turns() -> None:
    """The numbers follow the order of the calls. A source with a known address or ID keeps its number."""
    async with Provider(SCRIPT) as provider:
        await Loop(make_agent(provider.model())).drive()
    first, second, third = results_of(provider.requests[2])
    assert first == (
        f"Found.\n\n{HOW_TO_CITE}\n"
        "[1] Rivers of Europe (https://rivers.example/rhine)\nThe Rhine is 1,233 km long.\n\n"
        "[2] Elbe (https://rivers.example/elbe)\nThe Elbe is 1,094 km long."
    )
    assert second.endswith("[3] Field notes\nMeasured in May.")
    assert third.endswith("[2] Elbe (https://rivers.example/elbe)\nThe Elbe is 1,094 km long.\n\n[3] n7\nIn June.")


async def test_invalid_citations_are_removed_and_the_cited_sources_listed() -> None:
    async with Provider(SCRIPT) as provider:
        loop = Loop(make_agent(provider.model()))
        end = await loop.drive()
    assert end.answer == "The Rhine is longer [1], as measured [3]. See `list[7]` and [4](https://x.example)."
    assert end.metadata["sources"] == [
        {"n": 1, "id": "1", "title": "Rivers of Europe", "url": "https://rivers.example/rhine"},
        {"n": 3, "id": "n7", "title": "Field notes"},
    ]
    [review] = loop.records.bodies("review")
    assert review["notes"] == ["references: [8], [9] removed, because there is no such source"]
    assert review["is_accepted"] is True


async def test_numbers_and_sources_are_the_same_after_a_kill() -> None:
    async with Provider(SCRIPT) as provider:
        whole = await survives_kills(provider, make_agent)
    assert [it["n"] for it in whole.records.bodies("review")[0]["metadata"]["sources"]] == [1, 3]


async def test_references_of_an_agent_inside_of_a_call_count_in_its_callers_numbering() -> None:
    """The inner agent's [1] is the caller's [3], in its text too. The caller reads the cited sources."""

    def script(body: Body) -> Reply:
        is_inside = "reader" in str(body["messages"][0]["content"])
        results = results_of(body)
        if is_inside:
            return text("The note says May [1], not June [5].") if results else use(("archive", {}))
        if not results:
            return use(("search", {}), ("reader", {"task": "What do the notes say?"}))
        return text("May [3], by the river [1].")

    async with Provider(script) as provider:
        model = provider.model()
        reader = Agent("reader", "You are the reader.", model, [TOOLS[1]], middleware=[References()])
        agent = Agent("bob", "", model, [TOOLS[0], agent_tool(reader)], middleware=[References()])
        end = await Loop(agent).drive()
    told = results_of(provider.requests[-1])[1]
    assert told == f"The note says May [3], not June.\n\n{HOW_TO_CITE}\n[3] Field notes\nMeasured in May."
    sources: Any = end.metadata["sources"]
    assert [(it["n"], it["title"]) for it in sources] == [(3, "Field notes"), (1, "Rivers of Europe")]
    assert all("text" not in it for it in sources)


async def test_sources_go_with_the_message_and_are_shown_in_chat() -> None:
    async with Provider(SCRIPT) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=TOOLS, middleware=[References()])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            heard = await mia.ask("bob", "Which is longer?")
    assert heard.metadata is not None
    assert [it["n"] for it in heard.metadata["sources"]] == [1, 3]
    shown = io.StringIO()
    Screen(shown).message(heard)
    assert [line.strip() for line in shown.getvalue().splitlines()[1:]] == [
        "| [1] Rivers of Europe https://rivers.example/rhine", "| [3] Field notes",
    ]  # fmt: skip


async def test_no_more_is_numbered_than_can_be_cited_and_a_flood_does_not_hold_up_the_process() -> None:
    """Another agent may name thousands of sources."""
    flood = [{"id": str(it)} for it in range(4_000)]  # the most that fit into a record

    def make(model: Model) -> Agent:
        tools = [finds("search", *flood), finds("again", RHINE, flood[998])]
        return Agent("bob", "", model, tools, middleware=[References(max_chars=100)])

    async with Provider(by_turn(use(("search", {})), use(("again", {})), "It is so [999].")) as provider:
        started = time.process_time()
        end = await Loop(make(provider.model())).drive()
        assert time.process_time() - started < 2
    assert end.metadata["sources"] == [{"n": 999, "id": "998"}]
    assert results_of(provider.requests[-1])[1].endswith("\n[999] 998")


@pytest.mark.parametrize(
    "sources",
    ["none", [1, None, {"n": "x"}], {"n": 1}, [{"n": 1, "title": ["a"]}], [{"n": 1, "title": "a\x1b[2Jb\nc"}]],
)  # fmt: skip
def test_what_a_sender_calls_sources_cannot_drive_the_terminal(sources: Any) -> None:
    message = DirectMessage(
        seq=3, message_id="m", sender_id="eve", sender_kind="agent", to="agent:mia", thread_id="direct:eve~mia", root=3, hops=0,
        sent_at=0, content="hi", metadata={"sources": sources, "follow_ups": sources, "failed_checks": sources},
    )  # fmt: skip
    shown = io.StringIO()
    Screen(shown).message(message)
    assert "\x1b" not in shown.getvalue()
    assert all(line.startswith("  ") for line in shown.getvalue().splitlines()[1:])


async def test_sources_may_stand_in_the_text_instead() -> None:
    async with Provider(SCRIPT) as provider:
        agent = Agent("bob", "", provider.model(), TOOLS, middleware=[References(in_text=True)])
        end = await Loop(agent).drive()
    assert end.answer is not None
    assert end.answer.endswith("\n\nSources:\n[1] Rivers of Europe (https://rivers.example/rhine)\n[3] Field notes")
    assert end.metadata == {}


async def test_a_tool_whose_result_is_the_answer_has_its_sources_beside_it() -> None:
    @tool(idempotent=True, answers=True)
    def tell() -> Output:
        """Tell it."""
        return Output("1,233 km [1].", {"references": [RHINE]})

    async with Provider(by_turn(use(("tell", {})))) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [tell], middleware=[References()])).drive()
    assert end.answer == "1,233 km [1]."
    assert [it["n"] for it in end.metadata["sources"]] == [1]  # type: ignore[union-attr, index, call-overload]


async def test_what_a_tool_gives_as_null_is_not_there() -> None:
    found = {"id": "b12", "title": None, "url": None, "text": "1,233 km", "n": None}
    async with Provider(by_turn(use(("search", {})), "1,233 km [1].")) as provider:
        tool = finds("search", found, content="Found this.")
        end = await Loop(Agent("bob", "", provider.model(), [tool], middleware=[References()])).drive()
    assert "[1] b12\n1,233 km" in results_of(provider.requests[1])[0]
    assert (end.answer, end.metadata) == ("1,233 km [1].", {"sources": [{"n": 1, "id": "b12"}]})


async def test_what_is_no_reference_is_left_out() -> None:
    broken = finds("search", "just text", content="Found this.")
    async with Provider(by_turn(use(("search", {})), "Nothing [1].")) as provider:
        end = await Loop(Agent("bob", "", provider.model(), [broken], middleware=[References()])).drive()
    assert results_of(provider.requests[1]) == ["Found this."]
    assert (end.answer, end.metadata) == ("Nothing.", {})


@pytest.mark.parametrize(
    ("said", "cited"),
    [
        ("a [1] b [2, 3] c [1; 4]", [1, 2, 3, 4]),
        ("```\nx[1]\n``` and `y[2]` but z[3]", [3]),
        ("[2024] [1](https://x.example) [a]", []),
        ("```\nnever closed [1]", []),
    ],
)
def test_citations_are_told_from_code_links_and_years(said: str, cited: list[int]) -> None:
    assert find_citations(said) == cited


def test_references_are_set_in_the_agents_file(tmp_path: Path) -> None:
    path = tmp_path / "bob.yaml"
    path.write_text("{id: bob, instruction: x, model: {rules: []}, middleware: [{references: {in_text: true}}]}")
    [made] = build_runner(load_agents(path)[0]).agent.middleware
    assert isinstance(made, References)


# --- across the messages of a thread


def talk_script(*cited: str) -> Any:
    """Return a script that looks up one thing for each message, by its text, and answers with the next of the
    ``cited`` texts.
    """

    def script(body: Body) -> Reply:
        if results_of(body):
            return text(cited[str(body["messages"][1]["content"]).count('<message sender="bob">')])
        found = re.search(r"<incoming_message.*?<content>(\w+)", str(body["messages"][1]["content"]), re.DOTALL)
        assert found is not None
        return use((found[1], {}))

    return script


async def test_a_number_stays_what_it_was_in_a_thread(tmp_path: Path) -> None:
    """A source that an earlier message cited keeps its number, is listed again if it is cited again, and no other
    source gets its number.
    """
    said = ["The Rhine: [1].", "May [2], and as I said [1]. Not [3].", "The Rhine again [1], the Elbe [3]."]
    async with Provider(talk_script(*said)) as provider, Network.open() as network:
        tools = [finds("rhine", RHINE), TOOLS[1], TOOLS[0]]
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=tools, middleware=[References()])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            heard = [await mia.ask("bob", it) for it in ("rhine", "archive", "search and what was [2]?")]
    listed = [[(it["n"], it["title"]) for it in (one.metadata or {})["sources"]] for one in heard]
    rhine, note, elbe = "Rivers of Europe", "Field notes", "Elbe"
    assert listed == [[(1, rhine)], [(2, note), (1, rhine)], [(1, rhine), (3, elbe)]]
    assert [it.text for it in heard] == [said[0], "May [2], and as I said [1]. Not.", said[2]]


async def test_two_agents_that_gave_one_number_in_a_thread_are_told_apart_and_other_threads_cite_nothing() -> None:
    """The prompt tells them apart. A person's claim of sources has no effect."""
    source = {"n": 1, "title": "Ann's", "url": "https://ann.example"}
    async with Provider(by_turn("See [1], [2] and [3].")) as provider, Network.open() as network:
        bob = SimpleAgentRunner(
            "bob",
            instruction="x",
            model=provider.model(),
            middleware=[References()],
            channels=["dev"],
            policy=AgentPolicy(prompt="full"),
        )
        mia, ann, cid = await Person.join(network, "mia"), await network.join("ann"), await network.join("cid")
        async with running(network, bob):
            for it in (mia.client, ann, cid):
                await it.call("channels.join", {"name": "dev"})
            await ann.post("dev", "Ann says [1].", metadata={"sources": [source]})
            await cid.post("dev", "Cid says [1].", metadata={"sources": [{"n": 1, "title": "Cid's"}]})
            await mia.client.post("dev", "Mia says [3].", metadata={"sources": [{"n": 3, "title": "Mia's"}]})
            answers = [await mia.hear() for _ in range(3)]
            private = await mia.ask("bob", "And here?")
    channel, direct = (str(body["messages"][1]["content"]) for body in provider.requests)
    assert [it in channel for it in ("Ann says [1].", "Cid says [2].", "Mia says [3].")] == [True] * 3
    assert [it in direct for it in ("Ann says.", "Cid says.")] == [True] * 2
    assert (answers[-1].text, [it["title"] for it in (answers[-1].metadata or {})["sources"]]) == (
        "See [1], [2] and.", ["Ann's", "Cid's"],
    )  # fmt: skip
    assert (private.text, private.metadata) == ("See, and.", None)


def test_fragments_without_references_are_refused(tmp_path: Path) -> None:
    """Python and an agent file give the same error: without references, nobody would check or list the citations."""
    said = "agent bob: Fragments needs References. Add References to the agent's middleware"
    with pytest.raises(ConfigError, match=said):
        SimpleAgentRunner("bob", instruction="x", model=ScriptedModel(lambda it: "x"), middleware=[Fragments()])
    path = tmp_path / "bob.yaml"
    path.write_text("id: bob\ninstruction: x\nmodel: {rules: []}\nmiddleware:\n  - fragments: {}\n")
    with pytest.raises(ConfigError, match=rf"bob\.yaml:4.*{said}"):
        build_runner(load_agents(path)[0])
