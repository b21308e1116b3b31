"""Tests of the data policy: the stored parts of an agent's work, redactions, and how a resumed reaction handles
missing data.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import MiddlewareChoice, build_middleware
from roundelay.agents.tools import Output, Tool, tool
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Heard, Person, Provider, make_runner, running
from tests.support.fake_openai import error
from tests.support.loops import Body, Killed, Loop, Records, by_turn, results_of, system_of, use

SECRET = "4111-1111"


@tool(idempotent=True)
def look(at: str = "it") -> Output:
    """Look at something."""
    return Output(f"saw {at} {SECRET}", {"debug": [f"page {SECRET}", 3]}, summary=f"saw {SECRET}")


def make_pay(*, once: bool) -> tuple[Tool, list[str]]:
    paid: list[str] = []

    @tool(once=once, idempotent=not once)
    def pay(card: str) -> str:
        """Pay."""
        paid.append(card)
        return "paid"

    return pay, paid


SCRIPT = by_turn(use(("look", {"at": SECRET}), text=f"Looking for {SECRET}."), f"It is {SECRET}.")
NOTHING = {"text": False, "calls": False, "results": False}


async def keep(script: Any = SCRIPT, *tools: Tool, **policy: Any) -> tuple[Records, list[Body], str | None]:
    """Run a reaction under a data policy. Return the reaction's records, the provider's requests, and the answer."""
    async with Provider(script) as provider:
        loop = Loop(Agent("bob", "", provider.model(), tools or [look], middleware=[DataPolicy(**policy)]))
        end = await loop.drive()
        return loop.records, provider.requests, end.answer


def written(records: Records) -> str:
    return json.dumps(list(records.kept.values()))


async def test_without_choices_everything_is_kept() -> None:
    async with Provider(SCRIPT) as provider:
        plain = Loop(Agent("bob", "", provider.model(), [look]))
        await plain.drive()
    assert (await keep())[0].kept == plain.records.kept


async def test_what_is_not_kept_is_in_no_record_and_the_live_model_reads_it_all() -> None:
    records, requests, answer = await keep(**NOTHING)
    assert SECRET not in written(records)
    assert answer == f"It is {SECRET}."
    assert results_of(requests[1]) == [f"saw {SECRET} {SECRET}"]
    assert SECRET in str(requests[1]["messages"][2])  # the agent's own text and call
    [result] = records.bodies("tool_result")
    assert "did not keep the result of look" in result["content"]
    assert records.bodies("tool_started")[0]["args"] == "{}"
    first, last = records.bodies("model_reply")
    assert (first["reply"]["tool_calls"][0]["name"], first["altered"]) == ("look", {"text": True, "calls": [0]})
    assert (last["reply"]["text"], last["altered"]) == ("[not kept]", {"text": True})


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        ({"text": False}, {"text"}),
        ({"calls": False}, {"calls"}),
        ({"results": False}, {"results"}),
        ({"calls": ["other"], "results": ["look"]}, {"calls"}),
        ({"calls": lambda name: name == "look", "results": lambda name: False}, {"results"}),
    ],
)
async def test_text_calls_and_results_are_chosen_one_by_one_and_by_tool(
    policy: Mapping[str, Any], gone: set[str]
) -> None:
    records, _, _ = await keep(**policy)
    replies, results = records.bodies("model_reply"), records.bodies("tool_result")
    found = {
        "text": SECRET not in str([it["reply"]["text"] for it in replies]),
        "calls": SECRET not in str([it["reply"]["tool_calls"] for it in replies]) + str(records.bodies("tool_started")),
        "results": SECRET not in str(results),
    }
    assert {name for name, is_gone in found.items() if is_gone} == gone


@pytest.mark.parametrize("redact", [r"\d{4}-\d{4}", lambda text: text.replace(SECRET, "[redacted]")])
async def test_what_is_redacted_is_blacked_out_wherever_it_is_kept(redact: Any) -> None:
    records, requests, _ = await keep(redact=[redact])
    assert SECRET not in written(records)
    [result] = records.bodies("tool_result")
    assert result["content"] == "saw [redacted] [redacted]"
    assert result["data"]["debug"] == ["page [redacted]", 3]
    assert result["data"]["summary"] == "saw [redacted]"
    assert json.loads(records.bodies("tool_started")[0]["args"]) == {"at": "[redacted]"}
    assert SECRET in results_of(requests[1])[0]


async def test_numbers_and_broken_arguments_are_redacted_too() -> None:
    script = by_turn(use(("look", '{"at": 41111111, "n": 7}'), ("look", "{broken 41111111")), "Done.")
    records, _, _ = await keep(script, redact=[r"4\d{7}"])
    assert "41111111" not in str(records.bodies("model_reply"))
    first, second = records.bodies("model_reply")[0]["reply"]["tool_calls"]
    assert json.loads(first["arguments"]) == {"at": "[redacted]", "n": 7}
    assert second["arguments"] == "{broken [redacted]"


async def test_agents_inside_are_covered_by_the_policy_of_the_one_that_calls_them() -> None:
    def answer(body: Body) -> Any:
        return SCRIPT(body) if system_of(body) == "Inside." else by_turn(use(("inner", {"task": "x"})), "Done.")(body)

    async with Provider(answer) as provider:
        inner = agent_tool(Agent("inner", "Inside.", provider.model(), [look]))
        loop = Loop(Agent("bob", "Help.", provider.model(), [inner], middleware=[DataPolicy(**NOTHING)]))
        await loop.drive()
        assert SECRET not in written(loop.records)
        assert any(it["path"] == "1.0" for it in loop.records.bodies("tool_result") if "path" in it)


async def test_an_agent_that_takes_over_has_its_own_policy() -> None:
    def answer(body: Body) -> Any:
        if system_of(body) == "Take over.":
            return by_turn("", f"It is {SECRET}.")(body)
        return by_turn(use(("hand_over_to_ann", {"note": "go on"})))(body)

    async with Provider(answer) as provider:
        ann = Agent("ann", "Take over.", provider.model(), middleware=[DataPolicy(text=False)])
        loop = Loop(Agent("bob", "Help.", provider.model(), handoffs=[Handoff(ann)]))
        end = await loop.drive()
    assert end.answer == f"It is {SECRET}."
    assert SECRET not in written(loop.records)
    assert "go on" in written(loop.records)


# --- resumed


async def resume(script: Any, kill_after: int, *tools: Tool, **policy: Any) -> tuple[Loop, list[Body], str | None]:
    """Kill the process after a record and resume the reaction. Return the loop, the requests after the kill, and the
    answer.
    """
    async with Provider(script) as provider:
        agent = Agent("bob", "", provider.model(), tools or [look], middleware=[DataPolicy(**policy)])
        loop = Loop(agent, Records(kill_after=kill_after))
        with pytest.raises(Killed):
            await loop.drive()
        loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
        before = len(provider.requests)
        end = await loop.drive()
        return loop, provider.requests[before:], end.answer


async def test_a_resumed_reaction_is_told_what_was_not_kept() -> None:
    """The kill comes after the result (started, reply, intent, result). The second turn reads a sentence instead of
    the result.
    """
    _, requests, answer = await resume(SCRIPT, 4, **NOTHING)
    [told] = results_of(requests[0])
    assert told == "[This agent's data policy did not keep the result of look. If you still need it, get it again.]"
    assert [it["content"] for it in requests[0]["messages"] if it["role"] == "assistant"] == ["[not kept]"]
    assert answer == f"It is {SECRET}."


async def test_a_resumed_reaction_reads_what_was_blacked_out() -> None:
    _, requests, _ = await resume(SCRIPT, 4, redact=[SECRET])
    assert results_of(requests[0]) == ["saw [redacted] [redacted]"]


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("policy", [{"calls": False}, {"redact": [SECRET]}])
@pytest.mark.parametrize(
    ("kill_after", "told"), [(2, "arguments of this call were not kept"), (3, "outcome|effect is unknown")]
)
async def test_a_call_whose_arguments_were_not_kept_is_never_made_with_others(
    policy: dict[str, Any], kill_after: int, told: str, once: bool
) -> None:
    pay, paid = make_pay(once=once)
    script = by_turn(use(("pay", {"card": SECRET})), "Done.")
    _, requests, answer = await resume(script, kill_after, pay, **policy)
    assert any(it in results_of(requests[0])[0] for it in told.split("|"))
    assert set(paid) <= {SECRET}
    assert answer == "Done."


@pytest.mark.parametrize("policy", [{"text": False}, {"redact": [SECRET]}])
async def test_an_answer_that_was_not_kept_is_asked_for_again(policy: dict[str, Any]) -> None:
    _, requests, answer = await resume(by_turn(f"It is {SECRET}.", f"Again: {SECRET}."), 2, **policy)
    assert len(requests) == 1
    assert "what you wrote last was not kept and not sent. Write it again." in str(requests[0]["messages"][-1])
    assert answer == f"Again: {SECRET}."


async def test_an_answer_beside_finish_is_asked_for_again_too() -> None:
    finish = use(("finish", {"reason": "done"}), text=f"It is {SECRET}.")
    _, requests, answer = await resume(by_turn(finish, f"Again: {SECRET}."), 2, text=False)
    assert (len(requests), answer) == (1, f"Again: {SECRET}.")


async def test_a_tools_answer_that_was_not_kept_is_not_sent_in_its_place() -> None:
    answering = replace(look, answers=True)
    _, requests, answer = await resume(SCRIPT, 4, answering, results=False)
    assert "did not keep" in results_of(requests[0])[0]
    assert answer == f"It is {SECRET}."


async def test_an_answer_that_cannot_be_asked_for_again_is_not_made_up() -> None:
    async with Provider(by_turn("It is 7.")) as provider:
        agent = Agent("bob", "", provider.model(), middleware=[DataPolicy(text=False)])
        agent = replace(agent, policy=replace(agent.policy, max_turns=1))
        loop = Loop(agent, Records(kill_after=2))
        with pytest.raises(Killed):
            await loop.drive()
        loop.records.kill_after, loop.records.killed = 0, asyncio.Event()
        end = await loop.drive()
    assert (end.status, end.answer) == ("stopped", "I reached the limit of 1 turns without an answer.")


async def test_results_that_were_not_kept_are_not_taken_for_the_same() -> None:
    """Three calls without arguments have equal results after a resume. A fourth call is still not refused as a
    repeat.
    """
    count = iter(range(100))
    tick = tool(name="tick", idempotent=True)(lambda: f"tick {next(count)}")
    script = by_turn(*[use(("tick", {}))] * 4, "Done.")
    _, requests, _ = await resume(script, 10, tick, results=False)
    assert results_of(requests[-1])[-1].startswith("tick ")


# --- with a real hub, and from a file


async def test_nothing_of_it_is_in_the_ledger_but_the_answer_that_was_sent() -> None:
    heard = Heard()
    async with asyncio.timeout(20), Network.open() as network, Provider(SCRIPT) as provider:
        options = MiddlewareChoice.model_validate(
            {"data_policy": {"text": False, "results": ["other"], "redact": ["4111.*"]}}
        )
        runner = SimpleAgentRunner(
            "bob", instruction="Help.", model=provider.model(), tools=[look], middleware=[build_middleware(options, Path())],
            on_event=heard,
        )  # fmt: skip
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "one")).text == f"It is {SECRET}."
            [ended] = await heard.finished()
            kept = await mia.records(ended.reaction)
    assert {"model_reply", "tool_started", "tool_result"} <= {it["kind"] for it in kept}
    assert SECRET not in json.dumps(kept)


async def test_a_policy_that_raises_keeps_nothing_and_the_agent_lives() -> None:
    class Broken(Middleware):
        is_broken = True

        def store(self, kind: str, body: Mapping[str, object]) -> Mapping[str, object]:
            if self.is_broken:
                raise ZeroDivisionError(SECRET)
            return body

        async def review(self, around: Around, answer: str) -> str:
            return answer

    broken = Broken()
    runner = make_runner("bob", lambda request: f"It is {SECRET}.", middleware=[broken])
    async with asyncio.timeout(20), Network.open() as network, running(network, runner):
        mia = await Person.join(network, "mia")
        for text in ("one", "two"):
            assert "an error on my side" in (await mia.ask("bob", text)).text
        broken.is_broken = False
        assert (await mia.ask("bob", "three")).text == f"It is {SECRET}."


def test_a_pattern_that_is_none_is_refused() -> None:
    choice = MiddlewareChoice.model_validate({"data_policy": {"redact": ["("]}})
    with pytest.raises(ConfigError, match="not a regular expression"):
        build_middleware(choice, Path())


async def test_a_provider_that_repeats_the_request_in_its_error_is_blacked_out_too() -> None:
    refusal = error(400, f"Invalid content: 'my card is {SECRET}'")
    records, _, answer = await keep(lambda body: refusal, redact=[r"\d{4}-\d{4}"])
    assert answer == "I could not answer: my model refused the request."
    assert SECRET not in written(records)
    assert "my card is [redacted]" in records.bodies("model_failed")[0]["reason"]
