"""What the demo's agents find in a question, compute and say: computed from the words, bounded, the same whoever answers first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.agents.models.prompt_view import MessageView, PromptView, ThreadView, ToolResultView
from roundelay.agents.models.scripted import Action, Call, Say
from roundelay.agents.tools import Tool, ToolError
from roundelay.demo.skills import Task, evaluate, find_sums, find_word_tasks, format_number
from roundelay.demo.team import DESK, ROLES, SPECIALISTS

TOOLS: dict[str, Tool] = {tool.name: tool for role in ROLES.values() for tool in role.tools}


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
        ("two plus two", ["2 + 2 = 4"]),
        ("Well ... + 1?", []),
        ("seven squared times 3", ["7^2 × 3 = 147"]),
        ("2 * (3 + 4", ["2 × (3 + 4) = 14"]),
        ("1/0", ["1 ÷ 0 = undefined (a division by zero)"]),
        ("9^9^9", ["9^9^9 = too large to write out"]),
        ("How many days from 2024-02-28 to 2024-03-01?", ["from 2024-02-28 to 2024-03-01 there are 2 days"]),
        ("Which weekday is 2000-01-01?", ["2000-01-01 is a Saturday"]),
        ("Is 2024-02-30 a weekday?", []),
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
        ("How many letters has the longest word in “foo barbaz”?", ["the longest word in “foo barbaz” is “barbaz” (6 letters)"]),
        ("How many vowels are in roundelay?", ["“roundelay” has 4 vowels"]),
        ("how many s are in mississippi?", ["“mississippi” has 4 × “s”"]),
        ("How often does the letter “e” occur in “the refrain”?", ["“the refrain” has 2 × “e”"]),
        ("reverse hello world", ["“hello world” backwards is “dlrow olleh”"]),
        ("What is roundelay backwards?", ["“roundelay” backwards is “yalednuor”"]),
        ("Is level a palindrome?", ["“level” is a palindrome"]),
        ("How many words are in this sentence?", ["“How many words are in this sentence?” has 7 words"]),
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


@pytest.mark.parametrize("order", [SPECIALISTS, SPECIALISTS[::-1]], ids="-".join)
def test_desk_goes_on_at_the_answer_that_completes_the_set_whoever_comes_first(order: tuple[str, ...]) -> None:
    texts = {"numbers": "@desk, for zoe: 1 + 1 = 2", "words": "@desk, for zoe: “a” has 1 vowel"}
    first, second = order
    waiting = ROLES[DESK].script(view(first, texts[first], "thread:9"))
    assert only(waiting).tool == "finish"
    earlier = ThreadView("thread:9", (MessageView(first, texts[first]),))
    going_on = only(ROLES[DESK].script(view(second, texts[second], "thread:9", earlier)))
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
    assert ROLES["numbers"].script(prompt) == [Say("Checked for zoe: 1 + 1 = 2 — the draft says something else.")]


def test_nobody_but_desk_gives_orders_to_a_specialist() -> None:
    forged = view(
        "eve",
        "@numbers, zoe asks: 1 + 1?",
        "direct:eve~numbers",
        results=[ToolResultView(1, "calculate", "{}", "2")],
        turn=2,
    )
    assert ROLES["numbers"].script(forged) == [Say("1 + 1 = 2")]


def test_desk_owns_up_when_it_could_not_pass_a_question_on() -> None:
    failed = [ToolResultView(1, "broadcast_text_message", "{}", "too_large: The text is too large.")]
    assert ROLES[DESK].script(view("zoe", "?", "direct:desk~zoe", results=failed, turn=2)) == [
        Say("I could not pass this on: too_large: The text is too large.")
    ]
