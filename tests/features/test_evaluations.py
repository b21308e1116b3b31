"""Tests of evaluations and postprocessors of the final answer: the checks that run, the effects of their findings,
and broken checks.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.events import AnswerReviewed
from roundelay.agents.features.evaluations import Evaluations, Evidence, Grounding, Rule
from roundelay.agents.features.postprocessors import FollowUps, Postprocessors
from roundelay.agents.middleware import Answer, Around, Middleware
from roundelay.agents.models.model import Model
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Tool, tool
from roundelay.app import Network
from roundelay.display.screen import format_message
from roundelay.network.errors import ConfigError
from roundelay.network.messages import DirectMessage
from tests.support.agents import Person, Provider, running
from tests.support.fake_openai import Reply, server_error, text
from tests.support.loops import Body, Loop, Records, by_turn, survives_kills, tools_of, turn_of, use


def make(name: str, result: str) -> Tool:
    def act() -> str:
        """Look something up."""
        return result

    return tool(name=name, idempotent=True)(act)


SEARCH, CLOCK = make("search", "The Rhine is 1,233 km long."), make("clock", "noon")
NO_PRICES = Rule("no_prices", r"\d+ EUR", "Leave out prices.", forbids=True)


def is_judge(body: Body) -> bool:
    return tools_of(body) == ["verdict"]


class Writer:
    """A model that uses one tool and then gives its answers one after the other. As a judge, it rejects every answer
    without 1,233 km.
    """

    def __init__(self, used: str, *answers: str, judge: Reply | None = None) -> None:
        self._used = used
        self._answers = answers
        self._judge = judge

    def __call__(self, body: Body) -> Reply:
        if tools_of(body) == ["suggest"]:
            return use(("suggest", {"questions": ["And the Elbe?", " ", "Why?", "Since when?"]}), usage=(7, 1))
        if is_judge(body):
            if self._judge is not None:
                return self._judge
            answer = json.loads(body["messages"][1]["content"])["answer"]
            is_good = "1,233" in answer
            return use(("verdict", {"is_grounded": is_good, "problems": [] if is_good else [answer]}), usage=(5, 1))
        turn = turn_of(body)
        return use((self._used, {})) if turn == 1 else text(self._answers[min(turn - 2, len(self._answers) - 1)])


def own_requests(provider: Provider) -> list[Body]:
    return [it for it in provider.requests if not is_judge(it) and tools_of(it) != ["suggest"]]


def last_of(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def grounded(model: Model, *more: Middleware, **policy: Any) -> Agent:
    evaluations = Evaluations(by_tool={"search": [Grounding()]})
    return Agent("bob", "", model, [SEARCH, CLOCK], AgentPolicy(**policy), middleware=[evaluations, *more])


async def test_evaluations_of_the_final_answer_are_chosen_by_the_tools_used() -> None:
    for used, judged in (("search", 1), ("clock", 0)):
        async with Provider(Writer(used, "It is 1,233 km long.")) as provider:
            await Loop(grounded(provider.model())).drive()
        assert sum(map(is_judge, provider.requests)) == judged, used


async def test_a_failed_grounding_check_corrects_and_the_answer_is_written_again() -> None:
    """The judge gets results and answer as JSON, and the model gets the finding. The person gets only the good
    answer, and the total cost.
    """
    async with Provider(Writer("search", "It is 900 km long.", "It is 1,233 km long.")) as provider:
        loop = Loop(grounded(provider.model()))
        end = await loop.drive()
    assert (end.status, end.answer, end.turns) == ("finished", "It is 1,233 km long.", 3)
    judge = next(it for it in provider.requests if is_judge(it))
    assert judge["tool_choice"] == {"type": "function", "function": {"name": "verdict"}}
    facts = json.loads(judge["messages"][1]["content"])
    assert facts["results"] == [{"tool": "search", "content": "The Rhine is 1,233 km long."}]
    assert (facts["conversation"], facts["answer"]) == ("<conversation/>", "It is 900 km long.")
    told = last_of(own_requests(provider)[2])
    assert told.startswith("Your answer was not given. Your tools' results do not support these statements.")
    assert "\n- It is 900 km long." in told
    reviews = [(it.is_accepted, it.correction is not None) for it in loop.events if isinstance(it, AnswerReviewed)]
    assert reviews == [(False, True), (True, False)]
    assert [it["usage"]["prompt_tokens"] for it in loop.records.bodies("review")] == [5, 5]


async def test_corrections_are_bounded_and_noted_when_no_retry_is_left() -> None:
    """The record, the event and the person's message contain the note."""
    async with Provider(Writer("search", "It is 900 km long.")) as provider:
        loop = Loop(grounded(provider.model(), max_corrections=1))
        end = await loop.drive()
    assert end.metadata == {"failed_checks": ["grounding"]}
    shown = format_message(
        DirectMessage(
            seq=3,
            message_id="m",
            sender_id="bob",
            sender_kind="agent",
            to="agent:mia",
            thread_id="direct:bob~mia",
            root=3,
            hops=0,
            sent_at=0,
            content=end.answer,
            metadata=dict(end.metadata),
        )
    )
    assert shown.splitlines()[1:] == ["  | ! did not pass: grounding"]
    assert (end.answer, end.turns) == ("It is 900 km long.", 3)
    *_, last = loop.records.bodies("review")
    assert (last["is_accepted"], last["correction"]) == (False, None)
    assert last["notes"][0].startswith("grounding: Your tools' results do not support")


async def test_a_rule_and_a_check_of_ones_own_are_made_together() -> None:
    async def is_short(answer: str, evidence: Evidence, around: Around) -> str | None:
        assert evidence.results == [("clock", "noon")]
        return "Say it shorter." if len(answer) > 20 else None

    async with Provider(Writer("clock", "It is noon, and that costs 3 EUR.", "Noon.")) as provider:
        evaluations = Evaluations(always=[NO_PRICES, is_short])
        loop = Loop(Agent("bob", "", provider.model(), [CLOCK], middleware=[evaluations]))
        end = await loop.drive()
    assert end.answer == "Noon."
    assert "Leave out prices.\nSay it shorter." in last_of(provider.requests[2])
    assert loop.records.bodies("review")[0]["notes"] == ["no_prices, is_short: Leave out prices.\nSay it shorter."]


@pytest.mark.parametrize("judge", [server_error(), text("Looks fine to me."), use(("verdict", {"is_grounded": "?"}))])
async def test_a_check_that_cannot_be_made_holds_up_no_answer_and_is_noted(
    judge: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async with Provider(Writer("search", "It is 900 km long.", judge=judge)) as provider:
        loop = Loop(grounded(provider.model(), model_attempts=1))
        end = await loop.drive()
    assert (end.status, end.answer) == ("finished", "It is 900 km long.")
    [review] = loop.records.bodies("review")
    assert review["notes"][0].startswith("grounding: could not be made (ModelError: ")
    assert review["is_accepted"] is True
    [told] = [it for it in caplog.records if it.msg == "check not made"]
    assert not told.exc_info  # a model's reply is not a fault of code
    assert vars(told)["error"].startswith("ModelError: ")


async def test_a_check_that_cannot_be_made_is_noted_beside_one_that_found_something() -> None:
    def broken(answer: str, evidence: Evidence, around: Around) -> str | None:
        raise LookupError("no such table")

    async with Provider(Writer("clock", "It costs 3 EUR.")) as provider:
        layers = [Evaluations(always=[broken, NO_PRICES])]
        loop = Loop(Agent("bob", "", provider.model(), [CLOCK], AgentPolicy(max_corrections=0), middleware=layers))
        end = await loop.drive()
    assert end.answer == "It costs 3 EUR."
    assert loop.records.bodies("review")[0]["notes"] == [
        "no_prices: Leave out prices.", "broken: could not be made (LookupError: no such table)"
    ]  # fmt: skip


async def test_a_check_that_hangs_is_noted_too() -> None:
    async def hangs(answer: str, evidence: Evidence, around: Around) -> str | None:
        return await asyncio.Future()

    async with Provider(Writer("clock", "Noon.")) as provider:
        layers = [Evaluations(always=[hangs], timeout_s=0.01)]
        loop = Loop(Agent("bob", "", provider.model(), [CLOCK], middleware=layers))
        end = await loop.drive()
    assert end.answer == "Noon."
    assert loop.records.bodies("review")[0]["notes"][0].startswith("hangs: could not be made (CallTimedOut")


def answered(records: Records) -> int:
    """Return the number of requests that the records replace. A review replaces one judge request, and an accepted
    review also replaces the request for follow-up questions.
    """
    reviews = records.bodies("review")
    return len(records.bodies("model_reply")) + len(reviews) + sum(it["is_accepted"] for it in reviews)


async def test_evaluations_and_postprocessors_are_not_asked_again_after_a_kill() -> None:
    script = Writer("search", "It is 900 km long.", "It is 1,233 km long.")
    async with Provider(script) as provider:
        whole = await survives_kills(
            provider, lambda model: grounded(model, Postprocessors(FollowUps())), answered=answered
        )
    assert whole.end.metadata == {
        "passed_checks": ["grounding"],
        "follow_ups": ["And the Elbe?", "Why?", "Since when?"],
    }


# --- postprocessors


async def test_postprocessors_follow_an_answer_that_passed() -> None:
    """Postprocessors run in order. Follow-up questions are metadata of the message, and `chat` shows them."""

    def sign(answer: str, around: Around) -> str:
        return f"{answer} (bob)"

    script = Writer("search", "It is 900 km long.", "It is 1,233 km long.")
    async with Provider(script) as provider, Network.open() as network:
        layers = [Evaluations(by_tool={"search": [Grounding()]}), Postprocessors(sign, FollowUps(count=2))]
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[SEARCH], middleware=layers)
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            heard = await mia.ask("bob", "How long?")
    assert heard.text == "It is 1,233 km long. (bob)"
    assert heard.metadata == {"passed_checks": ["grounding"], "follow_ups": ["And the Elbe?", "Why?"]}
    assert [tools_of(it) for it in provider.requests].count(["suggest"]) == 1
    assert format_message(heard).splitlines()[1:] == [
        "  | ✓ passed: grounding", "  | ? And the Elbe?", "  | ? Why?",
    ]  # fmt: skip


async def test_an_answer_that_did_not_pass_is_not_processed() -> None:
    async with Provider(Writer("search", "It is 900 km long.")) as provider:
        end = await Loop(grounded(provider.model(), Postprocessors(FollowUps()), max_corrections=0)).drive()
    assert (end.answer, end.metadata) == ("It is 900 km long.", {"failed_checks": ["grounding"]})


async def test_a_postprocessor_that_fails_leaves_the_answer_and_is_noted() -> None:
    def broken(answer: str, around: Around) -> str:
        raise LookupError("no quotes today")

    def tag(answer: str, around: Around) -> Answer:
        return Answer(answer, {"topic": "time"})

    async with Provider(Writer("clock", "Noon.")) as provider:
        layers = [Postprocessors(broken, tag)]
        loop = Loop(Agent("bob", "", provider.model(), [CLOCK], middleware=layers))
        end = await loop.drive()
    assert (end.answer, end.metadata) == ("Noon.", {"topic": "time"})
    assert loop.records.bodies("review")[0]["notes"] == ["broken failed (LookupError: no quotes today)"]


def test_evaluations_and_postprocessors_are_set_in_the_agents_file(tmp_path: Path) -> None:
    path = tmp_path / "bob.yaml"
    path.write_text(
        "id: bob\ninstruction: x\nmodel: {rules: []}\nmiddleware:\n"
        "- evaluations: {checks: {plain: {regex: '[*]', forbids: true, instruction: No markup.}}, always: [plain], tools: {search: [grounding]}}\n"
        "- postprocessors: {follow_ups: 2}\n"
    )
    checks, added = build_runner(load_agents(path)[0]).agent.middleware
    assert isinstance(checks, Evaluations)
    assert isinstance(added, Postprocessors)
    path.write_text("{id: bob, instruction: x, model: {rules: []}, middleware: [{evaluations: {always: [nope]}}]}")
    with pytest.raises(ConfigError, match=r'bob\.yaml:1.*unknown check "nope". Known checks: grounding'):
        build_runner(load_agents(path)[0])


async def test_follow_up_questions_are_for_people() -> None:
    script = Writer("search", "It is 1,233 km long.")
    async with Provider(script) as provider, Network.open() as network:
        layers = [Postprocessors(FollowUps())]
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[SEARCH], middleware=layers)
        async with running(network, bob):
            ann = await network.join("ann")
            await ann.send("agent:bob", "How long?", requires_response=["bob"])
            heard = await anext(aiter(ann))
    assert (heard.text, heard.metadata) == ("It is 1,233 km long.", None)
    assert ["suggest"] not in [tools_of(it) for it in provider.requests]


async def test_a_tool_that_was_called_and_is_disabled_was_not_used() -> None:
    """The checks for that tool are skipped, because there are no results to compare the answer with."""

    @tool(idempotent=True, should_use=lambda context: False)
    def search() -> str:
        """Look something up."""
        return "found"

    def refuse(answer: str, evidence: Evidence, around: Around) -> str:
        return "Never good enough."

    async with Provider(by_turn(use(("search", {})), "It is so.")) as provider:
        agent = Agent("bob", "", provider.model(), [search], middleware=[Evaluations(by_tool={"search": [refuse]})])
        end = await Loop(agent).drive()
    assert (end.answer, end.metadata, end.tool_calls) == ("It is so.", {}, 0)
