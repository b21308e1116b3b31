"""Tests of a node whose shared log cannot be used: its errors and its recovery. docs/cluster.md."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from msgspec import Raw
from nats.js.api import DiscardPolicy
from nats.js.errors import NotFoundError
from websockets.exceptions import InvalidStatus

from roundelay.app import make_shared_log, serve
from roundelay.network.cluster import jetstream, postgres, settings
from roundelay.network.cluster.log_copies import compare
from roundelay.network.cluster.read_replica import ReadOnlyIndex
from roundelay.network.cluster.records import (
    Claim,
    Header,
    Heartbeat,
    digest,
    read_record,
    write_commit,
    write_record,
)
from roundelay.network.cluster.replicated import ReplicatedLedger
from roundelay.network.cluster.shared_log import UnusableLog
from roundelay.network.config import NodeConfig
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import CallResult, TableWrite
from roundelay.network.errors import ConfigError, LedgerError
from roundelay.network.ledger import KeyTaken, LeadershipLost, LogFull, Trim, TrimStep
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.log_urls import NatsAddress, read_log_url
from roundelay.nodes.hub_http import get_from_hub
from tests.contract.test_ledger import message
from tests.support.certificates import make_certificate
from tests.support.command import command, invoke, run
from tests.support.nats import Cable, NatsServer, free_port, nats_server, nats_servers
from tests.support.node import Node
from tests.support.postgres import PostgresServer, postgres_server

_numbers = itertools.count()


LogServer = NatsServer | PostgresServer


@pytest.fixture(params=["jetstream", pytest.param("postgres", marks=pytest.mark.full)])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LogServer]:
    async with nats_server(tmp_path / "nats") if request.param == "jetstream" else postgres_server() as running:
        yield running


def ledger(
    url: str,
    db: Path,
    *,
    index: type[SQLiteLedger] = SQLiteLedger,
    say: Callable[[str], None] = lambda _: None,
    is_full: bool = False,
) -> ReplicatedLedger:
    def new_id() -> str:
        return f"id-{next(_numbers)}"

    shared, own = make_shared_log(url), index(db, new_epoch=new_id, is_index=True)
    return ReplicatedLedger(
        shared, own, new_id=new_id, name="lab", report=say, requires_full=is_full, replica=CountingReplica()
    )


async def fill(made: ReplicatedLedger, *seqs: int) -> None:
    await made.open()
    for seq in seqs:
        await made.append([message(seq, "ann", "agent:bob")], [])
    await made.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nats://127.0.0.1:4222", "must end with the name of its stream"),
        ("nats://127.0.0.1:4222/a.b", "must end with the name of its stream"),
        ("http://127.0.0.1/lab", "is nats://USER"),
        ("nats://127.0.0.1:4222/lab?replicas=2", "replicas .* must be 1, 3 or 5"),
        ("nats://127.0.0.1:4222/lab?replicas=x", "replicas .* must be 1, 3 or 5"),
        ("nats://127.0.0.1:4222/lab?speed=9", "no option 'speed'"),
        ("nats://127.0.0.1:4222/lab?monitor=http", "monitor .* must be a port"),
        ("nats://a:1,b:2,c:3/lab?monitor=1,2", "one port for each"),
        ("nats://a:1/lab?monitor=99999", "one port"),
        ("nats://a:1/lab?replicas=1&replicas=3", "replicas twice"),
        ("nats://a:1/lab?max_bytes=99999999999999999999", "max_bytes"),
        *[
            (url, "In a user or a password write @ as %40")
            for url in (
                "nats://[::1/lab", "nats://[bad]:1/lab", "nats://a:99999/lab", "nats://a:0/lab", "nats://a:b/lab",
                "nats://a:1,,b:2/lab", "nats://me:hush@/lab", "nats://a b:1/lab", " nats://a:1/lab", "nats://a:1\n/lab",
                "nats://\u2100:1/lab", "nats://me:hu/sh@a:1/lab", "nats://me:hu#sh@a:1/lab", "nats://me:hu@sh@a:1/lab",
                "nats://me:hush@a:1,you:hush@b:2/lab", "nats://a:1/lab#lab", "postgres://[::1/db?network=lab",
                "postgres://a:99999/db?network=lab", "postgres://me:hu/sh@a/db?network=lab",
            )
        ],
        ("postgres://a/d%00b?network=lab", "DATABASE"),
        ("postgres://a/db?network=lab&password=hush", "no option 'password'"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", "[?]")) as refused:
        make_shared_log(url)
    assert "hu" not in str(refused.value)


async def test_a_password_is_shown_to_nobody() -> None:
    address = read_log_url("nats://me:secret@a:1,b:2/lab")
    assert isinstance(address, NatsAddress)
    assert address.shown == "nats://a:1,b:2/lab"
    assert address.servers == ("nats://a:1", "nats://b:2")
    for options in ((), ("--json",), ("--origin", "--json")):
        shown = await invoke("config", "show", *options, ROUNDELAY_LOG="nats://me:secret@a:1/lab")
        assert "secret" not in shown.out
        assert "nats://a:1/lab" in shown.out
    for wrong in ("nats://me:s3/cret@a:1/lab", "nats://me:s3#cret@a:1/lab", "nats://cret@[::1/lab", "cret@a"):
        refused = await invoke("config", "show", code=2, ROUNDELAY_LOG=wrong)
        assert "must be the address of a log" in refused.err
        assert "Unexpected" not in refused.err
        assert "cret" not in refused.out + refused.err


@pytest.mark.parametrize(
    "url",
    [
        "nats://u:s3cr3t@127.0.0.1:14222/lab?replicas=9",
        "nats://u:s3cr3t@127.0.0.1:14222/lab?speed=9",
        "nats://u:s3cr3t@127.0.0.1:14222/lab?monitor=http",
        "nats://u:s3cr3t@127.0.0.1:14222/lab?max_bytes=many",
        "nats://u:s3cr3t@127.0.0.1:14222/lab?nothing",
        "nats://u:s3@s3cr3t@127.0.0.1:14222/lab",
        "nats://u:s3/s3cr3t@127.0.0.1:14222/lab",
        "nats://u:12/s3cr3t@127.0.0.1:14222/lab",
        "nats://u:12?s3cr3t@127.0.0.1:14222/lab",
        "nats://u:12?s3cr3t=@127.0.0.1:14222/lab",
        "nats://u:12?max_bytes=s3cr3t@127.0.0.1:14222/lab",
        "nats:/u:s3cr3t@127.0.0.1:14222/lab",
        "//u:s3cr3t@127.0.0.1:14222/lab",
        "u:s3cr3t@127.0.0.1:14222/lab",
        "postgres://u:s3cr3t@127.0.0.1:15432/db",
        "postgres://127.0.0.1:15432/db?network=lab&password=s3cr3t",
        "postgres://127.0.0.1:15432/db?network=lab&sslpassword=12&s3cr3t",
    ],
)
async def test_a_password_is_in_no_traceback(tmp_path: Path, url: str) -> None:
    (tmp_path / "node.yaml").write_text(f"log: {json.dumps(url)}\n")
    (tmp_path / "list.yaml").write_text(f"log: [{json.dumps(url)}]\n")
    (tmp_path / "broken.yaml").write_text(f"log: {url}: x: y\n")
    up = ["up", "--port", "0", "--db", tmp_path / "a.db"]
    for arguments, environment in (
        ([*up, "--debug", "--log", url], {}),
        (up, {"ROUNDELAY_LOG": url, "ROUNDELAY_DEBUG": "1"}),
        (["cluster", "status", "--debug", "--log", url], {}),
        (["cluster", "migrate", "--debug", "--from", url, "--to", tmp_path / "b.db"], {}),
        *[([*up, "--debug", tmp_path / name], {}) for name in ("node.yaml", "list.yaml", "broken.yaml")],
    ):
        done = await invoke(*arguments, code=None, **environment)
        assert done.code
        assert "Error" in done.err
        assert "s3cr3t" not in done.out + done.err
    with pytest.raises(ConfigError) as refused:
        NodeConfig(log=url)
    assert "s3cr3t" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("place", ["nats://u:s3cr3t@127.0.0.1:1/lab", "postgres://u:s3cr3t@127.0.0.1:1/db?network=lab"])
async def test_the_password_of_a_log_that_is_away_is_in_no_traceback(tmp_path: Path, place: str) -> None:
    done = await run("up", "--port", "0", "--db", tmp_path / "a.db", "--debug", "--log", place, code=None)
    assert done.code
    assert "Traceback" in done.err
    assert "s3cr3t" not in done.out + done.err
    assert "s3cr3t" not in repr(NodeConfig(log=place))


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--log", "lab"], 2, "must be the address of a log"),
        (["--log", f"nats://127.0.0.1:{free_port()}/lab"], 1, "No NATS server"),
        (["--log", "nats://127.0.0.1:1/lab", "--durability", "memory"], 2, "cannot be combined with a shared log"),
    ],
)
async def test_a_node_that_cannot_use_its_log_says_why_in_a_sentence(
    tmp_path: Path, options: list[str], code: int, told: str
) -> None:
    done = await run("up", "--port", "0", "--db", tmp_path / "a.db", *options, code=code)
    assert told in done.err
    assert "Traceback" not in done.err


USERS = """\
jetstream { store_dir: "%s", max_file_store: 100MB }
accounts {
  NONE: {users: [{user: none, password: p}]}
  LAB: {jetstream: enabled, users: [
    {user: all, password: p}
    {user: "o@all", password: "p@/?#%%,"}
    {user: few, password: p, permissions: {publish: "orders.>", subscribe: "_INBOX.>"}}
  ]}
}
"""


async def test_what_servers_refuse_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "CONNECT_S", 1)
    monkeypatch.setattr(jetstream, "RECONNECTS", 1)
    async with nats_server(tmp_path / "nats", text=USERS % (tmp_path / "store")) as server:
        for who, options, told in (
            ("none", "", "has no JetStream for this user"),
            ("few", "", "must be allowed to publish to .JS.> and roundelay.lab.>"),
            ("other", "", "refuse this user"),
            ("all", "", "has no room"),
            ("all", f"?max_bytes={1 << 20}&replicas=3", "cannot keep 3 replicas"),
        ):
            with pytest.raises(LedgerError, match=told):
                await ledger(f"nats://{who}:p@{server.hosts}/lab{options}", tmp_path / "a.db").open()
        for number, who in enumerate(("all:p", "o%40all:p%40%2F%3F%23%25,"), 1):
            await fill(ledger(f"nats://{who}@{server.hosts}/lab?max_bytes={1 << 20}", tmp_path / "a.db"), number)
    async with nats_server(tmp_path / "other", text="# no JetStream") as server:
        with pytest.raises(LedgerError, match="configure `jetstream`"):
            await ledger(server.url("lab"), tmp_path / "b.db").open()


async def test_who_is_to_encrypt_is_told_nothing_before_it_does_and_shows_a_certificate_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    text = f'jetstream {{ store_dir: "{tmp_path}/store" }}\ntls {{ cert_file: "{certificate}", key_file: "{key}" }}'
    async with nats_server(tmp_path / "plain") as plain, nats_server(tmp_path / "nats", text=text) as server:
        for where, told in (
            (f"tls://me:hush@{plain.hosts}", "does not encrypt"),
            (f"tls://{server.hosts}", "CERTIFICATE_VERIFY_FAILED"),
            (f"nats://{server.hosts}", "CERTIFICATE_VERIFY_FAILED"),  # the server requires a certificate
        ):
            with pytest.raises(LedgerError, match=f"cannot be trusted.*{told}"):
                async with asyncio.timeout(10):
                    await make_shared_log(f"{where}/lab").open()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusted = make_shared_log(f"tls://{server.hosts}/lab")
        await trusted.open()
        await trusted.close()


@pytest.mark.parametrize("server", ["jetstream"], indirect=True)
async def test_full_is_what_servers_show_and_nothing_else_is_called_so(server: NatsServer, tmp_path: Path) -> None:
    async def durability_of(log: str) -> str:
        made = ledger(log, tmp_path / "a.db")
        await made.open()
        await made.close()
        return made.durability

    assert await durability_of(server.url("lab")) == "replicated", "no port is named where it shows it"
    assert await durability_of(f"{server.url('lab')}?monitor={free_port()}") == "replicated", "nobody answers there"
    assert await durability_of(server.shown_url("lab")) == "full"
    async with nats_server(tmp_path / "other", sync='"2m"') as lazy:
        mixed = f"nats://{lazy.hosts}/lab?monitor={server.monitor}"  # the port of another server
        for log, told in (
            (lazy.shown_url("lab"), "syncs every 120 s"),
            (mixed, "has not shown"),
            (lazy.url("lab"), "name their"),
        ):
            made = ledger(log, tmp_path / "b.db", is_full=True)
            with pytest.raises(LedgerError, match=f"durability full is configured.*{told}"):
                await made.open()
        up = ("up", "--port", "0", "--no-web", "--db", tmp_path / "b.db", "--log", lazy.shown_url("lab"))
        refused = await run(*up, "--durability", "full", code=1)
        assert "sync_interval: always" in refused.err
        async with command(*up) as node:
            await node.line("durability replicated")
            status = await run("cluster", "status", "--log", lazy.shown_url("lab"))
            assert "durability replicated: the server other syncs every 120 s" in status.out
            await node.stop()


async def test_a_leader_that_is_to_be_full_stops_when_its_server_shows_another_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "DURABILITY_CHECK_S", 1000.0)
    async with nats_server(tmp_path / "nats") as server:
        made = ledger(server.shown_url("lab"), tmp_path / "a.db", is_full=True)
        said = list[str]()
        other = ledger(server.shown_url("other"), tmp_path / "b.db", say=said.append)
        await asyncio.gather(made.open(), other.open())
        await asyncio.gather(made.verify(), other.verify())
        await server.kill9()
        server.sync = '"2m"'  # without quotes, the value would be two million seconds
        await server.start()

        for it in (made, other):
            await reach(it)
            await it.verify()
            assert it.durability == "full", "it was not time to look yet"
            it._durability.checked_at -= settings.DURABILITY_CHECK_S
        # A busy leader: a commit holds the lock at nearly every check.
        async with lock_of(made), lock_of(other):
            with pytest.raises(LedgerError, match="syncs every 120 s"):
                await made.verify()
            await other.verify()
        assert other.durability == "replicated"
        assert "now replicated" in said[-1]
        await asyncio.gather(made.close(), other.close())


async def reach(made: ReplicatedLedger) -> None:
    """Wait until its server answers again."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(LedgerError):
                await made._log.shared.end()
                return


@pytest.mark.full
async def test_a_server_whose_disk_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "PATIENCE_S", 3.0)
    disk = tmp_path / "disk"
    disk.mkdir()
    if await call("mount", "-t", "tmpfs", "-o", "size=40m", "none", disk):
        pytest.skip("no disk of its own can be made here")
    try:
        text = f'jetstream {{ store_dir: "{disk}/store", sync_interval: always }}'
        async with nats_server(tmp_path / "nats", text=text) as server:
            made = ledger(server.url(f"lab?max_bytes={20 << 20}"), tmp_path / "a.db")
            await made.open()
            await made.append([message(1, "ann", "agent:bob")], [])
            await asyncio.to_thread(fill_disk, disk / "filling")
            with pytest.raises(LedgerError, match="server nats answers, and stores nothing"):
                await append_each(made, 2, 100)
            head = (await made.rows(0, 100))[-1].seq
            await made.close()
            (disk / "filling").unlink()
            await server.stop()
            await server.start()
            await made.open()
            assert [row.seq for row in await made.rows(0, 100)] == [*range(1, head + 1)]
            await made.append([message(head + 1, "ann", "agent:bob")], [])
            await made.close()
    finally:
        assert await call("umount", disk) == 0


async def call(*words: str | Path) -> int:
    """Run a command and return its exit code. Return 1 if the program does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return await (await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)).wait()
    return 1


async def append_each(made: ReplicatedLedger, *between: int) -> None:
    for seq in range(*between):
        await made.append([message(seq, "ann", "agent:bob")], [])


def fill_disk(file: Path) -> None:
    with file.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(bytes(4096))


async def test_a_database_of_another_history_is_refused(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "INCOMPLETE_LOG_GRACE_S", 0.0)
    own = SQLiteLedger(tmp_path / "own.db", new_epoch=lambda: "e")
    await own.open()
    await own.append([message(1, "ann", "agent:bob")], [])
    await own.close()
    with pytest.raises(LedgerError, match="has a history of its own"):
        await ledger(server.url("lab"), tmp_path / "own.db").open()
    await fill(ledger(server.url("lab"), tmp_path / "lab.db"), 1, 2)
    await fill(ledger(server.url("other"), tmp_path / "other.db"), 1, 2, 3)
    with pytest.raises(LedgerError, match="built from another log"):
        await ledger(server.url("other"), tmp_path / "lab.db").open()
    with pytest.raises(LedgerError, match=r"There is no log .*\bnew\b"):
        await ledger(server.url("new"), tmp_path / "lab.db").open()
    new = make_shared_log(server.url("new"))
    with pytest.raises(LedgerError, match="There is no log"):
        await new.open(create=False)
    await fill(ledger(server.url("new"), tmp_path / "new.db"))
    with pytest.raises(LedgerError, match="has fewer"):
        await ledger(server.url("new"), tmp_path / "lab.db").open()
    await fill(ledger(server.url("lab"), tmp_path / "lab.db"), 3)


async def test_a_place_of_something_else_is_refused(server: LogServer, tmp_path: Path) -> None:
    await server.make_another("orders")
    with pytest.raises(LedgerError, match="not a log of a Roundelay network"):
        await ledger(server.url("orders"), tmp_path / "a.db").open()


async def test_what_somebody_else_writes_into_the_log_ends_who_follows(server: LogServer, tmp_path: Path) -> None:
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 1)
    await server.write("lab", b"what is this?")
    with pytest.raises(LedgerError, match="not a record of a Roundelay network"):
        await ledger(server.url("lab"), tmp_path / "b.db").open()
    forged = b'{"kind":"claim","writer":"evil"}\n'
    await server.drop("lab", 1, 2, 3, 4)
    await server.write("lab", forged)
    with pytest.raises(LedgerError, match="shared log"):
        await ledger(server.url("lab"), tmp_path / "a.db").open()


FORGED: dict[str, tuple[dict[str, Any], bytes]] = {
    "drops more than there is": ({"kind": "trim"}, msgspec.json.encode(TrimStep(1_000_000, 1_000_000, is_last=True))),
    "drops records that are to come": ({"kind": "trim"}, msgspec.json.encode(TrimStep(1, 9, is_last=True))),
    "drops below nothing": ({"kind": "trim"}, b'{"messages":-5,"records":-5,"is_last":true}'),
    "drops beyond all numbers": ({"kind": "trim"}, b'{"messages":9223372036854775808,"records":1,"is_last":true}'),
    "ends a base that is none": ({"kind": "based", "base": 3, "head": 0}, b""),
    "leaves seqs out": ({"kind": "commit"}, write_commit([message(57, "ann", "agent:bob")], [])),
    "repeats a row": ({"kind": "commit"}, write_commit([message(2, "ann", "agent:bob")], [])),
    "leaves seqs out inside": (
        {"kind": "commit"},
        write_commit([message(4, "ann", "agent:bob"), message(6, "ann", "agent:bob")], []),
    ),
    "goes below nothing": ({"kind": "commit"}, write_commit([message(-93, "ann", "agent:bob")], [])),
    "is torn": ({"kind": "commit"}, write_commit([message(4, "ann", "agent:bob")], [])[:-9]),
}


@pytest.mark.parametrize("what", FORGED)
async def test_what_is_written_in_the_leaders_name_and_cannot_be_is_taken_by_no_node(
    server: LogServer, tmp_path: Path, what: str
) -> None:
    header, body = FORGED[what]
    log = server.url("lab")
    leader = ledger(log, tmp_path / "a.db")
    await leader.open()
    for seq in (1, 2, 3):
        await leader.append([message(seq, "ann", "agent:bob")], [])
    reader = leader._log.reader
    forged = Header(writer=token_of(leader), previous=reader.end_digest, **header)
    await server.write("lab", write_record(forged, body))
    with pytest.raises(LeadershipLost):
        await leader.append([message(4, "ann", "agent:bob")], [])
    await leader.close()
    for name in ("a", "b"):
        made = ledger(log, tmp_path / f"{name}.db")
        with pytest.raises(UnusableLog, match=f"The record {reader.end + 1} of the shared log"):
            await made.open()
    assert {it.seq for it in await rows_of(tmp_path / "b.db")} <= {1, 2, 3}
    assert [it.seq for it in await rows_of(tmp_path / "a.db")] == [1, 2, 3]
    with pytest.raises(UnusableLog, match=f"The record {reader.end + 1} of the shared log"):
        await compare(make_shared_log(log), tmp_path / "a.db")


async def rows_of(db: Path) -> list[Row]:
    index = SQLiteLedger(db, new_epoch=lambda: "", is_index=True)
    await index.open()
    rows = await index.rows(0, 99)
    await index.close()
    return rows


async def test_a_log_that_is_full_refuses_and_says_so(server: LogServer, tmp_path: Path) -> None:
    made = ledger(server.url(f"lab?max_bytes={1 << 20}"), tmp_path / "a.db")
    await made.open()
    stored: list[int] = []

    async def append_on() -> None:
        for seq in range(1, 10_000, 50):
            rows = [message(it, "ann", "agent:bob") for it in range(seq, seq + 50)]
            await made.append(rows, [])
            stored.extend(row.seq for row in rows)

    with pytest.raises(LedgerError, match=r"maximum bytes exceeded|is full"):
        await append_on()
    assert [row.seq for row in await made.rows(0, 10_000)] == stored, "what was refused is in no index"
    await made.close()


async def test_a_commit_that_is_larger_than_a_record_is_one_all_the_same(server: LogServer, tmp_path: Path) -> None:
    made = ledger(server.url("lab"), tmp_path / "a.db")
    await made.open()
    rows = [message(seq, "ann", "agent:bob") for seq in range(1, 12_001)]
    await made.append(rows, [])
    await made.close()
    other = ledger(server.url("lab"), tmp_path / "b.db")
    await other.open()
    assert await other.rows(0, 20_000) == rows
    await other.close()


class FailingIndex(SQLiteLedger):
    """An index whose disk disappears."""

    has_failed = False

    async def open(self) -> Any:
        if self.has_failed:
            raise LedgerError("The disk is gone.")
        return await super().open()


async def test_who_cannot_open_its_index_says_of_no_leader_that_it_follows_it(
    server: LogServer, tmp_path: Path
) -> None:
    leader, follows = ledger(server.url("lab"), tmp_path / "a.db"), asyncio.Event()
    sick = ledger(server.url("lab"), tmp_path / "b.db", index=FailingIndex, say=lambda _: follows.set())
    await leader.open()
    following = asyncio.create_task(sick.open())
    async with asyncio.timeout(20):
        await follows.wait()
    assert str(sick.status).startswith("following, 0 records behind")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert str(sick.status) == "starting"
    assert isinstance(sick._index, FailingIndex)
    sick._index.has_failed = True
    with pytest.raises(LedgerError, match="The disk is gone"):
        await sick.open()
    assert str(sick.status) == "waiting, its log has the reason, log lab"
    await leader.close()


class SlowIndex(SQLiteLedger):
    """An index that takes a long time for each record."""

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite], **more: Any) -> None:
        await asyncio.sleep(0.05 * len(rows))
        await super().append(rows, puts, **more)


async def test_who_takes_long_to_catch_up_does_not_claim_what_another_one_leads(
    server: LogServer, tmp_path: Path
) -> None:
    leader = ledger(server.url("lab"), tmp_path / "a.db")
    await leader.open()
    for seq in range(1, 45):
        await leader.append([message(seq, "ann", "agent:bob")], [])
    has_caught_up = asyncio.Event()
    follower = ledger(server.url("lab"), tmp_path / "b.db", index=SlowIndex, say=lambda _: has_caught_up.set())
    following = asyncio.create_task(follower.open())
    async with asyncio.timeout(20):
        await has_caught_up.wait()
    await leader.append([message(45, "ann", "agent:bob")], [])
    await leader.close()
    meta, _ = await following
    assert meta.head == 45
    await follower.close()


async def test_a_leader_to_whom_nobody_writes_learns_that_another_one_leads(server: LogServer, tmp_path: Path) -> None:
    old = ledger(server.url("lab"), tmp_path / "a.db")
    await old.open()
    await old.verify()
    sleep(old)
    new = ledger(server.url("lab"), tmp_path / "b.db")
    await new.open()
    with pytest.raises(LeadershipLost):
        await old.verify()
    await new.verify()
    await asyncio.gather(old.close(), new.close())


async def test_who_leads_no_longer_knows_by_the_log_who_does(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.3)
    old, new = ledger(server.url("lab"), tmp_path / "a.db"), ledger(server.url("lab"), tmp_path / "b.db")
    old.set_identity("a:8700")
    new.set_identity("b:8700")
    await old.open()
    sleep(old)
    await new.open()
    await new.append([message(1, "ann", "agent:bob")], [])
    for attempt in (old.append([message(1, "mia", "agent:bob")], []), old.append([message(2, "mia", "agent:bob")], [])):
        with pytest.raises(LeadershipLost) as moved:
            await attempt
        assert moved.value.leader == "b:8700"
    monkeypatch.setattr(settings, "FIND_LEADER_TIMEOUT_S", 0.0)  # the log does not answer in time
    sleep(new)
    await old.close()
    await old.open()
    with pytest.raises(LeadershipLost) as moved:
        await new.verify()
    assert moved.value.leader == ""
    await asyncio.gather(old.close(), new.close())


def sleep(leader: ReplicatedLedger) -> None:
    """Stop the heartbeats, as on a paused node."""
    assert leader._leader is not None
    assert leader._leader._heartbeats is not None
    leader._leader._heartbeats.cancel()


def lock_of(leader: ReplicatedLedger) -> asyncio.Lock:
    assert leader._leader is not None
    return leader._leader.lock


def token_of(leader: ReplicatedLedger) -> str:
    assert leader._leader is not None
    return leader._leader.token


async def test_what_nodes_say_names_no_other_leader_than_the_log_does_and_can_be_shown(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, follows = ledger(server.url("lab"), tmp_path / "a.db"), asyncio.Event()
    follower = ledger(server.url("lab"), tmp_path / "b.db", say=lambda _: follows.set())
    stranger, shared, are_heard, names = (
        make_shared_log(server.url("lab")),
        follower._log.shared,
        asyncio.Event(),
        set[str](),
    )
    listen = shared.next_broadcast

    async def note_listen() -> str:
        if "last:1" in names:  # the node has also processed this message
            are_heard.set()
        said = await listen()
        names.add(Heartbeat.read(said).node)
        return said

    monkeypatch.setattr(shared, "next_broadcast", note_listen)
    leader.set_identity("a:8700")
    await leader.open()
    await stranger.open()
    following = asyncio.create_task(follower.open())
    async with asyncio.timeout(20):
        await follows.wait()
        sleep(leader)
        for node in (
            "evil:1",
            "a b:1",
            "evil:1\r\nSet-Cookie: a=b",
            "\x1b[31mred:1",
            "\u202eabc:1",
            "x" * 300,
            "last:1",
        ):
            await stranger.broadcast(Heartbeat(node, 1, leads=token_of(leader)).write())
        await are_heard.wait()
    assert follower.describe_leader().leader == "a:8700"
    assert names <= {"a:8700", "evil:1", "last:1", ""}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await asyncio.gather(leader.close(), stranger.close())


async def test_who_follows_asks_for_the_end_seldom_and_once_more_before_it_claims(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("HEARTBEAT_S", 0.02), ("LEADER_TIMEOUT_S", 0.5), ("POLL_END_S", 1000.0)):
        monkeypatch.setattr(settings, name, seconds)
    leader, follows = ledger(server.url("lab"), tmp_path / "a.db"), asyncio.Event()
    await leader.open()
    follower = ledger(server.url("lab"), tmp_path / "b.db", say=lambda _: follows.set())
    did, shared = list[str](), follower._log.shared
    end, append, listen = shared.end, shared.append, shared.next_broadcast

    async def note_end() -> int:
        did.append("asks")
        return await end()

    async def note_append(data: bytes, after: int) -> int:
        did.append("claims")
        return await append(data, after)

    async def note_listen() -> str:
        said = await listen()
        did.extend(["hears"] * ('"leads"' in said))
        return said

    monkeypatch.setattr(shared, "end", note_end)
    monkeypatch.setattr(shared, "append", note_append)
    monkeypatch.setattr(shared, "next_broadcast", note_listen)
    following = asyncio.create_task(follower.open())
    async with asyncio.timeout(20):
        await follows.wait()
        did.clear()
        while len(did) < 20:  # noqa: ASYNC110 (it tells nobody)
            await asyncio.sleep(0.01)
        assert set(did) == {"hears"}
        sleep(leader)
        await following
    assert did[did.index("claims") - 1] == "asks"
    await asyncio.gather(leader.close(), follower.close())


async def test_claims_of_older_releases_are_read_and_theirs_read_newer_ones(server: LogServer, tmp_path: Path) -> None:
    """An older node reads only the header of a claim, and refuses a header with additional fields."""
    head = b'{"kind":"begin","writer":"w","epoch":"e","name":"lab"}\n'
    shared = make_shared_log(server.url("lab"))
    await shared.open()
    for record in (head, b'{"kind":"claim","writer":"w","previous":"%s"}\n' % digest(head).encode()):
        await shared.append(record, await shared.end())
    made = ledger(server.url("lab"), tmp_path / "a.db")
    made.set_identity("a:8700")
    assert (await made.open())[0].epoch == "e"
    claim = await anext(records := shared.follow(2))
    await records.aclose()  # type: ignore[attr-defined]  # a generator
    header = json.loads(claim.data.partition(b"\n")[0])
    assert header.keys() == {"kind", "writer", "previous"}
    assert b"a:8700" in claim.data
    await asyncio.gather(made.close(), shared.close())


async def test_a_log_without_its_oldest_records_is_refused(server: LogServer, tmp_path: Path) -> None:
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 1, 2)
    await server.drop("lab", 3)
    async with asyncio.timeout(10):
        with pytest.raises(LedgerError, match="records are missing"):
            await ledger(server.url("lab"), tmp_path / "b.db").open()
        await server.drop_all("lab")
        with pytest.raises(LedgerError, match="records are missing"):
            await ledger(server.url("lab"), tmp_path / "b.db").open()


@pytest.mark.parametrize("what", ["all", "first", "one", "bound"])
async def test_a_leader_notices_that_somebody_has_taken_records_out_of_its_log(
    server: LogServer, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "DURABILITY_CHECK_S", 0.0)
    if what in ("one", "bound") and not isinstance(server, NatsServer):
        pytest.skip("PostgreSQL counts no rows without reading them all; `roundelay cluster verify` does")
    leader = ledger(server.url("lab"), tmp_path / "a.db")
    await leader.open()
    for seq in (1, 2, 3):
        await leader.append([message(seq, "ann", "agent:bob")], [])
    await leader.verify()
    match what:
        case "all":
            await server.drop_all("lab")
        case "first":
            await server.drop("lab", 1, 2, 3)
        case "one":
            await server.drop("lab", 4)
        case _:
            assert isinstance(server, NatsServer)
            await server.change("lab", max_msgs_per_subject=2, discard=DiscardPolicy.OLD)
    told = "max_msgs_per_subject" if what == "bound" else "records are missing|has lost its first row"
    with pytest.raises(LedgerError, match=told):
        await leader.verify()
    await leader.close()
    with pytest.raises(LedgerError, match=told):
        await leader.open()
    assert [it.seq for it in await rows_of(tmp_path / "a.db")] == [1, 2, 3]


async def test_what_the_index_refuses_does_not_come_into_the_log(server: LogServer, tmp_path: Path) -> None:
    made = ledger(server.url("lab"), tmp_path / "a.db")
    await made.open()
    twice = message(1, "ann", "agent:bob")
    with pytest.raises(KeyTaken):
        await made.append([twice, msgspec.structs.replace(message(2, "ann", "agent:bob"), key=twice.key)], [])
    await made.append([twice], [])
    with pytest.raises(LedgerError):  # this seq exists already
        await made.append([msgspec.structs.replace(twice, key="m:other")], [])
    await made.close()
    await fill(ledger(server.url("lab"), tmp_path / "b.db"), 2)


@pytest.mark.full
async def test_who_follows_waits_for_a_server_that_is_away(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "RECONNECTS", 1)
    monkeypatch.setattr(jetstream, "PATIENCE_S", 1.0)
    monkeypatch.setattr(postgres, "PATIENCE_S", 1.0)
    leader = ledger(server.url("lab"), tmp_path / "a.db")
    await leader.open()
    await leader.append([message(1, "ann", "agent:bob")], [])
    follows = asyncio.Event()
    follower = ledger(server.url("lab"), tmp_path / "b.db", say=lambda _: follows.set())
    following = asyncio.create_task(follower.open())
    await follows.wait()
    await server.kill9()
    with pytest.raises(LedgerError):
        async with asyncio.timeout(20):
            await leader.append([message(2, "ann", "agent:bob")], [])
    async with asyncio.timeout(8):  # the node does not wait for a server that is down to release its leadership
        await leader.close()
    await server.start()
    async with asyncio.timeout(20):
        await following
    assert [row.seq for row in await follower.rows(0, 9)] == [1]
    await follower.close()


async def test_an_index_is_no_database_of_its_own(server: LogServer, tmp_path: Path) -> None:
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 1)
    for words in (("up", "--port", "0"), ("token", "revoke", "ann")):
        done = await run(*words, "--db", tmp_path / "a.db", code=1)
        assert "Name the log with --log" in done.err
    await fill(ledger(server.url("lab"), tmp_path / "a.db"), 2)


@pytest.mark.full
async def test_a_node_that_starts_while_its_servers_choose_waits_for_them(tmp_path: Path) -> None:
    async with nats_servers(tmp_path / "nats") as servers:
        url = f"nats://{','.join(it.hosts for it in servers)}/lab?replicas=3"
        await fill(ledger(url, tmp_path / "a.db"), 1)
        for server in servers[1:]:
            await server.kill9()
        made = ledger(url, tmp_path / "b.db")
        opening = asyncio.create_task(made.open())
        await asyncio.sleep(1)  # one of three servers cannot elect a leader
        assert not opening.done()
        await asyncio.gather(*(server.start() for server in servers[1:]))
        async with asyncio.timeout(40):
            meta, _ = await opening
        assert meta.head == 1
        await made.close()


async def test_who_is_told_to_stop_as_the_answer_comes_stops(server: LogServer) -> None:
    """A cancellation is not lost, at whatever step of an answer it arrives."""
    shared = make_shared_log(server.url("lab"))
    await shared.open()

    async def ask() -> None:
        while True:
            await shared.end()

    async def say() -> None:
        while True:
            await shared.broadcast("I lead")
            await shared.append(b"{}", await shared.end())

    deaf = list[str]()
    for work in (ask, say):
        for step in range(40):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.002)
            time.sleep(0.003)  # noqa: ASYNC251 - whatever is under way is answered when the loop looks again
            for _ in range(step):
                await asyncio.sleep(0)
            task.cancel()
            if not (await asyncio.wait([task], timeout=0.2))[0]:
                deaf.append(f"{work.__name__} {step}")
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.01)
    await shared.close()
    assert not deaf


# --- failures that a follower survives, and failures that end a follower


class CountingReplica:
    """A `ReadReplica` that records when it serves."""

    def __init__(self) -> None:
        self.started = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        return self.started.is_set()

    async def start(self, index: ReadOnlyIndex) -> None:
        self.started.set()

    async def apply(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None: ...

    async def drop_before(self, first_seq: int) -> None: ...

    async def stop(self) -> None:
        self.started.clear()


def started(made: ReplicatedLedger) -> asyncio.Event:
    """Event that is set while a follower serves reads."""
    assert isinstance(made.replica, CountingReplica)
    return made.replica.started


async def follow(made: ReplicatedLedger) -> asyncio.Task[Any]:
    """Start to open the ledger, which finishes when it leads. On return, it has followed to the end and serves reads."""
    opening = asyncio.create_task(made.open())
    async with asyncio.timeout(20):
        await started(made).wait()
    return opening


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("LEADER_TIMEOUT_S", 0.3),
        ("POLL_END_S", 0.1),
        ("RETRY_S", 0.1),
        ("STALE_END_GRACE_S", 0.3),
        ("INCOMPLETE_LOG_GRACE_S", 0.3),
    ):
        monkeypatch.setattr(settings, name, seconds)
    monkeypatch.setattr(settings, "REPLICA_RETRY_S", 0.1)
    monkeypatch.setattr(settings, "SMALL_TRIM_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("hurried")
async def test_of_a_log_that_has_lost_its_newest_records_nobody_says_that_he_follows_or_leads(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        log = server.url("lab")
        leader, follower = ledger(log, tmp_path / "a.db"), ledger(log, tmp_path / "b.db")
        await leader.open()
        await leader.append([message(1, "ann", "agent:bob")], [])
        await server.stop()
        shutil.copytree(server.folder / "store", tmp_path / "before")
        await server.start()
        for seq in (2, 3):
            await leader.append([message(seq, "ann", "agent:bob")], [])
        opening = await follow(follower)
        assert (await follower.rows(2, 1))[0].seq == 3
        await server.kill9()  # a power loss: unsynced records are lost
        shutil.rmtree(server.folder / "store")
        shutil.copytree(tmp_path / "before", server.folder / "store")
        await server.start()
        async with asyncio.timeout(20):
            with pytest.raises(UnusableLog, match="has lost records"):
                await opening
            with pytest.raises(LedgerError, match="has lost records"):
                await verify_on(leader)
        await leader.close()
        with pytest.raises(UnusableLog, match="has fewer"):
            await leader.open()
        assert (await make_and_count(log)) < 6, "and nobody has written to it"


async def verify_on(made: ReplicatedLedger) -> None:
    """Verify the leadership periodically, as a hub does."""
    while True:
        await made.verify()
        await asyncio.sleep(0.05)


async def make_and_count(log: str) -> int:
    shared = make_shared_log(log)
    await shared.open()
    end = await shared.end()
    await shared.close()
    return end


def small_log(server: LogServer) -> str:
    return server.url("lab") + ("&" if "?" in server.url("lab") else "?") + f"max_bytes={1 << 20}"


async def append_on(made: ReplicatedLedger, stored: Iterator[int], length: int = 4000) -> None:
    for seq in stored:
        await made.append([message(seq, "ann", "agent:bob", thread="t" * length)], [])


@pytest.mark.usefixtures("hurried")
async def test_what_keeps_a_node_from_leading_is_said_once_and_never_that_another_one_leads(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    leader, follower = (
        ledger(server.url("lab"), tmp_path / "a.db"),
        ledger(server.url("lab"), tmp_path / "b.db", say=said.append),
    )
    leader.set_identity("a:1")
    follower.set_identity("b:1")
    await leader.open()
    opening = await follow(follower)
    async with asyncio.timeout(20):
        while not said:  # noqa: ASYNC110 (it is said by a callback)
            await asyncio.sleep(0.01)
    assert [it.partition(" leads")[0] for it in said] == ["Another node"]

    async def refuse() -> None:
        raise LedgerError("The log refuses this claim.")

    monkeypatch.setattr(follower._log, "check_first", refuse)
    tries = itertools.count()
    find = follower._log.restore_cursor
    tried = asyncio.Event()

    async def count() -> Any:
        if next(tries) == 4:
            tried.set()
        return await find()

    monkeypatch.setattr(follower._log, "restore_cursor", count)
    sleep(leader)
    async with asyncio.timeout(20):
        await tried.wait()
    assert said[1:] == ["The log refuses this claim. This node waits, and tries again."]
    assert str(follower.status) == "waiting, its log has the reason, log lab"
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await leader.close()


async def test_a_node_that_calls_itself_as_the_leader_does_says_so(server: LogServer, tmp_path: Path) -> None:
    said = list[str]()
    leader, follower = (
        ledger(server.url("lab"), tmp_path / "a.db"),
        ledger(server.url("lab"), tmp_path / "b.db", say=said.append),
    )
    leader.set_identity("127.0.0.1:8700")
    follower.set_identity("127.0.0.1:8700")
    await leader.open()
    opening = await follow(follower)
    async with asyncio.timeout(20):
        while sum("have the same address" in it for it in said) < 1:  # noqa: ASYNC110 (it is said by a callback)
            await asyncio.sleep(0.01)
    assert str(follower.status).startswith("following, ")
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await leader.close()


@pytest.mark.usefixtures("hurried")
async def test_who_led_takes_its_own_heartbeats_for_nobody_elses(server: LogServer, tmp_path: Path) -> None:
    said = list[str]()
    leader = ledger(server.url("lab"), tmp_path / "a.db", say=said.append)
    leader.set_identity("a:1")
    await leader.open()
    await leader.append([message(1, "ann", "agent:bob")], [])
    async with asyncio.timeout(20):
        while len(leader._log.shared._broadcasts) < 3:  # type: ignore[attr-defined]  # noqa: ASYNC110 (nobody listens while it leads)
            await asyncio.sleep(0.01)
    foreign = Header(kind="commit", writer="somebody", previous=leader._log.reader.end_digest)
    await server.write("lab", write_record(foreign, write_commit([], [])))
    with pytest.raises(LeadershipLost):
        await leader.append([message(2, "ann", "agent:bob")], [])
    said.clear()
    await leader.close()
    await leader.open()
    assert [it.partition(":")[0] for it in said] == ["This node leads"]
    await leader.append([message(2, "ann", "agent:bob")], [])
    await leader.close()


@pytest.mark.usefixtures("hurried")
async def test_of_a_log_that_is_full_the_leader_leads_on_and_leaves_room_for_what_makes_room(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "ROOM_CHECK_S", 0.0)
    log, db = small_log(server), tmp_path / "a.db"
    leader = ledger(log, db)
    await leader.open()
    call = "ann/" + "1" * 3000
    await leader.append([], [TableWrite("call", call, CallResult("d", 1, Raw(b"{}")))])
    stored = itertools.count(1)
    with pytest.raises(LogFull, match="is full"):
        await append_on(leader, stored)
    stored = itertools.count(next(stored) - 1)
    with pytest.raises(LogFull):  # not even a short record fits
        await append_on(leader, stored, 1)
    refused, end = next(stored) - 1, await make_and_count(log)
    for _ in range(3):
        with pytest.raises(LogFull):
            await leader.append([message(refused, "ann", "agent:bob", thread="t" * 4000)], [])
        await leader.expire_calls(99)  # the expiry of calls can wait until the log has room
        await leader.verify()
    assert await make_and_count(log) == end
    await leader.close()
    await leader.open()  # the log has enough room for this
    done = await leader.trim(Trim(messages_before=1005, pinned=9))
    assert done.dropped == 4, "also a trim has room"
    await server.widen("lab", 4 << 20)
    await leader.append([message(refused, "ann", "agent:bob", thread="t" * 4000)], [])
    await leader.expire_calls(99)
    assert await leader.lookup_cold("call", call) is None
    await leader.close()
    assert (await compare(make_shared_log(log), db)).difference == ""


@pytest.mark.usefixtures("hurried")
async def test_a_log_without_any_room_is_led_by_nobody_and_read_until_it_has_some(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log = small_log(server)
    leader, follower = ledger(log, tmp_path / "a.db", say=said.append), ledger(log, tmp_path / "b.db", say=said.append)
    await leader.open()
    opening = await follow(follower)
    stored = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "RESERVE_BYTES", 0)
        for length in (4000, 1):
            with pytest.raises(LogFull):
                await append_on(leader, stored, length)
            stored = itertools.count(next(stored) - 1)
    refused = next(stored)
    await leader.close()
    again, end = await follow(leader), await make_and_count(log)
    async with asyncio.timeout(20):
        while sum("too few for any node" in it for it in said) < 2:  # noqa: ASYNC110 (each says so once, when it would lead)
            await asyncio.sleep(0.05)
        await asyncio.gather(*(started(made).wait() for made in (leader, follower)))
    await asyncio.sleep(1)  # ten attempts of each
    assert await make_and_count(log) == end, "no claim takes the room that is left"
    assert not opening.done()
    assert not again.done()
    assert [len(await made.rows(refused - 2, 9)) for made in (leader, follower)] == [1, 1]
    await server.widen("lab", 4 << 20)
    done, _ = await asyncio.wait((opening, again), return_when=asyncio.FIRST_COMPLETED, timeout=20)
    made = follower if opening in done else leader
    await made.append([message(refused, "ann", "agent:bob")], [])
    for task in (opening, again):
        task.cancel()
    await asyncio.gather(opening, again, return_exceptions=True)
    await asyncio.gather(leader.close(), follower.close())


async def test_people_go_on_at_a_node_whose_log_is_full_and_what_they_send_is_put_off(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "ROOM_CHECK_S", 0.0)
    config = NodeConfig(host="127.0.0.1", port=0, db=tmp_path / "a.db", log=small_log(server), web=False)
    async with asyncio.timeout(60), serve(config) as node:
        people = Node(node.url, node.owner_token)
        ann, bob = await people.agent("ann"), await people.agent("bob")
        number = 0
        while (answer := await ann.submit("agent:bob", f"{number} " + "x" * 40_000, message_id=f"m{number}"))[
            "type"
        ] == "stored":
            number += 1
        assert (answer["code"], answer["retry_after_ms"]) == ("overloaded", 5000), answer
        assert "no room" in answer["message"]
        assert (
            len((await bob.call("network.history", {"thread_id": "direct:ann~bob", "limit": 500}))["messages"])
            == number
        )
        assert len((await ann.call("network.list_threads", {}))["threads"]) == 1
        assert node.hub.is_ready
        await server.widen("lab", 4 << 20)
        again = await ann.submit("agent:bob", f"{number} " + "x" * 40_000, message_id=f"m{number}")
        assert (again["type"], again.get("duplicate", False)) == ("stored", False)
        await people.close_sessions()


async def test_a_leader_that_is_cut_off_from_its_log_is_ready_no_more(tmp_path: Path) -> None:
    """Another node may lead by then. A load balancer must send nobody here, long before the sessions are closed."""
    async with nats_server(tmp_path / "nats") as server:
        cable = Cable(server.port)
        async with cable.laid() as port, asyncio.timeout(60):
            log = f"nats://127.0.0.1:{port}/lab"
            config = NodeConfig(host="127.0.0.1", port=0, db=tmp_path / "a.db", log=log, web=False)
            async with serve(config) as node:
                people = Node(node.url, node.owner_token)
                await people.agent("ann")
                assert (await asyncio.to_thread(get_from_hub, node.url, "/readyz")).status == 200
                cable.cut()
                while (answer := await asyncio.to_thread(get_from_hub, node.url, "/readyz")).status == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert (answer.status, answer.body) == (503, "the ledger does not answer\n")
                assert node.hub.status.is_open  # this moment is before UNREACHED_S, when the node closes its sessions
                with pytest.raises(InvalidStatus):
                    await people.agent("bob")
                cable.mend()
                while (await asyncio.to_thread(get_from_hub, node.url, "/readyz")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await people.agent("bob")
                await people.close_sessions()


class FullDisk(SQLiteLedger):
    """An index whose disk is full for a while."""

    is_full = False

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite], **more: Any) -> None:
        if self.is_full:
            raise LedgerError("There is no space left on the disk.")
        await super().append(rows, puts, **more)


@pytest.mark.usefixtures("hurried")
async def test_who_has_followed_waits_for_room_on_his_own_disk(server: LogServer, tmp_path: Path) -> None:
    said: list[str] = []
    leader = ledger(server.url("lab"), tmp_path / "a.db")
    follower = ledger(server.url("lab"), tmp_path / "b.db", index=FullDisk, say=said.append)
    index = follower._index
    assert isinstance(index, FullDisk)
    await leader.open()
    opening = await follow(follower)
    index.is_full = True
    for seq in range(1, 4):
        await leader.append([message(seq, "ann", "agent:bob")], [])
    async with asyncio.timeout(20):
        while not any("no space left" in it for it in said):  # noqa: ASYNC110 (it says so, and waits)
            await asyncio.sleep(0.05)
    index.is_full = False
    await leader.close()
    meta, _ = await asyncio.wait_for(opening, 20)
    assert meta.head == 3
    assert [row.seq for row in await follower.rows(0, 9)] == [1, 2, 3]
    await follower.close()


@pytest.mark.usefixtures("hurried")
async def test_who_knows_of_a_log_makes_none_in_its_place(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as server:
        leader = ledger(server.url("lab"), tmp_path / "a.db")
        await fill(leader, 1, 2)
        follower = ledger(server.url("lab"), tmp_path / "b.db")
        await fill(follower)
        async with await nats.connect(f"nats://{server.hosts}") as client:
            await client.jetstream().delete_stream("lab")
            for made in (leader, follower, ledger(server.url("lab"), tmp_path / "a.db")):
                with pytest.raises(LedgerError, match="There is no log"):
                    await made.open()
            with pytest.raises(NotFoundError):
                await client.jetstream().stream_info("lab")


@pytest.mark.usefixtures("hurried")
async def test_a_leader_that_could_not_drop_what_the_log_says_goes_on_only_when_it_has(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "a.db"
    made = ledger(server.url("lab"), db)
    await made.open()
    for seq in range(1, 5):
        await made.append([message(seq, "ann", "agent:bob")], [])

    async def fail(_: TrimStep) -> int:
        raise LedgerError("There is no space left on the disk.")

    with monkeypatch.context() as patch:
        patch.setattr(made._index, "drop", fail)
        for attempt in (
            made.trim(Trim(messages_before=1003, pinned=4)),
            made.append([message(5, "ann", "agent:bob")], []),
            made.verify(),
        ):
            with pytest.raises(LedgerError, match="no space left"):
                await attempt
    await made.close()
    meta, _ = await made.open()
    assert (meta.first_seq, meta.head) == (3, 4)
    await made.append([message(5, "ann", "agent:bob")], [])
    await made.close()
    assert (await compare(make_shared_log(server.url("lab")), db)).difference == ""


@pytest.mark.parametrize("said", ['{"x":' + "[" * 3000, "[" * 100_000, '{"node":"' + "n" * 5000 + '"}', "{}", "\0"])
def test_a_heartbeat_that_nobody_could_have_meant_says_nothing(said: str) -> None:
    assert Heartbeat.read(said) == Heartbeat()
    assert Claim.read(said.encode()) == Claim() or "nnn" in said
    with pytest.raises(UnusableLog):
        read_record(said.encode())


async def test_a_server_that_was_given_more_replicas_than_a_node_asks_for_is_used(tmp_path: Path) -> None:
    async with nats_servers(tmp_path / "nats") as servers:
        hosts = ",".join(it.hosts for it in servers)
        await fill(ledger(f"nats://{hosts}/lab?replicas=3", tmp_path / "a.db"), 1)
        await fill(ledger(f"nats://{hosts}/lab", tmp_path / "a.db"), 2)
