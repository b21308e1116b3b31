"""Tests of damaged rows: readers get a notice and continue after them, and the hub never guesses a value that depends
on one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.client import NetworkClient, Notice
from roundelay.network.core.rows import Row
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import Trim
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.integrity import summarize
from roundelay.network.ledger.log_file import read_log
from roundelay.network.ledger.schema import STEPS
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.faulty import DB
from tests.support.command import run
from tests.support.node import Node, running_node
from tests.support.wire import get_http

INTERIOR_PAGE = 5
"""First byte of a table page that refers to other pages: https://sqlite.org/fileformat2.html#b_tree_pages"""


def _change(db: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(db)) as connection:
        connection.create_function("flip", 1, lambda text: chr(ord(text[0]) ^ 1) + text[1:])
        assert connection.execute(sql, values).rowcount == 1
        connection.commit()


def damage(db: Path, seq: int, column: str = "data") -> None:
    """Flip a bit in a row's column. No process may have the file open."""
    _change(db, f"UPDATE log SET {column} = flip({column}) WHERE seq = ?", seq)


class Team:
    """A node that is started repeatedly on one file. The agents of the node keep their tokens."""

    def __init__(self, db: Path) -> None:
        self.db = db
        self._tokens: dict[str, str] = {}

    @asynccontextmanager
    async def node(self) -> AsyncIterator[Node]:
        async with running_node(db=self.db, durability="full") as node:
            node.tokens = self._tokens
            yield node

    async def send(self, *contents: str, **fields: Any) -> list[int]:
        """Let alice send to bob, who is registered but offline. Return the seqs."""
        async with self.node() as node:
            await (await node.agent("bob")).bye()
            alice = await node.agent("alice")
            return [(await alice.send("agent:bob", it, message_id=f"m-{it}", **fields))["seq"] for it in contents]


@pytest.fixture
def team(tmp_path: Path) -> Team:
    return Team(tmp_path / DB)


async def test_a_reader_goes_on_after_a_damaged_row_and_is_told(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    _, second, third = await team.send("one", "two", "three")
    damage(team.db, second)
    async with team.node() as node:
        for _ in range(2):  # bob acknowledges nothing, so everything is delivered again
            bob = await node.agent("bob")
            assert [(await bob.delivery())["message"]["content"] for _ in range(2)] == ["one", "three"]
            notice = await bob.expect("notice", kind="damaged")
            assert notice["body"] == {"seq": second}
            assert (await bob.call("network.history", {"thread_id": "direct:alice~bob"}))["damaged"] == [second]
            await bob.drop()
        bob = await node.agent("bob")
        await bob.deliveries_until("three")
        await bob.ack(third)
        await bob.bye()
        bob = await node.agent("bob")
        await (await node.agent("alice")).send("agent:bob", "four")
        await bob.message("four")
        assert [frame for frame in bob.unread if frame["type"] == "notice"] == []
        assert "\nroundelay_damaged_rows 1\n" in (await get_http(node.url, "/metrics"))[1]
    assert [it.seq for it in caplog.records if "damaged" in it.message] == [second]  # type: ignore[attr-defined]


async def test_the_client_hears_of_damage_and_takes_notices_that_it_does_not_know(team: Team) -> None:
    first, _ = await team.send("one", "two")
    damage(team.db, first)
    async with (
        team.node() as node,
        NetworkClient("bob", node.url, token=node.token_of("bob")) as bob,
    ):
        assert (await anext(bob.deliveries())).message.content == "two"
        bob.take_frame({"type": "notice", "kind": "of_a_newer_hub", "body": 1})
        events = bob.events()
        assert [await anext(events), await anext(events)] == [
            Notice("damaged", None, {"seq": first}),
            Notice("of_a_newer_hub", None, 1),
        ]


async def test_history_windows_and_lists_leave_it_out_and_say_so(team: Team) -> None:
    first, second, third, fourth = await team.send("one", "two", "three", "four")
    damage(team.db, second, "type")
    damage(team.db, fourth, "head")
    thread = {"thread_id": "direct:alice~bob"}
    async with team.node() as node:
        alice, owner = await node.agent("alice"), await node.person("mia")
        history = await alice.call("network.history", thread)
        assert [it["content"] for it in history["messages"]] == ["one", "three"]
        assert history["damaged"] == [second, fourth]
        assert (await alice.call("network.history", {**thread, "limit": 1}))["damaged"] == [fourth]
        assert "damaged" not in await alice.call("network.history", {**thread, "before": second})
        window = await alice.call("network.window", {"trigger": third})
        assert [it["seq"] for it in window["threads"][0]["messages"]] == [first, third]
        assert window["threads"][0]["damaged"] == [second]
        (listed,) = (await alice.call("network.list_threads"))["threads"]
        assert listed["readers"] == ["alice", "bob"]
        await alice.call_refused("unknown_message", "network.message_status", {"seq": second})
        log = await owner.call("network.log", {"after": first})
        assert ([it["seq"] for it in log["messages"]], log["damaged"]) == ([third], [second, fourth])
        assert log["next"] >= fourth  # a reader that continues there does not loop
        rows = await owner.call("network.rows", {"after": third})
        assert rows["damaged"] == [fourth]
        stranger = await node.agent("eve")
        await stranger.call_refused("unknown_message", "network.history", thread)


async def test_a_repeat_of_a_damaged_message_is_neither_confirmed_nor_stored_again(team: Team) -> None:
    (seq,) = await team.send("one")
    damage(team.db, seq)
    async with team.node() as node:
        alice = await node.agent("alice")
        for content in ("one", "another"):
            error = await alice.refused("internal", "agent:bob", content, message_id="m-one")
            assert f"seq {seq}" in error["message"]
        await alice.send("agent:bob", "one", message_id="m-one-again")
        history = await alice.call("network.history", {"thread_id": "direct:alice~bob"})
        assert [it["content"] for it in history["messages"]] == ["one"]


@pytest.mark.parametrize("field", ["cause", "reply_to"])
async def test_nothing_follows_from_a_damaged_message(team: Team, field: str) -> None:
    (seq,) = await team.send("one")
    damage(team.db, seq, "head")
    async with team.node() as node:
        alice = await node.agent("alice")
        await alice.refused("unknown_message", "agent:bob", "two", message_id="two", **{field: seq})
        await alice.send("agent:bob", "two", message_id="two")


async def test_an_agent_does_not_go_on_from_a_part_of_its_journal(team: Team) -> None:
    (seq,) = await team.send("one")
    async with team.node() as node:
        bob = await node.agent("bob")
        await bob.record("r", "started", {"trigger": seq})
        call = await bob.record("r", "tool_call", {"n": 1}, record_id="call")
    damage(team.db, call["seq"])
    async with team.node() as node:
        bob, owner = await node.agent("bob"), await node.person("mia")
        error = await bob.call_refused("internal", "network.records", {"reaction": "r"})
        assert f"record {call['seq']}" in error["message"]
        records = (await owner.call("network.records", {"reaction": "r"}))["records"]
        assert [it["kind"] for it in records] == ["started"]
        assert (await bob.submit_record("r", "tool_call", {"n": 1}, record_id="call"))["code"] == "internal"


async def test_a_call_whose_result_is_damaged_is_not_done_again(team: Team) -> None:
    async with team.node() as node:
        alice = await node.agent("alice")
        await alice.call("network.cancel", {"reaction": "none"}, call_id="stored-nothing")
        await alice.call("channels.create", {"name": "dev"}, call_id="stored-a-row")
    _change(team.db, "UPDATE state SET value = flip(value) WHERE key = 'alice/stored-nothing'")
    _change(team.db, "UPDATE state SET value = replace(value, 'dev', 'dew') WHERE key = 'alice/stored-a-row'")
    async with team.node() as node:
        alice = await node.agent("alice")
        await alice.call_refused("internal", "network.cancel", {"reaction": "none"}, call_id="stored-nothing")
        value = await alice.call("channels.create", {"name": "dev"}, call_id="stored-a-row")
        assert value["duplicate"]


async def test_a_damaged_message_does_not_come_again_and_holds_up_nothing(team: Team) -> None:
    first, second = await team.send("one", "two")
    async with team.node() as node:
        bob = await node.agent("bob")
        await bob.message("one")
        await bob.nack(first, retry_after_ms=0)
        await bob.expect("deliver", attempt=2)
        await bob.drop()
    damage(team.db, first)
    async with team.node() as node:
        bob = await node.agent("bob")
        assert (await bob.expect("notice", kind="damaged"))["body"] == {"seq": first}
        await bob.message("two")
        await bob.ack(second)
        await bob.bye()
    async with team.node() as node:
        bob = await node.agent("bob")
        assert bob.welcome["cursor"] >= second


@pytest.mark.parametrize("table", ["participant", "token", "channel", "member", "floor"])
async def test_a_damaged_table_is_refused_at_the_start_by_name(team: Team, table: str) -> None:
    (seq,) = await team.send("one")
    async with team.node() as node:
        bob = await node.agent("bob")
        await bob.call("channels.create", {"name": "dev"})
        await bob.message("one")
        await bob.ack(seq)
        await bob.bye()
    with closing(sqlite3.connect(team.db)) as db:
        (key,) = db.execute("SELECT key FROM state WHERE tbl = ? ORDER BY key LIMIT 1", (table,)).fetchone()
    _change(team.db, "UPDATE state SET value = flip(value) WHERE tbl = ? AND key = ?", table, key)
    before = team.db.read_bytes()
    for _ in range(2):
        with pytest.raises(LedgerError, match=f"{key}.*table '{table}' is damaged.*restore a backup"):
            async with team.node():
                pass
    assert team.db.read_bytes() == before
    if table == "token":  # one table is enough, because each run starts a process
        refused = await run("up", "--port", "0", "--db", team.db, code=1)
        assert (len(refused.err.splitlines()), table in refused.err) == (1, True)


async def test_a_damaged_name_of_a_table_hides_nothing_behind_it(team: Team) -> None:
    await team.send("one")
    _change(team.db, "UPDATE state SET tbl = 'qarticipant' WHERE tbl = 'participant' AND key = 'alice'")
    with pytest.raises(LedgerError, match="qarticipant"):
        async with team.node():
            pass


async def test_what_somebody_keeps_for_itself_is_forgotten_where_it_is_damaged(team: Team) -> None:
    async with team.node() as node:
        mia, bob = await node.person("mia"), await node.agent("bob")
        for text in ("one?", "two?"):
            asked = await bob.send("agent:mia", text, requires_response=True)
        await mia.call("network.mark", {"thread_id": asked["thread_id"], "read_upto": asked["seq"], "is_pinned": True})
        await mia.call("network.dismiss", {"kind": "budget", "seq": 0})
    for table in ("mark", "dismissed"):
        _change(team.db, "UPDATE state SET value = flip(value) WHERE tbl = ?", table)
    _change(team.db, "UPDATE state SET value = flip(value) WHERE tbl = 'question' AND key LIKE ?", f"%{asked['seq']}")
    async with team.node() as node:
        mia = await node.person("mia")
        assert [it["text"] for it in (await mia.call("network.inbox"))["items"]] == ["one?"]
        [thread] = (await mia.call("network.list_threads"))["threads"]
        assert "mark" not in thread
        assert (await mia.call("network.mark", {"thread_id": asked["thread_id"], "is_muted": True}))["is_muted"]


async def test_damaged_meta_is_refused_and_damaged_attempts_are_counted_anew(team: Team) -> None:
    (seq,) = await team.send("one")
    async with team.node() as node:
        bob = await node.agent("bob")
        await bob.message("one")
        await bob.nack(seq, retry_after_ms=3_600_000)
        await bob.settle()
    _change(team.db, "UPDATE state SET value = flip(value) WHERE tbl = 'attempt'")
    async with team.node() as node:
        assert (await (await node.agent("bob")).delivery())["attempt"] == 1
    _change(team.db, "UPDATE meta SET value = flip(value) WHERE key = 'first_seq' OR key = 'checked_from'")
    with pytest.raises(LedgerError, match="table 'meta' is damaged"):
        async with team.node():
            pass


@pytest.mark.usefixtures("real_processes")
async def test_doctor_and_backup_name_what_is_damaged(team: Team) -> None:
    _, second, third = await team.send("one", "two", "three")
    damage(team.db, second)
    damage(team.db, third, "target")
    found = await run("doctor", cwd=team.db.parent, ROUNDELAY_DB=str(team.db), code=1)
    assert f"2 damaged rows in the log: #{second}, #{third}" in found.out
    with pytest.raises(LedgerError, match=f"2 damaged rows in the log: #{second}, #{third}"):
        back_up(team.db, team.db.with_name("copy.db"))
    assert not team.db.with_name("copy.db").exists()


@pytest.mark.usefixtures("real_processes")
async def test_offline_commands_leave_it_out_and_say_so(team: Team) -> None:
    _, second, _ = await team.send("one", "two", "three")
    damage(team.db, second)
    exported = await run("export", "--db", team.db)
    assert '"content":"one"' in exported.out
    assert "two" not in exported.out
    assert f"1 damaged row is left out (#{second})" in exported.err
    with pytest.raises(LedgerError, match=f"damaged \\(#{second}\\)"):
        read_log(team.db)


async def test_the_time_of_a_damaged_row_moves_no_stamp_and_drops_nothing(tmp_path: Path) -> None:
    db = tmp_path / DB
    ledger = SQLiteLedger(db, new_epoch=lambda: "e")
    await ledger.open()
    rows = [Row(seq=seq, at=1000 + seq, type="message", actor="ann", key=f"m:{seq}") for seq in range(1, 9)]
    await ledger.append(rows, [])
    await ledger.close()
    _change(db, "UPDATE log SET at = at + (1 << 40) WHERE seq = 8")
    _change(db, "UPDATE log SET at = 5 WHERE seq = 4")
    meta, _ = await ledger.open()
    assert (meta.head, meta.stamp) == (8, 1007)
    assert (await ledger.trim(Trim(messages_before=1003, pinned=9))).dropped == 2
    assert [row.seq for row in await ledger.rows(0, 99)] == [3, 4, 5, 6, 7, 8]
    await ledger.close()


def _make_old(db: Path, rows: int) -> None:
    """Make a file of the first schema, before rows had checksums."""
    with closing(sqlite3.connect(db)) as old:
        old.executescript(STEPS[0])
        old.execute("PRAGMA user_version = 1")
        sql = "INSERT INTO log (seq, at, type, actor, key, target, stream, data) VALUES (?, ?, 'message', 'ann', ?, 'broadcast', 't', '{}')"
        old.executemany(sql, [(seq, seq, f"m:{seq}") for seq in range(1, rows + 1)])
        old.execute("INSERT INTO meta VALUES ('epoch', 'e'), ('state', 'clean')")
        old.execute("""INSERT INTO state VALUES ('floor', 'ann', '{"seq":1,"above":[],"open":[]}')""")
        old.commit()


async def test_rows_from_before_checksums_are_read_as_they_are_and_new_ones_need_theirs(tmp_path: Path) -> None:
    db = tmp_path / DB
    _make_old(db, 3)
    assert [row.seq for row in read_log(db)[1]] == [1, 2, 3]  # offline commands migrate nothing
    ledger = SQLiteLedger(db, new_epoch=lambda: "e")
    _, puts = await ledger.open()
    assert [put.key for put in puts] == ["ann"]
    new = [Row(seq=seq, at=seq, type="message", actor="ann", key=f"m:{seq}") for seq in (4, 5)]
    await ledger.append(new, [])
    await ledger.close()
    _change(db, "UPDATE log SET data = 'no JSON' WHERE seq = 2")  # doctor finds this row by its decoded content
    _change(db, "UPDATE log SET crc = NULL WHERE seq = 5")
    await ledger.open()
    read = [(row.seq, row.is_damaged) for row in await ledger.rows(0, 9)]
    assert read == [(1, False), (2, True), (3, False), (4, False), (5, True)]
    await ledger.close()
    assert summarize(db).unchecked == 3
    with closing(sqlite3.connect(db)) as file:
        assert file.execute("SELECT seq FROM log WHERE crc IS NOT NULL").fetchall() == [(4,)]
        assert file.execute("SELECT count(*) FROM state WHERE crc IS NULL").fetchone() == (0,)


async def test_one_row_that_sqlite_cannot_read_hides_no_other(team: Team) -> None:
    _, second, _ = await team.send("one", "two", "three")
    with closing(sqlite3.connect(team.db)) as db:
        db.execute("UPDATE log SET data = CAST(x'ff' || data AS TEXT) WHERE seq = ?", (second,))  # no UTF-8
        db.commit()
    async with team.node() as node:
        bob = await node.agent("bob")
        await bob.message("one")
        await bob.message("three")
        history = await bob.call("network.history", {"thread_id": "direct:alice~bob"})
        assert history["damaged"] == [second]


async def test_a_log_whose_pages_come_round_again_is_refused(team: Team) -> None:
    """A lost write may leave a page that refers to the same page twice. Reads of damaged rows would never end there."""
    async with team.node() as node:
        alice = await node.agent("alice")
        for _ in range(40):
            await alice.send("agent:alice", "x" * 200)
    with closing(sqlite3.connect(team.db)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,), (root,) = (
            connection.execute(sql).fetchone()
            for sql in ("PRAGMA page_size", "SELECT rootpage FROM sqlite_master WHERE name = 'log'")
        )
    content = bytearray(team.db.read_bytes())
    at = (root - 1) * size
    assert content[at] == INTERIOR_PAGE
    newest, cells = content[at + 8 : at + 12], int.from_bytes(content[at + 3 : at + 5], "big")
    for cell in range(cells):
        offset = at + int.from_bytes(content[at + 12 + 2 * cell : at + 14 + 2 * cell], "big")
        content[offset : offset + 4] = newest
    leaf = (int.from_bytes(newest, "big") - 1) * size
    content[leaf : leaf + size] = content[leaf : leaf + size].replace(b"xxx", b"yyy")
    team.db.write_bytes(content)
    with pytest.raises(LedgerError, match="damaged"):
        async with team.node():
            pass


async def test_explanations_leave_damaged_messages_out(team: Team) -> None:
    first, second = await team.send("one", "two")
    async with team.node() as node:
        bob = await node.agent("bob", role="reactor")
        body = {"trigger": second, "thread_id": "direct:alice~bob", "as_of": second, "manifest": [first, second]}
        await bob.record("r-1", "started", {**body, "config_hash": "c"})
        answer = (await bob.send("agent:alice", "done", cause=second))["seq"]
    damage(team.db, first)
    async with team.node() as node:
        bob = await node.agent("bob")
        [step, _] = (await bob.call("network.explain", {"seq": answer}))["steps"]
        assert [it["seq"] for it in step["messages"]] == [second]
        assert (await bob.call("network.work", {"reaction": "r-1", "agent_id": "bob"}))["manifest"] == [first, second]
        for op in ("network.explain", "network.effects"):
            await bob.call_refused("unknown_message", op, {"seq": first})
