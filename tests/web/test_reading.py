"""What the page makes of a reaction's records is what the command line makes of them: the same run, read by both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from roundelay.agents.models.model import Usage
from roundelay.agents.models.scripted import call
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.reaction_ids import derived_id
from roundelay.agents.tools import tool
from roundelay.network.client import NetworkClient
from roundelay.network.messages import BaseMessage
from roundelay.network.operations.reading import UsedTokens
from roundelay.runs.cost import CallFilter, read_cost
from roundelay.runs.node_source import LiveSource
from roundelay.runs.reading import RecordedReaction
from roundelay.runs.why import explain, follow
from roundelay.runs.work import work_to_json
from tests.support.agents import Person, make_runner
from tests.support.page_modules import run_module
from tests.support.refund import LAST, Run, by_turn, look, pay, refund

MODULES = """
import { derivedId } from "#core/hash.js";
import { readCost } from "#core/cost.js";
import { readCosts } from "#core/pricing.js";
import { readReaction, tellWork, traceMessage } from "#core/reading.js";
import { explain, follow } from "#core/why.js";
const facts = (it) => ({
  ...it, runs: undefined, steps: undefined, work: it.work.map((each) => tellWork(each, {})), started_at: undefined, ended_at: undefined,
});
"""


@tool
async def wait_for_ever() -> str:
    """Wait."""
    await asyncio.Event().wait()
    return "over"


@pytest.fixture
async def run(tmp_path: Any) -> AsyncIterator[Run]:
    """A run with all kinds of work, one reaction that waits for a person, and one whose process died in a tool."""
    async with refund(tmp_path / "team.db") as told:
        payer = make_runner("payer", by_turn(call("pay", to="ann", amount=7)), tools=[pay])
        lost = make_runner("lost", by_turn(call("look", what="it"), call("wait_for_ever")), tools=[look, wait_for_ever])
        ben = await Person.join(told.network, "ben")
        tasks = []
        for runner in (payer, lost):
            client = await told.network.join(runner.agent_id, role="reactor", card=runner.describe_card())
            tasks.append(asyncio.create_task(runner.run(client)))
            await runner.ready()
        request = await ben.ask("payer", "Pay ann")
        assert "May I call pay" in request.text
        sent = await ben.client.send_text("lost", "Look at it")
        source = LiveSource(await told.network.join("boss", kind="human"))
        while not any(it["body"].get("tool") == "wait_for_ever" for it in await last_records(source, sent.seq)):
            pass
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        yield told


async def last_records(source: LiveSource, seq: int) -> list[Any]:
    [message] = (await source.messages([seq])).values()
    return [record for it in await source.reactions_to(message) for record in it.records]


async def read_all(boss: NetworkClient) -> tuple[list[BaseMessage], list[RecordedReaction]]:
    source = LiveSource(boss)
    messages = [it async for it in source.all_messages(0)]
    found = {(it.agent_id, it.reaction): it for message in messages for it in await source.reactions_to(message)}
    return messages, list(found.values())


def tell_facts(it: RecordedReaction) -> dict[str, Any]:
    names = (
        "reaction",
        "agent_id",
        "trigger",
        "thread_id",
        "state",
        "status",
        "is_open",
        "is_waiting",
        "reason",
        "turns",
    )
    facts = {name: getattr(it, name) for name in names}
    usage = {name: getattr(it.usage, name) for name in it.usage.__slots__}
    more = {"is_readable": it.run is not None, "manifest": list(it.manifest), "usage": usage}
    return {**facts, **more, "work": [work_to_json(each, {}) for each in it.work]}


async def test_each_reaction_reads_the_same(run: Run) -> None:
    _, reactions = await read_all(await run.network.join("boss", kind="human"))
    assert {it.state for it in reactions} == {"finished", "waiting", "open"}
    given = [[it.reaction, it.agent_id, it.records] for it in reactions]
    told = await run_module(MODULES, "(given) => given.map((it) => facts(readReaction(...it)))", given)
    assert told == json.loads(json.dumps([tell_facts(it) for it in reactions]))


@pytest.mark.parametrize("caller", ["boss", "mia", "desk", "finance"])
async def test_why_and_what_followed_read_the_same(run: Run, caller: str) -> None:
    """For each message, by each of those who look, as far as they may."""
    messages, _ = await read_all(await run.network.join("boss", kind="human"))
    kind: Any = "agent" if caller in ("desk", "finance") else "human"
    client = await run.network.join(caller, kind=kind)
    source = LiveSource(client)
    seqs = sorted(await source.messages([it.seq for it in messages]))
    assert seqs
    expected = [
        [[step.to_json() for step in await explain(source, seq)], (await follow(source, seq)).to_json()] for seq in seqs
    ]
    work = """async (seqs, call) => {
      const told = [];
      for (const seq of seqs) {
        const steps = (await explain(call, seq)).map(({ message, reaction }) => ({ message, reaction }));
        told.push([steps, await follow(call, seq)]);
      }
      return told;
    }"""
    told = await run_module(MODULES, work, seqs, client.call)
    assert told == json.loads(json.dumps(expected))


class PricesOfTest:
    """A node's prices, with those of the test."""

    has_table = True

    def __init__(self, prices: Prices) -> None:
        self._prices = prices

    def price(self, uses: Sequence[UsedTokens]) -> list[float | None]:
        tokens = [Usage(it.prompt_tokens, it.completion_tokens, it.cached_tokens) for it in uses]
        costs = [self._prices.cost(it.model, usage) for it, usage in zip(uses, tokens, strict=True)]
        return [None if it is None else float(it) for it in costs]


@pytest.mark.parametrize("by", ["agent", "model", "thread", "root", "reaction", "day"])
async def test_cost_adds_up_the_same(run: Run, by: Any) -> None:
    boss = await run.network.join("boss", kind="human")
    prices = Prices({"scripted": Price(input=2, output=4)})  # type: ignore[arg-type]
    run.network.hub.view.price_list = PricesOfTest(prices)
    expected = (await read_cost(LiveSource(boss), CallFilter(), by, prices)).to_json()
    told = await run_module(MODULES, "(by, call) => readCost(call, {}, by)", by, boss.call)
    assert told.pop("has_prices") is True
    assert told["total"]["usd"] > 0
    assert expected["groups"]
    heads = [name for name in expected["groups"][0] if name not in expected["total"]]

    def by_name(report: dict[str, Any]) -> list[Any]:
        rounded = [{**it, "usd": round(it["usd"], 9)} for it in report["groups"]]
        return sorted(rounded, key=lambda it: [it[head] for head in heads])

    assert by_name(told) == by_name(expected)
    assert {**told["total"], "usd": 0} == {**expected["total"], "usd": 0}


async def test_equal_uses_are_asked_once_and_many_in_parts() -> None:
    """Without asking for what the node would refuse: no model, a name too long, negative tokens."""
    work = """async () => {
      const sizes = [];
      const call = async (op, { uses }) => {
        sizes.push(uses.length);
        return { usd: uses.map((it) => it.prompt_tokens), has_prices: true };
      };
      const uses = Array.from({ length: 501 }, (_, at) => ({ model: "m", usage: { prompt_tokens: at } }));
      const odd = [["", 1], ["m".repeat(257), 1], ["m", -1], [undefined, 1]];
      const more = odd.map(([model, prompt_tokens]) => ({ model, usage: { prompt_tokens } }));
      const { usd } = await readCosts(call, [...uses, ...uses, ...more]);
      return [sizes, usd];
    }"""
    sizes, usd = await run_module(MODULES, work)
    assert sizes == [500, 1]
    assert usd == [*range(501), *range(501), None, None, None, None]


@pytest.mark.parametrize(("code", "expected"), [("forbidden", None), ("unknown_operation", None), ("busy", "busy")])
async def test_tokens_are_shown_where_a_node_gives_no_prices(code: str, expected: str | None) -> None:
    work = """(code) => readCosts(async () => { throw Object.assign(new Error(), { code }); }, [{ model: "m", usage: {} }])
      .catch((error) => error.code)"""
    told = await run_module(MODULES, work, code)
    assert told == (expected or {"usd": [None], "has_prices": None})


async def test_steps_say_when_a_reaction_did_what(run: Run) -> None:
    """What the timeline draws: each step lies within its reaction, and what is under way has no end."""
    messages, reactions = await read_all(await run.network.join("boss", kind="human"))
    [desk] = [it for it in reactions if it.agent_id == "desk" and it.turns == 5]
    lost = next(it for it in reactions if it.agent_id == "lost")
    given = [[it.reaction, it.agent_id, it.records] for it in (desk, lost)]
    told = await run_module(MODULES, "(given) => given.map((it) => readReaction(...it))", given)
    kinds = [(it["kind"], it["path"], it["turn"]) for it in told[0]["steps"]]
    assert kinds.count(("model", "", 1)) == 1
    assert {"model", "tool", "wait", "approval", "review"} == {kind for kind, *_ in kinds}
    assert [kind for kind, path, _ in kinds if path == "1.2"] == ["model", "tool", "model"]
    for it in told[0]["steps"]:
        assert told[0]["started_at"] <= it["started_at"] <= it["ended_at"] <= told[0]["ended_at"]
    assert [(it["tool"], it["ended_at"] is None) for it in told[1]["steps"] if it["kind"] == "tool"] == [
        ("look", False),
        ("wait_for_ever", True),
    ]
    answer = next(it for it in messages if it.text == LAST)
    assert answer.message_id == derived_id(desk.reaction, "", 0, "answer")


STARTED = {"trigger": 3, "thread_id": "direct:ann~mia", "as_of": 3, "manifest": [1, 3], "config_hash": "c"}


@pytest.mark.parametrize(
    "body",
    [
        None, [], "x", 7, {}, {"turn": 1}, {"turn": "first", "call": 0}, {"turn": 1, "call": 0, "path": 7},
        {"turn": 1, "call": 0, "reply": {"text": None, "tool_calls": "x"}}, {"turn": 1, "call": 0, "questions": {"a": "b"}},
        {"turn": 1, "call": 0, "path": "__proto__", "status": ["x"], "tool": "t", "content": "c", "ok": True},
    ],
)  # fmt: skip
async def test_records_of_another_program_break_nothing(body: object) -> None:
    kinds = [
        "model_reply",
        "tool_started",
        "tool_result",
        "waiting",
        "approval",
        "review",
        "note",
        "finished",
        "__proto__",
    ]
    bodies: list[tuple[str, object]] = [("started", STARTED), *((kind, body) for kind in kinds)]
    records = [
        {"seq": 10 + place, "agent_id": "ann", "record_id": "x", "kind": kind, "body": it, "at": place}
        for place, (kind, it) in enumerate(bodies)
    ]
    told = await run_module(MODULES, "(given) => facts(readReaction('r', 'ann', given))", records)
    assert told == json.loads(json.dumps(tell_facts(RecordedReaction("r", "ann", records))))


async def test_tokens_of_another_shape_count_for_none() -> None:
    """As the command line leaves them out."""
    call = {"kind": "model_reply", "reaction": "r", "at": 1, "seq": 1, "model": "m", "tools": [], "used": []}
    usages = [{"prompt_tokens": 5}, {"prompt_tokens": "x"}, {"prompt_tokens": None}]
    page = {"agent_id": "ann", "calls": [{**call, "usage": it} for it in usages], "reactions": {}, "has_more": False}
    told = await run_module(
        MODULES,
        "(page) => readCost(async (op) => (op === 'network.usage' ? page : { usd: [1], has_prices: true }), {}, 'agent')",
        page,
    )
    assert (told["total"]["calls"], told["total"]["prompt_tokens"]) == (1, 5)
