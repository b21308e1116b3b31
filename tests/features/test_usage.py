"""Tests of usage and cost of models by call, turn, reaction, thread and root, with the real command line and a real
hub.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.middleware import Correction, Middleware
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta, ToolCall, Usage
from roundelay.agents.models.tokens import Price, Prices, write_dollars
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import ToolContext, tool
from roundelay.app import Network
from roundelay.commands.cost import GROUPS as OFFERED
from roundelay.network.ledger.log_file import open_log
from roundelay.runs.cost import GROUPS, CallFilter, CostReport, UsedCall, parse_since, read_cost
from roundelay.runs.file_source import FileSource
from roundelay.runs.node_source import LiveSource
from tests.support.agents import Heard, Person, running
from tests.support.announced import announced_node
from tests.support.command import invoke, run
from tests.support.fake_openai import FakeOpenAI, call, calls, text
from tests.support.node import Node

PRICES = Prices({"big": Price(input=Decimal(10), output=Decimal(20), cached=Decimal(1))})


class Fixed:
    """A model that gives these replies in turn, each with its own usage."""

    def __init__(self, *replies: ModelReply, name: str = "big") -> None:
        self.name = name
        self._replies = list(replies)

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        return self._replies.pop(0)


def reply(text: str | None, *tools: str, model: str = "big", usage: Usage | None = None) -> ModelReply:
    calls = tuple(ToolCall(f"c{place}", name, '{"task": "t"}') for place, name in enumerate(tools))
    return ModelReply(text, calls, usage or Usage(1000, 100, 400, 50), model=model)


@tool(idempotent=True)
def embed(context: ToolContext, task: str) -> str:
    """Embed a text."""
    with pytest.raises(ValueError, match=r"prompt_tokens is -1 and must be a number of tokens"):
        context.report_usage("embedder", Usage(-1))
    context.report_usage("embedder", Usage(40))
    return "0.1 0.2"


class Asks(Middleware):
    """Middleware that calls its own model in each turn, around each call and before each answer."""

    async def around_turn(self, around: Any, proceed: Any) -> None:
        await around.complete(Fixed(reply("go on", usage=Usage(3))), ModelRequest(()))
        await proceed()

    async def review(self, around: Any, answer: str) -> str | Correction:
        judged = await around.complete(Fixed(reply("fine", usage=Usage(10, 1))), ModelRequest(()))
        return answer if judged.text == "fine" else Correction("no")

    async def around_tool(self, around: Any, call: Any, proceed: Any) -> Any:
        await around.complete(Fixed(reply("ok", usage=Usage(7, 0))), ModelRequest(()))
        return await proceed(call)


async def work(network: Network) -> tuple[Person, int, int, str]:
    """Let mia ask ann twice. Ann calls a helper as a tool. Return mia, the seqs of the questions, and the first
    reaction.
    """
    mia, heard = await Person.join(network, "mia"), Heard()
    helper = agent_tool(Agent("helper", "You help.", Fixed(reply("helped", model="small", usage=Usage(30, 3)))))
    model = Fixed(reply(None, "helper", "embed"), reply("done"), reply("once more", model="small"))
    runner = SimpleAgentRunner(
        "ann", instruction="x", model=model, tools=[helper, embed], middleware=[Asks()], on_event=heard
    )
    async with running(network, runner):
        first = await mia.client.send_text("ann", "hello")
        assert (await mia.hear()).text == "done"
        second = await mia.client.send_text("ann", "and again")
        assert (await mia.hear()).text == "once more"
        ends = [it for it in await heard.finished(3) if not it.path]
        while "finished" not in {it["kind"] for it in await mia.records(ends[-1].reaction)}:
            pass
    return mia, first.seq, second.seq, ends[0].reaction


def prompts(written: dict[str, Any], *names: str) -> dict[tuple[str, ...], int]:
    return {tuple(group[name] for name in names): group["prompt_tokens"] for group in written["groups"]}


async def test_every_group_adds_up_to_the_same(network: Network) -> None:
    mia, first, second, reaction = await work(network)
    reports = {by: (await read_cost(LiveSource(mia.client), CallFilter(), by, PRICES)).to_json() for by in GROUPS}
    totals = [report["total"] for report in reports.values()]
    assert all(total == totals[0] for total in totals)
    # Three replies and the helper's one, two reviews, two calls, three turns, and one usage report of a tool.
    assert totals[0]["calls"] == 4 + 2 + 2 + 3 + 1
    assert totals[0]["prompt_tokens"] == 3 * 1000 + 30 + 2 * 10 + 2 * 7 + 3 * 3 + 40
    assert (totals[0]["cached_tokens"], totals[0]["reasoning_tokens"], totals[0]["tools"]) == (1200, 150, 2)
    of_replies = 2 * (600 * 10 + 400 * 1 + 100 * 20)
    assert totals[0]["usd"] == pytest.approx((of_replies + 2 * (10 * 10 + 20) + (2 * 7 + 3 * 3) * 10) / 1e6)
    assert totals[0]["unpriced"] == ["embedder", "small"]
    by_root: Any = reports["root"]
    assert prompts(by_root, "root", "model") == {
        (f"#{first}", "big"): 2000 + 10 + 14 + 6, (f"#{first}", "small"): 30, (f"#{first}", "embedder"): 40,
        (f"#{second}", "small"): 1000, (f"#{second}", "big"): 13,
    }  # fmt: skip
    by_turn: Any = reports["turn"]
    of_first = {
        key[1:]: tokens for key, tokens in prompts(by_turn, "reaction", "turn", "model").items() if key[0] == reaction
    }
    assert of_first == {
        ("1", "big"): 1014, ("1", "embedder"): 40, ("1 [1.0]", "small"): 30, ("2", "big"): 1010, ("-", "big"): 6,
    }  # fmt: skip
    by_model: Any = reports["model"]
    assert prompts(by_model, "model") == {("big",): 2043, ("small",): 1030, ("embedder",): 40}
    spent = await mia.client.call("network.spent", {"seq": first})  # the hub's own sums, which budgets use
    assert {model: (it["calls"], it["prompt_tokens"]) for model, it in spent["of_root"].items()} == {
        "big": (2 + 1 + 2 + 2, 2030), "small": (1, 30), "embedder": (1, 40),
    }  # fmt: skip


async def test_what_asked_agents_used_has_lines_of_its_own_in_the_reaction_that_asked(tmp_path: Path) -> None:
    def agent(agent_id: str, *replies: ModelReply) -> SimpleAgentRunner:
        return SimpleAgentRunner(agent_id, instruction="x", model=Fixed(*replies))

    def ask(whom: str) -> ModelReply:
        call = ToolCall("c", "ask", json.dumps({"agent_ids": [whom], "text": "?", "timeout_s": 60}))
        return ModelReply(None, (call,), Usage(100), model="big")

    ann, bob = agent("ann", ask("bob"), reply("so")), agent("bob", ask("carl"), reply("so"))
    async with Network.open(tmp_path / "n.db") as network:
        mia = await Person.join(network, "mia")
        async with running(network, ann, bob, agent("carl", reply("yes", model="small"), reply("yes"))):
            await mia.ask("carl", "first, something else")
            seq = (await mia.client.send_text("ann", "hello")).seq
            await mia.hear()
            ours = reaction_id("ann", seq, mia.client.welcome.network.epoch)
            report = await read_cost(LiveSource(mia.client), CallFilter(reaction=ours), "reaction", PRICES)
    with open_log(tmp_path / "n.db") as log:
        from_file = await read_cost(FileSource(log), CallFilter(reaction=ours), "reaction", PRICES)
    lines = {names[2:]: (names[0], names[1], total.usage.prompt_tokens) for names, total in report.groups.items()}
    assert lines["ann", "big"] == (ours, "-", 1100)
    of_bob = lines["bob", "big"]
    assert of_bob[1:] == (ours, 1100)
    assert lines["carl", "big"][1:] == (of_bob[0], 1000)
    assert len(lines) == 3
    assert from_file.groups.keys() == report.groups.keys()


async def test_what_is_wanted_is_counted_and_nothing_else(network: Network) -> None:
    mia, first, second, reaction = await work(network)

    async def count(wanted: CallFilter) -> int:
        return (await read_cost(LiveSource(mia.client), wanted, "agent")).total.usage.prompt_tokens

    assert await count(CallFilter()) == 3113
    assert await count(CallFilter(root=first, after=first)) == await count(CallFilter(reaction=reaction)) == 2100
    assert await count(CallFilter(root=second, after=second)) == 1013
    assert await count(CallFilter(thread_id="direct:ann~mia")) == 3113
    assert await count(CallFilter(thread_id="broadcast")) == 0
    assert await count(CallFilter(agent_id="ann")) == 3113
    assert await count(CallFilter(since=2**52)) == 0


async def test_an_agent_sees_its_own_and_a_stranger_nothing(network: Network) -> None:
    await work(network)
    ann, joe = await network.join("ann"), await network.join("joe")
    assert (await read_cost(LiveSource(ann), CallFilter(), "agent")).total.calls == 12
    assert (await read_cost(LiveSource(joe), CallFilter(), "agent")).total.calls == 0


def test_prices_of_the_package_are_used_where_it_is_installed() -> None:
    pytest.importorskip("genai_prices")
    known = Prices().cost("gpt-4o-mini", Usage(1_000_000, 100_000, 500_000))
    assert known is not None
    assert Decimal("0.05") < known < Decimal(1)
    assert Prices().cost("gpt-4o-mini", Usage(2000, 200), calls=2) == 2 * (
        Prices().cost("gpt-4o-mini", Usage(1000, 100)) or 0
    )
    assert Prices().cost("no-such-model-at-all", Usage(10, 10)) is None
    own = Prices({"gpt-4o-mini": Price(input=Decimal(1), output=Decimal(1))})
    assert own.cost("gpt-4o-mini", Usage(1_000_000, 0)) == 1


@pytest.mark.parametrize(
    ("amount", "shown"), [("0", "$0.00"), ("12.346", "$12.35"), ("0.0123", "$0.0123"), ("0.00004567", "$0.000046")]
)
def test_dollars_are_written_for_a_reader(amount: str, shown: str) -> None:
    assert write_dollars(Decimal(amount)) == shown


def test_a_time_is_read_as_people_write_it() -> None:
    assert parse_since("2h", now_s=10_000) == 2_800_000
    assert parse_since("2026-01-31T00:00:00+00:00") == 1_769_817_600_000
    for wrong in ("h", "yesterday", "-2h", ""):
        with pytest.raises(ValueError, match="isoformat"):
            parse_since(wrong)


def test_the_command_offers_every_group() -> None:
    assert OFFERED == GROUPS


# --- the command


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path) as running_node:
        yield running_node


async def test_agents_that_ask_no_model_cost_nothing(network: Network, tmp_path: Path) -> None:
    (tmp_path / "script.yaml").write_text("rules: [{do: [{say: hello}]}]")
    path = tmp_path / "agents.yaml"
    models = {"ann": "{rules: [{do: [{say: hello}]}]}", "bob": "{script: script.yaml}"}
    agents = [f"{{id: {name}, instruction: x, model: {model}}}" for name, model in models.items()]
    path.write_text(f"agents: [{', '.join(agents)}]")
    mia = await Person.join(network, "mia")
    async with running(network, *map(build_runner, load_agents(path))):
        for agent_id in models:
            await mia.ask(agent_id, "hi")
    report = await read_cost(LiveSource(mia.client), CallFilter(), "agent")
    assert [(names[0], total.calls, total.cost, total.unpriced) for names, total in report.by_cost()] == [
        ("ann", 1, 0, set()),
        ("bob", 1, 0, set()),
    ]


async def test_roundelay_cost_shows_what_was_used(node: Node) -> None:
    mia, ann = await node.person("mia"), await node.agent("ann", role="reactor")
    root = (await mia.send("agent:ann", "hello"))["seq"]
    await ann.record("r1", "started", {"trigger": root, "manifest": [root]})
    usage = {"prompt_tokens": 1200, "completion_tokens": 34, "cached_tokens": 1000, "reasoning_tokens": 5}
    written = {
        "text": "x",
        "tool_calls": [{"id": "1", "name": "look", "arguments": "{}"}],
        "usage": usage,
        "finish_reason": "stop",
        "model": "my\x1b[2Jmodel",
    }
    await ann.record("r1", "model_reply", {"turn": 1, "agent": "ann", "reply": written})
    shown = await invoke("cost")
    [head, line, *_] = shown.lines
    assert head.split() == ["AGENT", "MODEL", "CALLS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "TOOLS", "COST"]
    assert line.split()[0] == "ann"
    assert line.split()[-7:] == ["1", "1200", "1000", "34", "5", "1", "?"]
    assert "\x1b[2J" not in shown.out
    assert "No known price for: my" in shown.out
    value = json.loads((await invoke("cost", "--json", "--by", "root", "--thread", "direct:ann~mia")).out)
    assert value["groups"][0]["root"] == f"#{root}"
    assert value["total"]["prompt_tokens"] == 1200


async def test_a_time_that_is_none_is_wrong_usage() -> None:
    wrong = await invoke("cost", "--since", "yesterday", code=2)
    assert "Write 2h, 7d, or a date" in wrong.err


async def test_agent_try_tells_tokens_and_cost_at_its_end(tmp_path: Path) -> None:
    pytest.importorskip("genai_prices")
    async with FakeOpenAI([replace(text("hello"), usage=(1000, 100))]) as server:
        model = f"model: {{openai: {{name: gpt-4o-mini, base_url: {server.base_url}}}}}"
        (tmp_path / "desk.yaml").write_text(f"id: desk\ninstruction: You help.\n{model}\n", encoding="utf-8")
        shown = await run("agent", "try", tmp_path / "desk.yaml", "hi")
    assert shown.lines[-1].endswith("1 turn, 0 tool calls, 1000 prompt + 100 completion tokens, about $0.00021")


def test_a_record_that_used_nothing_makes_no_line() -> None:
    used = UsedCall(seq=3, at=0, agent_id="ann", kind="model_reply", reaction="r1", model="big", usage=Usage(10, 1))
    review = used.model_copy(update={"seq": 4, "kind": "review", "model": "", "usage": Usage()})
    report = CostReport("agent")
    for one in (used, review):
        report.add(one, PRICES)
    assert list(report.groups) == [("ann", "big")]


async def test_agent_try_shows_what_a_model_wrote_and_nobody_was_sent(tmp_path: Path) -> None:
    async with FakeOpenAI([text("It is three."), calls([call("give_answer", {"answer": 3})])]) as server:
        (tmp_path / "desk.yaml").write_text(
            f"id: desk\ninstruction: You help.\nmodel: {{openai: {{name: m, base_url: {server.base_url}, stream: false}}}}\n"
            "middleware: [{structured: {type: 'builtins:int'}}]\n",
            encoding="utf-8",
        )
        shown = await run("agent", "try", tmp_path / "desk.yaml", "hi")
    assert shown.lines.count("* wrote text that was not sent: It is three.") == 1
    assert "not sent: 3" not in shown.out
