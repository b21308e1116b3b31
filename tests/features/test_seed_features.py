"""Tests of the table in `docs/seed-features.md`: the named tests exist, and rows without another test are tested
here.
"""

from __future__ import annotations

import ast
import asyncio
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.postprocessors import FollowUps, Postprocessors
from roundelay.agents.models.model import ToolCall
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import ToolContext, tool
from roundelay.agents.values import AfterTool, ToolResult, TurnState
from roundelay.app import Network
from roundelay.network.config import load_yaml
from tests.support.agents import Heard, Person, Provider, make_runner, running
from tests.support.fake_openai import FakeOpenAI, Reply, text
from tests.support.loops import Body, Loop, by_turn, results_of, survives_kills, system_of, tools_of, turn_of, use

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "seed-features.md"
NONE = "-"
SAID = ("Missing", "Different")
"""Beginnings of the second cell in rows without a test."""


# --- the table


def read_rows() -> list[tuple[str, ...]]:
    """Return the rows of the page's tables: the seed's feature, its form here, and its tests."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith(("| ---", "| In the seed")):
            rows.append(tuple(it.strip() for it in line.strip("|").split(" | ")))
    return rows


@cache
def list_tests(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(it.name for it in tree.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_test_of_the_table_is_there() -> None:
    for row in read_rows():
        check_row(row)


def check_row(row: tuple[str, ...]) -> None:
    assert len(row) == 3, f"a row has three cells: {row}"
    feature, here, tests = row
    assert here, feature
    if tests == NONE:
        assert here.startswith(SAID), "what has no test is missing, or has nothing to test, and says so"
    named = re.findall(r"`([^`]+)`", tests)
    assert bool(named) == (tests != NONE), feature
    for name in named:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), f"there is no {path}"
        assert test.startswith("test_"), feature
        assert test in list_tests(path), f"{file} has no test {test}"


def test_the_table_has_a_part_for_each_seed() -> None:
    source = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)", source, re.MULTILINE) == ["UniqueAI", "Merlin", "OpenAgents", "JAF"]
    assert len(read_rows()) > 100
    assert len({row[0] for row in read_rows()}) == len(read_rows()), "a feature has one row"


# --- UniqueAI


async def test_what_postprocessors_add_is_out_of_later_prompts() -> None:
    def script(body: Body) -> Reply:
        if tools_of(body) == ["suggest"]:
            return use(("suggest", {"questions": ["And how deep is it?"]}))
        return text("The Rhine is 1,233 km long.")

    async with asyncio.timeout(20), Provider(script) as provider, Network.open() as network:
        layers = [Postprocessors(FollowUps(count=1))]
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=layers)
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            first = await mia.ask("bob", "How long is it?")
            await mia.ask("bob", "Thanks.")
    assert first.metadata == {"follow_ups": ["And how deep is it?"]}
    prompt = str([it for it in provider.requests if tools_of(it) != ["suggest"]][1]["messages"])
    assert "1,233 km long." in prompt
    assert "how deep" not in prompt


async def test_text_beside_calls_is_in_the_history_and_in_no_message() -> None:
    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "seen"

    script = by_turn(use(("look", {}), text="Let me look."), "It was seen.")
    async with asyncio.timeout(20), Provider(script) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[look])
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.ask("bob", "Is it there?")
            said = await mia.history("direct:bob~mia")
    assert said == [("mia", "Is it there?"), ("bob", "It was seen.")]
    assert provider.requests[1]["messages"][2]["content"] == "Let me look."


# --- Merlin


async def test_a_model_may_be_told_to_make_one_call_at_a_time() -> None:
    """Providers accept the option only together with tools, and the last turn has no tools."""

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "seen"

    async with Provider(by_turn(use(("look", {})), "It was seen.")) as provider:
        model = provider.model(settings={"parallel_tool_calls": False})
        end = await Loop(Agent("bob", "", model, [look], AgentPolicy(max_turns=2))).drive()
    assert end.answer == "It was seen."
    assert [it.get("parallel_tool_calls") for it in provider.requests] == [False, None]


async def test_what_a_tool_asks_of_a_model_counts_in_its_reaction() -> None:
    """The tool asks an inner agent, which may consist of only an instruction. The inner agent's stream is visible."""

    def script(body: Body) -> Reply:
        if system_of(body).startswith("You translate"):
            return text("Guten Tag", usage=(7, 2))
        return (
            use(("translate", {"words": "hello"}), usage=(20, 3))
            if turn_of(body) == 1
            else text("Done.", usage=(30, 4))
        )

    async with asyncio.timeout(20), Provider(script) as provider, Network.open() as network:
        model, heard = provider.model(), Heard()

        @tool(idempotent=True)
        async def translate(context: ToolContext, words: str) -> str:
            """Translate."""
            assert context.run_agent is not None
            end = await context.run_agent(Agent("translator", "You translate into German.", model), words)
            return end.answer or ""

        bob = SimpleAgentRunner("bob", instruction="x", model=model, tools=[translate], on_event=heard)
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.ask("bob", "What is hello in German?")
            [end] = [it for it in await heard.finished(2) if not it.path]
            records = await mia.records(end.reaction)
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (57, 9)
    [result] = [it["body"] for it in records if it["kind"] == "tool_result"]
    assert (result["content"], result["usage"]["prompt_tokens"]) == ("Guten Tag", 7)


async def test_what_a_message_carries_may_force_a_tool() -> None:
    """A function reads the prompt. If the incoming message has a file, the first turn must read it."""

    @tool(idempotent=True)
    def read_file() -> str:
        """Read the file."""
        return "Milk."

    def choose(state: TurnState) -> str | None:
        incoming = str(state.history[1].content).partition("<incoming_message")[2]
        return "read_file" if state.turn == 1 and "[file " in incoming else None

    async with asyncio.timeout(20), Provider(by_turn("So.")) as provider, Network.open() as network:
        policy = AgentPolicy(choose_tool=choose)
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[read_file], policy=policy)
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            for content in ("plain", {"text": "See this.", "files": [{"name": "notes.txt"}]}, "plain again"):
                await mia.client.send("agent:bob", content)
                await mia.hear()
    forced = {"type": "function", "function": {"name": "read_file"}}
    assert [it.get("tool_choice") for it in provider.requests] == [None, forced, None]


async def test_tools_that_failed_are_known_to_the_policy() -> None:
    """After two failures of a tool, the turns have no tools any more, even in a resumed reaction."""

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        raise LookupError("it is dark")

    def count(state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        failed = state.values["failed"]
        assert isinstance(failed, int)
        state.values["failed"] = failed + (not result.ok)
        return None

    def make(model: Any) -> Agent:
        policy = AgentPolicy(
            initial_state=lambda: {"failed": 0},
            after_tool=count,
            should_send_tools=lambda state: state.values["failed"] != 2,
        )
        return Agent("bob", "", model, [look], policy)

    async with Provider(by_turn(use(("look", {})), use(("look", {})), "I saw nothing.")) as provider:
        whole = await survives_kills(provider, make)
    assert [tools_of(it) for it in whole.requests] == [["look"], ["look"], []]
    assert results_of(whole.requests[-1]) == ["LookupError: it is dark"] * 2


RESEARCH = ROOT / "examples" / "deep_research" / "research.py"


def make_supervisor(provider: Provider, **options: Any) -> SimpleAgentRunner:
    team = load_yaml(RESEARCH.with_name("team.yaml")).value["agents"].value
    [spec] = [it for it in load_agents(team) if it.id == "supervisor"]
    return build_runner(spec, model=provider.model(), **options)


async def test_a_report_is_forced_after_two_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor belongs to the deep-research team, and its model would rather write text."""
    monkeypatch.syspath_prepend(str(RESEARCH.parent))

    def supervise(body: Body) -> Reply:
        if not results_of(body):
            return use(*((f"researcher-{n}", {"task": f"topic {n}"}) for n in (1, 2, 3)))
        if isinstance(body.get("tool_choice"), dict):
            return use(("write_report", {"title": "The report", "findings": results_of(body)}))
        return text("I know enough.")

    async with asyncio.timeout(20), Provider(supervise) as provider, Network.open() as network:
        researchers = [make_runner(f"researcher-{n}", lambda request, n=n: f"It is so {n}.") for n in (1, 2, 3)]
        async with running(network, make_supervisor(provider), *researchers):
            mia = await Person.join(network, "mia")
            answer = await mia.ask("supervisor", "What of bees, whales and leaves?")
    assert answer.text.splitlines() == ["The report", "", "- It is so 1.", "- It is so 2.", "- It is so 3."]
    choices = [it.get("tool_choice") for it in provider.requests]
    assert choices == [None, None, None, {"type": "function", "function": {"name": "write_report"}}]


async def test_the_supervisor_keeps_its_research_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RESEARCH.parent))

    def supervise(body: Body) -> Reply:
        return (
            use(("channels_list", {}), ("researcher-1", {"task": "bees"}), text="Let me see.")
            if turn_of(body) == 1
            else use(("write_report", {"title": "The report", "findings": results_of(body)[1:]}))
        )

    async with asyncio.timeout(20), Provider(supervise) as provider, Network.open() as network:
        heard = Heard()
        supervisor = make_supervisor(provider, on_event=heard)
        async with running(network, supervisor, make_runner("researcher-1", lambda request: "They dance.")):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("supervisor", "What do bees do?")).text == "The report\n\n- They dance."
            [end] = await heard.finished()
            records = await mia.records(end.reaction)
    kept = {it["body"]["tool"]: it["body"]["content"] for it in records if it["kind"] == "tool_result"}
    assert kept["researcher-1"] == "They dance."
    assert kept["write_report"].startswith("The report")
    assert "did not keep the result of channels_list" in kept["channels_list"]


async def test_a_summary_stays_in_its_reaction() -> None:
    """The prompt of the next message contains the messages, but no summary of results."""

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "y" * 1500

    def script(body: Body) -> Reply:
        if system_of(body).startswith("Summarize the earlier turns"):
            return text("The code is 4711.")
        if "and now?" in str(body["messages"][1]["content"]):
            return text("Nothing new.")
        return use(("look", {})) if turn_of(body) < 5 else text("I have looked.")

    async with asyncio.timeout(20), Provider(script) as provider, Network.open() as network:
        layers = [ContextEngine(1900, reserve_tokens=100, summary_tokens=100)]
        policy = AgentPolicy(max_same_calls=9, prompt="full")
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), tools=[look], policy=policy, middleware=layers
        )
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.ask("bob", "Look around.")
            await mia.ask("bob", "and now?")
    *_, before, after = [str(it["messages"]) for it in provider.requests]
    assert "4711" in before
    assert "I have looked." in after
    assert "4711" not in after


# --- OpenAgents

SEED_TEMPLATE = """
<conversation>
    <threads>
        {% for thread_id, thread in message_threads.items() %}
        <thread id="{{ thread_id }}">
            {% for message in thread.messages[-10:] %}
            <message sender="{{ message.sender_id }}">
                {% if message.text_representation %}
                <content>{{ message.text_representation }}</content>
                {% else %}
                <content>{{ message.content }}</content>
                {% endif %}
            </message>
            {% endfor %}
        </thread>
        {% endfor %}
    </threads>
    <current_interaction>
        <incoming_thread_id>{{ incoming_thread_id }}</incoming_thread_id>
        <incoming_message sender="{{ incoming_message.sender_id }}">
            {% if incoming_message.text_representation %}
            <content>{{ incoming_message.text_representation }}</content>
            {% else %}
            <content>{{ incoming_message.content }}</content>
            {% endif %}
        </incoming_message>
    </current_interaction>
</conversation>
"""


async def test_the_seeds_own_template_is_a_template_here(tmp_path: Path) -> None:
    (tmp_path / "seed.jinja").write_text(SEED_TEMPLATE, encoding="utf-8")
    async with asyncio.timeout(20), Provider(by_turn("Fine.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), template=tmp_path / "seed.jinja", channels=["dev"]
        )
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.ask("bob", "first")
            await mia.client.send("agent:bob", {"rows": 3}, text_representation="<three> rows")
            await mia.hear()
    prompt = ElementTree.fromstring(provider.requests[1]["messages"][1]["content"].partition("\n\nTurn")[0])
    said = [(it.get("sender"), (it.findtext("content") or "").strip()) for it in prompt.iter("message")]
    assert said == [("mia", "first"), ("bob", "Fine.")]
    assert prompt.findtext("current_interaction/incoming_thread_id") == "direct:bob~mia"
    assert prompt.findtext("current_interaction/incoming_message/content") == "<three> rows"


async def test_the_runner_for_openai_makes_its_own_model() -> None:
    async with asyncio.timeout(20), FakeOpenAI([text("Fine.")]) as server, Network.open() as network:
        bob = SimpleOpenAIAgentRunner("bob", instruction="Be kind.", model_name="small", base_url=server.base_url)
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "hi")).text == "Fine."
    assert (server.requests[0]["model"], system_of(server.requests[0])[:8]) == ("small", "Be kind.")
