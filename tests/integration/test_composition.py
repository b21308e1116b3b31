"""Tests of agents that hand over and call each other, with the real SDK. The tests check the provider's requests and
the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from roundelay.agents import Agent, AgentPolicy, Handoff, agent_tool, template_instruction
from roundelay.agents.agent import Returns
from roundelay.agents.events import HandedOver, ToolCallEnd, TurnStart
from roundelay.agents.models.model import ModelError, ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, finish
from roundelay.agents.models.scripted import call as scripted_call
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import ToolContext, tool
from roundelay.agents.values import ToolError
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Heard, Person, Provider, cancel, running, until_recorded
from tests.support.fake_openai import Reply, call, calls, server_error, text


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


Body = Mapping[str, Any]


def system_of(body: Body) -> str:
    return str(body["messages"][0]["content"])


def tools_of(body: Body) -> list[str]:
    return [it["function"]["name"] for it in body.get("tools", ())]


def roles_of(body: Body) -> list[str]:
    return [it["role"] for it in body["messages"]]


def results_of(body: Body) -> list[str]:
    return [it["content"] for it in body["messages"] if it["role"] == "tool"]


@tool(idempotent=True)
def look_up(order: int) -> str:
    """Look an order up."""
    return f"order {order}: paid twice"


class Desk:
    """The agent triage, which may hand over to billing, with one fake provider. The provider's script tells them
    apart by their instructions.
    """

    def __init__(self, server: Provider, handoff: Any = None, **options: Any) -> None:
        self.heard = Heard()
        self.billing = Agent(
            "billing",
            "You are billing.",
            server.model(),
            [look_up],
            description="Knows bills.",
        )
        self.runner = SimpleAgentRunner(
            "desk", instruction="You are triage.", model=server.model(),
            handoffs=[handoff(self.billing) if handoff else self.billing], on_event=self.heard, **options,
        )  # fmt: skip


def triage_then(*billing: Reply, triage: Reply | None = None, then: Reply | None = None) -> Any:
    """Return a script: triage hands over, billing replies in turn, and triage replies once more if it gets the
    conversation back.
    """
    left = list(billing)
    asked: list[str] = []

    def script(body: Body) -> Reply:
        if "You are billing." in system_of(body):
            return left.pop(0)
        asked.append("triage")
        first = triage or calls([("hand_over_to_billing", {"note": "she paid twice"})], "I know who knows.")
        return first if len(asked) == 1 else then or text("triage again")

    return script


async def test_a_handoff_gives_the_conversation_to_an_agent_with_its_own_instruction_and_tools(
    network: Network,
) -> None:
    mia = await Person.join(network, "mia")
    async with Provider(triage_then(calls([("look_up", {"order": 7})]), text("You get it back."))) as server:
        desk = Desk(server)
        async with running(network, desk.runner):
            answer = await mia.ask("desk", "I paid order 7 twice")
            [end] = await desk.heard.finished()
            records = await mia.records(end.reaction)
        requests = server.requests
    assert answer.text == "You get it back."
    assert [("You are triage." in system_of(it), "You are billing." in system_of(it)) for it in requests] == [
        (True, False), (False, True), (False, True),
    ]  # fmt: skip
    assert "hand_over_to_billing" in tools_of(requests[0])
    assert "look_up" not in tools_of(requests[0])
    assert "look_up" in tools_of(requests[1])
    assert "hand_over_to_billing" not in tools_of(requests[1])
    assert "I paid order 7 twice" in str(requests[1]["messages"])
    assert "desk handed this conversation over to you: she paid twice" in str(requests[1]["messages"])
    assert "tool" not in roles_of(requests[1]), "tool traffic is left out"
    assert [it["body"]["agent"] for it in records if it["kind"] == "model_reply"] == ["desk", "billing", "billing"]
    assert [it for it in desk.heard.events if isinstance(it, HandedOver)] == [
        HandedOver(end.reaction, 2, "billing", "desk")
    ]
    assert end.turns == 3


@pytest.mark.parametrize(("history", "roles"), [
    ("texts", ["system", "user", "assistant", "user"]),
    ("all", ["system", "user", "assistant", "tool", "user"]),
    ("none", ["system", "user"]),
    (1, ["system", "user"]),
    (lambda messages: messages[:1], ["system", "user", "assistant", "tool", "user"]),
])  # fmt: skip
async def test_what_the_other_agent_sees_is_filtered(network: Network, history: Any, roles: list[str]) -> None:
    mia = await Person.join(network, "mia")
    async with Provider(triage_then(text("done"))) as server:
        desk = Desk(server, lambda agent: Handoff(agent, history=history))
        async with running(network, desk.runner):
            assert (await mia.ask("desk", "hi")).text == "done"
        assert roles_of(server.requests[1]) == roles


async def test_of_several_handoffs_the_first_wins_after_the_other_calls_of_the_turn(network: Network) -> None:
    mia = await Person.join(network, "mia")
    noted: list[str] = []

    @tool(idempotent=True)
    def note(words: str) -> str:
        """Note."""
        noted.append(words)
        return "noted"

    handing = calls([
        ("hand_over_to_billing", {"note": "1"}), ("note", {"words": "x"}), ("hand_over_to_billing", {"note": "2"}),
        ("finish", {"reason": "no"}),
    ])  # fmt: skip
    async with Provider(triage_then(text("done"), triage=handing)) as server:
        desk = Desk(server, lambda agent: Handoff(agent, history="all"), tools=[note])
        async with running(network, desk.runner):
            assert (await mia.ask("desk", "hi")).text == "done"
        assert results_of(server.requests[1]) == [
            "The conversation is handed over.", "noted", "Not done: hand_over_to_billing came first.",
            "Not done: hand_over_to_billing came first.",
        ]  # fmt: skip
    assert noted == ["x"]


@pytest.mark.parametrize(
    ("returns", "answer", "next_answer"),
    [
        ("to_caller", "triage again", "triage again"),
        ("to_person", "billing says", "triage again"),
        ("never", "billing says", "billing again"),
    ],
)
async def test_control_returns_by_rule(network: Network, returns: Returns, answer: str, next_answer: str) -> None:
    mia = await Person.join(network, "mia")
    async with Provider(triage_then(text("billing says"), text("billing again"), text("billing for ever"))) as server:
        desk = Desk(server, lambda agent: Handoff(agent, returns=returns))
        async with running(network, desk.runner):
            assert (await mia.ask("desk", "one")).text == answer
            assert (await mia.ask("desk", "two")).text == next_answer
            assert (await mia.ask("desk", "three")).text == (
                "billing for ever" if returns == "never" else "triage again"
            )
        if returns == "to_caller":
            assert "billing has handed the conversation back to you. It said: billing says" in str(server.requests[2])


async def test_a_thread_stays_with_an_agent_that_speaks_by_a_tool_and_fails_in_between(network: Network) -> None:
    mia, heard, asked = await Person.join(network, "mia"), Heard(), list[str]()

    def triage(request: ModelRequest) -> Any:
        asked.append("triage")
        return scripted_call("hand_over_to_billing", note="")

    def billing(request: ModelRequest) -> Any:
        view = read_prompt(request)
        asked.append("billing")
        if view.incoming_text == "two":
            raise ModelError("down", reason="misconfigured")
        if view.tool_results:
            return finish()
        return scripted_call("send_text_message", target_agent_id="mia", text=f"billing says {view.incoming_text}")

    handoff = Handoff(Agent("billing", "", ScriptedModel(billing)), returns="never")
    runner = SimpleAgentRunner("desk", instruction="", model=ScriptedModel(triage), handoffs=[handoff], on_event=heard)
    async with running(network, runner):
        assert (await mia.ask("desk", "one")).text == "billing says one"
        assert (await mia.ask("desk", "two")).text.startswith("I could not answer")
        assert (await mia.ask("desk", "three")).text == "billing says three"
        await heard.finished(3)
    assert asked == ["triage", *["billing"] * 5]


# --- agents as tools


def test_an_agent_whose_id_is_no_name_of_a_tool_is_one_nevertheless() -> None:
    assert agent_tool(Agent("bob.smith", "", ScriptedModel(lambda request: "hi"))).name == "bob_smith"


def make_manager(server: Provider, **options: Any) -> SimpleAgentRunner:
    model = server.model()
    tools = [
        agent_tool(Agent("counter", "You count.", model, [look_up], description="Counts.")),
        agent_tool(Agent("writer", "You write.", model), name="write"),
    ]
    return SimpleAgentRunner("boss", instruction="You manage.", model=model, tools=tools, **options)


def manage(body: Body) -> Reply:
    if "You count." in system_of(body):
        done = results_of(body)
        return (
            text(f"counted: {done[-1]}", usage=(10, 1)) if done else calls([("look_up", {"order": 3})], usage=(10, 1))
        )
    if "You write." in system_of(body):
        return text("a poem", usage=(10, 1))
    done = results_of(body)
    if done:
        return text(" and ".join(done), usage=(100, 1))
    return calls([("counter", {"task": "count 3"}), ("write", {"task": "rhyme"})], usage=(100, 1))


async def test_a_manager_calls_two_agents_as_tools(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    async with Provider(manage) as server:
        async with running(network, make_manager(server, on_event=heard)):
            answer = await mia.ask("boss", "count and rhyme")
            ends = await heard.finished(3)
            await until_recorded(mia, ends[0].reaction, "finished")
            records = await mia.records(ends[0].reaction)
        inner = [it for it in server.requests if "You count." in system_of(it)]
    assert answer.text == "counted: order 3: paid twice and a poem"
    assert [it["content"].partition("\n")[0] for it in inner[0]["messages"][1:]] == ["count 3"], "only the tool's input"
    [end] = [it for it in ends if not it.path]
    assert (end.turns, end.tool_calls) == (2, 3), "its own turns, everybody's calls"
    assert end.usage.prompt_tokens == 200 + 30
    assert {(it.path, it.turn) for it in heard.events if isinstance(it, TurnStart)} == {
        ("", 1), ("", 2), ("1.0", 1), ("1.0", 2), ("1.1", 1),
    }  # fmt: skip
    assert [it.path for it in heard.events if isinstance(it, ToolCallEnd) and it.tool == "look_up"] == ["1.0"]
    assert [it["body"].get("path") for it in records if it["kind"] == "model_reply"].count("1.0") == 2
    assert records[-1]["body"]["usage"]["prompt_tokens"] == 230


async def test_agents_inside_of_a_killed_one_go_on_where_they_were(network: Network) -> None:
    mia = await Person.join(network, "mia")
    hold, reached = asyncio.Event(), asyncio.Event()

    async def script(body: Body) -> Reply:
        if "You count." in system_of(body) and results_of(body) and not hold.is_set():
            reached.set()
            await hold.wait()
        return manage(body)

    async with Provider(script) as server:
        first = make_manager(server)
        task = asyncio.create_task(first.run(await network.join("boss", role="reactor")))
        await first.ready()
        await mia.client.send_text("boss", "count and rhyme")
        await reached.wait()
        await first.stop()
        await task
        asked = len(server.requests)
        hold.set()
        async with running(network, make_manager(server)):
            assert (await mia.hear()).text == "counted: order 3: paid twice and a poem"
        assert len(server.requests) - asked == 2, "the call in flight and the manager's second turn"


async def test_agents_are_nested_no_deeper_than_allowed_and_a_failed_one_is_told(network: Network) -> None:
    mia = await Person.join(network, "mia")

    def script(body: Body) -> Reply:
        done = results_of(body)
        if "You are down." in system_of(body):
            return server_error()
        name = "inner" if "inner" in tools_of(body) else "down"
        return text(done[-1]) if done else calls([(name, {"task": "go"})])

    async with Provider(script) as server:
        model = server.model()
        policy = AgentPolicy(max_depth=1, model_attempts=1)
        down = agent_tool(Agent("down", "You are down.", model, policy=policy))
        inner = agent_tool(Agent("inner", "You nest.", model, [down], policy))
        for tools, words in (([inner], "agents call each other 2 deep already"), ([down], "down failed.")):
            runner = SimpleAgentRunner("boss", instruction="You manage.", model=model, tools=tools, policy=policy)
            async with running(network, runner):
                assert words in (await mia.ask("boss", "go")).text


async def test_an_agent_inside_is_cancelled_with_its_caller(network: Network) -> None:
    mia, heard = await Person.join(network, "mia"), Heard()
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> str:
        """Hang."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    def script(body: Body) -> Reply:
        return calls(
            [("inner" if "inner" in tools_of(body) else "hang", {"task": "x"} if "inner" in tools_of(body) else {})]
        )

    async with Provider(script) as server:
        model = server.model()
        tools = [agent_tool(Agent("inner", "You hang.", model, [hang]))]
        runner = SimpleAgentRunner("boss", instruction="You manage.", model=model, tools=tools, on_event=heard)
        async with running(network, runner):
            await mia.client.send_text("boss", "go")
            await begun.wait()
            await cancel(mia.client, thread_id="direct:boss~mia")
            [end] = await heard.finished()
    assert (end.status, end.path) == ("cancelled", "")
    assert ended.is_set()


async def test_an_agent_tool_outside_of_a_reaction_says_so() -> None:
    made = agent_tool(Agent("x", "y", ScriptedModel(lambda request: "z")))
    context = ToolContext("bob", "r", 1, "c", None, None)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="only inside a reaction"):
        await made.call(context, made.parse('{"task": "x"}'))


# --- instructions


async def test_an_instruction_may_be_a_template_or_a_callable_of_the_turn(network: Network) -> None:
    mia = await Person.join(network, "mia")
    sources: list[Any] = [
        template_instruction("Turn {{ turn }} of {{ max_turns }}, {{ agent_id }}."),
        lambda state: f"Turn {state.turn} of {state.max_turns}, {state.agent_id}.",
    ]
    for source in sources:
        async with Provider([calls([call("channels_list")]), text("done")]) as server:
            runner = SimpleAgentRunner("bob", instruction=source, model=server.model())
            async with running(network, runner):
                assert (await mia.ask("bob", "hi")).text == "done"
            assert [
                "Turn 1 of 30, bob." in system_of(server.requests[0]),
                "Turn 2 of 30, bob." in system_of(server.requests[1]),
            ] == [True, True]


@pytest.mark.parametrize("source", ["{{ nobody }}", "{% if %}"])
def test_a_wrong_template_of_an_instruction_is_refused_at_once(source: str) -> None:
    with pytest.raises(ConfigError, match="instruction's template"):
        template_instruction(source)


def test_a_handoff_and_a_tool_of_one_name_are_refused() -> None:
    model = ScriptedModel(lambda request: "z")
    other = Agent("look_up", "x", model)
    with pytest.raises(ToolError, match="two tools, or handoffs, named hand_over_to_look_up"):
        Agent("a", "x", model, [tool(name="hand_over_to_look_up")(look_up.function)], handoffs=[other])  # type: ignore[arg-type]
