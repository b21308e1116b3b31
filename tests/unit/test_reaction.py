"""Tests of a reaction's loop: for every reply of a model, the next step is right, and the history stays valid for a
provider.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.agents.agent import Agent
from roundelay.agents.loop_texts import UNKNOWN_OUTCOME
from roundelay.agents.middleware import Around, CallModel, Middleware
from roundelay.agents.models.model import (
    AssistantMessage,
    ChatMessage,
    ModelReply,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.policy import AgentPolicy, OnText
from roundelay.agents.reaction import CallTools, IllegalStep, LoopState, Reaction, Step
from roundelay.agents.reaction_state import ReactionSetup
from roundelay.agents.tools import tool
from roundelay.agents.values import (
    Begin,
    Cancel,
    Finish,
    ModelFailed,
    Outcome,
    Replayed,
    Review,
    Reviewed,
    ToolResult,
    ToolsDone,
)
from tests.support.loops import facts


@tool(name="add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = [*communication_tools(), add]


def make_reaction(
    *, answers: bool = True, max_turns: int = 10, on_text: OnText = "auto", max_calls: int = 16
) -> Reaction:
    policy = AgentPolicy(max_turns=max_turns, on_text=on_text, max_tool_calls_per_turn=max_calls)
    agent = Agent("bob", "Be brief.", ScriptedModel(lambda request: None), TOOLS, policy)
    return Reaction(agent, prompt="<conversation/>", answers=answers, setup=ReactionSetup(threads=["direct:bob~mia"]))


def call(name: str, call_id: str = "c1", /, **arguments: object) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))


def reply(*calls: ToolCall, text: str | None = None) -> ModelReply:
    return ModelReply(text, calls, Usage(10, 2))


def done(step: Step, ok: bool = True, threads: tuple[str, ...] = ()) -> ToolsDone:
    """Return an outcome in which each planned call returned its tool's name."""
    assert isinstance(step, CallTools)
    return ToolsDone({it.index: ToolResult(it.tool.name, ok=ok, threads=threads) for it in step.planned})


def tool_answers(reaction: Reaction) -> list[str]:
    return [message.content for message in reaction.history if isinstance(message, ToolMessage)]


def assert_valid(messages: Sequence[ChatMessage]) -> None:
    """Check the rules of OpenAI-compatible servers for a history."""
    open_calls: list[str] = []
    seen: set[str] = set()
    for message in messages:
        if isinstance(message, ToolMessage):
            assert open_calls, "a result without a call"
            assert open_calls.pop(0) == message.tool_call_id
            continue
        assert not open_calls, f"unanswered: {open_calls}"
        if isinstance(message, AssistantMessage):
            assert message.content or message.tool_calls
            for made in message.tool_calls:
                assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", made.name)
                assert isinstance(json.loads(made.arguments), dict)
                assert made.id
                assert made.id not in seen
                seen.add(made.id)
                open_calls.append(made.id)
    assert not open_calls
    kinds = [type(message) for message in messages]
    assert kinds[:2] == [SystemMessage, UserMessage]
    assert not any(a is UserMessage is b for a, b in itertools.pairwise(kinds)), "two user messages in a row"


def test_a_closing_answer_that_is_corrected_stands_before_its_correction() -> None:
    class Check(Middleware):
        async def review(self, around: Around, answer: str) -> str:
            return answer

    policy = AgentPolicy(max_tool_calls=1)
    agent = Agent("bob", "", ScriptedModel(lambda request: None), TOOLS, policy, middleware=[Check()])
    reaction = Reaction(agent, prompt="<conversation/>", answers=True)
    reaction.advance(Begin())
    reaction.advance(done(reaction.advance(reply(call("add", a=1, b=2)))))
    review = reaction.advance(reply(text="It is 4."))
    assert isinstance(review, Review)
    assert review.can_correct
    again = reaction.advance(Reviewed("It is 4.", "It is wrong."))
    assert isinstance(again, CallModel)
    answer, correction = again.messages[-2:]
    assert answer == AssistantMessage("It is 4.")
    assert str(correction.content).startswith("Your answer was not given. It is wrong.")


def test_the_conversation_comes_once_and_the_facts_of_the_turn_trail_it() -> None:
    reaction = make_reaction()
    first = reaction.advance(Begin())
    assert isinstance(first, CallModel)
    assert first.messages == (
        SystemMessage("Be brief."),
        UserMessage(f"<conversation/>\n\n{facts(1, 10, finish=True)}"),
    )
    second = reaction.advance(done(reaction.advance(reply(call("add", a=1, b=2)))))
    assert isinstance(second, CallModel)
    assert second.messages == (
        SystemMessage("Be brief."),
        UserMessage("<conversation/>"),
        AssistantMessage(None, (ToolCall("c1", "add", '{"a": 1, "b": 2}'),)),
        ToolMessage("c1", "add"),
        UserMessage(facts(2, 10, finish=True)),
    )
    assert [spec.name for spec in second.tools] == [it.name for it in TOOLS]


def test_planned_calls_carry_validated_arguments() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("add", "c1", a=1, b=2), call("add", "c2", a=3, b=4)))
    assert isinstance(step, CallTools)
    assert [(it.index, it.call.id, it.arguments) for it in step.planned] == [
        (0, "c1", {"a": 1, "b": 2}),
        (1, "c2", {"a": 3, "b": 4}),
    ]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            call("teleport", x=1),
            'There is no tool "teleport". The tools are: send_text_message, broadcast_text_message, ask, finish, add.',
        ),
        (ToolCall("c1", "add", '{"a": 1, "b": '), "Not run"),
        (call("add", a=1), "b"),
        (call("add", a="x", b=2), "a"),
        (call("add", a=1, b=2, c=3), "c"),
        (ToolCall("c1", "add", "[1, 2]"), "Not run"),
        (ToolCall("c1", "add", "[" * 100_000), "Not run"),
        (ToolCall("c1", "", ""), "There is no tool"),
        (ToolCall("c1", "functions.add now!", "{}"), "There is no tool"),
    ],
)
def test_a_wrong_call_is_answered_and_the_loop_goes_on(wrong: ToolCall, words: str) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("add", "c0", a=1, b=1), wrong))
    assert isinstance(step, CallTools)
    assert [it.call.id for it in step.planned] == ["c0"]
    assert [(index, result.ok) for index, result in step.refused.items()] == [(1, False)]
    following = reaction.advance(done(step))
    assert isinstance(following, CallModel)
    assert_valid(following.messages)
    assert tool_answers(reaction)[0] == "add"
    assert words in tool_answers(reaction)[1]


def test_surplus_calls_are_answered_not_dropped() -> None:
    reaction = make_reaction(max_calls=2)
    reaction.advance(Begin())
    step = reaction.advance(reply(*(call("add", f"c{i}", a=i, b=i) for i in range(4))))
    assert isinstance(step, CallTools)
    assert [it.index for it in step.planned] == [0, 1]
    assert isinstance(reaction.advance(done(step)), CallModel)
    assert tool_answers(reaction)[:2] == ["add", "add"]
    assert all("at most 2 calls" in answer for answer in tool_answers(reaction)[2:])
    assert_valid(reaction.history)


def test_ids_that_repeat_or_are_missing_are_made_unique() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    for calls in (
        [call("add", "x", a=1, b=1), call("add", "x", a=2, b=2), call("add", "", a=3, b=3)],
        [call("add", "x", a=4, b=4)],
    ):
        step = reaction.advance(reply(*calls))
        assert isinstance(step, CallTools)
        assert len(step.planned) == len(calls)
        reaction.advance(done(step))
    assert len(tool_answers(reaction)) == 4
    assert_valid(reaction.history)


# --- finish


def test_finish_ends_the_reaction_with_its_reason() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("finish", reason="nothing to do")))
    assert step == CallTools(1, (), {}, None, (call("finish", reason="nothing to do"),))
    assert reaction.advance(ToolsDone({})) == Finish("finished", "nothing to do", None, 1, Usage(10, 2))
    assert reaction.state is LoopState.FINISHED
    assert_valid(reaction.history)


@pytest.mark.parametrize("arguments", ["", "{", "null", '{"why": 1}', '{"reason": 3}', "[" * 100_000])
def test_finish_with_broken_arguments_finishes(arguments: str) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    reaction.advance(reply(ToolCall("c1", "finish", arguments)))
    finish = reaction.advance(ToolsDone({}))
    assert isinstance(finish, Finish)
    assert (finish.status, finish.reason) == ("finished", "")
    assert_valid(reaction.history)


def test_finish_beside_other_calls_waits_for_them() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("finish", "c1", reason="done"), call("add", "c2", a=1, b=2)))
    assert isinstance(step, CallTools)
    assert [it.call.id for it in step.planned] == ["c2"]
    finish = reaction.advance(done(step))
    assert isinstance(finish, Finish)
    assert finish.reason == "done"
    assert tool_answers(reaction) == ["Finished.", "add"]


@pytest.mark.parametrize("beside", [call("add", "c2", a=1, b=2), call("add", "c2", a="x"), call("none", "c2")])
def test_finish_beside_a_call_that_fails_does_not_hold(beside: ToolCall) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("finish", "c1", reason="done"), beside))
    assert isinstance(reaction.advance(done(step, ok=False)), CallModel)
    assert tool_answers(reaction)[0].startswith("Not finished")
    assert_valid(reaction.history)


def test_of_several_finishes_the_first_counts() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    reaction.advance(reply(call("finish", "c1", reason="first"), call("finish", "c2", reason="second")))
    finish = reaction.advance(ToolsDone({}))
    assert isinstance(finish, Finish)
    assert finish.reason == "first"
    assert tool_answers(reaction) == ["Finished.", "Finished already."]


# --- text


@pytest.mark.parametrize(
    ("on_text", "answers", "sent"),
    [("auto", True, True), ("auto", False, False), ("reply", True, True), ("reply", False, True), ("record", True, False), ("record", False, False)],
)  # fmt: skip
def test_text_without_a_call_ends_the_reaction_and_is_sent_or_recorded(
    on_text: OnText, answers: bool, sent: bool
) -> None:
    reaction = make_reaction(on_text=on_text, answers=answers)
    reaction.advance(Begin())
    finish = reaction.advance(reply(text=" It is 42. "))
    assert isinstance(finish, Finish)
    assert (finish.status, finish.turns, finish.answer) == ("finished", 1, "It is 42." if sent else None)
    assert_valid(reaction.history)


def test_nudge_sends_the_model_back_to_its_tools() -> None:
    reaction = make_reaction(on_text="nudge", max_turns=2)
    reaction.advance(Begin())
    step = reaction.advance(reply(text="It is 42."))
    assert isinstance(step, CallModel)
    assert step.messages[2] == AssistantMessage("It is 42.")
    assert_valid(step.messages)
    finish = reaction.advance(reply(text="It is 42, really."))
    assert isinstance(finish, Finish)
    assert (finish.status, finish.answer) == ("stopped", "It is 42, really.")


@pytest.mark.parametrize("text", [None, "", "  \n"])
def test_an_empty_reply_is_answered(text: str | None) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(text=text))
    assert isinstance(step, CallModel)
    assert step.turn == 2
    assert_valid(step.messages)
    last = step.messages[-1]
    assert isinstance(last, UserMessage)
    assert "Your reply was empty" in last.content


def test_text_beside_a_call_is_kept_and_not_sent() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    reaction.advance(done(reaction.advance(reply(call("add", a=1, b=2), text="Let me see."))))
    assert reaction.history[2] == AssistantMessage("Let me see.", (ToolCall("c1", "add", '{"a": 1, "b": 2}'),))
    finish = reaction.advance(done(reaction.advance(reply(call("finish", "c2", reason="ok")))))
    assert isinstance(finish, Finish)
    assert finish.answer is None


@pytest.mark.parametrize(
    ("threads", "answer"),
    [((), "It is 42."), (("direct:bob~zoe",), "It is 42."), (("direct:bob~zoe", "direct:bob~mia"), None)],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_text_beside_finish_is_the_answer_unless_the_agent_has_spoken_in_the_thread(
    threads: tuple[str, ...], answer: str | None, at_once: bool
) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    sending, finishing = call("send_text_message", "c0", target_agent_id="x", text="42"), call("finish", reason="ok")
    if at_once:
        finish = reaction.advance(done(reaction.advance(reply(sending, finishing, text="It is 42.")), threads=threads))
    else:
        reaction.advance(done(reaction.advance(reply(sending)), threads=threads))
        finish = reaction.advance(done(reaction.advance(reply(finishing, text="It is 42."))))
    assert isinstance(finish, Finish)
    assert finish.answer == answer


def test_a_send_that_failed_is_not_having_spoken() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(reply(call("send_text_message", "c0", target_agent_id="nobody", text="42")))
    reaction.advance(done(step, ok=False))
    finish = reaction.advance(done(reaction.advance(reply(call("finish", reason="ok"), text="It is 42."))))
    assert isinstance(finish, Finish)
    assert finish.answer == "It is 42."


# --- replies that are cut off or withheld


def finish_of(step: Step) -> Finish:
    assert isinstance(step, Finish)
    return step


def test_a_reply_that_was_cut_off_is_not_sent_as_the_answer() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(ModelReply("It is 4", finish_reason="length"))
    assert isinstance(step, CallModel)
    assert "cut off" in str(step.messages[-1].content)
    assert_valid(step.messages)
    assert finish_of(reaction.advance(reply(text="It is 42."))).answer == "It is 42."


def test_an_answer_cut_off_on_the_last_turn_says_so() -> None:
    reaction = make_reaction(max_turns=1)
    reaction.advance(Begin())
    finish = finish_of(reaction.advance(ModelReply("It is 4", finish_reason="length")))
    assert finish.answer == "It is 4\n[cut off here: the reply reached its limit of length]"


@pytest.mark.parametrize("text", [None, "Half of a se"])
def test_a_withheld_reply_is_asked_for_in_other_words_and_then_given_up(text: str | None) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(ModelReply(text, finish_reason="content_filter"))
    assert isinstance(step, CallModel)
    assert "filter withheld your reply" in str(step.messages[-1].content)
    assert_valid(step.messages)
    finish = finish_of(reaction.advance(ModelReply(text, finish_reason="content_filter")))
    assert (finish.status, finish.answer) == (
        "failed", "I could not answer: my model's provider withheld the reply.",
    )  # fmt: skip


# --- repeated equal calls


def test_the_same_call_with_the_same_result_is_not_run_for_ever() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    for number in range(3):
        step = reaction.advance(reply(ToolCall(f"c{number}", "add", '{"b": 2, "a":1}')))
        reaction.advance(done(step))
    step = reaction.advance(reply(call("add", "c9", a=1, b=2), call("add", "c10", a=1, b=3)))
    assert isinstance(step, CallTools)
    assert [it.call.id for it in step.planned] == ["c10"]
    [refusal] = step.refused.values()
    assert "this very call 3 times" in refusal.content


def test_a_call_whose_result_changes_may_go_on() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    for number in range(6):
        step = reaction.advance(reply(call("add", f"c{number}", a=1, b=2)))
        assert isinstance(step, CallTools)
        assert len(step.planned) == 1
        reaction.advance(ToolsDone({0: ToolResult(f"still {number}", ok=True)}))


@pytest.mark.parametrize("way", ["told_now", "recorded", "performed"])
def test_a_call_whose_outcome_is_unknown_is_not_the_same_result_again(way: str) -> None:
    """The unknown outcome is added by the process that continues the call (told_now), read from the records
    (recorded), or returned as the call's result by a replay (performed). In all three cases, the reaction continues.
    """
    reaction = make_reaction()
    reaction.advance(Begin())
    told = ToolResult(UNKNOWN_OUTCOME, ok=False)
    for number in range(5):
        made = reply(call("add", f"c{number}", a=1, b=2))
        if way == "performed":
            step = reaction.advance(made)
            assert isinstance(step, CallTools)
            assert len(step.planned) == 1
            reaction.advance(ToolsDone({0: told}))
        else:
            results = {0: told} if way == "recorded" else {}
            step = reaction.advance(Replayed(made, results, frozenset({0}), frozenset({0}), goes_on=True))
            assert isinstance(step, CallTools)
            assert [*step.refused.values()] == [told]
            reaction.advance(ToolsDone({}))
    assert reaction.tool_calls == 0
    step = reaction.advance(reply(call("add", "c9", a=1, b=2)))
    assert isinstance(step, CallTools)
    assert [it.call.id for it in step.planned] == ["c9"]


# --- contexts that are too long


def test_a_context_that_is_too_long_is_shortened_and_tried_once_more_in_the_same_turn() -> None:
    agent = Agent("bob", "Be brief.", ScriptedModel(lambda request: None), TOOLS)
    reaction = Reaction(agent, prompt="long " * 100, answers=True, setup=ReactionSetup(shorten=lambda: "short"))
    reaction.advance(Begin())
    for number in range(2):
        reaction.advance(reply(call("add", f"c{number}", a=number, b=1)))
        reaction.advance(ToolsDone({0: ToolResult("x" * 5000, ok=True)}))
    again = reaction.advance(ModelFailed("Too long.", "context_too_long"))
    assert isinstance(again, CallModel)
    assert again.turn == 3
    assert again.messages[1] == UserMessage("short")
    old, new = [it.content for it in again.messages if isinstance(it, ToolMessage)]
    assert len(old) < 1000 < len(new)
    assert_valid(again.messages)
    finish = finish_of(reaction.advance(ModelFailed("Too long.", "context_too_long")))
    assert finish.answer == "I could not answer: the conversation is too long for my model."


# --- replayed turns


def test_a_replayed_turn_takes_its_results_from_the_records() -> None:
    reaction = make_reaction(max_turns=1, max_calls=1)
    reaction.advance(Begin())
    calls = (call("add", "c0", a=1, b=1), call("gone", "c1"), call("add", "c2", a=2, b=2), call("add", "c3", a=3, b=3))
    recorded = {0: ToolResult("two", ok=True), 1: ToolResult("it was there", ok=True)}
    step = reaction.advance(Replayed(reply(*calls), recorded, frozenset({0, 1, 2}), goes_on=True))
    assert isinstance(step, CallTools)
    assert step.planned == ()  # add is a once tool
    assert isinstance(reaction.advance(ToolsDone({})), CallModel)
    answers = tool_answers(reaction)
    assert answers[:2] == ["two", "it was there"]
    assert "Whether it took effect is unknown" in answers[2]
    assert "at most 1 calls" in answers[3]  # the call was never started


def test_a_replayed_turn_that_went_on_goes_on() -> None:
    """The next turn is in the records, whatever the current settings are."""
    for made in (reply(text="Hm."), reply(call("finish", reason="x"))):
        reaction = make_reaction(max_turns=1)
        reaction.advance(Begin())
        step = reaction.advance(Replayed(made, goes_on=True))
        if isinstance(step, CallTools):
            step = reaction.advance(ToolsDone({}))
        assert isinstance(step, CallModel)
        assert_valid(step.messages)


# --- limits, failures, cancelling


def test_the_last_turn_has_no_tools_and_its_text_is_the_closing_answer() -> None:
    reaction = make_reaction(max_turns=2)
    reaction.advance(Begin())
    step = reaction.advance(done(reaction.advance(reply(call("add", a=1, b=2)))))
    assert isinstance(step, CallModel)
    assert step.tools == ()
    last = step.messages[-1]
    assert isinstance(last, UserMessage)
    assert "last one" in last.content
    assert reaction.advance(reply(text="It is 3.")) == Finish(
        "stopped", "reached the limit of 2 turns", "It is 3.", 2, Usage(20, 4), tool_calls=1
    )


@pytest.mark.parametrize("final", [reply(call("add", "c9", a=1, b=2)), reply(), reply(call("none", "c9"))])
def test_a_model_that_never_stops_is_stopped_with_an_answer(final: ModelReply) -> None:
    reaction = make_reaction(max_turns=2)
    reaction.advance(Begin())
    reaction.advance(done(reaction.advance(reply(call("add", a=1, b=2)))))
    step = reaction.advance(final)
    finish = reaction.advance(done(step)) if isinstance(step, CallTools) else step
    assert isinstance(finish, Finish)
    assert (finish.status, finish.turns) == ("stopped", 2)
    assert finish.answer == "I reached the limit of 2 turns without an answer."
    assert_valid(reaction.history)


def test_finish_holds_on_the_last_turn_too() -> None:
    reaction = make_reaction(max_turns=1)
    reaction.advance(Begin())
    finish = reaction.advance(
        done(reaction.advance(reply(call("finish", reason="ok"), call("add", "c2", a=1, b=2), text="Hi.")))
    )
    assert isinstance(finish, Finish)
    assert (finish.status, finish.reason, finish.answer) == ("finished", "ok", "Hi.")


def test_a_model_that_fails_ends_the_reaction_with_the_reason() -> None:
    """The provider's own error text goes to the record, not to the thread."""
    for answers, answer in ((True, "I could not answer: my model does not let me in."), (False, None)):
        reaction = make_reaction(answers=answers)
        reaction.advance(Begin())
        failed = ModelFailed("The key sk-1 is wrong.", "unauthorized")
        end = Finish("failed", "The key sk-1 is wrong.", answer, 1, Usage(), failure="unauthorized")
        assert reaction.advance(failed) == end


def test_people_are_told_of_the_operator_only_where_one_is_notified() -> None:
    for reported_by, answer in (
        ("desk", "desk cannot answer right now; the operator has been notified."),
        ("", "I could not answer: the credit for my model is used up."),
    ):
        reaction = make_reaction(answers=True)
        reaction.advance(Begin())
        finish = reaction.advance(ModelFailed("402: pay first", "quota", reported_by=reported_by))
        assert isinstance(finish, Finish)
        assert finish.answer == answer


def test_cancelling_answers_every_open_call() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    reaction.advance(reply(call("add", "c1", a=1, b=2), call("none", "c2"), call("finish", "c3", reason="x")))
    assert reaction.advance(Cancel("mia said stop")) == Finish("cancelled", "mia said stop", None, 1, Usage(10, 2))
    assert tool_answers(reaction)[0] == "Cancelled."
    assert_valid(reaction.history)


def test_a_reaction_can_be_cancelled_before_it_begins() -> None:
    assert make_reaction().advance(Cancel("x")) == Finish("cancelled", "x", None, 0, Usage())


@pytest.mark.parametrize(
    ("reached", "outcome"),
    [
        ([], reply()),
        ([], ToolsDone({})),
        ([Begin()], Begin()),
        ([Begin()], ToolsDone({})),
        ([Begin(), reply(call("add", a=1, b=2))], reply()),
        ([Begin(), reply(call("add", a=1, b=2))], ModelFailed("x")),
        ([Begin(), reply(text="bye")], reply()),
        ([Begin(), reply(text="bye")], Cancel("x")),
    ],
)
def test_an_outcome_that_is_not_awaited_is_refused_by_name(reached: list[Outcome], outcome: Outcome) -> None:
    reaction = make_reaction()
    for earlier in reached:
        reaction.advance(earlier)
    with pytest.raises(IllegalStep, match=f"{reaction.state.value} cannot take {type(outcome).__name__}"):
        reaction.advance(outcome)


def test_results_have_to_be_complete() -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    reaction.advance(reply(call("add", a=1, b=2)))
    with pytest.raises(ValueError, match="no result for add"):
        reaction.advance(ToolsDone({}))


CALLS = st.builds(
    ToolCall,
    st.sampled_from(["", "a", "b", "call_1_0"]) | st.text(max_size=3),
    st.sampled_from(["add", "finish", "send_text_message", "nope", "", "bad name!"]),
    st.sampled_from(
        ['{"a": 1, "b": 2}', '{"reason": "r"}', "{", "", "[]", '"x"', '{"target_agent_id": "mia", "text": "t"}', "NaN"]
    ),
)
REPLIES = st.builds(
    ModelReply, st.sampled_from([None, "", "text"]), st.lists(CALLS, max_size=5).map(tuple), st.just(Usage(1, 1))
)


@settings(max_examples=60)
@given(
    replies=st.lists(REPLIES, min_size=6, max_size=6),
    oks=st.lists(st.booleans(), min_size=6, max_size=6),
    on_text=st.sampled_from(["auto", "reply", "nudge", "record"]),
    answers=st.booleans(),
    max_turns=st.integers(1, 6),
)
def test_any_model_ends_within_its_turns_with_a_valid_history_at_every_step(
    replies: list[ModelReply], oks: list[bool], on_text: OnText, answers: bool, max_turns: int
) -> None:
    reaction = make_reaction(on_text=on_text, answers=answers, max_turns=max_turns, max_calls=3)
    step = reaction.advance(Begin())
    asked = 0
    while not isinstance(step, Finish):
        if isinstance(step, CallModel):
            assert_valid(step.messages)
            asked += 1
            assert step.turn == asked
            assert step.tools or step.is_last
            assert step.is_last or asked < max_turns
            step = reaction.advance(replies[asked - 1])
        else:
            assert {it.index for it in step.planned}.isdisjoint(step.refused)
            step = reaction.advance(done(step, ok=oks[asked - 1]))
    assert_valid(reaction.history)
    assert step.turns == asked <= max_turns
    assert step.usage == Usage(asked, asked)
    assert step.answer is None or on_text == "reply" or (answers and on_text != "record")


# --- stuck models

IDLE: dict[str, tuple[ModelReply, dict[str, object]]] = {
    "empty": (ModelReply(None), {}),
    "only white space": (ModelReply(" \n"), {}),
    "cut": (ModelReply("half a sent", finish_reason="length"), {}),
    "text for nobody": (ModelReply("hello"), {"on_text": "nudge"}),
    "unknown tool": (ModelReply(None, (ToolCall("c1", "look_up", "{}"),)), {}),
    "broken JSON": (ModelReply(None, (ToolCall("c1", "add", '{"a": 1'),)), {}),
    "wrong arguments": (ModelReply(None, (ToolCall("c1", "add", '{"a": "x"}'),)), {}),
    "several, none of them run": (
        ModelReply("wait", (ToolCall("c1", "nope", "{}"), ToolCall("c2", "add", "[]"))),
        {},
    ),
}


@pytest.mark.parametrize("kind", IDLE)
def test_three_turns_in_a_row_without_effect_make_the_next_one_the_last(kind: str) -> None:
    made, options = IDLE[kind]
    reaction = make_reaction(max_turns=30, **options)  # type: ignore[arg-type]
    step = reaction.advance(Begin())
    asked: list[CallModel] = []
    while not isinstance(step, Finish):
        if isinstance(step, CallModel):
            asked.append(step)
            step = reaction.advance(made)
        else:
            step = reaction.advance(done(step))
    assert [(it.is_last, it.tools == ()) for it in asked] == [(False, False)] * 3 + [(True, True)]
    assert step.status == "stopped"
    assert step.reason == "stopped after 3 turns in a row without effect (max_idle_turns)"
    assert step.answer is not None


@pytest.mark.parametrize(
    "content", ["Not run: Wrong arguments.", "tool: Not sent: enough", "unknown_recipient: no bob", "forbidden: no"]
)
def test_a_call_that_is_refused_when_it_is_run_has_no_effect(content: str) -> None:
    reaction = make_reaction(max_turns=30)
    step = reaction.advance(Begin())
    for number in range(3):
        assert isinstance(step, CallModel)
        assert not step.is_last
        assert isinstance(reaction.advance(reply(call("add", a=number, b=2))), CallTools)
        step = reaction.advance(ToolsDone({0: ToolResult(content, ok=False)}))
    assert isinstance(step, CallModel)
    assert step.is_last


def test_the_same_call_again_and_again_ends_the_reaction() -> None:
    reaction = make_reaction(max_turns=30)
    step = reaction.advance(Begin())
    asked = 0
    while not isinstance(step, Finish):
        if isinstance(step, CallModel):
            asked += 1
            step = reaction.advance(reply(call("add", a=1, b=2)))
        else:
            step = reaction.advance(done(step))
    assert asked == 3 + 3 + 1  # three runs, three refusals, and the last turn


def test_a_turn_with_effect_between_them_begins_the_count_anew_and_a_failure_is_one() -> None:
    reaction = make_reaction(max_turns=30)
    step = reaction.advance(Begin())
    for number in range(8):
        assert isinstance(step, CallModel)
        assert not step.is_last
        if number % 3 == 2:
            reaction.advance(reply(call("add", a=number, b=2)))
            step = reaction.advance(ToolsDone({0: ToolResult(f"it broke at {number}", ok=False)}))
        else:
            step = reaction.advance(ModelReply(None))


def test_who_is_stuck_is_derived_from_the_records_when_a_reaction_is_resumed() -> None:
    refusal = ToolResult('There is no tool "nope".', ok=False)
    reaction = make_reaction(max_turns=30)
    step = reaction.advance(Begin())
    for _ in range(3):
        made = reply(ToolCall("c", "nope", "{}"))
        reaction.advance(Replayed(made, {0: refusal}, frozenset(), frozenset(), goes_on=True))
        step = reaction.advance(ToolsDone({}))
    assert isinstance(step, CallModel)
    assert step.is_last
    # A run of an earlier release continued at this point, and is replayed as recorded.
    step = reaction.advance(
        Replayed(
            reply(call("add", a=1, b=2)), {0: ToolResult("3", ok=True)}, frozenset({0}), frozenset({0}), goes_on=True
        )
    )
    assert isinstance(step, CallTools)
    step = reaction.advance(ToolsDone({}))
    assert isinstance(step, CallModel)
    assert not step.is_last


def test_how_many_idle_turns_there_may_be_is_the_policys() -> None:
    agent = Agent("bob", "Be brief.", ScriptedModel(lambda request: None), TOOLS, AgentPolicy(max_idle_turns=1))
    reaction = Reaction(agent, prompt="x", answers=True)
    reaction.advance(Begin())
    step = reaction.advance(ModelReply(None))
    assert isinstance(step, CallModel)
    assert step.is_last


@pytest.mark.parametrize("reason", ["max_tokens", "MAX_TOKENS", "model_length"])
def test_a_reply_that_was_cut_by_any_name_is_not_sent(reason: str) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(ModelReply("Half a sen", finish_reason=reason))
    assert isinstance(step, CallModel)
    assert "was cut off at its limit of length" in str(step.messages[-1].content)
    step = reaction.advance(ModelReply(None, finish_reason=reason))
    assert isinstance(step, CallModel)
    assert "before it said anything" in str(step.messages[-1].content), "all of it went into thinking"


@pytest.mark.parametrize("reason", ["SAFETY", "content_filter"])
def test_a_reply_that_was_withheld_by_any_name_is_asked_for_in_other_words(reason: str) -> None:
    reaction = make_reaction()
    reaction.advance(Begin())
    step = reaction.advance(ModelReply("Half a sen", finish_reason=reason))
    assert isinstance(step, CallModel)
    assert "filter withheld" in str(step.messages[-1].content)
    assert isinstance(reaction.advance(ModelReply(None, finish_reason=reason)), Finish)


def test_ids_that_a_model_leaves_out_or_repeats_become_nine_letters_or_digits() -> None:
    ids = []
    for _ in range(2):
        reaction = make_reaction()
        reaction.advance(Begin())
        step = reaction.advance(reply(call("add", "", a=1, b=2), call("add", "", a=1, b=3), call("add", "x", a=2, b=2)))
        step = reaction.advance(done(step))
        step = reaction.advance(reply(call("add", "x", a=5, b=5)))
        ids.append([it.id for message in reaction.history for it in getattr(message, "tool_calls", ())])
    assert ids[0] == ids[1], "a resumed reaction gives the same ones"
    assert len(set(ids[0])) == 4
    assert [len(it) for it in ids[0]] == [9, 9, 1, 9]
