"""Tests of the number of commits per answer, and of the records that must be stored before an effect is visible.
docs/reactions.md, "The journal".
"""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.agents import record_queue
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelReply, ModelRequest
from roundelay.agents.models.scripted import call, say
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.config import Limits
from tests.support.agents import Person, make_runner, running

DEFAULT_DELAY_S = record_queue.MAX_DELAY_S
KINDS = ["started", "model_reply", "tool_started", "tool_result", "model_reply", "finished"]


@pytest.fixture(autouse=True)
def only_what_must_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store no record because of a timeout."""
    monkeypatch.setattr(record_queue, "MAX_DELAY_S", 60.0)


@tool(idempotent=True)
def look() -> str:
    """Look."""
    return "it rains"


@tool(read_only=True)
def peek() -> str:
    """Peek."""
    return "it rains"


@tool(once=True)
def pay() -> str:
    """Pay."""
    return "paid"


def answer_with(name: str) -> Any:
    return lambda request: say("done") if request.turn == 2 else call(name)


def count_commits(network: Network) -> float:
    return next(it.value for it in network.hub.view.list_metrics() if it.name.endswith("commits_total"))


async def kinds(mia: Person, seq: int) -> list[str]:
    reaction = reaction_id("bob", seq, mia.client.welcome.network.epoch)
    return [it["kind"] for it in await mia.records(reaction)]


@pytest.mark.parametrize(
    ("limits", "tool_name", "commits"),
    [(Limits(), "peek", 3), (Limits(), "look", 4), (Limits(), "pay", 5), (Limits(max_batch=1), "look", 8)],
    ids=["read_only", "idempotent", "once", "without batches"],
)
async def test_an_answer_with_one_call_takes_few_commits(limits: Limits, tool_name: str, commits: int) -> None:
    async with Network.open(limits=limits) as network:
        mia = await Person.join(network, "mia")
        async with running(network, make_runner("bob", answer_with(tool_name), tools=[peek, look, pay])):
            await mia.ask("bob", "first")
            before = count_commits(network)
            asked = await mia.client.send_text("bob", "go")
            answer = await mia.hear()
            assert answer.text == "done"
            while "finished" not in await kinds(mia, asked.seq):
                pass
            assert count_commits(network) - before == commits
        records = await mia.records(reaction_id("bob", asked.seq, mia.client.welcome.network.epoch))
        assert [it["kind"] for it in records] == KINDS
        assert records[-2]["seq"] < answer.seq < records[-1]["seq"]


@pytest.mark.parametrize(("tool_name", "most"), [("peek", 5), ("look", 6), ("pay", 7)])
async def test_default_delay_adds_few_commits(monkeypatch: pytest.MonkeyPatch, tool_name: str, most: int) -> None:
    monkeypatch.setattr(record_queue, "MAX_DELAY_S", DEFAULT_DELAY_S)
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        async with running(network, make_runner("bob", answer_with(tool_name), tools=[peek, look, pay])):
            await mia.ask("bob", "first")
            before = count_commits(network)
            asked = await mia.client.send_text("bob", "go")
            await mia.hear()
            while "finished" not in await kinds(mia, asked.seq):
                pass
            assert count_commits(network) - before <= most


async def test_a_message_of_an_earlier_session_is_started_before_its_model_is_asked() -> None:
    """A previous session may have reacted to it already, so the ledger is checked first."""
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        await network.join("bob")
        asked = await mia.client.send_text("bob", "go")
        seen = []

        async def script(request: ModelRequest) -> str:
            seen.append(await kinds(mia, asked.seq))
            return "done"

        async with running(network, make_runner("bob", script)):
            assert (await mia.hear()).text == "done"
        assert seen == [["started"]]


class Writes(Middleware):
    """Middleware that writes to zoe before the model is called, or after its reply."""

    def __init__(self, when: str) -> None:
        self.when = when

    async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> ModelReply:
        if self.when == "before":
            await around.context.client.send_text("zoe", "now")
        return await proceed(request)

    async def around_turn(self, around: Around, proceed: Any) -> None:
        await proceed()
        if self.when == "after":
            await around.context.client.send_text("zoe", "now")


@pytest.mark.parametrize(("when", "stored"), [("before", ["started"]), ("after", ["started", "model_reply"])])
async def test_what_a_hook_sends_comes_behind_the_records_before_it(when: str, stored: list[str]) -> None:
    async with Network.open() as network:
        mia, zoe = await Person.join(network, "mia"), await Person.join(network, "zoe")
        async with running(network, make_runner("bob", lambda request: "done", middleware=[Writes(when)])):
            asked = await mia.client.send_text("bob", "go")
            told = await zoe.hear()
            await mia.hear()
        reaction = reaction_id("bob", asked.seq, mia.client.welcome.network.epoch)
        assert [it["kind"] for it in await mia.records(reaction) if it["seq"] < told.seq] == stored


async def test_questions_to_several_agents_share_a_commit_with_their_records() -> None:
    def ask_both(request: ModelRequest) -> Any:
        return say("done") if request.turn == 2 else call("ask", agent_ids=["bob1", "bob2"], text="?")

    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        workers = [make_runner(name, lambda request: "yes") for name in ("bob1", "bob2")]
        async with running(network, make_runner("ann", ask_both), *workers):
            asked = await mia.client.send_text("ann", "go")
            assert (await mia.hear()).text == "done"
        records = await mia.records(reaction_id("ann", asked.seq, mia.client.welcome.network.epoch))
        seqs = {it["kind"]: it["seq"] for it in records}
        waiting = next(it["body"] for it in records if it["kind"] == "waiting")
        first = seqs["tool_started"]
        assert seqs["asking"] == first + 1
        assert sorted(waiting["questions"].values()) == [first + 2, first + 3]
