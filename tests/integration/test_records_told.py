"""Tests that `roundelay reactions show` describes each kind of record in words, and none as raw JSON."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.agents.features.evaluations import Evaluations, Rule
from roundelay.agents.middleware import Around, Correction, middleware_of
from roundelay.agents.models.model import Usage
from roundelay.agents.models.scripted import call, say, send
from roundelay.agents.policy import AgentPolicy, KeptRecords
from roundelay.agents.recorded import RECORD_TYPES
from roundelay.agents.tools import ToolContext, tool
from roundelay.app import Network
from roundelay.runs.reactions import describe_record
from tests.support.agents import Heard, Person, make_runner, running, until_recorded


@tool(idempotent=True)
def dig(context: ToolContext) -> str:
    """Dig."""
    context.report("digging")
    context.report_usage("tiny", Usage(3, 2))
    return "a coin"


async def told(script: Any, **options: Any) -> dict[str, list[str]]:
    """Return the description of each record of one reaction, by kind."""
    heard = Heard()
    async with Network.open() as network, running(network, make_runner("bob", script, on_event=heard, **options)):
        mia = await Person.join(network, "mia")
        await mia.client.send_text("bob", "Go.")
        [end] = await heard.finished()
        await until_recorded(mia, end.reaction, "finished")
        records = await mia.records(end.reaction)
    lines: dict[str, list[str]] = {}
    for record in records:
        lines.setdefault(record["kind"], []).append(describe_record(record))
        assert not lines[record["kind"]][-1].startswith(f"{record['kind']} {{"), "it is raw JSON"
    return lines


RULE = Rule("polite", "please", "Say please.")


async def test_reviews_are_told_in_words() -> None:
    answers = {1: "Dig.", 2: "Dig, please."}
    lines = await told(lambda it: say(answers[it.turn]), middleware=[Evaluations([RULE])])
    first, second = lines["review"]
    assert first.splitlines() == [
        "turn 1: the answer is not sent, and the model is asked for another one: Say please.", "polite: Say please.",
    ]  # fmt: skip
    assert second.splitlines() == ["turn 2: the answer passed: Dig, please.", "polite: passed", "with passed_checks"]
    [blocked] = (
        await told(
            lambda it: say("Dig."),
            middleware=[Evaluations([RULE], blocking=["polite"])],
            policy=AgentPolicy(max_corrections=0),
        )
    )["review"]
    assert blocked.startswith("turn 1: the answer is blocked\npolite: Say please.")
    [better] = (
        await told(lambda it: say("Dig."), middleware=[Evaluations([RULE])], policy=AgentPolicy(max_corrections=0))
    )["review"]
    assert better.startswith("turn 1: the answer is sent, because the model wrote no better one: Dig.")


async def test_a_review_of_a_message_names_its_call() -> None:
    async def review(around: Around, answer: str) -> str | Correction:
        return answer.upper()

    lines = await told(
        lambda it: send("mia", "hello") if it.turn == 1 else call("finish", reason="sent"),
        middleware=[middleware_of(review=review)],
    )
    assert lines["review"] == ["turn 1: the message 1 of call 1.0 passed: HELLO"]


async def test_what_is_kept_beside_is_told_in_words() -> None:
    policy = AgentPolicy(keep=KeptRecords(progress=True))
    lines = await told(lambda it: call("dig") if it.turn == 1 else say("Done."), tools=[dig], policy=policy)
    assert lines["progress"] == ["1.0 reports: digging"]
    assert lines["used"] == ["1.0 used tiny, 3 prompt + 2 completion tokens"]


@pytest.mark.parametrize("kind", sorted(RECORD_TYPES))
def test_each_kind_has_words(kind: str) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    body: dict[str, Any] = {
        "turn": 1, "call": 0, "trigger": 7, "thread_id": "t", "manifest": [], "agent": "bob", "seqs": [7], "failure": "timeout", "reason": "late",
        "reply": {"text": "Hi.", "tool_calls": [], "usage": usage}, "name": "n", "value": 1, "tool": "dig", "args": "{}", "ok": True, "content": "c",
        "messages": {"ann": "m"}, "questions": {"ann": 8}, "is_approval": False, "is_approved": True, "arguments": None, "seq": 9, "by": "mia",
        "status": "finished", "turns": 1, "tool_calls": 0, "usage": usage, "answer": "Hi.", "correction": None, "is_accepted": True, "notes": [],
        "used": [{"model": "m", "usage": usage}], "text": "Hi.", "steps": ["s"], "parts": [], "tools": ["dig"],
    }  # fmt: skip
    assert not describe_record({"kind": kind, "body": body}).startswith(f"{kind} {{")
