"""Tests of `roundelay view`, which shows the page for a ledger file and changes nothing in it. docs/web.md."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.ledger.schema import ROW_COLUMNS, SCHEMA_VERSION, STEPS, checksum
from tests.crash.test_takeovers import cluster, find_leader, follows, join
from tests.integration.test_web_links import open_link
from tests.support.command import Command, command, invoke, run
from tests.support.node import running_node
from tests.support.refund import LAST, refund
from tests.support.wire import WireSession

CALLS: dict[str, dict[str, Any]] = {
    "network.mark": {"thread_id": "direct:desk~mia", "is_pinned": True},
    "network.create_login": {"agent_id": "eve", "login_hash": "0" * 64},
    "network.remove": {"agent_id": "desk"},
    "network.resume_root": {"root": 4},
}


@pytest.fixture
async def ledger(tmp_path: Path) -> Path:
    async with refund(tmp_path / "team.db"):
        pass
    return tmp_path / "team.db"


def look_at_folder(folder: Path) -> dict[str, str]:
    """Return a hash of every file in the folder."""
    return {it.name: hashlib.sha256(it.read_bytes()).hexdigest() for it in folder.iterdir() if it.is_file()}


@asynccontextmanager
async def viewing(path: Path) -> AsyncIterator[tuple[Command, WireSession, dict[str, Any]]]:
    async with command("view", str(path), "--no-open") as view:
        link = (await view.line("^(http://.*)$"))[1]
        page = await open_link(link)
        try:
            yield view, page, await page.expect("welcome")
        finally:
            await page.close()
            await view.stop()


@pytest.mark.usefixtures("real_processes")
async def test_a_file_is_read_and_nothing_in_it_or_beside_it_changes(ledger: Path) -> None:
    before = await asyncio.to_thread(look_at_folder, ledger.parent)
    async with viewing(ledger) as (_, page, welcome):
        assert (welcome["is_operator"], welcome["is_read_only"]) == (True, True)
        value = await page.call("network.history", {"thread_id": "direct:desk~mia"})
        assert value["messages"][-1]["content"] == LAST
        why = await page.call("network.why", {"seq": value["messages"][-1]["seq"]})
        assert any("reaction" in it for it in why["chain"])
    assert await asyncio.to_thread(look_at_folder, ledger.parent) == before


async def test_a_view_takes_no_message_no_record_and_no_change(ledger: Path) -> None:
    async with viewing(ledger) as (_, page, welcome):
        send = {"type": "send", "message_id": "a" * 32, "to": "agent:desk", "content": "x"}
        told = {"type": "record", "record_id": "b" * 32, "reaction": "r", "kind": "note", "body": {}}
        for frame in (send, told):
            await page.send_frame(frame)
            assert (await page.expect("error"))["code"] == "forbidden"
        for op, args in CALLS.items():
            await page.send_frame({"type": "call", "call_id": op, "op": op, "args": args})
            assert (await page.expect("error"))["code"] == "forbidden"
        assert (await page.call("network.info"))["head"] == welcome["head"]


async def test_a_file_that_a_node_writes_is_shown_as_it_was(tmp_path: Path) -> None:
    async with (
        running_node(db=tmp_path / "team.db", durability="full"),
        viewing(tmp_path / "team.db") as (view, page, _),
    ):
        assert "may be in use" in "\n".join(view.errors)
        assert (await page.call("network.info"))["name"] == "contract"


async def test_what_is_no_whole_database_is_told_in_a_sentence(ledger: Path) -> None:
    folder = ledger.parent
    newer, damaged, export, other = (folder / name for name in ("newer.db", "damaged.db", "log.jsonl", "other.db"))
    await invoke("export", "--db", ledger, "-o", export)

    def prepare() -> None:
        newer.write_bytes(ledger.read_bytes())
        with closing(sqlite3.connect(newer)) as db:
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        data = bytearray(ledger.read_bytes())
        data[8192:16384] = b"\x7f" * 8192
        damaged.write_bytes(data)
        with closing(sqlite3.connect(other)) as db:
            db.execute("CREATE TABLE mine (x)")

    await asyncio.to_thread(prepare)
    sentences = {
        folder: "it is a folder",
        folder / "none.db": "There is no database",
        export: "roundelay export --format html --db",
        newer: "Upgrade Roundelay",
        damaged: "is damaged",
        other: "is a database of another program",
    }
    for path, sentence in sentences.items():
        done = await run("view", path, "--no-open", code=1)
        assert sentence in done.err, path
        assert len(done.err.splitlines()) == 1, done.err


async def test_a_file_of_an_earlier_schema_is_brought_up_in_the_copy_alone(ledger: Path) -> None:
    def make_older() -> None:
        older = ledger.with_name("older.db")
        with closing(sqlite3.connect(older)) as db:
            db.create_function("checksum", -1, lambda *columns: checksum(columns))
            for step in STEPS[:6]:
                db.executescript(step)
            db.execute("ATTACH ? AS newer", (str(ledger),))
            for table, columns in (
                ("log", ROW_COLUMNS),
                ("state", "tbl, key, value, crc"),
                ("meta", "key, value, crc"),
            ):
                db.execute(f"DELETE FROM {table}")
                db.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM newer.{table}")
            db.execute("PRAGMA user_version = 6")
            db.commit()
        older.replace(ledger)

    await asyncio.to_thread(make_older)
    before = await asyncio.to_thread(look_at_folder, ledger.parent)
    async with viewing(ledger) as (_, page, _):
        assert (await page.call("network.history", {"thread_id": "direct:desk~mia"}))["messages"]
    assert await asyncio.to_thread(look_at_folder, ledger.parent) == before


@pytest.mark.usefixtures("real_processes")
async def test_a_node_that_follows_can_be_looked_at_while_it_follows(tmp_path: Path) -> None:
    async with asyncio.timeout(60), cluster(tmp_path, "a", "b") as (_, nodes):
        leader = await find_leader(nodes)
        [waiting] = [it for it in nodes if it is not leader]
        await follows(waiting)
        async with join(nodes, "mia") as mia:
            sent = await mia.send_text("mia", "seen on both nodes")
            url = f"nats://127.0.0.1:{leader.log.partition('127.0.0.1:')[2]}"
            while "1 record behind" in (told := (await run("cluster", "status", "--log", url)).out):
                assert "follows" in told
            async with viewing(waiting.db) as (_, page, _):
                history = await page.call("network.history", {"thread_id": "direct:mia~mia"})
                assert [it["seq"] for it in history["messages"]] == [sent.seq]
            await mia.send_text("mia", "and the follower goes on")
