"""Tests of the work behind an answer in `why` and `impact`: calls and results, asked agents, approvals, checks,
handoffs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from roundelay.agents.features.evaluations import Evaluations
from roundelay.agents.models.model import ModelReply, ReplyOrigin
from roundelay.agents.models.scripted import call, finish, send
from roundelay.app import Network
from roundelay.cli import cli
from roundelay.runs.node_source import LiveSource
from roundelay.runs.why import explain, follow
from roundelay.runs.why_text import describe_effect, describe_steps
from tests.support.agents import Person, make_runner, running
from tests.support.refund import EDITED, LAST, Run, by_turn, look, no_promises, refund


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with refund(tmp_path / "team.db") as told:
        yield told


def without_seqs(lines: Sequence[str]) -> list[str]:
    return [re.sub(r"#\d+", "#", line) for line in lines]


async def test_why_tells_what_an_answer_rests_on(run: Run) -> None:
    boss = await run.network.join("boss", kind="human")
    steps = await explain(LiveSource(boss), run.seq(LAST))
    lines = without_seqs(describe_steps(steps))
    assert lines[lines.index("    Before that:") + 1 : -4] == [
        '      turn 1 called look {"what": "order 12"}, result: order 12: 40 EUR',
        '      turn 1 called ask {"agent_ids": ["finance"], "text": "May I?"}, result: <answer sender="finance">Yes, 40 EUR</answer>',
        "        Asked finance (#): May I?",
        "        finance answered (#): Yes, 40 EUR",
        '      turn 1 called auditor {"task": "Check"}, result: Sound.',
        '      [1.2] turn 1 called look {"what": "books"}, result: books: 40 EUR',
        f"      turn 2 called pay {EDITED}, result: 4 paid to ann",
        f"        Needed approval (#): mia approved it (#), with {EDITED}",
        "      turn 3: desk handed the conversation to billing: It is paid.",
        "      turn 4: the answer was sent back: no_promises: Promise nothing.",
        "        Rejected text: I guarantee it.",
        "      turn 5: the answer passed the review (no_promises: passed)",
    ]
    told = steps[0].to_json()["reaction"]["work"]
    assert [it["type"] for it in told] == ["call"] * 5 + ["handoff", "review", "review"]
    question, answer = run.seq("May I?"), run.seq("Yes, 40 EUR")
    assert told[1]["asked"] == [
        {
            "agent_id": "finance",
            "seq": question,
            "text": "May I?",
            "answer": {"seq": answer, "text": "Yes, 40 EUR", "is_declined": False},
        },
    ]
    assert told[4]["approval"] == {
        "request": run.seq("May I call pay"),
        "is_approved": True,
        "by": "mia",
        "seq": run.seq("/edit"),
        "arguments": EDITED,
        "reason": "",
    }
    assert (told[5]["from"], told[5]["to"], told[5]["note"]) == ("desk", "billing", "It is paid.")
    assert (told[6]["is_accepted"], told[6]["correction"]) == (False, "Promise nothing.")
    assert json.loads(json.dumps(told)) == told


async def test_a_message_rests_on_no_call_of_its_own_turn_or_of_a_later_one(run: Run) -> None:
    live = LiveSource(await run.network.join("boss", kind="human"))
    [question, _] = await explain(live, run.seq("May I?"))
    assert question.to_json()["reaction"]["work"] == []
    request = (await explain(live, run.seq("May I call pay")))[0]
    assert [it["tool"] for it in request.to_json()["reaction"]["work"]] == ["look", "ask", "auditor", "look"]
    assert request.to_json()["reaction"]["sent"]["approval"]["by"] == "mia"
    assert any("mia approved it" in line for line in describe_steps([request]))


async def test_impact_tells_what_was_done_in_each_reaction(run: Run) -> None:
    live = LiveSource(await run.network.join("boss", kind="human"))
    effect = await follow(live, run.seq("Refund order 12"))
    assert without_seqs(describe_effect(effect))[:8] == [
        "# mia → desk: Refund order 12",
        "└─ desk reacted (finished after 5 turns)",
        '   ├─ turn 1 called look {"what": "order 12"}, result: order 12: 40 EUR',
        '   ├─ turn 1 called ask {"agent_ids": ["finance"], "text": "May I?"}, result: <answer sender="finance">Yes, 40 EUR</answer>',
        "   │    Asked finance (#): May I?",
        "   │    finance answered (#): Yes, 40 EUR",
        '   ├─ turn 1 called auditor {"task": "Check"}, result: Sound.',
        '   ├─ [1.2] turn 1 called look {"what": "books"}, result: books: 40 EUR',
    ]
    [step] = [it for it in await explain(live, run.seq(LAST)) if it.reaction is not None]
    assert effect.to_json()["reactions"][0]["work"] == step.to_json()["reaction"]["work"]


@pytest.mark.parametrize("command", ["why", "impact"])
async def test_a_file_tells_the_same_as_its_node(run: Run, command: str) -> None:
    live = LiveSource(await run.network.join("boss", kind="human"))
    seq = run.seq(LAST if command == "why" else "Refund order 12")
    expected = (
        {"chain": [it.to_json() for it in await explain(live, seq)]}
        if command == "why"
        else (await follow(live, seq)).to_json()
    )
    done = await asyncio.to_thread(CliRunner().invoke, cli, [command, str(seq), "--db", str(run.db), "--json"])
    assert json.loads(done.output) == json.loads(json.dumps(expected))
    assert "\x1b" not in done.output


async def test_who_may_not_read_the_records_is_told_nothing_of_the_work(run: Run) -> None:
    """An asked agent sees its own work, and only the question of the asking agent."""
    own = LiveSource(await run.network.join("finance"))
    [answer, question] = await explain(own, run.seq("Yes, 40 EUR"))
    assert (answer.status, question.reaction, question.work) == ("finished", None, ())
    effect = await follow(own, run.seq("May I?"))
    told = json.dumps([answer.to_json(), question.to_json(), effect.to_json()]) + str(
        describe_steps([answer, question])
    )
    assert not any(hidden in told for hidden in ("order 12", "paid", "books", "I guarantee"))


async def test_an_agent_is_told_of_its_own_work(run: Run) -> None:
    own, boss = await run.network.join("desk"), await run.network.join("boss", kind="human")
    [step, *_] = await explain(LiveSource(own), run.seq(LAST))
    assert step.to_json() == (await explain(LiveSource(boss), run.seq(LAST)))[0].to_json()


async def test_a_message_by_a_tool_rests_on_its_own_review_and_what_was_sent_back(tmp_path: Path) -> None:
    script = by_turn(
        [send("mia", "I guarantee it."), call("look", what="it")],
        [call("look", what="books"), send("mia", "Perhaps.")],
        finish(),
    )
    desk = make_runner("desk", script, tools=[look], middleware=[Evaluations(always=[no_promises])])
    async with Network.open(tmp_path / "team.db") as network:
        mia = await Person.join(network, "mia")
        async with running(network, desk):
            heard = await mia.ask("desk", "Will it work?")
        steps = await explain(LiveSource(mia.client), heard.seq)
    told = [it for it in steps[0].to_json()["reaction"]["work"] if it["type"] == "review"]
    assert [(it["turn"], it["call"], it["is_accepted"]) for it in told] == [(1, 0, False), (2, 1, True)]
    assert [line.strip() for line in describe_steps(steps) if "message of call" in line] == [
        "turn 1: the message of call 1.0 was sent back: no_promises: Promise nothing.",
        "turn 2: the message of call 2.1 passed the review (no_promises: passed)",
    ]


async def test_why_does_not_tell_what_the_models_server_wants_back(tmp_path: Path) -> None:
    fields = {"reasoning_content": "hidden thought"}
    origin = ReplyOrigin("https://models.example chat", fields, demanded=frozenset(fields))
    desk = make_runner("desk", lambda request: ModelReply("hello", origin=origin))
    async with Network.open(tmp_path / "team.db") as network:
        mia = await Person.join(network, "mia")
        async with running(network, desk):
            heard = await mia.ask("desk", "Hello?")
        assert heard.reply_to is not None
        source = LiveSource(mia.client)
        asked = await source.messages([heard.reply_to])
        [recorded] = await source.reactions_to(asked[heard.reply_to])
        assert recorded.replies[0].origin is not None
        told = [it.to_json() for it in await explain(source, heard.seq)]
    assert told[0]["reaction"]["sent"]["reply"]["text"] == "hello"
    assert "hidden thought" not in json.dumps(told)
