"""Tests that a shortened, filtered or compacted history is still valid for a provider."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from roundelay.agents.history import append_user_text, compact, filter_history, repair
from roundelay.agents.models.model import AssistantMessage, ChatMessage, ToolCall, ToolMessage, UserMessage

A, B = ToolCall("a", "add", "{}"), ToolCall("b", "add", "{}")


def test_results_without_a_call_go_and_calls_without_a_result_are_answered() -> None:
    broken = [
        ToolMessage("lost", "x"), UserMessage("hi"), AssistantMessage(None, (A, B)), UserMessage("go on"),
        ToolMessage("b", "2"), UserMessage("more"),
    ]  # fmt: skip
    assert repair(broken) == [
        UserMessage("hi"), AssistantMessage(None, (A, B)), ToolMessage("a", "No result is known."), ToolMessage("b", "2"),
        UserMessage("go on\n\nmore"),
    ]  # fmt: skip


TURNS: list[ChatMessage] = [
    AssistantMessage("Let me see.", (A,)), ToolMessage("a", "3"), AssistantMessage(None, (B,)), ToolMessage("b", "4"),
    AssistantMessage("It is 4."),
]  # fmt: skip


def test_filters() -> None:
    assert filter_history(TURNS, "all") == TURNS
    assert filter_history(TURNS, "none") == []
    assert filter_history(TURNS, "texts") == [AssistantMessage("Let me see."), AssistantMessage("It is 4.")]
    assert filter_history(TURNS, 2) == [AssistantMessage("It is 4.")]
    assert filter_history(TURNS, 3) == TURNS[2:]
    assert filter_history(TURNS, lambda turns: turns[:1]) == [TURNS[0], ToolMessage("a", "No result is known.")]


def test_compacting_shortens_old_results_only() -> None:
    long = "x" * 5000
    history: list[ChatMessage] = [
        UserMessage(long), AssistantMessage(None, (A,)), ToolMessage("a", long), AssistantMessage(None, (B,)),
        ToolMessage("b", long),
    ]  # fmt: skip
    lengths = [len(str(it.content or "")) for it in compact(history)]
    assert lengths[0] == lengths[4] == 5000
    assert lengths[2] < 600


MESSAGES = st.one_of(
    st.builds(UserMessage, st.sampled_from(["u", "v"])),
    st.builds(ToolMessage, st.sampled_from(["a", "b", "c"]), st.just("r")),
    st.builds(AssistantMessage, st.sampled_from([None, "", "t"]), st.just(())),
    st.builds(AssistantMessage, st.sampled_from([None, "t"]), st.sampled_from([(A,), (B,), (A, B)])),
)


@given(st.lists(MESSAGES, max_size=8))
def test_whatever_is_repaired_is_paired(messages: Sequence[ChatMessage]) -> None:
    repaired = repair(messages)
    waiting: list[str] = []
    before: ChatMessage | None = None
    for message in repaired:
        if isinstance(message, ToolMessage):
            assert waiting.pop(0) == message.tool_call_id
        else:
            assert not waiting
            assert not (isinstance(before, UserMessage) and isinstance(message, UserMessage))
            if isinstance(message, AssistantMessage):
                assert message.content or message.tool_calls
                waiting = [it.id for it in message.tool_calls]
        before = message
    assert not waiting
    assert repair(repaired) == repaired


def test_say_joins_what_the_user_says() -> None:
    messages: list[ChatMessage] = []
    append_user_text(messages, "one")
    append_user_text(messages, "two")
    assert messages == [UserMessage("one\n\ntwo")]
