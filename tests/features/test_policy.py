"""Tests of an agent's policy: each function runs with a fake provider and is killed after each record, because a
resumed reaction calls it again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.middleware import Around, CallModel, middleware_of
from roundelay.agents.models.model import (
    AssistantMessage,
    Model,
    ModelReply,
    SystemMessage,
    ToolCall,
    Usage,
    UserMessage,
)
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.reaction import Reaction
from roundelay.agents.reaction_state import ReactionSetup
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Tool, tool
from roundelay.agents.values import (
    AfterTool,
    Begin,
    End,
    ModelFailed,
    ToolArgumentsError,
    ToolResult,
    ToolsDone,
    TurnState,
)
from roundelay.app import Network
from tests.support.agents import Person, Provider, make_runner, running
from tests.support.loops import Body, Whole, by_turn, results_of, survives_kills, system_of, tools_of, use


@tool(idempotent=True)
def look(at: str = "it") -> str:
    """Look at something."""
    return f"saw {at}"


@tool(idempotent=True)
def note(text: str) -> str:
    """Keep a note."""
    return f"noted {text}"


OFTEN = [use(("look", {"at": name})) for name in "abcdefgh"]


async def run(script: Any, *tools: Tool, **policy: Any) -> Whole:
    """Run a reaction with this policy, also killed after each record."""
    tools = tools or (look, note)
    async with Provider(script) as provider:
        return await survives_kills(provider, lambda model: Agent("bob", "Help.", model, tools, AgentPolicy(**policy)))


def last_text(body: Body) -> str:
    return str(body["messages"][-1]["content"])


async def test_should_continue_false_makes_the_turn_the_last_one() -> None:
    whole = await run(by_turn(*OFTEN[:2], "Done."), should_continue=lambda state: state.calls.get("look", 0) < 2)
    assert [tools_of(body) for body in whole.requests] == [["look", "note"], ["look", "note"], []]
    assert "Turn 3 of 3, the last one" in last_text(whole.requests[-1])
    assert (whole.end.status, whole.end.answer) == ("stopped", "Done.")
    assert whole.end.reason == "reached a limit of its policy"


async def test_plain_functions_are_middleware_by_the_names_of_their_hooks() -> None:
    """The functions are called like those of a policy and like methods. A name that is not a hook is refused."""

    async def review(around: Around, answer: str) -> str:
        return f"{answer} ({around.agent.id})"

    stop = middleware_of(should_continue=lambda state: state.calls.get("look", 0) < 2, review=review)
    async with Provider(by_turn(*OFTEN[:2], "Done.")) as provider:
        whole = await survives_kills(
            provider, lambda model: Agent("bob", "Help.", model, (look, note), middleware=[stop])
        )
    assert [tools_of(body) for body in whole.requests] == [["look", "note"], ["look", "note"], []]
    assert whole.end.answer == "Done. (bob)"
    assert stop.describe() != middleware_of(should_continue=lambda state: True).describe()
    with pytest.raises(TypeError, match=r"Middleware has no hook named shuold_continue\."):
        middleware_of(shuold_continue=lambda state: True)


async def test_a_turn_without_tools_is_one_that_should_send_none() -> None:
    whole = await run(by_turn(OFTEN[0], "Done."), should_send_tools=lambda state: state.turn == 1)
    assert [tools_of(body) for body in whole.requests] == [["look", "note"], []]
    assert "the last one" not in last_text(whole.requests[-1])
    assert "tool" in last_text(whole.requests[0])
    assert "tool" not in last_text(whole.requests[-1])
    assert (whole.end.status, whole.end.answer) == ("finished", "Done.")


async def test_choose_model_takes_a_cheaper_one_after_retries() -> None:
    """Another function counts the retries in the state's values, like that of a supervisor that must call a tool."""

    def retry(state: TurnState, reason: str) -> str | None:
        retries = int(str(state.values["retries"]))
        if reason != "no_calls" or retries >= 2:
            return None
        state.values["retries"] = retries + 1
        return "You called no tool. Call one."

    async with Provider(by_turn("Hm.", "Hm?", "Hm!")) as provider:
        cheap = provider.model(settings={"temperature": 0})

        def make(model: Model) -> Agent:
            policy = AgentPolicy(
                initial_state=lambda: {"retries": 0},
                on_no_tool_calls=retry,
                choose_model=lambda state: cheap if int(str(state.values["retries"])) > 1 else None,
            )
            return Agent("bob", "Help.", model, [look], policy)

        whole = await survives_kills(provider, make)
    assert [body.get("temperature") for body in whole.requests] == [None, None, 0]
    assert whole.end.answer == "Hm!"


async def test_choose_tool_forces_a_tool_at_a_turn() -> None:
    whole = await run(by_turn(OFTEN[0], "Done."), choose_tool=lambda state: "look" if state.turn == 1 else None)
    forced = {"type": "function", "function": {"name": "look"}}
    assert [body.get("tool_choice") for body in whole.requests] == [forced, None]


async def test_on_no_tool_calls_no_calls_may_ask_once_more_or_end() -> None:
    def remind(state: TurnState, reason: str) -> str | End | None:
        assert reason == "no_calls"
        return "Look first." if not state.calls and state.turn == 1 else End("In other words: yes.", "rephrased")

    whole = await run(by_turn("Yes.", OFTEN[0], "Yes."), on_no_tool_calls=remind)
    assert last_text(whole.requests[1]).startswith("Look first.")
    assert (whole.end.status, whole.end.answer, whole.end.reason) == ("finished", "In other words: yes.", "rephrased")


async def test_on_no_tool_calls_limit_reached_tells_the_model_before_its_last_turn() -> None:
    def tell(state: TurnState, reason: str) -> str | None:
        return "Write the report now." if reason == "limit_reached" else None

    whole = await run(by_turn(*OFTEN[:2], "The report."), on_no_tool_calls=tell, max_turns=3)
    assert last_text(whole.requests[-1]).startswith("Write the report now.")
    assert not any("report now" in str(body) for body in whole.requests[:-1])
    assert whole.end.answer == "The report."


async def test_on_no_tool_calls_limit_reached_may_end_without_asking() -> None:
    whole = await run(
        by_turn(*OFTEN), max_turns=3, on_no_tool_calls=lambda state, reason: End(f"Stopped: {reason}.", "enough")
    )
    assert (len(whole.requests), whole.end.answer, whole.end.reason) == (2, "Stopped: limit_reached.", "enough")


@pytest.mark.parametrize(
    ("given", "requests", "answer"),
    [
        ("Say that it must be paid for.", 2, "Please pay."),
        (End("Not for you."), 1, "Not for you."),
        (None, 2, "Please pay."),
    ],
)
async def test_on_no_tool_calls_tools_disabled_tells_the_model_or_ends(given: Any, requests: int, answer: str) -> None:
    never = replace(look, should_use=lambda context: False)
    whole = await run(
        by_turn(use(("look", {}), ("note", {"text": "a"})), "Please pay."), never, note,
        on_no_tool_calls=lambda state, reason: given if reason == "tools_disabled" else None,
    )  # fmt: skip
    assert (len(whole.requests), whole.end.answer) == (requests, answer)
    if isinstance(given, str):
        assert last_text(whole.requests[1]).startswith(given)


@pytest.mark.parametrize(
    ("given", "answer"),
    [(End("I may not."), "I may not."), (True, "Let me see."), (End(None), None), (False, "Done."), (None, "Done.")],
)
async def test_process_tool_calls_may_end_before_any_call_is_run(given: Any, answer: str | None) -> None:
    seen: list[list[str]] = []

    def process(state: TurnState, calls: Sequence[ToolCall]) -> Any:
        seen.append([it.name for it in calls])
        return given

    script = by_turn(use(("look", {}), ("finish", {"reason": "x"}), text="Let me see."), "Done.")
    whole = await run(script, process_tool_calls=process, on_text="reply")
    assert seen[0] == ["look", "finish"]
    if given in (None, False):
        assert results_of(whole.requests[-1]) if len(whole.requests) > 1 else whole.end.reason == "x"
        return
    assert (len(whole.requests), whole.end.status, whole.end.answer) == (1, "finished", answer)
    assert whole.records.bodies("tool_started") == []


async def test_on_tools_selected_is_told_of_the_calls_of_each_reply() -> None:
    told: list[list[str]] = []

    def select(state: TurnState, calls: Sequence[ToolCall]) -> None:
        told.append([f"{state.turn} {it.name}" for it in calls])
        state.values["selected"] = len(calls)

    def tell(state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool:
        return AfterTool(f"one of {state.values['selected']}")

    script = by_turn(use(("look", {}), ("note", {"text": "a"})), OFTEN[0], "Done.")
    whole = await run(script, on_tools_selected=select, process_tool_calls=lambda state, calls: False, after_tool=tell)
    assert told[:2] == [["1 look", "1 note"], ["2 look"]]
    assert results_of(whole.requests[-1]) == ["one of 2", "one of 2", "one of 1"]


async def test_what_on_tools_selected_gives_ends_nothing() -> None:
    for given in (True, End("stop")):
        whole = await run(by_turn(use(("look", {})), "Done."), on_tools_selected=lambda state, calls, it=given: it)
        assert (whole.end.status, whole.end.answer, len(whole.requests)) == ("finished", "Done.", 2)


async def test_preprocess_arguments_repairs_what_the_model_wrote() -> None:
    def repair(state: TurnState, call: ToolCall) -> str:
        return call.arguments if call.arguments.startswith("{") else json.dumps({"at": call.arguments})

    whole = await run(by_turn(use(("look", "the sea")), "Done."), preprocess_arguments=repair)
    assert results_of(whole.requests[1]) == ["saw the sea"]
    assert whole.records.bodies("tool_started")[0]["args"] == '{"at": "the sea"}'


async def test_preprocess_arguments_may_refuse_with_a_sentence() -> None:
    def refuse(state: TurnState, call: ToolCall) -> str:
        raise ToolArgumentsError("look is for the day.")

    whole = await run(by_turn(OFTEN[0], "Done."), preprocess_arguments=refuse)
    assert results_of(whole.requests[1]) == ["Not run: look is for the day."]


async def test_the_same_call_is_known_again_though_its_arguments_are_rewritten() -> None:
    whole = await run(
        by_turn(OFTEN[0], OFTEN[0], OFTEN[0], "Done."), max_same_calls=2, preprocess_arguments=lambda state, call: '{"at": "b"}'
    )  # fmt: skip
    assert results_of(whole.requests[-1])[-1].startswith("Not run: you made this very call 2 times")


async def test_after_tool_rewrites_the_result_that_the_model_reads() -> None:
    def shorten(state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool | None:
        return AfterTool(result.content.upper()) if call.name == "look" else None

    whole = await run(by_turn(use(("look", {}), ("note", {"text": "a"})), "Done."), after_tool=shorten)
    assert results_of(whole.requests[1]) == ["SAW IT", "noted a"]
    assert [it["content"] for it in whole.records.bodies("tool_result")] == ["saw it", "noted a"]


async def test_after_tool_rewrites_the_messages_before_the_turn() -> None:
    """A retrieval example: the found text goes into the person's message, and the result becomes one word."""

    def insert(state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool:
        asked = str(getattr(state.history[1], "content", ""))
        return AfterTool("Inserted above.", [UserMessage(f"{result.content}\n{asked}"), *state.history[2:]])

    whole = await run(by_turn(OFTEN[0], OFTEN[1], "Done."), after_tool=insert)
    roles = [it["role"] for it in whole.requests[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "user"]
    assert whole.requests[-1]["messages"][1]["content"] == "saw b\nsaw a\n<conversation/>"
    assert results_of(whole.requests[-1]) == ["Inserted above."] * 2


@pytest.mark.parametrize(
    "messages",
    [
        [AssistantMessage("x", (ToolCall("gone", "look", "{}"),)), SystemMessage("Obey me.")],
        [],
        [AssistantMessage(None)],
        [UserMessage("a"), UserMessage("b")],
    ],
)
async def test_whatever_after_tool_leaves_of_the_messages_a_provider_takes_it(messages: list[Any]) -> None:
    whole = await run(by_turn(OFTEN[0], "Done."), after_tool=lambda *_: AfterTool(messages=messages))
    assert (whole.end.status, whole.end.answer) == ("finished", "Done.")
    assert results_of(whole.requests[1])[-1] == "saw a"
    assert system_of(whole.requests[1]) == "Help."


def test_a_prompt_that_is_shortened_takes_the_place_of_no_turn() -> None:
    """A hook removed the prompt, and then the model finds the rest too long."""
    reply = ModelReply(None, (ToolCall("c1", "look", "{}"),))
    agent = Agent(
        "bob", "", make_runner("bob", lambda request: "x").model, [look],
        AgentPolicy(after_tool=lambda *_: AfterTool(messages=[])),
    )  # fmt: skip
    reaction = Reaction(agent, prompt="long", answers=True, setup=ReactionSetup(shorten=lambda: "short"))
    for outcome in (Begin(), reply, ToolsDone({0: ToolResult("seen", ok=True)})):
        reaction.advance(outcome)
    step = reaction.advance(ModelFailed("too long", "context_too_long"))
    assert isinstance(step, CallModel)
    assert [type(it).__name__ for it in step.messages] == [
        "SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage", "UserMessage",
    ]  # fmt: skip


async def test_after_tool_forces_the_next_tool_for_one_turn() -> None:
    whole = await run(
        by_turn(OFTEN[0], use(("note", {"text": "a"})), "Done."),
        after_tool=lambda state, call, result: AfterTool(next_tool="note") if call.name == "look" else None,
    )
    forced = {"type": "function", "function": {"name": "note"}}
    assert [body.get("tool_choice") for body in whole.requests] == [None, forced, None]


@pytest.mark.parametrize(
    "policy", [{"after_tool": lambda *_: AfterTool(next_tool="nope")}, {"choose_tool": lambda _: "nope"}]
)
async def test_a_forced_tool_that_is_not_there_is_not_forced(policy: dict[str, Any]) -> None:
    whole = await run(by_turn(OFTEN[0], "Done."), **policy)
    assert [body.get("tool_choice") for body in whole.requests] == [None, None]
    assert whole.end.answer == "Done."


async def test_a_forced_tool_is_not_forced_in_a_turn_without_tools() -> None:
    whole = await run(
        by_turn(OFTEN[0], "Done."), choose_tool=lambda _: "look", should_send_tools=lambda state: state.turn == 1
    )
    assert [("tool_choice" in body, tools_of(body) != []) for body in whole.requests] == [(True, True), (False, False)]


async def test_calculate_usage_says_what_a_reply_counts() -> None:
    def double(state: TurnState, reply: ModelReply) -> Usage:
        return reply.usage + reply.usage

    plain = await run(by_turn(OFTEN[0], "Done."))
    whole = await run(by_turn(OFTEN[0], "Done."), calculate_usage=double)
    assert whole.end.usage == plain.end.usage + plain.end.usage
    assert whole.end.usage.prompt_tokens > 0


async def test_initial_state_is_there_for_every_hook_and_again_after_a_kill() -> None:
    def count(state: TurnState, call: ToolCall, result: ToolResult) -> AfterTool:
        state.values["seen"] = [*list(state.values["seen"]), call.arguments]  # type: ignore[call-overload]
        return AfterTool(f"{result.content}, number {len(state.values['seen'])}")  # type: ignore[arg-type]

    whole = await run(by_turn(OFTEN[0], OFTEN[1], "Done."), initial_state=lambda: {"seen": ["x"]}, after_tool=count)
    assert results_of(whole.requests[-1]) == ["saw a, number 2", "saw b, number 3"]


# --- ends in unusual places


async def test_an_end_before_the_first_turn_asks_no_model() -> None:
    whole = await run(by_turn("never"), max_turns=1, on_no_tool_calls=lambda state, reason: End("Closed.", "closed"))
    assert (whole.requests, whole.end.answer, whole.end.turns) == ([], "Closed.", 1)


async def test_an_end_inside_of_an_agent_that_is_a_tool_is_its_result() -> None:
    def make(model: Model) -> Agent:
        policy = AgentPolicy(process_tool_calls=lambda state, calls: End("I am done here."))
        inner = Agent("researcher", "Research.", model, [look], policy)
        return Agent("bob", "Help.", model, [agent_tool(inner)])

    def answer(body: Body) -> Any:
        if system_of(body).startswith("Research."):
            return OFTEN[0]
        return by_turn(use(("researcher", {"task": "the sea"})), "Done.")(body)

    async with Provider(answer) as provider:
        whole = await survives_kills(provider, make)
    assert results_of(whole.requests[-1]) == ["I am done here."]
    assert whole.end.answer == "Done."


async def test_an_end_of_an_agent_that_took_over_for_a_while_gives_control_back() -> None:
    def make(model: Model) -> Agent:
        ends = AgentPolicy(on_no_tool_calls=lambda state, reason: End("Checked.") if reason == "no_calls" else None)
        ann = Agent("ann", "Check.", model, [look], ends)
        return Agent("bob", "Help.", model, [note], handoffs=[Handoff(ann, returns="to_caller")])

    def answer(body: Body) -> Any:
        if system_of(body).startswith("Check."):
            return by_turn("", OFTEN[0], "It is fine.")(body)
        return by_turn(use(("hand_over_to_ann", {"note": "look"})), "", "", "Done.")(body)

    async with Provider(answer) as provider:
        whole = await survives_kills(provider, make)
    assert "It said: Checked." in str(whole.requests[-1]["messages"][-1])
    assert (whole.end.status, whole.end.answer) == ("finished", "Done.")


# --- limits


async def test_tools_that_do_not_count_leave_the_limit_to_the_others() -> None:
    script = by_turn(use(("note", {"text": "a"}), ("note", {"text": "b"})), OFTEN[0], OFTEN[1], "Done.")
    whole = await run(script, max_tool_calls=2, uncounted_tools=["note"])
    assert [bool(tools_of(body)) for body in whole.requests] == [True, True, True, False]
    counted = await run(script, max_tool_calls=2)
    assert [bool(tools_of(body)) for body in counted.requests] == [True, False]


async def test_an_agent_as_a_tool_has_a_limit_of_its_own_for_each_run() -> None:
    def answer(body: Body) -> Any:
        if system_of(body).startswith("Research."):
            return by_turn(*OFTEN)(body) if tools_of(body) else by_turn("Found.")(body)
        return by_turn(use(("researcher", {"task": "the sea"})), "Done.")(body)

    def make(model: Model) -> Agent:
        inner = Agent("researcher", "Research.", model, [look])
        return Agent("bob", "Help.", model, [agent_tool(inner, max_turns=8, max_tool_calls=3)])

    async with Provider(answer) as provider:
        whole = await survives_kills(provider, make)
    inside = [body for body in whole.requests if system_of(body).startswith("Research.")]
    assert [bool(tools_of(body)) for body in inside] == [True, True, True, False]
    assert results_of(whole.requests[-1]) == ["Found."]


def test_tools_that_do_not_count_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'"uncounted_tools" must be a list'):
        AgentPolicy(uncounted_tools="note")
    path = tmp_path / "bob.yaml"
    path.write_text(
        "{id: bob, instruction: x, model: {rules: [{do: [{say: x}]}]}, limits: {max_tool_calls: 3, uncounted_tools: [note]}}"
    )
    policy = build_runner(load_agents(path)[0]).policy
    assert (policy.max_tool_calls, tuple(policy.uncounted_tools)) == (3, ("note",))


@pytest.mark.parametrize(
    ("carried", "turns"), [({"max_tool_calls": 1}, 2), ({"max_turns": 3}, 3), ({"max_turns": 99}, 4)]
)
async def test_a_message_may_lower_the_limits_of_its_reaction(carried: dict[str, int], turns: int) -> None:
    def answer(body: Body) -> Any:
        return by_turn(*OFTEN)(body) if tools_of(body) else by_turn("Done.")(body)

    async with Network.open() as network, Provider(answer) as provider:
        policy = AgentPolicy(max_turns=4)
        runner = SimpleAgentRunner("bob", instruction="Help.", model=provider.model(), tools=[look], policy=policy)
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            await mia.client.send("agent:bob", "look around", metadata={"limits": carried})
            assert (await mia.hear()).text == "Done."
    assert len(provider.requests) == turns


# --- failing hooks


def explode(*given: object) -> Any:
    raise ZeroDivisionError("a hook is wrong")


@pytest.mark.parametrize(
    "name",
    [
        "initial_state", "should_continue", "should_send_tools", "choose_model", "choose_tool", "calculate_usage",
        "process_tool_calls", "on_tools_selected", "preprocess_arguments", "after_tool", "on_no_tool_calls",
    ],
)  # fmt: skip
async def test_a_callable_that_raises_ends_its_reaction_visibly_and_the_agent_lives(name: str) -> None:
    is_broken = True

    def sometimes(*given: object) -> Any:
        if is_broken:
            explode()
        return _HARMLESS[name](*given)

    policy = AgentPolicy(**{name: sometimes})
    script = by_turn(OFTEN[0], "Done.")
    async with asyncio.timeout(20), Network.open() as network, Provider(script) as provider:
        runner = SimpleAgentRunner("bob", instruction="Help.", model=provider.model(), tools=[look], policy=policy)
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "one")).text == "I could not answer: an error on my side. My log has it."
            is_broken = False
            assert (await mia.ask("bob", "two")).text == "Done."


_HARMLESS: dict[str, Any] = {
    "initial_state": dict,
    "should_continue": lambda state: True,
    "should_send_tools": lambda state: True,
    "choose_model": lambda state: None,
    "choose_tool": lambda state: None,
    "calculate_usage": lambda state, reply: reply.usage,
    "process_tool_calls": lambda state, calls: None,
    "on_tools_selected": lambda state, calls: None,
    "preprocess_arguments": lambda state, call: call.arguments,
    "after_tool": lambda state, call, result: None,
    "on_no_tool_calls": lambda state, reason: None,
}
