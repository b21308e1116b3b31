"""Tests of operating a long-running node: backups, dead letters, figures, checks."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.config import NodeConfig, Retain
from roundelay.network.core.joining import hash_token
from roundelay.network.errors import LedgerError
from roundelay.network.home import announce_node
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.log_file import open_log
from roundelay.network.ledger.opening import PAGE_BYTES
from roundelay.nodes import doctor, up
from roundelay.nodes.status import compute_rates, describe_figures, describe_quotas
from tests.support.announced import announced_node
from tests.support.command import command, invoke
from tests.support.node import Node, ProcessNode, node_process
from tests.support.wire import WireSession, make_token

LARGE = "x" * 200_000


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with announced_node(tmp_path, limits={"root_messages_per_s": 100_000}) as running:
        yield running


async def run_json(*arguments: str | Path, **environment: str) -> Any:
    return json.loads((await invoke(*arguments, "--json", **environment)).out)


# -- backup


class Writer:
    """Client that broadcasts continuously. `acknowledged` lists the messages that the hub has stored."""

    def __init__(self, session: WireSession) -> None:
        self.acknowledged: list[str] = []
        self.is_under_way = asyncio.Event()
        self._session = session
        self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while True:
            text = f"message {len(self.acknowledged)}"
            await self._session.send("broadcast", text)
            self.acknowledged.append(text)
            if len(self.acknowledged) == 10:
                self.is_under_way.set()

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def read_log(node: Node) -> list[Any]:
    operator = await node.service("auditor")
    found: list[Any] = []
    page: dict[str, Any] = {"next": 0, "head": 1}
    while page["next"] < page["head"]:
        page = await operator.call("network.log", {"after": page["next"], "limit": 50})
        found += [message["content"] for message in page["messages"]]
    return found


async def test_doctor_tells_each_page_that_is_wrong_in_words_of_its_own(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with node_process(db):
        pass
    data = bytearray(db.read_bytes())
    pages = int.from_bytes(data[28:32], "big") + 2  # two more in the header than in the file's tables and lists
    data[28:32] = pages.to_bytes(4, "big")
    db.write_bytes(bytes(data) + bytes(2 * PAGE_BYTES))
    config = tmp_path / "roundelay.yaml"
    config.write_text("db: team.db\n")
    told = next(it for it in (await invoke("doctor", config, code=1)).lines if "integrity" in it)
    assert "is damaged: Page" in told
    assert "\\x0a" not in told


async def test_a_backup_of_a_node_that_is_written_to_holds_what_was_acknowledged_before(tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "monday.db"
    copy.parent.mkdir()
    async with node_process(tmp_path / "team.db", limits={"root_messages_per_s": 100_000}) as node:
        ann = await node.agent("ann")
        for _ in range(100):  # more than one step of a stepwise copy, which writes in between would restart
            await ann.send("broadcast", LARGE)
        writer = Writer(ann)
        await writer.is_under_way.wait()
        before = len(writer.acknowledged)
        made = await run_json("backup", copy)
        assert len(writer.acknowledged) > before, "the node went on"
        await writer.stop()
        epoch = ann.welcome["network"]["epoch"]
    assert made["database"] == str(tmp_path / "team.db"), "that of the node which runs"
    assert made["bytes"] == copy.stat().st_size > 100 * len(LARGE)
    assert list_folder(copy.parent) == ["monday.db"]
    said = await run_json("history", "broadcast", "--limit", 500, "--db", copy)
    assert len(said["messages"]) >= 100 + before
    with open_log(copy) as log:
        assert log.head.epoch == epoch, "by which replay and why know the reactions in it"
    async with node_process(copy) as restored:
        kept = await read_log(restored)
        auditor = restored.sessions[-1]
        assert auditor.welcome["network"]["epoch"] != epoch
        assert auditor.welcome["head"] >= made["head"]
    assert kept[:100] == [LARGE] * 100
    assert kept[100 : 100 + before] == writer.acknowledged[:before]
    assert kept[100:] == [f"message {number}" for number in range(len(kept) - 100)], "a prefix, without a gap"


async def test_a_stopped_nodes_database_is_found_by_its_configuration(tmp_path: Path) -> None:
    node = await ProcessNode.start(tmp_path / "team.db")
    assert await node.stop() == 0
    (tmp_path / "roundelay.yaml").write_text("db: team.db\n")
    done = await invoke("backup", "copy.db", cwd=tmp_path)
    assert done.out.startswith("Wrote copy.db: team.db up to #")


def list_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        ("there.db", "other.db", "never overwrites"),
        ("copy.db", "missing.db", "There is no database"),
        ("copy.db", "text.db", "not a database"),
        ("copy.db", "other.db", "a database of another program"),
        ("missing/copy.db", "other.db", "there is no folder"),
    ],
)
def test_a_backup_that_cannot_be_made_leaves_nothing(tmp_path: Path, target: str, source: str, said: str) -> None:
    (tmp_path / "there.db").write_text("mine")
    (tmp_path / "text.db").write_text("this is no database, but long enough to be looked at as one" * 20)
    with closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE songs (name TEXT)")
    files = list_folder(tmp_path)
    with pytest.raises(LedgerError, match=said):
        back_up(tmp_path / source, tmp_path / target)
    assert list_folder(tmp_path) == files
    assert (tmp_path / "there.db").read_text() == "mine"


async def test_of_several_nodes_one_has_to_be_named(tmp_path: Path) -> None:
    for port in (1111, 2222):
        announce_node(f"ws://127.0.0.1:{port}/", tmp_path / f"{port}.db.owner")
    refused = await invoke("backup", "copy.db", cwd=tmp_path, code=2)
    assert "1111.db" in refused.err
    assert "--db" in refused.err
    chosen = await invoke("backup", "copy.db", cwd=tmp_path, code=1, ROUNDELAY_DB="2222.db")
    assert "There is no database 2222.db" in chosen.err


async def make_database(folder: Path) -> Path:
    """Create a database of a stopped node with at least one page of every kind."""
    node = await ProcessNode.start(folder / "team.db", limits={"root_messages_per_s": 100_000})
    ann = await node.agent("ann")
    for number in range(200):
        await ann.send("broadcast", f"{number} {'x' * 500}")
    await node.close_sessions()
    await node.stop()
    return node.db


async def test_a_damaged_database_is_found_and_not_copied(tmp_path: Path) -> None:
    db = await make_database(tmp_path)
    data = bytearray(db.read_bytes())
    for page in range(40, len(data) // PAGE_BYTES, 2):
        data[page * PAGE_BYTES : page * PAGE_BYTES + 200] = b"\x55" * 200
    db.write_bytes(data)
    with pytest.raises(LedgerError, match=r"damaged|malformed"):
        back_up(db, tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()
    done = await invoke("doctor", "--json", cwd=tmp_path, code=1, ROUNDELAY_DB=str(db), ROUNDELAY_PORT="0")
    checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert checks["integrity"]["status"] == "failed"
    assert "backup" in checks["integrity"]["advice"]


# -- dead letters


async def poison(node: Node, recipient: WireSession, content: str = "poison") -> int:
    sender = await node.person("zoe")
    stored = await sender.send(f"agent:{recipient.welcome['agent_id']}", content)
    for _ in range(5):
        await recipient.expect("deliver")
        await recipient.nack(stored["seq"], reason="it is \x1b[31mpoison")
    await recipient.expect("notice", kind="dead_letter")
    return int(stored["seq"])


async def test_dead_letters_are_listed_delivered_again_and_dropped(node: Node) -> None:
    bob = await node.agent("bob")
    seq = await poison(node, bob)
    other = await poison(node, bob, "more poison")
    [letter, _] = (await run_json("dead-letters", "list"))["dead_letters"]
    assert (letter["agent_id"], letter["seq"], letter["attempts"]) == ("bob", seq, 5)
    shown = (await invoke("dead-letters", "list", "--of", "bob", "--limit", "1")).lines
    assert shown[0].split() == ["MESSAGE", "RECIPIENT", "AT", "ATTEMPTS", "REASON"]
    assert shown[1].startswith(f"#{seq}")
    assert shown[1].endswith(r"it is \x1b[31mpoison")

    assert (await invoke("dead-letters", "retry", str(seq))).out == f"#{seq} is delivered again to bob.\n"
    again = await bob.expect("deliver")
    assert (again["message"]["seq"], again["attempt"]) == (seq, 1)
    dropped = await run_json("dead-letters", "drop", str(other))
    assert dropped == {"dead_letters": [{"agent_id": "bob", "seq": other}]}
    assert (await invoke("dead-letters", "list")).out == "There are no dead letters.\n"
    gone = await invoke("dead-letters", "drop", str(other), code=1)
    assert f"There is no dead letter #{other}" in gone.err


async def test_a_participant_has_its_own_dead_letters_only(node: Node) -> None:
    token = make_token()
    made = {"agent_id": "eve", "kind": "human", "token_hash": hash_token(token)}
    await (await node.service("auditor")).call("network.create_token", made)
    eve = await node.join("eve", kind="human", token=token)
    bob = await node.agent("bob")
    others = await poison(node, bob)
    own, taken = await poison(node, eve), await poison(node, eve)
    identity = {"ROUNDELAY_AS": "eve", "ROUNDELAY_TOKEN": token}
    listed, refused, hidden, _ = await asyncio.gather(
        invoke("dead-letters", "list", "--json", **identity),
        invoke("dead-letters", "list", "--of", "bob", code=1, **identity),
        invoke("dead-letters", "drop", str(others), code=1, **identity),
        invoke("dead-letters", "drop", str(taken), **identity),
    )
    assert {letter["seq"] for letter in json.loads(listed.out)["dead_letters"]} - {taken} == {own}
    assert "operators" in refused.err
    assert "There is no dead letter" in hidden.err
    [letter] = (await eve.call("network.dead_letters"))["dead_letters"]
    assert letter["seq"] == own


async def test_whose_dead_letter_is_meant_has_to_be_said_when_it_is_of_several(node: Node) -> None:
    ann, bob, zoe = await node.agent("ann"), await node.agent("bob"), await node.person("zoe")
    seq = (await zoe.send("broadcast", "poison"))["seq"]
    for session in (ann, bob):
        for _ in range(5):
            await session.expect("deliver")
            await session.nack(seq)
        await session.expect("notice", kind="dead_letter")
    refused = await invoke("dead-letters", "drop", str(seq), code=1)
    assert "ann, bob" in refused.err
    await invoke("dead-letters", "drop", str(seq), "--of", "ann")
    assert [it["agent_id"] for it in (await run_json("dead-letters", "list"))["dead_letters"]] == ["bob"]


# -- status


async def test_status_counts_what_happens_meanwhile(node: Node) -> None:
    ann = await node.agent("ann")
    writer = Writer(ann)
    value = await run_json("status", "--over", "0.5")
    await writer.stop()
    assert 0.5 <= value["rates"]["over_s"] < 10
    assert value["rates"]["messages_per_s"] > 0
    assert value["figures"]["commit_rows_max"] >= 1
    operator = await node.service("auditor")
    assert set(value["figures"]) == set(await operator.call("network.status"))


FIGURES = {
    "sessions": 3, "sessions_behind": 1, "sessions_opening": 0, "backlog_deliveries": 7, "backlog_bytes": 3 * 2**20,
    "unacked_deliveries": 2, "pending_entries": 5, "open_reactions": 4, "commits_total": 10, "rows_total": 25, "commit_rows_p50": 2,
    "commit_rows_max": 9, "commit_ms_p50": 0.5, "commit_ms_p99": 4.0, "messages_total": 20, "deliveries_total": 60,
    "connections_total": 8, "made_room_total": 0, "signals_dropped_total": 0, "overloaded_total": 0, "recoveries_total": 0,
}  # fmt: skip


def test_a_hub_that_was_started_again_between_two_readings_counts_from_zero() -> None:
    after = {**FIGURES, "messages_total": 5}
    assert compute_rates(FIGURES, after, 2.0) == {
        "over_s": 2.0, "messages_per_s": 2.5, "deliveries_per_s": 0.0, "commits_per_s": 0.0,
    }  # fmt: skip


def test_trouble_is_told_when_there_was_some() -> None:
    rates = compute_rates(FIGURES, FIGURES, 1.0)
    well = describe_figures(FIGURES, rates)
    assert "trouble" not in well
    assert well["sessions"].startswith("3, 1 of them behind")
    assert "7 deliveries queued (3.0 MiB)" in well["backlog"]
    assert "of 2.5 rows" in well["commits"]
    assert "2 times" in describe_figures({**FIGURES, "recoveries_total": 2}, rates)["trouble"]


def test_who_is_near_the_end_of_a_quota_is_shown() -> None:
    limits = {"bytes_per_day": 4 * 2**20, "messages_per_day": None, "max_created_channels": 10}
    ann = {"agent_id": "ann", "bytes": 3 * 2**20, "messages": 7, "channels": 2, **limits, "used": 0.75}
    bob = {**ann, "agent_id": "bob", "used": 0.49}
    shown = describe_quotas([ann, bob])["quotas"]
    assert shown == "ann 75% (7 of any messages; 3.0 MiB of 4.0 MiB today; 2 of 10 channels)"
    assert describe_quotas([bob]) == {}
    assert describe_quotas([{**ann, "agent_id": f"a{number}"} for number in range(7)])["quotas"].endswith(" and 2 more")


# -- checks


def test_few_open_files_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for limit in (1024, 500):
        monkeypatch.setattr(up, "raise_file_limit", lambda limit=limit: limit)
        up.warn_of_few_files(said.append)
    assert len(said) == 1
    assert "500 files" in said[0]
    monkeypatch.setattr(doctor, "raise_file_limit", lambda: 500)
    assert doctor.check_files(NodeConfig()).status == "note"


async def test_what_holds_retention_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node_process(tmp_path / "team.db") as node:
        ann, bob = await node.agent("ann"), await node.agent("bob", role="reactor")
        stored = await ann.send("agent:bob", "work")
        await bob.message("work")
        await bob.record("r1", "started", {"trigger": stored["seq"], "manifest": [stored["seq"]]})
    config = NodeConfig(db=tmp_path / "team.db", retain=Retain(days=30, bytes=2**30))
    well = doctor.check_retention(config)
    assert (well.status, well.detail.split(";")[0]) == ("ok", "Kept: messages for 30 days, at most 1024.0 MiB")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 31 * 86_400)
    held = doctor.check_retention(config)
    assert held.status == "note"
    assert "bob" in held.detail
    async with node_process(tmp_path / "team.db") as node:
        await (await node.service("auditor")).call("network.remove", {"agent_id": "bob"})
    assert doctor.check_retention(config).status == "ok"
    everything = doctor.check_retention(NodeConfig(db=tmp_path / "team.db"))
    assert everything.detail.startswith("Everything is kept")


# -- following


async def test_tail_shows_a_message_when_it_is_stored_and_outlives_its_hub(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    async with node_process(db) as node:
        port = node.url.rpartition(":")[2].rstrip("/")
        async with command("tail", "--count", "2") as tail:
            await tail.error("Following")
            ann = await node.agent("ann")
            await ann.send("broadcast", "before")
            await tail.line("before")
            await node.close_sessions()
            await node.kill9()
            async with command("up", "--port", port, "--db", db, cwd=tmp_path) as again:
                await again.line("is ready")
                await invoke("send", "broadcast", "after")
                await tail.end()
        assert [line.rpartition(": ")[2] for line in tail.lines] == ["before", "after"]
