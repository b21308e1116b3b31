"""Tests of moving a network from a database to a shared log and back, and of comparing an index with its log.
docs/cluster.md.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shlex
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import nats
import pytest

from roundelay.app import make_shared_log
from roundelay.network.cluster.shared_log import LogElectionPending
from roundelay.network.core.tables import DeadLetter, TableWrite, Token
from roundelay.network.errors import LedgerError
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.contract.test_ledger import message
from tests.integration.test_shared_log import fill, ledger
from tests.support.command import command, invoke, run
from tests.support.nats import NatsServer, free_port, nats_server
from tests.support.node import running_node


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path / "nats") as running:
        yield running


async def make_database(db: Path, rows: int, epoch: str = "e1") -> None:
    made = SQLiteLedger(db, new_epoch=lambda: epoch, name="lab", durability="normal")
    await made.open()
    for start in range(1, rows + 1, 1000):
        await made.append([message(seq, "ann", "agent:bob") for seq in range(start, min(start + 1000, rows + 1))], [])
    letter = DeadLetter("bob", 1, "no", 5, 1)
    await made.append(
        [], [TableWrite("token", "h", Token("ann", "agent", 1)), TableWrite("dead", f"bob/{1:016d}", letter)]
    )
    await made.close()


def list_files(folder: Path) -> list[str]:
    return sorted(it.name for it in folder.iterdir() if it.is_file())


async def export(db: Path) -> str:
    return (await invoke("export", "--db", db)).out


async def test_a_network_moves_into_a_log_and_back_with_every_row_and_who_is_who(
    server: NatsServer, tmp_path: Path
) -> None:
    lab, back, log = tmp_path / "lab.db", tmp_path / "back.db", server.url("lab")
    async with running_node(db=lab, durability="full") as node:
        ann, bob = await node.agent("ann"), await node.agent("bob")
        await ann.call("channels.create", {"name": "dev"})
        await bob.call("channels.join", {"name": "dev"})
        for number in range(20):
            await ann.send("channel:dev", f"message {number} " + "é" * number)
        tokens = node.tokens
    before = await export(lab)
    moved = json.loads((await invoke("cluster", "migrate", "--from", lab, "--to", log, "--json")).out)
    assert moved["is_equal"]
    assert moved["rows"] == len(before.splitlines()) - 1
    assert await export(lab) == before
    again = await invoke("cluster", "migrate", "--from", lab, "--to", log)
    assert "lab.db is in the log" in again.out
    await invoke("cluster", "rebuild", "--log", log, "--db", tmp_path / "a.db")
    assert json.loads((await invoke("cluster", "verify", "--log", log, "--db", tmp_path / "a.db", "--json")).out)[
        "is_equal"
    ]
    refused = await invoke("cluster", "migrate", "--from", tmp_path / "a.db", "--to", server.url("other"), code=1)
    assert "Make a database from that log, and move that database" in refused.err
    assert ("--log" in refused.err, "--from URL --to FILE" in refused.err) == (False, True)
    owner = Path(f"{back}.owner")
    told = await invoke("cluster", "migrate", "--from", log, "--to", back)
    assert f"(copy a node's .owner file to {owner})" in told.out
    assert await export(back) == before, "also the epoch"
    done = await invoke("cluster", "migrate", "--from", log, "--to", back, code=1)
    assert "has a history of its own" in done.err
    async with running_node(db=back, durability="full") as node:
        node.tokens = tokens
        bob = await node.agent("bob")
        assert (await bob.call("network.history", {"thread_id": "channel:dev"}))["messages"][-1]["content"].startswith(
            "message 19"
        )


@pytest.mark.full
async def test_a_move_that_is_killed_goes_on_and_nobody_serves_what_is_not_whole(
    server: NatsServer, tmp_path: Path
) -> None:
    lab, log = tmp_path / "lab.db", server.url("lab")
    await make_database(lab, 20_000)
    client = await nats.connect(f"nats://{server.hosts}")
    appended = await client.subscribe("roundelay.lab.log")
    found = list[int]()
    for kill_at in (3, 4):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roundelay", "cluster", "migrate", "--from", str(lab), "--to", log),
            stdout=asyncio.subprocess.DEVNULL,
        )
        for _ in range(kill_at):
            await appended.next_msg(timeout=30)
        process.kill()
        await process.wait()
        found.append((await client.jetstream().stream_info("lab")).state.last_seq)
        while appended.pending_msgs:
            await appended.next_msg()
    assert found[0] < found[1] < 22, "each was killed in the middle, and the second went on"
    refused = await run("up", "--port", "0", "--db", tmp_path / "a.db", "--log", log, code=1)
    assert "still being filled from a database" in refused.err
    out = await invoke("cluster", "migrate", "--from", log, "--to", tmp_path / "b.db", code=1)
    assert "is not complete" in out.err
    other = tmp_path / "other.db"
    await make_database(other, 3, epoch="e2")
    assert "holds another network" in (await invoke("cluster", "migrate", "--from", other, "--to", log, code=1)).err
    moved = json.loads((await invoke("cluster", "migrate", "--from", lab, "--to", log, "--json")).out)
    assert (moved["is_equal"], moved["rows"], moved["values"]) == (True, 20_000, 2)
    await client.close()


def change(db: Path, sql: str) -> None:
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute(sql)


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("UPDATE log SET data = '{}' WHERE seq = 3", "lacks row #3"),
        ("DELETE FROM log WHERE seq = 5", "lacks row #5"),
        ("DELETE FROM state WHERE tbl = 'token'", "lacks 'h' of the table token"),
        ("UPDATE state SET value = '{}' WHERE tbl = 'dead'", "another value for"),
        (
            "INSERT INTO state (tbl, key, value) VALUES ('hold', 'broadcast', '{}')",
            "has, and the log has not, 'broadcast'",
        ),
    ],
)
async def test_what_differs_from_the_log_is_named(server: NatsServer, tmp_path: Path, sql: str, told: str) -> None:
    lab, index, log = tmp_path / "lab.db", tmp_path / "a.db", server.url("lab")
    await make_database(lab, 5)
    await invoke("cluster", "migrate", "--from", lab, "--to", log)
    await invoke("cluster", "rebuild", "--log", log, "--db", index)
    change(index, sql)
    assert told in (await invoke("cluster", "verify", "--log", log, "--db", index, code=1)).out


async def test_what_cannot_be_moved_is_refused_and_nothing_is_made(server: NatsServer, tmp_path: Path) -> None:
    lab, log = tmp_path / "lab.db", server.url("lab")
    migrate = ("cluster", "migrate", "--from")
    assert "There is no database" in (await invoke(*migrate, lab, "--to", log, code=1)).err
    lab.write_text("some text that is no database")
    assert "not the database of a node" in (await invoke(*migrate, lab, "--to", log, code=1)).err
    lab.unlink()
    assert "There is no log" in (await invoke(*migrate, log, "--to", tmp_path / "b.db", code=1)).err
    assert not (tmp_path / "b.db").exists()
    assert "One of --from and --to" in (await invoke(*migrate, lab, "--to", tmp_path / "b.db", code=2)).err
    await make_database(lab, 5)
    change(lab, "DELETE FROM log WHERE seq = 2")
    assert "row #2 is missing or damaged" in (await invoke(*migrate, lab, "--to", log, code=1)).err
    for look in ("status",), ("rebuild", "--db", tmp_path / "none.db"), ("verify", "--db", lab):
        told = (await invoke("cluster", *look, "--log", server.url("new"), code=1)).err
        assert told.endswith("check the address. The first node that starts with this address creates the log.\n"), told
    assert [it for it in list_files(tmp_path) if it.startswith("none")] == []
    for log in ("one", "two"):
        await fill(ledger(server.url(log), tmp_path / f"{log}.db"), 1)
    wrong = (await invoke(*migrate, server.url("one"), "--to", tmp_path / "two.db", code=1)).err
    assert ("Name a new file with --to" in wrong, "--db" in wrong) == (True, False)
    to = tmp_path / "own.db"
    to.with_name("own.db.owner").write_text("t" * 43)
    assert f"(its owner's token is in {to}.owner)" in (await invoke(*migrate, server.url("one"), "--to", to)).out


async def test_status_asks_again_while_servers_choose_a_leader(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 1)
    asked = list[str]()

    class Choosing:
        async def open(self, *, create: bool) -> None:
            raise LogElectionPending("The servers are there, and do not answer (nats: timeout).")

    def make(url: str) -> Any:
        asked.append(url)
        return Choosing() if len(asked) < 3 or is_for_ever else make_shared_log(url)

    monkeypatch.setattr("roundelay.app.make_shared_log", make)
    monkeypatch.setattr("roundelay.commands.cluster.ASK_AGAIN_S", 0.01)
    is_for_ever = False
    told = await invoke("cluster", "status", "--log", server.url("lab"))
    assert told.err.count("electing a leader, which takes up to ten seconds; the command asks them again.") == 1
    assert "no node reports its state" in told.out
    monkeypatch.setattr("roundelay.commands.cluster.CHOOSING_S", 0.05)
    is_for_ever = True
    refused = await invoke("cluster", "status", "--log", server.url("lab"), code=1)
    assert refused.err.endswith("electing a leader, which takes up to ten seconds. Ask again.\n")


@pytest.mark.full
async def test_a_start_with_an_address_where_no_log_is_leaves_no_file_of_its_own(
    server: NatsServer, tmp_path: Path
) -> None:
    nowhere = f"nats://127.0.0.1:{free_port()}/lab"
    up = ("up", "--port", "0", "--no-web", "--db", tmp_path / "a.db", "--log")
    (tmp_path / "a.db.owner").write_text("t" * 43)
    (tmp_path / "a.db.owner").chmod(0o600)
    assert "can be reached" in (await run(*up, nowhere, code=1)).err
    assert list_files(tmp_path) == ["a.db.owner"], "which was there"
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 1)
    assert "can be reached" in (await run(*up, nowhere, code=1)).err
    assert list_files(tmp_path) == ["a.db", "a.db.head", "a.db.owner"]


async def test_an_index_that_has_followed_nothing_yet_is_what_the_log_said_then(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        own = SQLiteLedger(tmp_path / "own.db", new_epoch=lambda: "e")
        await own.open()
        await own.append([message(1, "ann", "agent:bob")], [])
        await own.close()
        await invoke("cluster", "migrate", "--from", tmp_path / "own.db", "--to", server.url("lab"))
        new = SQLiteLedger(tmp_path / "new.db", new_epoch=lambda: "e", is_index=True)
        await new.open()
        await new.close()
        told = await invoke("cluster", "verify", "--log", server.url("lab"), "--db", tmp_path / "new.db")
        assert "up to record 0: 0 rows" in told.out


@pytest.mark.full
async def test_servers_for_trying_out_are_started_and_stopped_and_tell_who_is_there(tmp_path: Path) -> None:
    port = next(port for port in iter(free_port, None) if port < 60_000)
    folder = tmp_path / 'my "nats" {1}'
    start = ("cluster", "start", "--nodes", "1", "--port", str(port), "--dir", str(folder))

    async def started() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "roundelay", *start), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert "ready" in (await process.stdout.readline()).decode()
        assert (
            f"--log 'nats://127.0.0.1:{port}/lab?monitor={port + 4000}'" in (await process.stdout.readline()).decode()
        )
        return process

    async def stop(process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0

    log, known = f"nats://127.0.0.1:{port}/lab", dict[str, Any]()
    process = await started()
    taken = await run(*start[:-1], tmp_path / "other", code=2)
    assert f"Port {port}" in taken.err
    wrong = await run(*start, "--stream", "a.b", code=2)
    assert "the name of its stream" in wrong.err
    process.kill()  # the server of the killed process still runs and still writes to its pipe
    await process.wait()
    pid = (folder / "servers.pid").read_text()
    try:
        assert f"(processes {pid})" in (await run(*start, code=2)).err
    finally:
        os.kill(int(pid), signal.SIGTERM)
    with (folder / "servers.pid").open() as held:
        await asyncio.to_thread(fcntl.flock, held, fcntl.LOCK_EX)
    process = await started()
    up = ("up", "--port", "0", "--no-web", "--db", str(tmp_path / "a.db"), "--log", log)
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "roundelay", *up), stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    while b"ready" not in (await node.stdout.readline()):
        pass
    known = json.loads((await invoke("cluster", "status", "--log", log, "--json")).out)
    assert [(it["leads"], it["behind"]) for it in known["nodes"]] == [(True, 0)]
    refused = await invoke("cluster", "migrate", "--from", log, "--to", tmp_path / "b.db", code=1)
    assert f"Nodes use the log {log} ({known['nodes'][0]['node']})" in refused.err
    await stop(node)
    await stop(process)
    process = await started()
    told = await invoke("cluster", "status", "--log", log)
    assert "no node reports its state" in told.out
    assert f"{known['records'] + 1} records" in told.out, "what they had, and that the node has gone"
    await stop(process)


@pytest.mark.full
async def test_of_servers_for_trying_out_one_may_be_killed_and_a_full_node_starts_without_it(tmp_path: Path) -> None:
    port = Random().randrange(20_000, 26_000)  # nine ports below the range that the system assigns
    start = ("cluster", "start", "--port", str(port), "--dir", "nats")
    async with command(*start, cwd=tmp_path) as servers:
        url = (await servers.line(r"--log '(\S+)'"))[1]
        await fill_when_chosen(url, tmp_path / "a.db")
        pid = int((tmp_path / "nats" / "servers.pid").read_text().split()[1])
        os.kill(pid, signal.SIGKILL)
        up = ("up", "--port", "0", "--no-web", "--db", tmp_path / "b.db", "--log", url, "--durability", "full")
        await servers.error(r"The NATS server in nats/n2 has ended by signal 9; the other servers keep running")
        again = shlex.split((await servers.error(r"\* +(\S*nats-server .*)"))[1])
        async with asyncio.timeout(60):
            while not await is_full(url):  # noqa: ASYNC110 (the servers tell nobody that they miss one)
                await asyncio.sleep(0.5)
        async with command(*up) as node:
            await node.line("is ready .*durability full")
            server = await asyncio.create_subprocess_exec(
                *again, cwd=tmp_path, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            await node.stop()
        server.terminate()
        await server.wait()
        await servers.stop()


async def fill_when_chosen(url: str, db: Path) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await fill(ledger(url, db), 1)
            except LedgerError:
                await asyncio.sleep(0.2)
            else:
                return


async def is_full(url: str) -> bool:
    shared = make_shared_log(url)
    try:
        await shared.open(create=False)
        return not await shared.find_sync_risk()
    except LedgerError:
        return False
    finally:
        await shared.close()


async def test_deleted_text_is_in_no_index_and_no_copy_of_a_log(server: NatsServer, tmp_path: Path) -> None:
    log, one, two, back = server.url("lab"), tmp_path / "one.db", tmp_path / "two.db", tmp_path / "back.db"
    async with running_node(db=one, log=log, durability="normal", mods=["messages"]) as node:
        ann = await node.agent("ann")
        for text in ("xylophone one", "xylophone two"):
            seq = (await ann.send("broadcast", text))["seq"]
            await ann.call("messages.edit", {"seq": seq, "text": f"{text} again"})
            await ann.call("messages.delete", {"seq": seq})
        kept = (await ann.send("broadcast", "kept"))["seq"]
        await ann.call("messages.edit", {"seq": kept, "text": "kept and edited"})
    await invoke("cluster", "rebuild", "--log", log, "--db", two)
    await invoke("cluster", "migrate", "--from", log, "--to", back)
    for db in (one, two):
        assert "is_equal" in (await invoke("cluster", "verify", "--log", log, "--db", db, "--json")).out
    exported = [(await export(db)).partition("\n")[2] for db in (one, two, back)]
    assert "xylophone" not in exported[0]
    assert "kept and edited" in exported[0]
    assert exported[0] == exported[1] == exported[2]
    again = await invoke("cluster", "migrate", "--from", back, "--to", server.url("other"), "--json")
    assert json.loads(again.out)["is_equal"]
    await invoke("cluster", "rebuild", "--log", server.url("other"), "--db", tmp_path / "three.db")
    assert (await export(tmp_path / "three.db")).partition("\n")[2] == exported[0]
