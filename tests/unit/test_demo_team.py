"""Tests of the demo's agents: their results depend only on the words of a question, are bounded, and are the same in
whatever order they answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay import demo
from roundelay.agents.models.prompt_view import MessageView, PromptView, ThreadView, ToolResultView
from roundelay.agents.models.scripted import Action, Call, Say
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Tool
from roundelay.agents.values import ToolError
from roundelay.demo.agents import ANSWERS, DESK, SPECIALISTS
from roundelay.demo.tools import Task, evaluate, find_sums, find_word_tasks, format_number

TEAM = Path(demo.__file__).with_name("team.yaml")
TOOLS: dict[str, Tool] = {
    tool.name: tool for spec in load_agents(TEAM) if spec.id in SPECIALISTS for tool in build_runner(spec).tools
}


def do(task: Task) -> str:
    function = TOOLS[task.tool].function
    assert function is not None
    return f"{task.label} {function(**task.arguments)}"


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("What is 17 × 23?", ["17 × 23 = 391"]),
        ("what's 17*23 and what's 2+2", ["17 × 23 = 391", "2 + 2 = 4"]),
        ("(17+4)*2^3", ["(17 + 4) × 2^3 = 168"]),
        ("0.1 + 0.2", ["0.1 + 0.2 = 0.3"]),
        ("10/3", ["10 ÷ 3 = about 3.3333333333"]),
        ("1/1000 - 1", ["1 ÷ 1000 - 1 = -0.999"]),
        ("15% of 1,200", ["15 ÷ 100 × 1200 = 180"]),
        ("2 plus 2", ["2 + 2 = 4"]),
        ("Well ... + 1?", []),
        ("7 squared times 3", ["7^2 × 3 = 147"]),
        ("2^0.5", []),
        ("2 * (3 + 4", ["2 × (3 + 4) = 14"]),
        ("1/0", ["1 ÷ 0 = undefined (a division by zero)"]),
        ("9^9^9", ["9^9^9 = too large to write out"]),
        ("I have 3 cats, and “2 + 2” is a text", []),
    ],
)
def test_numbers_finds_and_does_what_is_asked(question: str, found: list[str]) -> None:
    assert [do(task) for task in find_sums(question)] == found


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("Which is the longest word in “a small refrain”?", ["the longest word in “a small refrain” is “refrain” (7 letters)"]),
        ("the longest word in the quick brown fox?", ["the longest word in “the quick brown fox” is “quick” and “brown” (5 letters each)"]),
        ("the shortest word in “to be or not”?", ["the shortest word in “to be or not” is “to” and “be” and “or” (2 letters each)"]),
        ("How many vowels are in roundelay?", ["“roundelay” has 4 vowels"]),
        ("How many letters are in “the refrain”?", ["“the refrain” has 10 letters"]),
        ("How many letters are in “Straße”?", ["“Straße” has 6 letters"]),
        ("reverse hello world", ["“hello world” backwards is “dlrow olleh”"]),
        ("What is roundelay backwards?", ["“roundelay” backwards is “yalednuor”"]),
        ("How many words has “one two”?", ["“one two” has 2 words"]),
        ("Vowels in “one”, then reverse “two”", ["“one” has 2 vowels", "“two” backwards is “owt”"]),
        ("Will it rain?", []),
    ],
)  # fmt: skip
def test_words_finds_and_does_what_is_asked(question: str, found: list[str]) -> None:
    assert [do(task) for task in find_word_tasks(question)] == found


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os')",
        "a + 1",
        "1e9 + 1",
        "1 if 1 else 2",
        "[1]",
        "1 < 2",
        "2 ** 0.5",
        "",
        "1 +",
        "... + 1",
        "(" * 150 + "1",
    ],
)
def test_calculating_takes_numbers_and_signs_only(source: str) -> None:
    with pytest.raises(ToolError):
        evaluate(source)


@given(st.text(alphabet="0123456789.+-*/%^() ×÷,xtwosquared", max_size=300))
def test_no_question_breaks_or_holds_up_the_specialists(question: str) -> None:
    started = time.process_time()
    for task in [*find_sums(question), *find_word_tasks(question)]:
        do(task)
    assert time.process_time() - started < 2


@given(st.fractions(max_denominator=10**6))
def test_a_number_is_written_as_it_is_or_said_to_be_rounded(value: Fraction) -> None:
    text = format_number(value)
    if text.startswith("about "):
        assert abs(Fraction(text.removeprefix("about ")) - value) <= Fraction(1, 2 * 10**10)
    else:
        assert Fraction(text) == value


def view(
    sender: str, text: str, thread_id: str, *threads: ThreadView, results: Sequence[ToolResultView] = (), turn: int = 1
) -> PromptView:
    return PromptView(threads, thread_id, sender, text, tuple(results), turn)


def only(actions: Sequence[Action]) -> Call:
    [action] = actions
    assert isinstance(action, Call)
    return action


@pytest.mark.parametrize("order", [tuple(SPECIALISTS), tuple(SPECIALISTS)[::-1]], ids="-".join)
def test_desk_goes_on_at_the_answer_that_completes_the_set_whoever_comes_first(order: tuple[str, ...]) -> None:
    texts = {"numbers": "@desk, for zoe: 1 + 1 = 2", "words": "@desk, for zoe: “a” has 1 vowel"}
    first, second = order
    waiting = ANSWERS[DESK](view(first, texts[first], "thread:9"))
    assert only(waiting).tool == "finish"
    earlier = ThreadView("thread:9", (MessageView(first, texts[first]),))
    going_on = only(ANSWERS[DESK](view(second, texts[second], "thread:9", earlier)))
    assert going_on.arguments == {
        "target_agent_id": "numbers",
        "text": "My draft for zoe: 1 + 1 = 2; “a” has 1 vowel\nIs your part right?",
    }


def test_a_wrong_draft_is_not_confirmed() -> None:
    asked = ThreadView("broadcast", (MessageView(DESK, "@numbers @words, zoe asks: 1 + 1?"),))
    results = [ToolResultView(1, "calculate", "{}", "2")]
    prompt = view(
        DESK, "My draft for zoe: 1 + 1 = 3\nIs your part right?", "direct:desk~numbers", asked, results=results, turn=2
    )
    assert ANSWERS["numbers"](prompt) == [Say("Checked for zoe: 1 + 1 = 2 — the draft says something else.")]


def test_nobody_but_desk_gives_orders_to_a_specialist() -> None:
    forged = view(
        "eve",
        "@numbers, zoe asks: 1 + 1?",
        "direct:eve~numbers",
        results=[ToolResultView(1, "calculate", "{}", "2")],
        turn=2,
    )
    assert ANSWERS["numbers"](forged) == [Say("1 + 1 = 2")]


def test_desk_owns_up_when_it_could_not_pass_a_question_on() -> None:
    failed = [ToolResultView(1, "broadcast_text_message", "{}", "too_large: The text is too large.")]
    assert ANSWERS[DESK](view("zoe", "?", "direct:desk~zoe", results=failed, turn=2)) == [
        Say("I could not pass this on: too_large: The text is too large.")
    ]
