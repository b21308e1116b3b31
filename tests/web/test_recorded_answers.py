"""Tests that an exported page answers like its hub, and holds nothing that the caller may not read."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.errors import LedgerError
from roundelay.network.hub.local import LocalConnection, LocalTransport
from roundelay.network.ledger.log_file import open_log
from roundelay.runs import why
from roundelay.runs.export import Part
from roundelay.runs.file_source import FileSource
from roundelay.runs.node_source import LiveSource
from roundelay.runs.page import write_page
from roundelay.runs.source import Source
from tests.support.page_modules import run_module
from tests.support.refund import Run, refund

MODULES = """
import { openRecording } from "#core/recording.js";
import { readTimeline } from "#core/timeline.js";
import { explain, follow } from "#core/why.js";
const read = async (call, seqs) => ({
  steps: await Promise.all(seqs.map((seq) => explain(call, seq))),
  effects: await Promise.all(seqs.map((seq) => follow(call, seq))),
  costs: await Promise.all(["agent", "model", "thread", "root", "reaction", "day"].map((by) => call("network.cost_report", { by }))),
  some_costs: await call("network.cost_report", { by: "model", thread_id: "direct:desk~finance", since: 1 }),
  timeline: await readTimeline(call),
  threads: (await call("network.list_threads", { limit: 500 })).threads.map(({ thread_id, last_seq, messages, readers, last }) => ({
    thread_id, last_seq, messages, readers, last,
  })),
  history: await call("network.history", { thread_id: "direct:desk~mia", limit: 2, before: seqs.at(-1) }),
  found: await call("network.search", { query: "ORDER 12" }),
  few: await call("network.search", { query: "p*", limit: 1 }),
  agents: (await call("network.list_agents", {})).agents.map(({ agent_id, kind, card }) => ({ agent_id, kind, card })),
});
"""


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with refund(tmp_path / "team.db") as told:
        yield told


class OfNoOperator(Network):
    """The same network, joined by people who are not operators."""

    def _make_link(self, agent_id: str) -> Any:
        class Way(LocalTransport):
            async def connect(self) -> LocalConnection:
                return LocalConnection(self._hub, administers=False)

        return Way(self.hub), lambda: 1.0


async def join(run: Run, caller: str) -> NetworkClient:
    if caller == "boss":
        return await run.network.join("boss", kind="human")
    plain = OfNoOperator(run.network.hub, run.network._new_id)
    client = plain.client(caller, kind="human" if caller == "mia" else "agent")
    run.network._clients.append(client)  # the network closes this client together with itself
    await client.connect()
    return client


def without_hidden(read: dict[str, Any]) -> dict[str, Any]:
    """Remove hidden reactions from the hub's answers. The hub reports their existence to callers without access, but
    a page omits them.
    """
    steps = [[_drop_hidden_reaction(step) for step in explanation["steps"]] for explanation in read["steps"]]
    return {**read, "steps": steps, "effects": [_drop_hidden(it) for it in read["effects"]]}


def _drop_hidden_reaction(step: dict[str, Any]) -> dict[str, Any]:
    """Remove from an explained message the parts that a page does not show: the earlier work, and the messages of
    that work.
    """
    reaction = step.get("reaction", {"is_hidden": True})
    if reaction["is_hidden"]:
        return {"message": step["message"]}
    seqs = [str(seq) for seq in reaction["manifest"]]
    messages = {seq: step["messages"][seq] for seq in seqs if seq in step["messages"]}
    return {**step, "reaction": {**reaction, "work": None, "prompt": None}, "messages": messages}


def _drop_hidden(effect: dict[str, Any]) -> dict[str, Any]:
    reactions = [{**it, "work": None} for it in effect["reactions"] if it["status"]]
    return {**effect, "reactions": reactions, "followers": [_drop_hidden(it) for it in effect["followers"]]}


async def write_rows(source: Source, part: Part | None = None) -> Any:
    """Return the rows in the exported page."""
    page = await write_page(source, part or Part(), now_s=1.0, nonce="n")
    [packed] = re.findall(r'id="recording">([^<]*)<', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


async def read_both(client: NetworkClient, rows: Any, seqs: list[int]) -> tuple[Any, Any]:
    live = await run_module(MODULES, "(seqs, call) => read(call, seqs)", seqs, client.call)
    work = "({ rows, seqs }) => { const { call } = openRecording(rows); return read(call, seqs); }"
    return live, await run_module(MODULES, work, {"rows": rows, "seqs": seqs})


@pytest.mark.parametrize("caller", ["boss", "mia", "desk"])
async def test_a_page_answers_as_its_hub(run: Run, caller: str) -> None:
    client = await join(run, caller)
    seqs = sorted(await LiveSource(client).messages(run.seqs.values()))
    live, recorded = await read_both(client, await write_rows(LiveSource(client)), seqs)
    assert recorded["history"].pop("has_more") == live["history"].pop("has_more")
    live, recorded = without_hidden(live), without_hidden(recorded)
    for name in live:
        assert recorded[name] == live[name], name


async def test_work_that_a_person_overtook_and_the_work_in_its_place_are_both_told(tmp_path: Path) -> None:
    """The hub, the page made from it, and the page made from its file must agree."""
    async with Network.open(tmp_path / "held.db") as network:
        boss, bob = await network.join("boss", kind="human"), await network.join("bob", role="reactor")
        seq = (await boss.send_text("bob", "question")).seq
        began = {"trigger": seq, "thread_id": "direct:bob~boss", "as_of": seq, "manifest": [seq], "config_hash": "x"}
        await bob.record("before", "started", began, record_id="1")
        for op in ("network.take", "network.give"):
            await boss.call(op, {"thread_id": "direct:bob~boss"})
        await bob.record("after", "started", began, record_id="2")
        await bob.send("agent:boss", "answer", cause=seq)
        for is_ended in (False, True):
            if is_ended:
                await bob.record("before", "finished", {"status": "cancelled"}, record_id="3")
            rows = await write_rows(LiveSource(boss))
            live = await run_module(MODULES, "(seq, call) => follow(call, seq)", seq, boss.call)
            work = "({ rows, seq }) => follow(openRecording(rows).call, seq)"
            recorded = await run_module(MODULES, work, {"rows": rows, "seq": seq})
            assert _drop_hidden(recorded) == _drop_hidden(live)
            assert [it["reaction"] for it in live["reactions"]] == ["before", "after"]
            with open_log(tmp_path / "held.db") as log:
                for source in (LiveSource(boss), FileSource(log)):
                    effect = await why.follow(source, seq)
                    assert [it.reaction for it in effect.reactions] == ["before", "after"]


async def test_a_file_gives_the_page_that_its_node_gives(run: Run) -> None:
    """Cards and the readers of a thread may differ, because the log does not contain them."""
    boss = await run.network.join("boss", kind="human")
    live = await write_rows(LiveSource(boss))
    with open_log(run.db) as log:
        file = await write_rows(FileSource(log))
    names = ("network", "messages", "explained", "effects", "reactions", "calls", "has_prices")
    assert {name: file[name] for name in names} == {name: live[name] for name in names}
    assert {it["agent_id"] for it in file["agents"]} == {it["agent_id"] for it in live["agents"]}


async def test_a_page_holds_what_its_caller_may_read_alone(run: Run) -> None:
    """A person's page holds her messages, an agent's page also its own records. The export of a part holds nothing
    else.
    """
    boss = await run.network.join("boss", kind="human")
    mia, finance = await join(run, "mia"), await join(run, "finance")
    of_mia, of_finance = await write_rows(LiveSource(mia)), await write_rows(LiveSource(finance))
    assert {it["thread_id"] for it in of_mia["messages"]} == {"direct:desk~mia"}
    assert (of_mia["reactions"], of_mia["calls"], of_mia["viewer"]["is_operator"]) == ([], [], False)
    assert {it["agent_id"] for it in [*of_finance["reactions"], *of_finance["calls"]]} == {"finance"}
    assert "Refund order" not in json.dumps(of_finance)
    part = await write_rows(LiveSource(boss), Part(thread_id="direct:desk~finance"))
    assert {it["thread_id"] for it in part["messages"]} == {"direct:desk~finance"}
    assert {it["agent_id"] for it in [*part["reactions"], *part["calls"]]} == {"finance"}
    assert set(part["readers"]) <= {"direct:desk~finance"}
    assert "mia" not in {it["agent_id"] for it in part["agents"]}


async def test_a_page_takes_no_change() -> None:
    rows = {
        "network": {},
        "head": 0,
        "viewer": {},
        "agents": [],
        "readers": {},
        "messages": [],
        "explained": {},
        "effects": {},
        "reactions": [],
        "calls": [],
    }
    work = "(rows) => openRecording(rows).call('network.mark', {}).catch((error) => error.code)"
    assert await run_module(MODULES, work, rows) == "forbidden"


async def test_a_run_that_no_page_can_hold_is_told_with_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.runs.page.MAX_BYTES", 1000)
    with open_log(run.db) as log, pytest.raises(LedgerError, match=r"Choose a part .* roundelay view"):
        await write_rows(FileSource(log))
