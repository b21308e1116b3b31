"""Tests of agents that hand over, ask or call each other in circles, from both ends and all at once: each circle ends
and says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import Any

import pytest

from roundelay.agents import Agent, AgentPolicy, Handoff, Middleware
from roundelay.agents import replies as awaited
from roundelay.agents.agent import Returns
from roundelay.agents.agent_tools import agent_tool, remote_agent_tool, remote_handoff
from roundelay.agents.events import Event, ToolCallEnd, ToolCallStart, TurnStart, Waiting
from roundelay.agents.features.budget import Budget, MoneyLimits
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.models.model import ModelRequest, NamedTool
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Script, ScriptedModel, call, finish, send
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Tool, tool
from roundelay.agents.values import TurnState
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from tests.support.agents import Heard, Person, make_runner, running

PATIENCE_S = 30.0


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


def last_result(request: ModelRequest) -> str:
    return read_prompt(request).tool_results[-1].content


# --- circles of questions


def make_asker_script(agent_id: str, asks: str, meet: asyncio.Barrier) -> Callable[[ModelRequest], Awaitable[Any]]:
    """Return a script that reacts to a greeting by asking the next agent, once all others do the same, and reports
    the result to mia. The script also answers questions.
    """

    async def script(request: ModelRequest) -> Any:
        view = read_prompt(request)
        if view.incoming_text == "how many?":
            return f"{agent_id} has two"
        match request.turn:
            case 1:
                await meet.wait()
                return call("ask", agent_ids=[asks], text="how many?", timeout_s=300)
            case 2:
                return send("mia", last_result(request))
            case _:
                return finish()

    return script


async def greet(network: Network, pairs: Sequence[tuple[str, str]]) -> None:
    clients = {agent_id: await network.join(agent_id) for agent_id, _ in pairs}
    for sender, to in pairs:
        await clients[sender].send_text(to, "hello")


@pytest.mark.parametrize("ring", [("ann", "bob"), ("ann", "bob", "cid")])
async def test_agents_that_ask_each_other_in_a_circle_out_of_the_very_threads_they_ask_in_all_get_answers(
    network: Network, ring: tuple[str, ...]
) -> None:
    """Each agent has a running reaction in the thread in which the previous one asks. Behind that reaction, the
    question would wait forever.
    """
    mia, meet = await Person.join(network, "mia"), asyncio.Barrier(len(ring))
    after = dict(zip(ring, (*ring[1:], ring[0]), strict=True))
    await greet(network, list(after.items()))
    runners = [make_runner(agent_id, make_asker_script(agent_id, after[agent_id], meet)) for agent_id in ring]
    # ann is greeted by the last agent, and asks the next one
    async with asyncio.timeout(PATIENCE_S), running(network, *runners):
        told = {(it.sender_id, it.text) for it in [await mia.hear() for _ in ring]}
    assert told == {
        (agent_id, f'<answer sender="{asked}">{asked} has two</answer>') for agent_id, asked in after.items()
    }


async def test_a_restarted_agent_takes_up_both_a_wait_and_the_question_that_went_ahead_of_it(network: Network) -> None:
    """Two reactions of one thread are open. The second reaction must not wait for the first, which waits for the
    asking agent.
    """
    mia, bob = await Person.join(network, "mia"), await network.join("bob")
    await network.join("ann")
    meet, heard, gate = asyncio.Barrier(1), Heard(), asyncio.Event()

    async def script(request: ModelRequest) -> Any:
        if read_prompt(request).incoming_text == "how many?":
            await gate.wait()
        return await ask(request)

    ask = make_asker_script("ann", "bob", meet)
    await bob.send_text("ann", "hello")
    inbox = bob.__aiter__()
    async with asyncio.timeout(PATIENCE_S):
        async with running(network, make_runner("ann", script, on_event=heard)):
            question = await anext(inbox)
            await heard.first(Waiting)
            asked = await bob.send_text(
                "ann", "how many?", requires_response=["ann"], metadata={"ask": {"waiting": ["bob"]}}
            )
            while len([it for it in heard.events if isinstance(it, TurnStart)]) < 2:
                await heard.next()
        async with running(network, make_runner("ann", script)):
            gate.set()
            answer = await anext(inbox)
            await bob.reply(question, "bob has two")  # bob answers only after he has the answer to his own question
            assert (answer.text, answer.reply_to) == ("ann has two", asked.seq)
            assert (await mia.hear()).text == '<answer sender="bob">bob has two</answer>'


async def test_a_question_that_arrives_while_others_are_read_gets_its_own_answer(network: Network) -> None:
    """With `inject`, the model reads new messages, and these get no reaction. The asker of a question would wait in
    vain.
    """
    mia, asked, answered = await Person.join(network, "mia"), asyncio.Event(), asyncio.Event()

    async def bob(request: ModelRequest) -> Any:
        view = read_prompt(request)
        if view.incoming_text == "how many?":
            return "three"
        if request.turn == 1:
            asked.set()
            await answered.wait()
        return [finish("seen")] if request.turn > 1 else call("send_text_message", target_agent_id="mia", text="at it")

    def ann(request: ModelRequest) -> Any:
        if request.turn == 1:
            return call("ask", agent_ids=["bob"], text="how many?", timeout_s=300)
        return last_result(request)

    await network.join("bob")
    await greet(network, [("ann", "bob")])
    runner = make_runner("bob", bob, policy=AgentPolicy(on_new_message="inject"))
    heard = Heard()
    async with asyncio.timeout(PATIENCE_S), running(network, runner, make_runner("ann", ann, on_event=heard)):
        await asked.wait()
        await mia.client.send_text("ann", "go")
        await heard.first(Waiting)
        answered.set()
        said = [(await mia.hear()).text for _ in range(2)]
    assert said == ["at it", '<answer sender="bob">three</answer>']


@pytest.mark.parametrize("others", [("bob",), ("bob", "cid")])
@pytest.mark.parametrize("returns", ["to_person", "to_caller", "never"])
async def test_a_circle_of_handoffs_elsewhere_ends_where_it_closes_and_says_so(
    network: Network, returns: Returns, others: tuple[str, ...]
) -> None:
    """Each agent hands over to the next one at once. The last agent would hand over to the first, which waits for it."""
    mia, ring = await Person.join(network, "mia"), ("ann", *others)
    turns: list[str] = []

    def script(request: ModelRequest) -> Any:
        turns.append(request.agent_id)
        if request.turn == 1:
            return call(next(it.name for it in request.tools if it.name.startswith("hand_over_to_")), note="")
        return f"{request.agent_id}: {last_result(request)}"

    runners = [
        make_runner(agent_id, script, tools=[remote_handoff(to, returns=returns)])
        for agent_id, to in zip(ring, (*others, "ann"), strict=True)
    ]
    refused = f"{ring[-1]}: tool: ann was not asked, because it waits for your answer. Answer it instead."
    passed_on = refused if returns != "to_caller" else ": ".join([*ring[:-1], refused])
    async with asyncio.timeout(PATIENCE_S), running(network, *runners):
        for text in ("help", "and now?"):
            assert (await mia.ask("ann", text)).text == passed_on
    # In a thread that stays with another agent, messages reach that agent without a model call.
    assert turns.count("ann") == {"to_person": 2, "never": 1, "to_caller": 4}[returns]


async def test_agents_that_call_each_other_as_tools_elsewhere_from_both_ends_at_once_all_end(network: Network) -> None:
    mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
    meet = asyncio.Barrier(2)

    def script_of(other: str) -> Script:
        async def script(request: ModelRequest) -> Any:
            if request.turn == 1:
                if read_prompt(request).incoming_text == "go":
                    await meet.wait()
                return call(other, task="count")
            return f"{request.agent_id}: {last_result(request)}"

        return script

    runners = [
        make_runner(agent_id, script_of(other), tools=[remote_agent_tool(other)])
        for agent_id, other in (("ann", "bob"), ("bob", "ann"))
    ]
    async with asyncio.timeout(PATIENCE_S), running(network, *runners):
        told = [it.text for it in await asyncio.gather(mia.ask("ann", "go"), zoe.ask("bob", "go"))]
    refused = "was not asked, because it waits for your answer. Answer it instead."
    assert told == [f"ann: bob: tool: ann {refused}", f"bob: ann: tool: bob {refused}"]


# --- nested agents


async def test_an_agent_that_calls_itself_as_a_tool_is_stopped_at_the_depth_and_its_turns(network: Network) -> None:
    class Itself(Middleware):
        """Middleware that adds the agent as its own tool, which its arguments do not allow."""

        def list_tools(self, state: TurnState) -> Sequence[Tool]:
            return made

    mia, heard = await Person.join(network, "mia"), Heard()

    def script(request: ModelRequest) -> Any:
        return f"{last_result(request)}" if request.turn > 1 else call("again", task="once more")

    made: list[Tool] = []
    made.append(agent_tool(Agent("bob", "x", ScriptedModel(script), middleware=[Itself()]), name="again"))
    runner = make_runner("bob", script, middleware=[Itself()], on_event=heard)
    async with asyncio.timeout(PATIENCE_S), running(network, runner):
        assert (await mia.ask("bob", "go")).text == "tool: Not run: agents call each other 4 deep already."
    assert len([it for it in heard.events if isinstance(it, ToolCallStart)]) == 4


@pytest.mark.parametrize("returns", ["to_person", "to_caller", "never"])
async def test_agents_that_hand_over_to_each_other_for_ever_end_at_the_turns_of_the_first(
    network: Network, returns: Returns
) -> None:
    """A chain of twenty agents, each of which hands over to the next one at once. No agent can be among its own
    handoffs.
    """
    mia, heard, asked = await Person.join(network, "mia"), Heard(), list[str]()

    def script(request: ModelRequest) -> Any:
        asked.append(request.agent_id)
        offered = [spec.name for spec in request.tools if spec.name.startswith("hand_over_to_")]
        return call(offered[0], note="") if offered else None

    agent = Agent("a20", "x", ScriptedModel(script))
    for number in reversed(range(1, 20)):
        agent = Agent(f"a{number}", "x", ScriptedModel(script), handoffs=[Handoff(agent, returns=returns)])
    runner = make_runner(
        "bob", script, handoffs=[Handoff(agent, returns=returns)], policy=AgentPolicy(max_turns=6), on_event=heard
    )
    async with asyncio.timeout(PATIENCE_S), running(network, runner):
        assert (await mia.ask("bob", "go")).text == "I reached the limit of 6 turns without an answer."
        [end] = await heard.finished()
    assert (end.status, end.turns) == ("stopped", 6)
    assert asked == ["bob", "a1", "a2", "a3", "a4", "a5"]


# --- threads that stay with a remote agent


def hand_over_first(request: ModelRequest) -> Any:
    """Script that hands over, and returns the error if the handoff failed."""
    results = read_prompt(request).tool_results
    return f"desk: {results[-1].content}" if results else call("hand_over_to_lawyer", note="")


async def test_a_thread_that_stays_elsewhere_waits_for_one_that_is_away_while_the_person_writes_on(
    network: Network,
) -> None:
    mia, asked, waits = await Person.join(network, "mia"), list[str](), asyncio.Semaphore(0)

    async def lawyer(request: ModelRequest) -> str:
        asked.append(read_prompt(request).incoming_text)
        return f"law {len(asked)}"

    def listen(event: Event) -> None:
        if isinstance(event, Waiting):
            waits.release()

    tools = [remote_handoff("lawyer", returns="never", timeout_s=300)]
    desk = make_runner("desk", hand_over_first, tools=tools, on_event=listen)
    async with asyncio.timeout(PATIENCE_S), running(network, desk):
        async with running(network, make_runner("lawyer", lawyer)):
            assert (await mia.ask("desk", "one")).text == "law 1"
        for text in ("two", "three"):  # the agent `lawyer` is offline now
            await mia.client.send_text("desk", text)
        for _ in range(2):
            await waits.acquire()
        async with running(network, make_runner("lawyer", lawyer)):
            assert [(await mia.hear()).text for _ in range(2)] == ["law 2", "law 3"]
    assert asked == ["mia wrote: one", "mia wrote: two", "mia wrote: three"]


async def test_a_thread_comes_back_from_one_that_never_answers_and_is_asked_no_more(network: Network) -> None:
    mia, away = await Person.join(network, "mia"), await network.join("lawyer")

    def desk(request: ModelRequest) -> Any:
        view = read_prompt(request)
        return hand_over_first(request) if view.incoming_text == "one" or view.tool_results else "desk here"

    tools = [remote_handoff("lawyer", returns="never", timeout_s=0.05)]
    async with asyncio.timeout(PATIENCE_S), running(network, make_runner("desk", desk, tools=tools)):
        gone = "desk: tool: lawyer has not answered within 0.05 s. A later answer comes as a message."
        assert [(await mia.ask("desk", text)).text for text in ("one", "two")] == [gone, "desk here"]
    assert len((await away.history("direct:desk~lawyer")).messages) == 1


@pytest.mark.parametrize("end", ["is removed", "cannot take it", "is stopped by its conversation's limit"])
async def test_a_wait_ends_once_no_answer_can_come_any_more(
    network: Network, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    is_told = end == "cannot take it"  # the hub reports the end, so no look-up is needed
    monkeypatch.setattr(awaited, "FIRST_LOOK_S", 3600.0 if is_told else 0.02)
    limits = Limits(max_hops=1) if end.startswith("is stopped") else Limits()
    async with asyncio.timeout(PATIENCE_S), Network.open(limits=limits) as network, AsyncExitStack() as stack:
        mia, heard = await Person.join(network, "mia"), Heard()
        desk = make_runner(
            "desk", hand_over_first, tools=[remote_handoff("lawyer", returns="never")], on_event=heard
        )  # fmt: skip
        if end.startswith("is stopped"):
            await stack.enter_async_context(running(network, make_runner("lawyer", lambda request: "law")))
        else:
            lawyer = await network.join("lawyer", role="reactor")
        await stack.enter_async_context(running(network, desk))
        await mia.client.send_text("desk", "one")
        await heard.first(Waiting)
        if end == "is removed":
            await mia.client.call("network.remove", {"agent_id": "lawyer"})
        elif end == "cannot take it":
            for _ in range(5):
                await (await anext(lawyer.deliveries())).nack("no", retry_after_ms=1)
        ended = await heard.first(ToolCallEnd)
    assert isinstance(ended, ToolCallEnd)
    told = ended.content
    assert told.startswith("tool: lawyer will not answer: ")
    why = {
        "is removed": "it was removed from the network.",
        "cannot take it": "it failed to take the question, again and again, and does not get it any more.",
        "is stopped by its conversation's limit": "its work on the question has ended (stopped), and no answer came of it.",
    }
    assert told.endswith(why[end])


async def test_a_wait_goes_on_while_a_person_holds_the_thread_and_ends_with_what_is_said_after(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted reaction counts as cancelled, and another one replaces it."""
    monkeypatch.setattr(awaited, "FIRST_LOOK_S", 0.02)
    looks, begins = asyncio.Semaphore(0), asyncio.Semaphore(0)
    find = awaited.find_unanswerable

    async def look(client: NetworkClient, questions: Mapping[str, int]) -> dict[str, str]:
        found = await find(client, questions)
        looks.release()
        return found

    async def lawyer(request: ModelRequest) -> str:
        begins.release()
        return await asyncio.Future() if not is_given else "law"

    monkeypatch.setattr(awaited, "find_unanswerable", look)
    mia, is_given = await Person.join(network, "mia"), False
    desk = make_runner("desk", hand_over_first, tools=[remote_handoff("lawyer", returns="never")])
    async with (
        asyncio.timeout(PATIENCE_S),
        running(network, make_runner("lawyer", lawyer)),
        running(network, desk),
    ):
        await mia.client.send_text("desk", "one")
        await begins.acquire()
        await mia.client.call("network.take", {"thread_id": "direct:desk~lawyer"})
        for _ in range(3):  # the first look-up may have started before
            await looks.acquire()
        is_given = True
        await mia.client.call("network.give", {"thread_id": "direct:desk~lawyer"})
        assert (await mia.hear()).text == "law"


@pytest.mark.parametrize("how", ["forced tools", "a choice of model", "a budget in dollars"])
async def test_a_thread_that_stays_elsewhere_is_passed_on_once_whatever_shapes_the_agent(
    network: Network, how: str
) -> None:
    """Middleware and callables apply to its own model. The message is passed on without that model."""
    mia, asked, models = await Person.join(network, "mia"), list[str](), list[tuple[str, int]]()

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "a cat"

    @tool(idempotent=True)
    def note() -> str:
        """Note."""
        return "noted"

    def named(name: str) -> ScriptedModel:
        def script(request: ModelRequest) -> Any:
            models.append((name, request.turn))
            if isinstance(request.tool_choice, NamedTool):
                return call(request.tool_choice.name)
            view = read_prompt(request)
            is_done = any(it.tool == "hand_over_to_lawyer" for it in view.tool_results)
            return f"{name}: {last_result(request)}" if is_done else call("hand_over_to_lawyer", note="")

        return ScriptedModel(script, name=name)

    def lawyer(request: ModelRequest) -> Any:
        asked.append(read_prompt(request).incoming_text)
        return finish("closed") if "three" in asked[-1] else f"law {len(asked)}"

    middleware: list[Middleware] = []
    policy = AgentPolicy()
    if how == "forced tools":
        middleware = [ForcedTools("look", "note")]
    elif how == "a choice of model":
        policy = AgentPolicy(choose_model=lambda state: named("cheap"))
    else:
        price = Price(input=Decimal(1), output=Decimal(1))
        middleware = [Budget(usd=MoneyLimits(day=Decimal(10)), prices=Prices({"own": price}))]
    desk = SimpleAgentRunner(
        "desk", instruction="x", model=named("own"), tools=[look, note, remote_handoff("lawyer", returns="never")],
        policy=policy, middleware=middleware,
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S), running(network, desk, make_runner("lawyer", lawyer)):
        said = [(await mia.ask("desk", text)).text for text in ("one", "two")]
        models.clear()
        said.append((await mia.ask("desk", "three")).text)
    who = "cheap" if how == "a choice of model" else "own"
    assert said == ["law 1", "law 2", f'{who}: tool: <declined sender="lawyer">closed</declined>']
    assert asked == ["mia wrote: one", "mia wrote: two", "mia wrote: three"]
    assert models == [(who, 2)]
