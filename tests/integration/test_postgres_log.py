"""Tests of the shared log in PostgreSQL: the requirements on servers, databases and tables, and the settings of a
connection. docs/cluster.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest

from roundelay.app import make_shared_log
from roundelay.network.cluster import postgres
from roundelay.network.cluster.postgres import PostgresLog
from roundelay.network.cluster.shared_log import LogElectionPending, LogUnavailable, UnusableLog
from roundelay.network.config import resolve_config
from roundelay.network.errors import ConfigError, LedgerError
from roundelay.network.ledger import LeadershipLost, LogFull
from roundelay.network.log_urls import PostgresAddress, read_log_url
from tests.support.certificates import make_certificate
from tests.support.command import command, invoke, run
from tests.support.nats import free_port, nats_server
from tests.support.pages import read_pages
from tests.support.postgres import DATABASE, PASSWORD, USER, PostgresServer, postgres_server


@pytest.fixture
async def server() -> AsyncIterator[PostgresServer]:
    async with postgres_server() as running:
        yield running


async def refused(url: str, kind: type[LedgerError] = LedgerError) -> str:
    """Return the error of a node that cannot use this log: one line without a password."""
    log = make_shared_log(url)
    with pytest.raises(LedgerError) as caught:
        async with asyncio.timeout(20):
            await log.open()
    assert type(caught.value) is kind
    told = str(caught.value)
    assert "\n" not in told
    assert PASSWORD not in told
    return told


# --- addresses


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgres://127.0.0.1:5432", "postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("postgres://127.0.0.1:port/lab?network=lab", "postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("postgres:///lab?network=lab", "postgres://USER:PASSWORD@HOST:PORT/DATABASE"),
        ("postgres://127.0.0.1/lab", "must name its network in the database"),
        ("postgres://127.0.0.1/lab?network=a;b", "must name its network in the database"),
        ("postgres://127.0.0.1/lab?network=" + "a" * 49, "must name its network in the database"),
        ("postgres://127.0.0.1/lab?network=lab&options=-c", "no option 'options'"),
        ("postgres://127.0.0.1/lab?network=lab&max_bytes=x", "whole number"),
        ("postgres://127.0.0.1/lab?network=lab&max_bytes=5", "one mebibyte"),
        ("postgres://127.0.0.1/lab?network=lab&sslmode=perhaps", "sslmode"),
        (
            "postgres://127.0.0.1/lab?network=lab&sslmode=verify-full&sslrootcert=/no/ca.pem",
            "names a missing file: /no/ca.pem",
        ),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_shared_log(url)


async def test_a_password_is_shown_to_nobody() -> None:
    url = "postgres://me:se%3Fcret@a:1,[::1]:2/lab?network=dev&sslmode=verify-full"
    address = read_log_url(url)
    assert isinstance(address, PostgresAddress)
    assert address.shown == "postgres://a:1,[::1]:2/lab?network=dev"
    assert address.dsn == "postgresql://me:se%3Fcret@a:1,[::1]:2/lab?sslmode=verify-full"
    shown = await invoke("config", "show", "--json", ROUNDELAY_LOG=url)
    assert "cret" not in shown.out
    with pytest.raises(ConfigError) as caught:
        resolve_config(None, {"ROUNDELAY_LOG": "postgres://me:secret@a/lab"}, {})
    assert "secret" not in str(caught.value)
    assert "postgres://HOST/DATABASE?network=lab" in str(caught.value)


@pytest.mark.full
async def test_a_server_is_reached_through_a_socket_and_with_a_password_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    # The data folder of the server is accessible to root and to the server's own user.
    async with postgres_server(unix_socket_directories=".") as server:
        folder = quote(str(server.folder / "data"), safe="")
        for number, place in enumerate((f"127.0.0.1:{server.port}", f"{folder}:{server.port}")):
            log = make_shared_log(f"postgres://{USER}@{place}/{DATABASE}?network=lab")
            await log.open()
            assert await log.append(str(number).encode(), number) == number + 1
            await log.close()


# --- refusals


@pytest.mark.full
async def test_a_server_that_is_away_or_is_none_is_told() -> None:
    assert "can be reached" in await refused(f"postgres://127.0.0.1:{free_port()}/lab?network=lab", LogUnavailable)
    up = ("up", "--port", "0", "--log", f"postgres://127.0.0.1:{free_port()}/lab?network=lab")
    assert "is one running?" in (await run(*up, code=1)).err


@pytest.mark.full
async def test_what_is_no_postgresql_server_is_told(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as other:
        told = await refused(f"postgres://{other.hosts}/lab?network=lab&sslmode=disable", LogUnavailable)
        assert "is one running?" in told


@pytest.mark.full
async def test_who_may_not_is_told_what_would_let_him(server: PostgresServer) -> None:
    assert "refuses who connects" in await refused(server.url("lab", password="wrong"))
    assert "refuses who connects" in await refused(server.url("lab", user="nobody"))
    other = server.url("lab").replace("/lab?", "/elsewhere?")
    assert "createdb elsewhere" in await refused(other)
    await server.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
    await server.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    guest = server.url("lab", user="guest")
    assert "GRANT CREATE ON SCHEMA public" in await refused(guest)
    await make_shared_log(server.url("lab")).open()
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON roundelay_lab" in await refused(guest)
    await server.execute("GRANT SELECT ON roundelay_lab TO guest")
    reader = make_shared_log(guest)
    await reader.open(create=False)  # a reader needs no more rights
    assert await reader.end() == 0
    with pytest.raises(LedgerError, match="permission denied"):
        await reader.append(b"x", 0)
    await reader.close()


@pytest.mark.full
@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE roundelay_lab (id bigint PRIMARY KEY)",
        "CREATE TABLE roundelay_lab (position bigint, data bytea, total bigint)",  # the table has no guard
        "CREATE UNLOGGED TABLE roundelay_lab (position bigint PRIMARY KEY, data bytea, total bigint)",
        "CREATE VIEW roundelay_lab AS SELECT 0::bigint AS position, ''::bytea AS data, 0::bigint AS total",
    ],
)
async def test_a_table_that_does_not_keep_what_a_log_has_to_is_refused(server: PostgresServer, sql: str) -> None:
    await server.execute(sql)
    assert "is not a log of a Roundelay network" in await refused(server.url("lab"), UnusableLog)


@pytest.mark.full
@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
async def test_a_server_that_does_not_sync_is_not_full(tmp_path: Path, setting: str) -> None:
    async with postgres_server(**{setting: "off"}) as server:
        up = ("up", "--port", "0", "--no-web", "--db", tmp_path / "a.db", "--log", server.url("lab"))
        told = (await run(*up, "--durability", "full", code=1)).err
        assert f"{setting} = off: set {setting} = on in its postgresql.conf" in told
        async with command(*up) as node:
            await node.line("durability replicated")
            status = await run("cluster", "status", "--log", server.url("lab"))
            assert f"durability replicated: its server has {setting} = off" in status.out
            await node.stop()


@pytest.mark.full
async def test_a_server_that_is_too_old_is_refused(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "OLDEST", 99)
    assert "A shared log needs 99 or newer" in await refused(server.url("lab"))


@pytest.mark.full
async def test_whatever_a_server_does_by_default_a_node_asks_it_to_sync() -> None:
    async with postgres_server(
        synchronous_commit="off", default_transaction_isolation="serializable", statement_timeout="1"
    ) as server:
        log = make_shared_log(server.url("lab"))
        assert isinstance(log, PostgresLog)
        await log.open()
        await log.append(b"1", 0)
        assert log._pool is not None
        assert await log._pool.fetchval("SHOW synchronous_commit") == "on"
        assert (await log.describe())["durability"] == "full"
        await log.close()


@pytest.mark.full
async def test_a_standby_is_refused_and_found_behind_it_is_the_primary(server: PostgresServer) -> None:
    standby = PostgresServer(server.folder.with_name("standby"))
    await server.copy_to(standby)
    await standby.start(is_ready=b"ready to accept read-only")
    try:
        assert "it is a standby" in await refused(standby.url("lab"), LogUnavailable)
        both = server.url("lab").replace(
            f"127.0.0.1:{server.port}", f"127.0.0.1:{standby.port},127.0.0.1:{server.port}"
        )
        log = make_shared_log(both)
        await log.open()
        await log.append(b"1", 0)
        told = await log.describe()
        assert [(it["name"], it["is_current"]) for it in told["servers"]] == [("standby", True)]
        # The primary is lost, and the standby replaces it.
        await wait_until_replayed(standby)
        await server.kill9()
        await standby.execute("SELECT pg_promote()", database="postgres")
        assert await log.append(b"2", 1) == 2
        assert await log.end() == 2
        await log.close()
    finally:
        await standby.kill9()


async def wait_until_replayed(standby: PostgresServer) -> None:
    connection = await standby.connect()
    async with asyncio.timeout(20):
        while await connection.fetchval("SELECT count(*) FROM roundelay_lab") < 2:  # noqa: ASYNC110 (a server tells nobody)
            await asyncio.sleep(0.05)
    await connection.close()


@pytest.mark.full
async def test_a_server_that_begins_to_serve_is_waited_for(server: PostgresServer) -> None:
    connection = await server.connect()
    starting = asyncpg.CannotConnectNowError("the database system is starting up")
    log = make_shared_log(server.url("lab"))
    assert isinstance(log, PostgresLog)
    assert type(log._explain_failed_open(starting)) is LogElectionPending
    await connection.close()


@pytest.mark.full
async def test_a_table_that_is_full_is_widened_while_it_is_used(server: PostgresServer) -> None:
    log = make_shared_log(server.url("lab?max_bytes=1048576"))
    await log.open()
    await log.append(b"x" * 1_000_000, 0)
    with pytest.raises(LedgerError, match="is full") as caught:
        await log.append(b"x" * 100_000, 1)
    assert type(caught.value) is LogFull
    # As described in docs/cluster/postgres.md.
    widen = "DROP CONSTRAINT max_bytes, ADD CONSTRAINT max_bytes CHECK (total <= 21474836480) NOT VALID"
    assert widen in " ".join(read_pages("cluster").split())
    await server.execute(f"ALTER TABLE roundelay_lab {widen}")
    assert await log.append(b"x" * 100_000, 1) == 2
    told = await log.describe()
    assert (told["bytes"], told["max_bytes"]) == (1_100_000, 21_474_836_480)
    await log.close()


# --- guarantees


@pytest.mark.full
async def test_an_append_whose_answer_was_lost_stands_there_once(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "ASK_S", 0.3)
    log = make_shared_log(server.url("lab"))
    await log.open()
    await log.append(b"1", 0)
    other = await server.connect()
    holding = other.transaction()
    await holding.start()
    await other.execute("LOCK TABLE roundelay_lab IN EXCLUSIVE MODE")  # blocks writers
    appending = asyncio.create_task(log.append(b"2", 1))
    async with asyncio.timeout(10):
        while (await waiting(server)) < 3:  # noqa: ASYNC110 (tries of which no answer came; a server tells nobody)
            await asyncio.sleep(0.05)
    await holding.rollback()
    assert await appending == 2
    assert await log.end() == 2
    await log.close()
    await other.close()


async def waiting(server: PostgresServer) -> int:
    connection = await server.connect()
    count: int = await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")
    await connection.close()
    return count


@pytest.mark.full
async def test_a_table_that_was_made_anew_takes_nothing_of_who_knew_the_old_one(server: PostgresServer) -> None:
    log = make_shared_log(server.url("lab"))
    await log.open()
    await log.append(b"1", 0)
    await server.execute("DROP TABLE roundelay_lab")
    other = make_shared_log(server.url("lab"))
    await other.open()
    await other.append(b"another 1", 0)
    with pytest.raises(LeadershipLost):
        await log.append(b"2", 1)
    with pytest.raises(LedgerError, match="was replaced"):
        await log.end()
    assert await other.end() == 1
    await asyncio.gather(log.close(), other.close())


@pytest.mark.full
async def test_connections_that_a_server_ends_are_made_again_and_few(server: PostgresServer) -> None:
    log = make_shared_log(server.url("lab"))
    await log.open()
    for number in range(5):
        await asyncio.gather(*(log.end() for _ in range(20)), *(log.broadcast("x") for _ in range(20)))
        connection = await server.connect()
        found = await connection.fetch("SELECT pid FROM pg_stat_activity WHERE application_name = 'roundelay_lab'")
        assert 2 <= len(found) <= postgres.CONNECTIONS + 1
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) pid", [it["pid"] for it in found]
        )
        await connection.close()
        assert await log.append(str(number).encode(), number) == number + 1
        while log._broadcasts:  # type: ignore[attr-defined]  # what was said before
            await log.next_broadcast()
        async with asyncio.timeout(5):
            heard = asyncio.create_task(log.next_broadcast())
            while not heard.done():
                await log.broadcast("again")
                await asyncio.wait((heard,), timeout=0.1)
    await log.close()


@pytest.mark.full
async def test_who_asks_a_log_while_it_is_closed_hears_of_it(server: PostgresServer) -> None:
    for turns in range(12):
        log = make_shared_log(server.url("lab"))
        await log.open()
        asked = [
            asyncio.ensure_future(it) for it in (log.end(), log.broadcast("x"), log.describe(), log.end(), log.end())
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        await log.close()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, LedgerError), answer


@pytest.mark.full
async def test_a_network_is_spoken_to_through_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    stranger, _ = make_certificate(tmp_path, stem="stranger")
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(postgres_server())
        await server.stop()
        for path in (certificate, key):
            server.take(path)
        server.settings |= {"ssl": "on", "ssl_cert_file": "../tls-cert.pem", "ssl_key_file": "../tls-key.pem"}
        await server.start()
        trusted = server.url(f"lab?sslmode=verify-full&sslrootcert={quote(str(certificate), safe='')}")
        log = make_shared_log(trusted)
        assert isinstance(log, PostgresLog)
        await log.open()
        assert log._pool is not None
        assert await log._pool.fetchval("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")
        await log.close()
        other = server.url(f"lab?sslmode=verify-full&sslrootcert={quote(str(stranger), safe='')}")
        assert "Name its issuer with sslrootcert" in await refused(other)
    async with postgres_server() as server:
        assert "SSL" in await refused(server.url("lab?sslmode=require"), LogUnavailable)


@pytest.mark.full
async def test_what_a_standby_has_to_confirm_is_acknowledged_once_it_has(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule also covers an append whose answer was lost, and whose record everybody can already see."""
    standby = PostgresServer(server.folder.with_name("standby"))
    await server.copy_to(standby)
    await standby.start(is_ready=b"ready to accept read-only")
    log = make_shared_log(server.url("lab"))
    await log.open()
    await server.execute("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
    await server.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(20):
        while (await log.describe())["replicas"] != 2:  # noqa: ASYNC110 (a server tells nobody)
            await asyncio.sleep(0.05)
    await log.append(b"1", 0)
    await standby.kill9()
    monkeypatch.setattr(postgres, "ASK_S", 0.3)
    monkeypatch.setattr(postgres, "PATIENCE_S", 1.0)
    short = make_shared_log(server.url("lab"))
    await short.open()
    with pytest.raises(LogUnavailable):
        await short.append(b"2", 1)
    await server.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    async with asyncio.timeout(20):
        while await short.end() < 2:  # noqa: ASYNC110 (now the server has it, and the standby has not)
            await asyncio.sleep(0.05)
    with pytest.raises(LogUnavailable):
        await short.append(b"2", 1)
    await standby.start(is_ready=b"ready to accept read-only")
    assert await log.append(b"2", 1) == 2
    await asyncio.gather(log.close(), short.close())
    await standby.kill9()


# --- commands


@pytest.mark.full
async def test_a_network_moves_into_a_table_and_back(server: PostgresServer, tmp_path: Path) -> None:
    from tests.integration.test_log_copies import export, make_database

    lab, log = tmp_path / "lab.db", server.url("lab")
    await make_database(lab, 5_000)
    before = await export(lab)
    await invoke("cluster", "migrate", "--from", lab, "--to", log)
    await invoke("cluster", "rebuild", "--log", log, "--db", tmp_path / "a.db")
    told = await invoke("cluster", "verify", "--log", log, "--db", tmp_path / "a.db")
    assert "5,000 rows, 2 values" in told.out
    await invoke("cluster", "migrate", "--from", log, "--to", tmp_path / "back.db")
    assert await export(tmp_path / "back.db") == before
    status = await invoke("cluster", "status", "--log", log)
    assert "PostgreSQL 1" in status.out
    assert PASSWORD not in status.out
