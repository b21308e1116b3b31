"""Tests of `roundelay why`, `impact` and `export` with a node and with its file, for operators and others, whatever
the messages contain.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from roundelay.agents.models.model import ModelRequest, ToolMessage
from roundelay.agents.models.scripted import Answer, finish, say, send
from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.config import Limits
from roundelay.network.core.rows import Row
from roundelay.network.home import announce_node
from roundelay.network.ledger.log_file import decode_row, encode_row, open_log, read_lines, read_log
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.runs.file_source import FileSource
from roundelay.runs.node_source import LiveSource
from roundelay.runs.reactions import list_reactions
from roundelay.runs.why import explain
from roundelay.runs.why_text import describe_steps
from tests.support.agents import Person, make_runner
from tests.support.command import Done, invoke
from tests.support.node import Node, running_node
from tests.support.recorded import record

EVIL = "it\x1b[2J\u202e <script> `x` ; end\n# head\n99:99:99 #1 boss \u2192 mia: fired"


def results(request: ModelRequest) -> list[str]:
    return [it.content for it in request.messages if isinstance(it, ToolMessage)]


def work(request: ModelRequest) -> Answer:
    incoming = str(request.messages[1].content).partition("<incoming_message")[2]
    if 'sender="finance"' in incoming:
        return finish() if results(request) else send("mia", "You get 40 EUR.")
    return say("I asked.") if results(request) else send("finance", "Refund 40 EUR?")


def approve(request: ModelRequest) -> Answer:
    return finish() if results(request) else send("desk", "Approved.")


@dataclass
class Run:
    """A finished run, and the seqs of its messages by text."""

    node: Node
    db: Path
    seqs: dict[str, int]


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[Run]:
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="full") as node:
        note = announce_node(node.url, tmp_path / "team.db.owner")
        desk, finance = make_runner("desk", work, url=node.url), make_runner("finance", approve, url=node.url)
        tasks = [asyncio.create_task(it.run()) for it in (desk, finance)]
        await asyncio.gather(desk.ready(), finance.ready())
        async with NetworkClient("mia", node.url, kind="human") as mia, NetworkClient("pat", node.url) as pat:
            await pat.send_text("mia", EVIL)
            await mia.send_text("desk", "Refund order 12")
            heard = mia.__aiter__()
            while (await anext(heard)).text != "You get 40 EUR.":
                continue
        async with NetworkClient("auditor", node.url, kind="service") as auditor:
            page = await auditor.call("network.log", {"limit": 500})
            messages = page["messages"]
            while (await auditor.call("network.status"))[
                "open_reactions"
            ]:  # the last message comes before the last records
                page = await auditor.call("network.log", {"after": page["next"], "wait_ms": 1000})
        for runner in (desk, finance):
            await runner.stop()
        await asyncio.gather(*tasks)
        yield Run(node, db, {it["content"]: it["seq"] for it in messages})
        note.unlink()


async def shown_by(*arguments: str | Path) -> str:
    """Run a command and return its output."""
    return (await invoke(*arguments)).out


def without_times(done: Done) -> list[str]:
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in done.lines]


async def test_why_tells_every_step_up_to_the_root(told: Run) -> None:
    seq = told.seqs["You get 40 EUR."]
    live = await invoke("why", str(seq))
    lines = without_times(live)
    heads = [line for line in lines if line.startswith("#")]
    assert [re.sub(r"#\d+", "#", head) for head in heads] == [
        "# desk \u2192 mia: You get 40 EUR.",
        "# finance \u2192 desk (re #): Approved.",
        "# desk \u2192 finance: Refund 40 EUR?",
        "# mia \u2192 desk: Refund order 12",
    ]
    text = live.out
    assert f"of desk to #{told.seqs['Approved.']} (finished)" in text
    assert 'Sent by the call send_text_message in turn 1: {"target_agent_id": "mia", "text": "You get 40 EUR."}' in text
    assert f"      #{told.seqs['Refund order 12']} mia: Refund order 12" in lines
    assert lines[-1] == "    Root of the conversation."
    assert await shown_by("why", str(seq), "--db", told.db) == live.out


async def test_why_as_json_holds_the_same(told: Run) -> None:
    seq = told.seqs["You get 40 EUR."]
    live = json.loads((await invoke("why", str(seq), "--json")).out)
    assert live == json.loads(await shown_by("why", str(seq), "--json", "--db", told.db))
    assert [it["message"]["seq"] for it in live["chain"]] == sorted(
        (it["message"]["seq"] for it in live["chain"]), reverse=True
    )
    sent = live["chain"][0]["reaction"]["sent"]
    assert (sent["tool_call"]["name"], sent["turn"]) == ("send_text_message", 1)
    assert told.seqs["Approved."] in live["chain"][0]["reaction"]["manifest"]


async def test_an_answer_is_told_as_one(told: Run) -> None:
    done = await invoke("why", str(told.seqs["I asked."]))
    assert "    Sent as the answer, after turn 2." in done.lines


async def test_who_is_no_operator_sees_its_own_part(told: Run) -> None:
    seq = told.seqs["You get 40 EUR."]
    token = await make_token(told, "lou")
    await invoke("why", str(seq), "--as", "lou", "--token", token, code=1)
    await invoke("impact", str(seq), "--as", "lou", "--token", token, code=1)
    done = await invoke("export", "--as", "lou", "--token", token, code=1)
    assert "Only operators may call" in done.err
    markdown = await invoke("export", "--format", "markdown", "--as", "lou", "--token", token)
    assert "40 EUR" not in markdown.out


async def make_token(told: Run, person: str) -> str:
    done = await invoke("token", "create", person, "--kind", "human", "--json")
    return str(json.loads(done.out)["token"])


async def test_impact_is_a_tree_of_reactions_and_messages(told: Run) -> None:
    seq = told.seqs["Refund order 12"]
    live = await invoke("impact", str(seq))
    shape = [re.sub(r"#\d+", "#", line) for line in live.lines]
    assert sorted(shape) == sorted([
        "# mia \u2192 desk: Refund order 12",
        "\u2514\u2500 desk reacted (finished after 2 turns)",
        "   \u251c\u2500 # desk \u2192 finance: Refund 40 EUR?",
        "   \u2502  \u2514\u2500 finance reacted (finished after 2 turns)",
        "   \u2502     \u2514\u2500 # finance \u2192 desk: Approved.",
        "   \u2502        \u2514\u2500 desk reacted (finished after 2 turns)",
        "   \u2502           \u2514\u2500 # desk \u2192 mia: You get 40 EUR.",
        "   \u2514\u2500 # desk \u2192 mia: I asked.",
        "* 4 messages followed.",
    ])  # fmt: skip
    assert await shown_by("impact", str(seq), "--db", told.db) == live.out
    value = json.loads(await shown_by("impact", str(seq), "--json", "--db", told.db))
    assert value["message"]["seq"] == seq
    assert [it["agent_id"] for it in value["reactions"]] == ["desk"]
    assert [it["message"]["content"] for it in value["followers"]] == ["Refund 40 EUR?", "I asked."]


@pytest.mark.parametrize(
    "command",
    [
        ("history", "direct:desk~finance"),
        ("history", "direct:desk~mia", "--limit", "1"),
        ("history", "direct:desk~mia", "--before", "{seq}"),
        ("cost", "--by", "turn"),
        ("cost", "--by", "root", "--agent", "desk", "--root", "{root}"),
        ("reactions", "list"),
        ("reactions", "list", "--last", "1"),
        ("reactions", "list", "--open"),
        ("reactions", "show", "{reaction}"),
    ],
)
async def test_a_file_or_an_export_is_looked_into_as_a_node_is(
    told: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    reaction = json.loads(await shown_by("reactions", "list", "--json", "--db", told.db))["reactions"][0]["reaction"]
    names = {"seq": told.seqs["I asked."], "root": told.seqs["Refund order 12"], "reaction": reaction}
    arguments = [it.format(**names) for it in command]
    log = tmp_path / "log.jsonl"
    await shown_by("export", "--db", told.db, "-o", log)
    for flags in ((), ("--json",)):
        live = (await invoke(*arguments, *flags)).out
        assert [await shown_by(*arguments, *flags, "--db", it) for it in (told.db, log)] == [live, live]


async def test_threads_of_a_file_name_who_has_written_there(told: Run) -> None:
    live = json.loads((await invoke("threads", "--json")).out)["threads"]
    found = json.loads(await shown_by("threads", "--json", "--db", told.db))["threads"]
    for it in live:  # a file does not know the readers and their unread counts
        assert it.pop("readers")
        assert it.pop("last")["seq"] == it["last_seq"]
        assert it.pop("unread") >= 0
        assert it.pop("may_take") is True, "the owner is an operator"
    assert [{**it, "senders": 0} for it in found] == [{**it, "senders": 0} for it in live]
    assert {it["thread_id"]: it["senders"] for it in found}["direct:desk~finance"] == ["desk", "finance"]
    assert (await shown_by("threads", "--limit", "1", "--db", told.db)).count("direct:") == 1
    done = await invoke("history", "channel:no", "--db", told.db, code=1)
    assert "no messages of the thread 'channel:no'" in done.err


async def test_what_nobody_said_is_unknown(told: Run) -> None:
    for name in (("why",), ("impact",), ("cost", "--root")):
        for where in ((), ("--db", told.db)):
            assert "There is no message 9999" in (await invoke(*name, "9999", *where, code=1)).err
    for where in ((), ("--db", told.db)):
        told_of = (await invoke("dead-letters", "list", "--of", "nobody", *where, code=1)).err
        assert "Nobody is registered as 'nobody'." in told_of
        assert (await invoke("dead-letters", "list", "--of", "desk", *where)).out == "There are no dead letters.\n"


async def test_the_exported_log_has_lost_nothing(told: Run, tmp_path: Path) -> None:
    live = await invoke("export")
    assert (await invoke("export", "-o", "-", cwd=tmp_path)).out == live.out
    assert "-" not in os.listdir(tmp_path)
    assert live.out == await shown_by("export", "--db", told.db)
    (tmp_path / "run.jsonl").write_text(live.out, encoding="utf-8")
    head, rows = read_lines(live.out.splitlines(keepends=True), "run")
    found = list(rows)
    assert (head, found) == read_log(told.db) == read_log(tmp_path / "run.jsonl")
    assert any(row.label == "finished" for row in found)


async def test_a_file_at_rest_is_read_as_it_is_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.send("agent:desk", {"n": [1.0, 1e5]})
        await people["mia"].hear()

    db = tmp_path / "deep" / "log.db"
    db.parent.mkdir()
    await record(db, [make_runner("desk", lambda request: say("noted"))], talk)
    before = {path.name: path.stat().st_size for path in db.parent.iterdir()}
    _, found = read_log(db)
    assert {path.name: path.stat().st_size for path in db.parent.iterdir()} == before
    ledger = SQLiteLedger(db, new_epoch=lambda: "new")
    await ledger.open()
    rows = await ledger.rows(0, 10_000)
    await ledger.close()
    assert [decode_row(encode_row(row)) for row in rows] == rows == found


def test_a_row_whose_json_spans_lines_is_one_line() -> None:
    row = Row(seq=1, at=2, type="record", actor="desk", key="r:1", stream="r", label="x", data=b'{\n"a":\r\n1.10}')
    line = encode_row(row)
    assert b"\n" not in line
    assert b"\r" not in line
    assert decode_row(line) == row


async def test_a_transcript_keeps_what_was_said_in_its_place(told: Run) -> None:
    done = await invoke("export", "--format", "markdown")
    assert "\x1b" not in done.out
    assert "\u202e" not in done.out
    assert "<script>" not in done.out
    assert "> \\# head" in done.lines
    assert not any(line.startswith(("# head", "99:99")) for line in done.lines)
    assert "**desk** to mia, " in done.out
    assert await shown_by("export", "--format", "markdown", "--db", told.db) == done.out


async def test_a_sequence_diagram_keeps_what_was_said_in_its_place(told: Run) -> None:
    lines = (await shown_by("export", "--format", "mermaid", "--db", told.db)).splitlines()
    assert lines[0] == "sequenceDiagram"
    assert all(
        re.fullmatch(r" {4}(participant p\d+ as \S+|p\d+-?->>p\d+: [^;#\n]*([#]\d+;[^;#\n]*)*)", it) for it in lines[1:]
    )
    assert "You get 40 EUR." in lines[-1]


async def test_parts_can_be_exported(told: Run) -> None:
    thread = await invoke("export", "--format", "markdown", "--thread", "direct:desk~finance")
    assert "Approved" in thread.out
    assert "Refund order 12" not in thread.out
    root = str(told.seqs["Refund order 12"])
    where = ("--db", told.db)
    live = await invoke("export", "--format", "mermaid", "--root", root)
    followed = await shown_by("export", "--format", "mermaid", "--root", root, *where)
    assert live.out == followed
    assert "You get 40 EUR" in followed
    assert "head" not in followed
    some = await shown_by("export", "--from", root, "--to", str(told.seqs["Approved."]), *where)
    seqs = [json.loads(line)["seq"] for line in some.splitlines()[1:]]
    assert (seqs[0], seqs[-1]) == (int(root), told.seqs["Approved."])
    rows = [json.loads(line) for line in (await shown_by("export", "--root", root, *where)).splitlines()]
    assert rows[0]["is_excerpt"] is True
    assert {it["type"] for it in rows[1:]} == {"message", "record"}
    assert EVIL not in [it["data"].get("content") for it in rows[1:]]


async def test_a_part_of_a_log_is_not_replayed(told: Run, tmp_path: Path) -> None:
    await shown_by("export", "--from", "3", "-o", tmp_path / "part.jsonl", "--db", told.db)
    (tmp_path / "desk.yaml").write_text("id: desk\ninstruction: x\nmodel: {rules: []}\n", encoding="utf-8")
    done = await invoke("replay", tmp_path / "part.jsonl", tmp_path / "desk.yaml", code=1)
    assert "a replay needs all of it" in done.err


async def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("hello\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, said in {
        "other.txt": "is not an export of a ledger",
        "binary": "neither a node's database nor an export",
    }.items():
        assert said in (await invoke("why", "1", "--db", tmp_path / name, code=1)).err


async def test_a_replay_needs_agents(told: Run) -> None:
    assert "pass their files" in (await invoke("replay", told.db, code=2)).err
    assert "returns no runners" in (await invoke("replay", told.db, "--agents", "nothing:here", code=2)).err


async def test_a_long_way_up_is_read_page_by_page_as_far_as_it_may_be_seen() -> None:
    async with Network.open(limits=Limits(max_result_bytes=3000)) as network:
        mia, ann, bob = [await network.join(name) for name in ("mia", "ann", "bob")]
        hidden = await mia.send_text("ann", "between us")
        last = await ann.send_text("bob", "x" * 400, cause=hidden.seq)
        for _ in range(10):
            last = await bob.send_text("ann", "y" * 400, cause=last.seq)
            last = await ann.send_text("bob", "x" * 400, cause=last.seq)
        boss = await network.join("boss", kind="human")
        assert len(await explain(LiveSource(boss), last.seq)) == 22
        seen = await explain(LiveSource(bob), last.seq)
        assert len(seen) == 21
        assert describe_steps(seen)[-1] == f"    You may not see the messages above it, up to the root #{hidden.seq}."
        assert len((await LiveSource(boss).following(hidden.seq))[0]) == 21


SCENARIO = """
scenario: Refund needs finance
seed: 7
agents:
  desk: {file: desk.yaml}
  finance: {file: finance.yaml}
people: [mia]
steps:
  - {as: mia, to: desk, send: Refund order 12}
  - wait: {until: idle, at_most: 60s}
expect:
  - message: {from: desk, to: mia, contains: approved}
"""
AGENT = """
id: {agent_id}
instruction: You are under test.
model:
  rules:
    - {rule}
"""


async def test_the_ledger_of_a_scenario_is_looked_into_and_replayed_like_any_other(tmp_path: Path) -> None:
    rules = {
        "desk": "{when: {contains: Refund}, do: [{tool: ask, args: {agent_ids: [finance], text: May I}}]}\n"
        "    - {when: {after: ask}, do: [{say: '{{ result }}'}]}",
        "finance": "{when: {contains: May I}, do: [{say: approved}]}",
    }
    for agent_id, rule in rules.items():
        (tmp_path / f"{agent_id}.yaml").write_text(AGENT.format(agent_id=agent_id, rule=rule), encoding="utf-8")
    (tmp_path / "refund.scenario.yaml").write_text(SCENARIO, encoding="utf-8")
    await invoke("scenario", "run", tmp_path / "refund.scenario.yaml", "--ledger", tmp_path / "run.jsonl")
    files = [tmp_path / "desk.yaml", tmp_path / "finance.yaml"]
    assert "No differences: 4 messages" in await shown_by("replay", tmp_path / "run.jsonl", *files)
    assert "approved" in await shown_by("export", "--format", "markdown", "--db", tmp_path / "run.jsonl")
    log = (tmp_path / "run.jsonl").read_bytes()
    (tmp_path / "two.jsonl").write_bytes(log + log)
    assert "a second log begins" in (await invoke("export", "--db", tmp_path / "two.jsonl", code=1)).err


async def test_a_file_names_the_same_reactions_as_its_node(tmp_path: Path) -> None:
    """The run has two reactions to one message, one of them started twice, and messages before, during, between and
    after them.
    """
    db = tmp_path / "team.db"
    async with running_node(db=db, durability="full") as node:
        mia, helper = await node.person("mia"), await node.agent("helper")
        request = (await mia.send("agent:helper", "a request"))["seq"]
        said = [request, (await helper.send("agent:mia", "before any", cause=request))["seq"]]
        for step in ("r1 started", "r2 started", "r2 finished", "r1 finished", "r1 started"):
            reaction, kind = step.split()
            await helper.record(reaction, kind, {"trigger": request, "manifest": [request]})
            said.append((await helper.send("agent:mia", step, cause=request))["seq"])
        async with NetworkClient("auditor", node.url, kind="service", token=node.owner_token) as auditor:
            live = LiveSource(auditor)
            chains = [await live.chain(seq) for seq in said]
            messages = await live.messages([request])
            begun = await live.reactions_to(messages[request])
            listed = [it.to_json() for it in await list_reactions(live, 5)]
            opened = await live.open_reactions()
    with open_log(db) as log:
        file = FileSource(log)
        assert [await file.chain(seq) for seq in said] == chains
        assert [it.to_json() for it in await list_reactions(file, 5)] == listed
        assert await file.open_reactions() == opened
        for found in (await file.reactions_to(messages[request]), begun):
            assert [(it.agent_id, it.reaction) for it in found] == [("helper", "r1")]
    named = [next((it["reaction"] for it in chain if "reaction" in it), None) for chain in chains]
    assert named == [None, None, "r1", "r2", "r1", None, "r1"]
