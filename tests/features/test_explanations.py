"""Tests of a node's explanations of runs: they equal those of the command line, respect the caller's rights, and
include times and prices.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.scripted import call
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.errors import Forbidden, TooLarge, UnknownMessage, UnknownOperation
from roundelay.network.operations import explaining
from roundelay.network.operations.reading import Reading
from roundelay.runs.cost import CallFilter, read_cost
from roundelay.runs.export import Part
from roundelay.runs.node_answers import NodeRunReader
from roundelay.runs.node_source import LiveSource
from roundelay.runs.page import write_page
from roundelay.runs.reading import RecordedReaction
from roundelay.runs.timeline import list_steps
from roundelay.runs.why import explain, follow
from tests.support.agents import Person, make_runner, running
from tests.support.explained import PATH, make_answers
from tests.support.refund import LAST, Run, by_turn, look, pay, refund

PRICES = Prices({"scripted": Price(input=Decimal(2), output=Decimal(4))})


def test_answers_have_the_shape_that_the_page_draws() -> None:
    """After a change of the format, run: python -m tests.support.explained"""
    assert make_answers() == json.loads(PATH.read_text(encoding="utf-8"))


@tool
async def wait_for_ever() -> str:
    """Wait."""
    await asyncio.Event().wait()
    return "over"


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """A run with all kinds of work, a reaction that waits for a person, and a reaction whose process died in a tool."""
    async with refund(tmp_path / "team.db") as scene:
        scene.network.hub.view.run_reader = NodeRunReader(PRICES)
        payer = make_runner("payer", by_turn(call("pay", to="ann", amount=7)), tools=[pay])
        lost = make_runner("lost", by_turn(call("look", what="it"), call("wait_for_ever")), tools=[look, wait_for_ever])
        ben = await Person.join(scene.network, "ben")
        tasks = []
        for runner in (payer, lost):
            client = await scene.network.join(runner.agent_id, role="reactor", card=runner.describe_card())
            tasks.append(asyncio.create_task(runner.run(client)))
            await runner.ready()
        request = await ben.ask("payer", "Pay ann")
        assert "May I call pay" in request.text
        sent = await ben.client.send_text("lost", "Look at it")
        source = LiveSource(await scene.network.join("boss", kind="human"))
        while not any(it["body"].get("tool") == "wait_for_ever" for it in await read_last_records(source, sent.seq)):
            pass
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        yield scene


async def read_last_records(source: LiveSource, seq: int) -> list[Any]:
    [message] = (await source.messages([seq])).values()
    return [record for it in await source.reactions_to(message) for record in it.records]


def drop_steps(step: dict[str, Any]) -> dict[str, Any]:
    """Return an explained message in the command line's format, without times and prompt messages."""
    value = {name: step[name] for name in ("message", "reaction") if name in step}
    if "reaction" in value:
        value["reaction"] = {name: it for name, it in value["reaction"].items() if name != "steps"}
    return value


@pytest.mark.parametrize("caller", ["boss", "mia", "desk", "finance"])
async def test_explanations_are_those_of_the_command_line(run: Run, caller: str) -> None:
    """The comparison covers each message and each caller, within the caller's rights."""
    boss = LiveSource(await run.network.join("boss", kind="human"))
    seqs = [message.seq async for message in boss.all_messages(0)]
    kind: Any = "agent" if caller in ("desk", "finance") else "human"
    client = await run.network.join(caller, kind=kind)
    source = LiveSource(client)
    visible = sorted(await source.messages(seqs))
    assert visible
    for seq in visible:
        explained = await client.call("network.explain", {"seq": seq})
        expected = json.loads(json.dumps([step.to_json() for step in await explain(source, seq)]))
        assert [drop_steps(step) for step in explained["steps"]] == expected
        assert "next" not in explained
        effects = await client.call("network.effects", {"seq": seq})
        assert effects.pop("has_more") is False
        assert effects == json.loads(json.dumps((await follow(source, seq)).to_json()))
    for seq in set(seqs) - set(visible):
        for op in ("network.explain", "network.effects"):
            with pytest.raises(UnknownMessage):
                await client.call(op, {"seq": seq})


async def test_a_part_of_what_followed_says_that_there_is_more(run: Run) -> None:
    boss = await run.network.join("boss", kind="human")
    start = run.seq("Refund order 12")
    effects = await boss.call("network.effects", {"seq": start, "limit": 1})
    assert effects["has_more"] is True
    assert len(effects["followers"]) == 1


@pytest.mark.parametrize("by", ["agent", "model", "thread", "root", "reaction", "day"])
async def test_costs_are_those_of_the_command_line(run: Run, by: Any) -> None:
    boss = await run.network.join("boss", kind="human")
    report = await boss.call("network.cost_report", {"by": by})
    assert report.pop("has_more") is False
    assert isinstance(report.pop("has_prices"), bool)
    assert report == json.loads(json.dumps((await read_cost(LiveSource(boss), CallFilter(), by, PRICES)).to_json()))
    assert report["total"]["usd"] > 0


async def test_costs_of_a_part_are_chosen(run: Run) -> None:
    boss = await run.network.join("boss", kind="human")
    whole = (await boss.call("network.cost_report", {}))["total"]["calls"]
    root = run.seq("Refund order 12")
    for chosen in ({"agent_id": "desk"}, {"root": root}, {"thread_id": "direct:desk~mia"}):
        part = (await boss.call("network.cost_report", chosen))["total"]["calls"]
        assert 0 < part < whole
    assert (await boss.call("network.cost_report", {"since": 2**50}))["groups"] == []


async def test_others_costs_are_for_operators(run: Run) -> None:
    desk = await run.network.join("desk", kind="agent")
    assert {it["agent"] for it in (await desk.call("network.cost_report", {}))["groups"]} == {"desk"}
    with pytest.raises(Forbidden):
        await desk.call("network.cost_report", {"agent_id": "finance"})


async def test_steps_say_when_a_reaction_did_what(run: Run) -> None:
    """Each step lies within its reaction, and a running step has no end."""
    boss = await run.network.join("boss", kind="human")
    steps = (await boss.call("network.explain", {"seq": run.seq(LAST)}))["steps"]
    explained = steps[0]["reaction"]
    name = {"reaction": explained["reaction"], "agent_id": "desk"}
    told = await boss.call("network.work", name)
    assert told["steps"] == explained["steps"]
    kinds = [(it["kind"], it["path"], it["turn"]) for it in told["steps"]]
    assert kinds.count(("model", "", 1)) == 1
    assert {kind for kind, *_ in kinds} == {"model", "tool", "wait", "approval", "review"}
    assert [kind for kind, path, _ in kinds if path == "1.2"] == ["model", "tool", "model"]
    for step in told["steps"]:
        assert told["started_at"] <= step["started_at"] <= step["ended_at"] <= told["ended_at"]
    assert all(step["usd"] > 0 for step in told["steps"] if step["kind"] == "model")
    [lost] = [it["reaction"] for it in await list_open(boss) if it["agent_id"] == "lost"]
    told = await boss.call("network.work", {"reaction": lost, "agent_id": "lost"})
    assert (told["state"], told["ended_at"]) == ("open", None)
    assert [(it["tool"], it["ended_at"] is None) for it in told["steps"] if it["kind"] == "tool"] == [
        ("look", False),
        ("wait_for_ever", True),
    ]


async def list_open(boss: Any) -> list[Any]:
    return list((await boss.call("network.open_reactions", {}))["reactions"])


async def test_work_of_others_is_empty(run: Run) -> None:
    desk, boss = await run.network.join("desk", kind="agent"), await run.network.join("boss", kind="human")
    [payer] = [it["reaction"] for it in await list_open(boss) if it["agent_id"] == "payer"]
    name = {"reaction": payer, "agent_id": "payer"}
    told = await desk.call("network.work", name)
    assert (told["work"], told["steps"], told["trigger"], told["is_readable"]) == ([], [], 0, False)
    told = await boss.call("network.work", name)
    assert (told["state"], [it["kind"] for it in told["steps"]]) == ("waiting", ["model", "approval"])


async def test_a_hub_without_a_reader_says_so() -> None:
    async with Network.open() as network:
        network.hub.view.run_reader = None
        mia = await Person.join(network, "mia")
        sent = await mia.client.send_text("mia", "note")
        with pytest.raises(UnknownOperation):
            await mia.client.call("network.explain", {"seq": sent.seq})


async def test_long_texts_of_an_answer_that_is_too_large_are_cut() -> None:
    long = make_runner("long", lambda request: "x" * 60_000)
    async with Network.open(limits=Limits(max_result_bytes=65_536)) as network, running(network, long):
        mia = await Person.join(network, "mia")
        answer = await mia.ask("long", "Write.")
        boss = await network.join("boss", kind="human")
        [first, *_] = (await boss.call("network.explain", {"seq": answer.seq}))["steps"]
        assert first["message"]["content"] == "x" * 20_000 + "…"


STARTED = {"trigger": 3, "thread_id": "direct:ann~mia", "as_of": 3, "manifest": [1, 3], "config_hash": "c"}


@pytest.mark.parametrize(
    "body",
    [
        None, [], "x", 7, {}, {"turn": 1}, {"turn": "first", "call": 0}, {"turn": 1, "call": 0, "path": 7},
        {"turn": 1, "call": 0, "reply": {"text": None, "tool_calls": "x"}}, {"turn": 1, "call": 0, "questions": {"a": "b"}},
        {"turn": 1, "call": 0, "path": "__proto__", "status": ["x"], "tool": "t", "content": "c", "ok": True},
    ],
)  # fmt: skip
def test_records_of_another_program_break_nothing(body: object) -> None:
    kinds = ["model_reply", "model_failed", "tool_started", "tool_result", "waiting", "approval", "review", "finished"]
    bodies: list[tuple[str, object]] = [("started", STARTED), *((kind, body) for kind in kinds)]
    records = [
        {"seq": 10 + place, "agent_id": "ann", "record_id": "x", "kind": kind, "body": it, "at": place}
        for place, (kind, it) in enumerate(bodies)
    ]
    steps = list_steps(RecordedReaction("r", "ann", records))
    assert {step.kind for step in steps} <= {"tool"}


async def write_chain(network: Network, count: int, text: str = "x") -> tuple[NetworkClient, list[int]]:
    """Let ann and bob answer each other. Return ann's client and the seqs, oldest first."""
    ann, bob = await network.join("ann", kind="agent", role="reactor"), await network.join("bob", kind="agent")
    seqs: list[int] = []
    for number in range(count):
        sender, recipient = (bob, "ann") if (count - number) % 2 else (ann, "bob")
        sent = await sender.send_text(recipient, text, cause=seqs[-1] if seqs else None)
        seqs.append(sent.seq)
    return ann, seqs


async def start_reaction(client: NetworkClient, trigger: int, manifest: list[int]) -> None:
    """Write the record of a reaction by hand, as any program may."""
    body = {**STARTED, "trigger": trigger, "thread_id": "direct:ann~bob", "as_of": trigger, "manifest": manifest}
    await client.record("r-1", "started", body, record_id="start")


class CountingPermit:
    """A read's permit that counts its turns."""

    def __init__(self) -> None:
        self.acquired = self.released = 0

    async def acquire(self) -> None:
        self.acquired += 1

    def release(self) -> None:
        self.released += 1


async def test_an_explanation_reads_the_messages_of_a_prompt_without_walking_to_their_root(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ``network.why``, each message of a prompt would cost a walk along its whole chain."""
    async with Network.open() as network:
        ann, seqs = await write_chain(network, 60)
        await start_reaction(ann, seqs[-1], manifest=seqs)
        answer = await ann.send_text("bob", "done", cause=seqs[-1])
        count = 0
        ledger, heads = network.hub.view.ledger, network.hub.view.ledger.heads

        async def count_heads(wanted: Any) -> Any:
            nonlocal count
            count += 1
            return await heads(wanted)

        monkeypatch.setattr(ledger, "heads", count_heads)
        [step, *_] = (await ann.call("network.explain", {"seq": answer.seq}))["steps"]
        assert [it["seq"] for it in step["messages"]] == seqs
        assert count < 10 * len(seqs)


async def test_messages_that_a_record_names_wrongly_break_no_explanation() -> None:
    async with Network.open() as network:
        ann, seqs = await write_chain(network, 2)
        await start_reaction(ann, seqs[-1], manifest=[-1, 0, seqs[0], 999, 2**53, 2**70])
        answer = await ann.send_text("bob", "done", cause=seqs[-1])
        [step, *_] = (await ann.call("network.explain", {"seq": answer.seq}))["steps"]
        assert [it["seq"] for it in step["messages"]] == [seqs[0]]
        [reaction] = await LiveSource(ann).read_reactions([("ann", "r-1")])
        assert list(await LiveSource(ann).messages(reaction.manifest)) == [seqs[0]]


async def test_the_messages_of_a_prompt_are_bounded_by_the_size_of_a_result() -> None:
    """Any participant can write a record that names a thousand large messages. Such messages must not fill the node's
    memory.
    """
    async with Network.open(limits=Limits(max_result_bytes=65_536)) as network:
        ann, seqs = await write_chain(network, 8, "x" * 20_000)
        await start_reaction(ann, seqs[-1], manifest=seqs)
        answer = await ann.send_text("bob", "done", cause=seqs[-1])
        [step, *_] = (await ann.call("network.explain", {"seq": answer.seq}))["steps"]
        assert [it["seq"] for it in step["messages"]] == seqs[:3]


async def test_what_effects_read_is_bounded() -> None:
    async with Network.open(limits=Limits(max_result_bytes=65_536)) as network:
        ann, [seq, *_] = await write_chain(network, 1)
        await start_reaction(ann, seq, manifest=[seq])
        for number in range(20):
            await ann.record("r-1", "note", {"text": "x" * 60_000}, record_id=f"note-{number}")
        with pytest.raises(TooLarge):
            await ann.call("network.effects", {"seq": seq})


async def test_an_explanation_takes_turns_with_other_reads() -> None:
    """An explanation consists of many reads. Other reads must run in between, and it ends together with its session."""
    place = CountingPermit()
    async with Network.open() as network:
        _, seqs = await write_chain(network, 3)
        hub = network.hub
        [origin, _] = [it.live_origin() for it in hub.registry.sessions.values()]
        reading = Reading(origin, hub.view, "network", place)
        await explaining.explain(reading, seq=seqs[-1])
    assert place.acquired >= 1
    assert place.released == place.acquired


async def write_rows(client: Any) -> dict[str, Any]:
    """Return the rows of the page that a caller exports."""
    page = await write_page(LiveSource(client), Part(), now_s=1.0, nonce="n")
    [packed] = re.findall(r'id="recording">([^<]*)<', page)
    rows: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return rows


def without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: it for name, it in value.items() if name not in names}


def drop_prices(work: dict[str, Any]) -> dict[str, Any]:
    """Remove prices, because an exported page uses the prices of the process that writes it."""
    return {**work, "steps": [without(step, "usd") for step in work["steps"]]}


async def test_an_exported_page_holds_the_answers_of_its_node(run: Run) -> None:
    boss = await run.network.join("boss", kind="human")
    rows = await write_rows(boss)
    for message in rows["messages"]:
        seq = message["seq"]
        step = (await boss.call("network.explain", {"seq": seq}))["steps"][0]
        expected = without(step["reaction"], "work", "prompt", "steps") if "reaction" in step else None
        assert rows["explained"].get(str(seq)) == expected
        reactions = (await boss.call("network.effects", {"seq": seq}))["reactions"]
        assert rows["effects"].get(str(seq), []) == [without(it, "work") for it in reactions]
    assert {it["agent_id"] for it in rows["reactions"]} == {"desk", "finance", "payer", "lost"}
    for it in rows["reactions"]:
        answer = await boss.call("network.work", {"agent_id": it["agent_id"], "reaction": it["reaction"]})
        expected = drop_prices(without(answer, "has_prices"))
        assert drop_prices(without(it, "agent_id", "reaction", "seq")) == expected
    total = (await boss.call("network.cost_report", {}))["total"]
    for name in ("calls", "prompt_tokens", "completion_tokens", "tools"):
        assert sum(it[name] for it in rows["calls"]) == total[name], name


async def test_an_exported_page_explains_an_agents_own_work_alone(run: Run) -> None:
    finance = await run.network.join("finance", kind="agent")
    rows = await write_rows(finance)
    assert {it["agent_id"] for it in rows["reactions"]} == {"finance"}
    assert {it["agent_id"] for it in rows["explained"].values()} == {"finance"}
    assert {it["agent_id"] for it in rows["calls"]} == {"finance"}
