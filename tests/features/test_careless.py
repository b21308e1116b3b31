"""Tests of careless authors' configurations: options out of range, duplicate or conflicting features, and checks and
postprocessors that return anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.features.attachments import Attachments
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Evidence, Grounding
from roundelay.agents.features.few_shot import Example, FewShot
from roundelay.agents.features.postprocessors import Postprocessors
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.middleware import Answer, Around, Middleware
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Tool, tool
from roundelay.agents.values import Finish
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Heard, Person, Provider, running
from tests.support.fake_openai import Reply, text
from tests.support.loops import Body, Loop, by_turn, tools_of, use


def build(path: Path, *items: str) -> None:
    listed = "".join(f"  - {it}\n" for it in items)
    path.write_text(f"id: bob\ninstruction: x\nmodel: {{rules: []}}\nmiddleware:\n{listed}")
    build_runner(load_agents(path)[0])


WRONG = [
    ("references: {max_chars: 0}", "max_chars"),
    ("references: {max_chars: -5}", "max_chars"),
    ("references: {max_chars: true}", "must be a whole number, not true"),
    ("references: {max_chars: .nan}", "must be a whole number"),
    ("references: {max_chars: 99999999999999999999}", "max_chars"),
    ("references: {in_txt: true}", 'did you mean "in_text"'),
    ("references:", "write references: {}"),
    ("custom:", "write custom: module:callable"),
    ("shown_results: {loud: true}", "known here: none, write {}"),
    ("fragments: {limit: -1}", "limit"),
    ("fragments: {limit: 0}", "limit"),
    ("fragments: {max_chars: 0}", "max_chars"),
    ("few_shot: {examples: []}", "must have at least 1 item"),
    ("few_shot: {examples: [{user: a}]}", '"middleware.1.few_shot.examples.1.answer" is missing'),
    ("few_shot: {models: [], examples: [{user: a, answer: b}]}", "models"),
    ("few_shot: {models: 'small*', examples: [{user: a, answer: b}]}", "must be a list"),
    ("few_shot: {examples: [{user: a, answer: b, calls: [{tool: 'look up'}]}]}", "examples.1.calls.1.tool"),
    ("forced_tools: {tools: ['']}", "tools.1"),
    ("forced_tools: {tools: search}", "must be a list"),
    (
        "context: {max_tokens: 1000, layouts: [summary, full]}",
        "in this order, each at most once: full, tool_summary, summary",
    ),
    ("context: {max_tokens: 1000, layouts: [full, full]}", "each at most once"),
    ("context: {max_tokens: 1000, summary_tokens: 600}", r"less than the maximum of a request \(500\)"),
    ("context: {max_tokens: 1000, reserve_tokens: -1}", "reserve_tokens"),
    ("long_results: {max_chars: 50000, max_kept_chars: 2000}", r"max_kept_chars must be at least max_chars \(50000\)"),
    ("long_results: {max_kept_chars: 5000, max_total_chars: 2000}", "max_total_chars must be at least max_kept_chars"),
    ("prompt_budget: {max_tokens: 1000, per_thread: 5000}", r"per_thread must be at most max_tokens \(1000\)"),
    ("prompt_budget: {max_tokens: 1000, per_thread: 60, per_message: 61}", r"the tokens of a thread \(60\)"),
    ("data_policy: {}", "changes nothing: set text, thinking, calls, results or redact"),
    ("data_policy: {calls: search}", r"must be true, false or a list of tools: write \[search\]"),
    ("data_policy: {results: 0}", "must be true, false or a list of tools"),
    ("data_policy: {redact: ['']}", r"matches the empty text"),
    ("data_policy: {redact: ['a*']}", r"'a\*' matches the empty text"),
    ("evaluations: {}", "no check ever runs: name checks under always or under tools"),
    ("evaluations: {tools: {search: []}}", "no check ever runs"),
    ("evaluations: {checks: {a: {regex: x}}}", "the check a never runs"),
    ("evaluations: {checks: {a: {call: 'os:getcwd', forbids: true}}, always: [a]}", "forbids, which need regex"),
    ("evaluations: {checks: {a: {regex: x, instruction: ''}}, always: [a]}", "instruction"),
    ("evaluations: {max_corrections: 3, always: [grounding]}", 'unknown key "max_corrections"'),
    ("postprocessors: {}", r"do nothing: set call: \[module:function\] or follow_ups: 3"),
    ("budget: {tokens: {}}", "tokens limits nothing: set at least one of turn, reaction, root, day"),
    ("budget: {usd: {}}", "usd limits nothing"),
    ("budget: {tokens: {turn: 500}}", r"reserve \(1000\) must be less than the 500 tokens for a turn"),
    ("budget: {tokens: {day: .nan}}", "must be a whole number"),
    ("budget: {usd: {day: .inf}}", "must be a valid decimal"),
    ("budget: {usd: {day: 0}}", "greater than 0"),
    ("budget: {usd: {day: 1}, prices: {m: {input: -1, output: 1}}}", "prices.m.input"),
    ("registry: {sets: {a: []}, modes: [b]}", "unknown tool set b in the registry. Known sets: a"),
    ("structured: {type: 'os:sep'}", "the type 'os:sep'"),
]


@pytest.mark.parametrize(("item", "said"), WRONG)
def test_a_wrong_option_is_named_with_its_line_and_what_to_write(item: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"bob\.yaml:5: .*{said}"):
        build(tmp_path / "bob.yaml", item)


@pytest.mark.parametrize(
    "item",
    [
        "references: {}", "fragments: {}", "context: {max_tokens: 1000}", "long_results: {}", "many_results: {}", "registry: {}",
        "prompt_budget: {max_tokens: 1000}", "shown_results: {}", "structured: {type: 'builtins:int'}", "forced_tools: {tools: [a]}",
        "budget: {tokens: {day: 5000}}",
    ],
)  # fmt: skip
def test_a_second_one_that_would_undo_the_first_is_refused(item: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bob\.yaml:7: .* is already in the list, as item 1: keep one"):
        build(tmp_path / "bob.yaml", item, "data_policy: {text: false}", item)


def test_features_of_which_several_make_sense_may_stand_there_more_than_once(tmp_path: Path) -> None:
    examples = "few_shot: {models: [%s], examples: [{user: a, answer: b}]}"
    build(
        tmp_path / "bob.yaml", examples % "'small*'", examples % "'large*'", "attachments: {takes: [image]}", "attachments: {takes: [pdf]}",
        "evaluations: {always: [grounding]}", "evaluations: {checks: {a: {regex: x}}, always: [a]}", "data_policy: {text: false}",
        "data_policy: {redact: ['a+']}",
    )  # fmt: skip


def test_a_budget_around_several_forced_requests_is_refused(tmp_path: Path) -> None:
    items = "budget: {tokens: {day: 5000}}", "forced_tools: {tools: [a, b]}"
    with pytest.raises(
        ConfigError, match=r"bob\.yaml:6: .*would reserve one request for several: move budget after forced_tools"
    ):
        build(tmp_path / "bob.yaml", *items)
    build(tmp_path / "bob.yaml", *items[::-1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FewShot([Example("a", "b")], models="small*"), r'"models" must be a list .*not "small\*"'),
        (lambda: DataPolicy(calls="search"), r"must be a list. Write \['search'\]"),
        (lambda: DataPolicy(results="search"), r"results is 'search'"),
        (lambda: DataPolicy(redact=r"\d+"), "redact is"),
        (lambda: Attachments("image"), r'"takes" must be a list .*not "image"'),
        (lambda: Attachments(["image"], models="gpt-*"), r'"models" must be a list .*not "gpt-\*"'),
    ],
)
def test_a_text_in_place_of_a_list_is_not_taken_letter_by_letter(make: Callable[[], Middleware], said: str) -> None:
    with pytest.raises((TypeError, ConfigError), match=said):
        make()


# --- limits that a message carries


@pytest.mark.parametrize(
    "limits",
    [
        {"max_turns": 10**9, "max_tool_calls": 10**9}, {"max_tool_calls": 10**18}, {"max_turns": True, "max_tool_calls": False},
        {"max_turns": -1, "max_tool_calls": 0}, {"max_turns": 1.0}, {"max_turns": "1"}, {"max_turns": [1]}, {"max_turns": None}, [], "x", 1, True,
        {"max_tool_calls": 1e308},
    ],
)  # fmt: skip
async def test_what_is_no_limit_does_not_keep_a_message_from_its_answer(limits: Any) -> None:
    async with Provider(by_turn(use(("look", {})), "The answer.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model())
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "Well?", metadata={"limits": limits})
            assert (await mia.hear()).text == "The answer."


# --- custom checks and postprocessors


async def answer(
    *middleware: Middleware, script: Callable[[Body], Reply] | None = None, **policy: Any
) -> tuple[Finish, list[Body]]:
    """Return the end of a reaction and its reviews."""
    async with Provider(script or by_turn("The answer.")) as provider:
        loop = Loop(Agent("bob", "", provider.model(), [], AgentPolicy(**policy), middleware=middleware))
        return await loop.drive(), loop.records.bodies("review")


@pytest.mark.parametrize("given", [True, False, 5, {"a": 1}, ["x"], b"x"])
async def test_a_check_that_gives_no_text_is_noted_and_holds_up_nothing(given: Any) -> None:
    def check(answer: str, evidence: Evidence, around: Around) -> Any:
        return given

    end, reviews = await answer(Evaluations([check]))
    assert (end.status, end.answer) == ("finished", "The answer.")
    [review] = reviews
    assert review["is_accepted"] is True
    assert review["notes"] == [
        f"check: could not be made (TypeError: it returned a {type(given).__name__} and must return an instruction as text, or None)"
    ]


@pytest.mark.parametrize("given", ["", "  \n"])
async def test_a_check_that_says_nothing_found_nothing(given: str) -> None:
    def check(answer: str, evidence: Evidence, around: Around) -> str:
        return given

    _, reviews = await answer(Evaluations([check]))
    assert reviews[0]["correction"] is None


async def test_a_check_may_be_an_object_that_cannot_be_hashed_and_is_made_once() -> None:
    made = []

    @dataclass
    class Kind:
        wanted: str = "kind"

        def __call__(self, answer: str, evidence: Evidence, around: Around, /) -> None:
            made.append(answer)

    check = Kind()
    end, _ = await answer(Evaluations([check, check], {"search": [check]}))
    assert end.status == "finished"
    assert made == ["The answer."]


@pytest.mark.parametrize("said", ["so \ud800 odd", "x" * 1_000_000])
async def test_what_a_check_says_is_fit_to_be_sent(said: str) -> None:
    def check(answer: str, evidence: Evidence, around: Around) -> str | None:
        return said if "better" not in answer else None

    end, reviews = await answer(Evaluations([check]), script=by_turn("The answer.", "A better one."))
    assert end.answer == "A better one."
    assert len(reviews[0]["correction"]) < 10_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "it returned a NoneType and must return the answer, as text or as Answer"),
        ({"a": 1}, "it returned a dict"),
        (("text", {}), "it returned a tuple"),
        (Answer(None), "it returned a Answer"),  # type: ignore[arg-type]
        (Answer("x", None), "TypeError"),  # type: ignore[arg-type]
        (Answer("x", {"a": object()}), "PydanticSerializationError"),  # type: ignore[dict-item]
        (Answer("x", {"a": "b" * 400_000}), "its metadata has 400009 characters; the maximum is 50000"),
        (Answer("x", {"a": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}), "nested deeper"),
    ],
)  # fmt: skip
async def test_a_postprocessor_that_gives_no_answer_leaves_it_as_it_was(given: Any, said: str) -> None:
    def add(answer: str, around: Around) -> Any:
        return given

    end, reviews = await answer(Postprocessors(add, lambda answer, around: f"{answer} Really."))
    assert (end.status, end.answer, end.metadata) == ("finished", "The answer. Really.", {})
    [note] = reviews[0]["notes"]
    assert note.startswith("add failed (")
    assert said in note


async def test_what_a_postprocessor_gives_is_fit_to_be_sent() -> None:
    """A real hub accepts neither lone surrogates nor NaN."""

    def add(answer: str, around: Around) -> Answer:
        return Answer(f"{answer}\ud800", {"score": float("nan")}, ["n" * 100_000])

    async with Provider(by_turn("The answer.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[Postprocessors(add)])
        async with running(network, bob):
            heard = await (await Person.join(network, "mia")).ask("bob", "Well?")
    assert (heard.text, heard.metadata) == ("The answer.?", {"score": "NaN"})


async def test_a_review_that_gives_nothing_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The custom middleware forgets to return a value. The reaction ends with a visible error."""

    class Forgets(Middleware):
        async def review(self, around: Around, answer: str) -> Any:
            print(answer)

    async with Provider(by_turn("The answer.")) as provider, Network.open() as network:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[Forgets()])
        async with running(network, bob):
            heard = await (await Person.join(network, "mia")).ask("bob", "Well?")
    assert heard.text == "I could not answer: an error on my side. My log has it."
    assert "a reviewer gave a NoneType and must give the answer, as text or as Answer" in caplog.text


# --- judges that do not follow their instructions


JUDGES: dict[str, tuple[Callable[[], Reply], bool]] = {
    "another case": (lambda: use(("Verdict", {"is_grounded": False, "problems": ["the length"]})), True),
    "a fence": (lambda: text('```json\n{"is_grounded": false, "problems": ["the length"]}\n```'), True),
    "an object": (
        lambda: Reply(
            tool_calls=({"id": "a", "type": "function", "function": {"name": "verdict", "arguments": {"is_grounded": False}}},)
        ),
        True,
    ),
    "prose": (lambda: text("It looks fine to me."), False),
    "nothing": (lambda: Reply(None, finish_reason="stop"), False),
    "cut off": (lambda: use(("verdict", '{"is_grounded": fal'), finish_reason="length"), False),
    "withheld": (lambda: Reply("", finish_reason="content_filter"), False),
    "wrong types": (lambda: use(("verdict", {"is_grounded": "perhaps"})), False),
    "nonsense": (lambda: use(("verdict", "[[[["), ("verdict", {})), False),
}  # fmt: skip


@pytest.mark.parametrize("judge", JUDGES)
async def test_a_judge_that_answers_oddly_is_understood_or_holds_up_nothing(judge: str) -> None:
    reply, is_understood = JUDGES[judge]

    def script(body: Body) -> Reply:
        if tools_of(body) == ["verdict"]:
            return reply()
        said = [it["content"] for it in body["messages"] if it["role"] == "user"]
        if not any(it["role"] == "tool" for it in body["messages"]):
            return use(("no_such_tool", {}))
        return text("Better." if "was not given" in said[-1] else "The answer.")

    end, reviews = await answer(Evaluations([Grounding()]), script=script, max_corrections=1)
    assert end.status == "finished"
    first = reviews[0]
    if is_understood:
        assert first["correction"] is not None
    else:
        assert (end.answer, first["correction"]) == ("The answer.", None)
        assert "did not call verdict as requested" in first["notes"][0]


# --- answers that are too large for a message


async def test_a_large_answer_goes_out_without_the_metadata_that_has_no_room_beside_it() -> None:
    """A frame holds 256 KiB, and the message would contain the value twice."""
    value = {"text": "x" * 150_000}
    middleware: list[Middleware] = [
        StructuredAnswer(dict[str, str]), Postprocessors(lambda answer, around: Answer(answer, {"kind": "large"})),
    ]  # fmt: skip
    heard = Heard()
    async with Provider(by_turn(json.dumps(value))) as provider, Network.open() as network:
        policy = AgentPolicy(max_turns=1)
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), middleware=middleware, on_event=heard, policy=policy
        )
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            answered = await mia.ask("bob", "Well?")
            [end] = await heard.finished()
            records = await mia.records(end.reaction)
    assert json.loads(answered.text) == value
    assert answered.metadata == {"kind": "large"}
    [review] = [it["body"] for it in records if it["kind"] == "review"]
    assert review["notes"] == ["too large for the message's metadata: structured"]


async def test_a_structured_answer_is_not_cut_as_a_long_result_is() -> None:
    value = {"text": "é" * 15_000 + "x" * 10_000}
    async with Provider(by_turn(use(("give_answer", {"answer": value})))) as provider, Network.open() as network:
        structured = StructuredAnswer(dict[str, str])
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[structured])
        async with running(network, bob):
            heard = await (await Person.join(network, "mia")).ask("bob", "Well?")
    assert structured.read(heard) == json.loads(heard.text) == value
    assert len(provider.requests) == 1


async def test_a_structured_answer_too_large_for_a_message_is_asked_for_again_shorter() -> None:
    script = by_turn(
        use(("give_answer", {"answer": {"text": "x" * 120_000}})), use(("give_answer", {"answer": {"text": "short"}}))
    )
    async with Provider(script) as provider, Network.open() as network:
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), middleware=[StructuredAnswer(dict[str, str])]
        )
        async with running(network, bob):
            heard = await (await Person.join(network, "mia")).ask("bob", "Well?")
    assert json.loads(heard.text) == {"text": "short"}
    told = next(it["content"] for it in provider.requests[1]["messages"] if it["role"] == "tool")
    assert told.startswith("Not sent: your answer has 120017 characters as JSON; the maximum is ")


SECRET = "the pass phrase is tangerine"


def fail(*_: object) -> Any:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        raise ValueError(f"cannot do it: {SECRET}") from error


class FailsAround(Middleware):
    async def around_tool(self, around: Around, call: object, proceed: object) -> Any:
        fail()


@tool(idempotent=True)
def look(what: str) -> str:
    """Look."""
    return str(fail(what))


@tool(idempotent=True)
def see(what: str) -> str:
    """See."""
    return what


@pytest.mark.parametrize(
    ("told", "tools", "layers"),
    [
        ("tool failed", [look], []),
        ("middleware around a tool failed", [see], [FailsAround()]),
        ("postprocessor failed", [], [Postprocessors(fail)]),
        ("check not made", [], [Evaluations(always=[fail])]),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
async def test_what_an_authors_code_raises_is_logged_with_its_places_and_without_its_words(
    told: str, tools: list[Tool], layers: list[Middleware], caplog: pytest.LogCaptureFixture
) -> None:
    """The exception text may quote the conversation. The model and the record of the call or review get the text, but
    the log does not.
    """
    replies = [use((tools[0].name, {"what": SECRET}))] if tools else []
    async with Provider(by_turn(*replies, text("Done."))) as provider:
        loop = Loop(Agent("bob", "", provider.model(), tools, middleware=layers))
        end = await loop.drive()
    assert end.answer == "Done."
    assert told in caplog.text
    assert "KeyError" in caplog.text, "the cause"
    assert "in fail" in caplog.text, "the place"
    assert "tangerine" not in caplog.text + str([vars(it) for it in caplog.records])
    assert "tangerine" in json.dumps([it["body"] for it in loop.records.kept.values()])
