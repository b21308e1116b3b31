"""Tests of a node's files that others use: programs that open and close them, other nodes, a move, a deletion, an
older copy.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from roundelay.network.errors import LedgerError
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.faulty import DB, until_ready
from tests.support.command import run
from tests.support.counts import Note
from tests.support.node import Node, ProcessNode, node_process, running_node
from tests.support.wire import WireSession, get_http

_LOOK = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); print(db.execute('select 1').fetchall()); db.close()"
_LIMITS = {"root_messages_per_s": 100_000}


async def _execute(*command: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0, command


async def _say(session: WireSession, stored: dict[str, int], count: int) -> None:
    for number in range(len(stored), len(stored) + count):
        stored[f"m{number}"] = (await session.send("broadcast", "x" * 500, message_id=f"m{number}"))["seq"]


async def _assert_all_there(session: WireSession, stored: dict[str, int]) -> None:
    """Check that every repeat is answered with the original seq."""
    for message_id, seq in stored.items():
        again = await session.send("broadcast", "x" * 500, message_id=message_id)
        assert (again["seq"], again.get("duplicate")) == (seq, True)


def _read_locks(pid: int, path: Path) -> list[str]:
    inode = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    return [line for line in lines if inode in line and f" {pid} " in line]


async def test_programs_beside_a_node_lose_nothing_of_it_when_it_is_killed(tmp_path: Path, note: Note) -> None:
    db = tmp_path / DB
    stored: dict[str, int] = {}
    seq = 0
    async with node_process(db, limits=_LIMITS) as node:
        commands: dict[str, Callable[[], object]] = {
            "python": lambda: _execute(sys.executable, "-c", _LOOK, db),
            "cp": lambda: _execute("cp", db, tmp_path / "copy.db"),
            "backup": lambda: run("backup", tmp_path / f"backup{len(stored)}.db", "--db", db),
            "export": lambda: run("export", "--db", db, "-o", tmp_path / f"export{len(stored)}.jsonl"),
            "doctor": lambda: run("doctor", ROUNDELAY_DB=str(db)),
            "why": lambda: run("why", str(seq), "--db", db),
        }
        if shutil.which("sqlite3"):
            commands["sqlite3"] = lambda: _execute("sqlite3", db, "select 1")
        alice = await node.agent("alice")
        for name, command in commands.items():
            await _say(alice, stored, 20)
            seq = next(iter(stored.values()))
            await command()
            assert any("POSIX" in line for line in _read_locks(node.pid, db)), f"no lock is left after {name}"
            await _say(alice, stored, 20)
        await node.kill9()  # if another program has deleted the WAL, the WAL is lost with the process
        await node.restart()
        await _assert_all_there(await node.agent("alice"), stored)
    note(programs=len(commands), acknowledged=len(stored), lost=0)


async def test_a_ledger_of_this_process_can_be_read_in_it_and_keeps_its_lock(tmp_path: Path) -> None:
    from roundelay.network.ledger.log_file import read_log

    db = tmp_path / DB
    async with running_node(db=db, durability="full") as node:
        alice = await node.agent("alice")
        await alice.send("broadcast", "one")
        assert len([row for row in read_log(db)[1] if row.type == "message"]) == 1
        assert any("POSIX" in line for line in _read_locks(os.getpid(), db))


async def test_a_file_that_its_own_process_opens_and_closes_is_locked_again_within_a_second(tmp_path: Path) -> None:
    db = tmp_path / DB
    async with running_node(db=db, durability="full") as node:
        alice = await node.agent("alice")
        stored: dict[str, int] = {}
        await _say(alice, stored, 3)
        db.read_bytes()  # in POSIX, closing a file drops all locks of the process on it
        assert not any("POSIX" in line for line in _read_locks(os.getpid(), db))
        assert await alice.closed() == 4503
        await until_ready(node.url)
        assert any("POSIX" in line for line in _read_locks(os.getpid(), db))
        await _assert_all_there(await node.agent("alice"), stored)


async def test_a_second_node_is_refused_by_whatever_name_it_comes(tmp_path: Path) -> None:
    home, link = tmp_path / "home", tmp_path / "link"
    home.mkdir()
    db = home / DB
    async with running_node(db=db, durability="full") as node:
        alice = await node.agent("alice")
        await alice.send("broadcast", "one")
        (tmp_path / "symbolic.db").symlink_to(db)
        (tmp_path / "hard.db").hardlink_to(db)
        link.symlink_to(home)
        for other in (db, tmp_path / "symbolic.db", tmp_path / "hard.db", link / DB):
            refused = await run("up", "--port", "0", "--db", other, code=1)
            assert "in use by another node" in refused.err
        for path in home.iterdir():  # none of the node's other files prevents a second node from starting
            if path.name not in (DB, f"{DB}-wal", f"{DB}-shm"):
                path.unlink()
        refused = await run("up", "--port", "0", "--db", db, code=1)
        assert "in use by another node" in refused.err
        await alice.send("broadcast", "two")


async def _until(is_so: Callable[[], bool]) -> None:
    """Poll until the condition is true, as an operator checks files and the log."""
    for _ in range(1000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("what was awaited did not come")


_HARM: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "renamed": (lambda db: db.rename(f"{db}.moved"), lambda db: Path(f"{db}.moved").rename(db)),
    "deleted": (lambda db: db.unlink(), lambda db: Path(f"{db}.rescued").rename(db)),
    "log deleted": (lambda db: Path(f"{db}-wal").unlink(), lambda _: None),
    "index deleted": (lambda db: Path(f"{db}-shm").unlink(), lambda _: None),
    "touched": (lambda db: os.utime(db), lambda _: None),
    "folder renamed": (lambda db: db.parent.rename(f"{db.parent}.moved"), lambda db: Path(f"{db.parent}.moved").rename(db.parent)),
}  # fmt: skip


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "writing"])
@pytest.mark.parametrize("harm", _HARM)
async def test_files_that_go_under_a_node_stop_it_and_it_goes_on_when_they_are_back(
    tmp_path: Path, note: Note, caplog: pytest.LogCaptureFixture, harm: str, is_idle: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    db = home / DB
    begin, end = _HARM[harm]
    async with running_node(db=db, durability="full", limits=_LIMITS) as node:
        alice = await node.agent("alice")
        epoch = alice.welcome["network"]["epoch"]
        stored: dict[str, int] = {}
        await _say(alice, stored, 50)
        begin(db)
        if not is_idle:
            for number in range(50, 60):
                await alice.send_frame({"type": "send", "message_id": f"m{number}", "to": "broadcast", "content": "y"})
        for frame in await alice.rest():
            if frame["type"] == "stored":  # a running commit may have ended before
                stored[frame["message_id"]] = frame["seq"]
        assert await alice.closed() == 4503
        assert len(stored) <= 51
        is_gone = harm in ("renamed", "deleted", "folder renamed")
        if is_gone:
            assert (await get_http(node.url, "/readyz"))[0] == 503
        while harm == "deleted" and "its content is in" not in caplog.text:
            assert (await get_http(node.url, "/readyz"))[0] == 503
        # A session may have ended before, because its data could not be read.
        await _until(lambda: "the ledger failed" in caplog.text)
        told = [it.message for it in caplog.records if it.message.startswith("the ledger failed")]
        assert len(told) == len(set(told)) <= 2  # the file is missing and cannot be opened again
        assert str(db) in told[0]
        if harm == "deleted":
            await _until(Path(f"{db}.rescued").exists)  # a rescued file gets its name when it is complete
        end(db)
        await until_ready(node.url)
        alice = await node.agent("alice")
        assert alice.welcome["network"]["epoch"] == epoch
        stored = {message_id: seq for message_id, seq in stored.items() if int(message_id[1:]) < 50}
        await _assert_all_there(alice, stored)
        note(acknowledged=len(stored), lost=0)


@pytest.fixture
def saved_before(tmp_path: Path) -> Iterator[Path]:
    saved = tmp_path / f"{DB}.rescued"
    saved.write_text("of an earlier time")
    yield saved
    assert saved.read_text() == "of an earlier time"


async def test_a_database_that_is_deleted_twice_is_saved_twice(tmp_path: Path, saved_before: Path) -> None:
    db, saved = tmp_path / DB, saved_before.with_name(f"{saved_before.name}.2")
    async with running_node(db=db, durability="full", limits=_LIMITS) as node:
        stored: dict[str, int] = {}
        await _say(await node.agent("alice"), stored, 5)
        db.unlink()
        await _until(saved.exists)
        os.replace(saved, db)
        await until_ready(node.url)
        await _assert_all_there(await node.agent("alice"), stored)


@pytest.mark.parametrize("harm", ["older copy", "copy in place", "cut", "emptied log", "another ledger"])
async def test_a_file_that_is_no_longer_the_nodes_ledger_is_not_served(tmp_path: Path, harm: str) -> None:
    db = tmp_path / DB
    ledger = SQLiteLedger(tmp_path / "another.db", new_epoch=lambda: "another")
    await ledger.open()
    await ledger.close()
    async with running_node(db=db, durability="full") as node:
        await (await node.agent("alice")).send("broadcast", "x" * 500, message_id="m0")
        tokens = node.tokens
    shutil.copy(db, tmp_path / "copy.db")
    async with running_node(db=db, durability="full", limits=_LIMITS) as node:
        node.tokens = tokens
        alice = await node.agent("alice")
        stored: dict[str, int] = {}
        await _say(alice, stored, 30)
        match harm:
            case "older copy":
                os.replace(tmp_path / "copy.db", db)
            case "copy in place":
                shutil.copyfile(tmp_path / "copy.db", db)
            case "cut":
                os.truncate(db, 0)
            case "emptied log":
                os.truncate(f"{db}-wal", 0)
            case _:
                os.replace(tmp_path / "another.db", db)
        assert await alice.closed() == 4503
        assert await get_http(node.url, "/readyz") == (503, "recovering\n")


async def test_a_second_name_of_a_database_is_not_opened_without_what_lies_beside_the_first(tmp_path: Path) -> None:
    db, other = tmp_path / DB, tmp_path / "other.db"
    async with node_process(db) as node:
        alice = await node.agent("alice")
        stored: dict[str, int] = {}
        await _say(alice, stored, 10)
        await node.kill9()
        other.hardlink_to(db)
        refused = await run("up", "--port", "0", "--db", other, code=1)
        assert "hard links" in refused.err
        await node.restart()
        await _assert_all_there(await node.agent("alice"), stored)


async def test_an_older_copy_put_back_begins_another_epoch_and_hides_no_message(tmp_path: Path, note: Note) -> None:
    db = tmp_path / DB
    async with node_process(db, limits=_LIMITS) as node:
        alice, bob = await node.agent("alice"), await node.agent("bob")
        epoch = bob.welcome["network"]["epoch"]
        stored: dict[str, int] = {}
        await _say(alice, stored, 30)
        await node.stop()
        shutil.copy(db, tmp_path / "copy.db")
        await node.restart()
        alice = await node.agent("alice")
        await _say(alice, stored, 50)
        cursor = list(stored.values())[-1]
        await node.stop()
        shutil.copy(tmp_path / "copy.db", db)
        await node.restart()
        alice = await node.agent("alice")
        assert alice.welcome["network"]["epoch"] != epoch
        for number in range(100):
            await alice.send("broadcast", number)
        bob = await node.agent("bob", resume={"epoch": epoch, "cursor": cursor})
        assert bob.welcome["resume"] == "limited"
        assert [it for it in await bob.contents_until(99) if isinstance(it, int)] == list(range(99))
        note(acknowledged=len(stored), put_back=30, sent_after=100, skipped=0)


async def _live_three_times(folder: Path, copy: str) -> tuple[Path, str]:
    """Create a database with a WAL that is newer than the database's copy ``copy.db``. Return the path and the epoch
    of the database. The folder ``killed`` has the files of a killed node, with a WAL that is not yet copied into the
    database.
    """
    db, killed = folder / DB, folder / "killed"
    killed.mkdir()
    stored: dict[str, int] = {}
    tokens: dict[str, str] = {}
    for life, count in enumerate((30, 40, 40)):
        async with running_node(db=db, durability="full", limits=_LIMITS) as node:
            node.tokens = tokens
            alice = await node.agent("alice")
            await _say(alice, stored, count)
            if life == 0 and copy == "backup":
                await run("backup", folder / "copy.db", "--db", db)
            if life == 2:
                for name in (f"{DB}-wal", f"{DB}.head"):
                    shutil.copy(folder / name, killed / name)
        if life == 0 and copy == "cp":
            shutil.copy(db, folder / "copy.db")
    return db, alice.welcome["network"]["epoch"]


def _delete_log(db: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{db}{suffix}").unlink(missing_ok=True)


@pytest.mark.parametrize("copy", ["backup", "cp"])
async def test_a_copy_is_not_mixed_with_the_log_that_another_database_has_left(tmp_path: Path, copy: str) -> None:
    db, epoch = await _live_three_times(tmp_path, copy)
    shutil.copy(tmp_path / "copy.db", db)
    for path in (tmp_path / "killed").iterdir():
        shutil.copy(path, tmp_path)
    as_copied = db.read_bytes()
    with pytest.raises(LedgerError, match="belongs to another database"):
        async with running_node(db=db, durability="full"):
            pass
    assert db.read_bytes() == as_copied
    _delete_log(db)
    async with running_node(db=db, durability="full", limits=_LIMITS) as node:
        assert await _epoch_of(node, "bob") != epoch
    assert "damaged row" not in (await run("doctor", ROUNDELAY_DB=str(db))).out


@pytest.mark.parametrize("way", ["mv", "cp"])
async def test_a_backup_put_in_the_place_of_a_running_nodes_database_is_not_mixed_with_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    db, epoch = await _live_three_times(tmp_path, "backup")
    copy = tmp_path / "copy.db"
    as_copied = copy.read_bytes()
    async with running_node(db=db, durability="full", limits=_LIMITS) as node:
        alice = await node.agent("bob")
        await _say(alice, {}, 10)
        if way == "mv":
            copy.replace(db)
        else:
            shutil.copyfile(copy, db)
        assert await alice.closed() == 4503
        if way == "cp":  # SQLite's log still exists and would be applied to the copied file
            await _until(lambda: "belongs to another database" in caplog.text)
            assert (await get_http(node.url, "/readyz"))[0] == 503
            assert db.read_bytes() == as_copied
            _delete_log(db)
        await until_ready(node.url)
        assert await _epoch_of(node, "carol") != epoch
    assert "damaged row" not in (await run("doctor", ROUNDELAY_DB=str(db))).out


async def test_a_copy_from_before_there_were_head_files_is_an_older_copy_too(tmp_path: Path) -> None:
    db = tmp_path / DB
    async with node_process(db) as node:
        epoch = await _epoch_of(node)
        await node.stop()
        shutil.copy(db, tmp_path / "copy.db")
        with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
            copy.execute("DELETE FROM meta WHERE key = 'has_head_file'")
            copy.commit()
        await node.restart()
        await (await node.agent("alice")).send("broadcast", "one")
        await node.stop()
        shutil.copy(tmp_path / "copy.db", db)
        await node.restart()
        assert await _epoch_of(node) != epoch


async def test_a_head_file_that_names_the_database_in_letters_refuses_no_log(tmp_path: Path) -> None:
    db, head = tmp_path / DB, tmp_path / f"{DB}.head"
    async with node_process(db) as node:
        alice = await node.agent("alice")
        stored: dict[str, int] = {}
        await _say(alice, stored, 10)
        await node.kill9()
        assert (tmp_path / f"{DB}-wal").stat().st_size > 0
        head.write_text(f"{head.read_text().splitlines()[0]}\ngjW5RsGNbCdmSoqDkrt5Cg\n")
        await node.restart()
        assert await _epoch_of(node, "bob") == alice.welcome["network"]["epoch"]
        await _assert_all_there(await node.agent("alice"), stored)


async def _epoch_of(node: Node, agent_id: str = "alice") -> str:
    session = await node.agent(agent_id)
    epoch: str = session.welcome["network"]["epoch"]
    return epoch


@pytest.mark.parametrize(("moved", "is_kept"), [((DB, f"{DB}.head"), True), ((DB,), False)])
async def test_a_ledger_keeps_its_epoch_where_its_head_file_goes_with_it(
    tmp_path: Path, moved: tuple[str, ...], is_kept: bool
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    async with node_process(old / DB) as node:
        epoch, tokens = await _epoch_of(node), node.tokens
        await node.stop()
    for name in moved:
        (old / name).rename(new / name)
    async with node_process(new / DB) as node:
        node.tokens = tokens
        assert (await _epoch_of(node) == epoch) is is_kept


@pytest.mark.parametrize("durability", ["full", "normal"])
async def test_a_killed_process_keeps_the_epoch_and_a_restarted_machine_does_so_with_full(
    tmp_path: Path, durability: str
) -> None:
    db = tmp_path / DB
    node = await ProcessNode.start(db, durability=durability)  # type: ignore[arg-type]
    try:
        epoch = await _epoch_of(node)
        await node.kill9()
        await node.restart()
        assert await _epoch_of(node) == epoch
        await node.kill9()
    finally:
        await node.stop()
    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed", durability=durability, boot="another")  # type: ignore[arg-type]
    meta, _ = await ledger.open()
    await ledger.close()
    assert meta.epoch == (epoch if durability == "full" else "renewed")
