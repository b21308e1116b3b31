"""Tests that every node of a shared log drops the old rows that the leader decides to drop. docs/cluster.md
("Configuration of a cluster node").
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from msgspec import Raw

from roundelay.app import make_shared_log
from roundelay.network.clock import system_clock
from roundelay.network.cluster import settings
from roundelay.network.cluster.log_copies import compare, rebuild_index
from roundelay.network.cluster.records import write_trim
from roundelay.network.cluster.replicated import ReplicatedLedger
from roundelay.network.cluster.shared_log import UnusableLog
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import CallResult, DeadLetter, TableWrite, Token
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import LeadershipLost, LogFull, Trim, TrimStep, retention, sqlite
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.units import DAY_MS
from tests.contract.test_ledger import message
from tests.integration.test_shared_log import LogServer, ledger, make_and_count, server, sleep
from tests.support.command import invoke

__all__ = ["server"]


def record(seq: int, agent: str = "bob") -> Row:
    return Row(
        seq=seq, at=1000 + seq, type="record", actor=agent, key=f"r:{seq}", stream=f"reaction-{seq // 3}", label="started",
        digest="d", data=b'{"seq":%d}' % seq,
    )  # fmt: skip


def mixed(seq: int) -> Row:
    return record(seq) if seq % 3 == 0 else message(seq, "ann", "agent:bob")


def letter(seq: int) -> TableWrite:
    return TableWrite("dead", f"bob/{seq:016d}", DeadLetter("bob", seq, "no", 5, 1))


def told(db: Path, sql: str = "SELECT seq FROM log ORDER BY seq") -> list[object]:
    with closing(sqlite3.connect(db)) as connection:
        return [row[0] for row in connection.execute(sql)]


async def difference(log: str, db: Path) -> str:
    return (await compare(make_shared_log(log), db)).difference


async def test_what_the_leader_drops_goes_from_each_node(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.3)
    log, a, b, c = server.url("lab"), *(tmp_path / f"{name}.db" for name in "abc")
    leader, follower = ledger(log, a), ledger(log, b)
    await leader.open()
    taking_over = asyncio.create_task(follower.open())
    for seq in range(1, 31):
        await leader.append([mixed(seq)], [letter(seq)] if seq % 5 == 0 else [])
    done = await leader.trim(Trim(messages_before=1011, records_before=1021, pinned=26))
    assert (done.dropped, done.first_seq, done.is_pinned) == (7 + 6, 11, False)
    await leader.append([mixed(31)], [])
    kept = [seq for seq in range(1, 32) if seq >= (21 if seq % 3 == 0 else 11)]
    assert (await leader.trim(Trim(messages_before=1011, records_before=1021, pinned=26))).dropped == 0
    await rebuild_index(make_shared_log(log), c)
    sleep(leader)
    meta, _ = await taking_over
    assert (meta.first_seq, meta.head) == (11, 31)
    for db in (a, b, c):
        assert told(db) == kept, db
        assert told(db, "SELECT key FROM state WHERE tbl = 'dead'") == [
            f"bob/{seq:016d}" for seq in (15, 20, 25, 30)
        ], db
        assert await difference(log, db) == "", db
    assert await follower.lookup_cold("dead", f"bob/{10:016d}") is None
    with pytest.raises(LeadershipLost):
        await leader.trim(Trim(messages_before=1021, pinned=31))
    assert told(a) == kept, "who leads no longer drops nothing"
    await asyncio.gather(leader.close(), follower.close())


@pytest.mark.parametrize("off_days", [30, -30, 0])
async def test_a_node_whose_clock_is_another_one_says_so_and_drops_nothing_for_its_age(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_days: int
) -> None:
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(settings, "CLOCK_OFFSET_S", 0.3)
    log, said = server.url("lab"), list[str]()
    leader, follower = ledger(log, tmp_path / "a.db"), ledger(log, tmp_path / "b.db", say=said.append)
    follower._log._clock = lambda: system_clock() + off_days * DAY_MS
    await leader.open()
    taking_over = asyncio.create_task(follower.open())
    for seq in range(1, 12):
        await leader.append([message(seq, "ann", "agent:bob")], [])
    if off_days:
        async with asyncio.timeout(20):
            while not any("2,592,000 s" in it for it in said):  # noqa: ASYNC110 (it is said by a callback)
                await asyncio.sleep(0.01)
    sleep(leader)
    await taking_over
    done = await follower.trim(Trim(messages_before=9999, pinned=12))
    assert done.dropped == (0 if off_days else 11)
    assert sum(it.startswith("This node's clock is") for it in said) == bool(off_days)
    assert sum(it.startswith("Until it is restarted, this node deletes nothing") for it in said) == bool(off_days)
    assert (await follower.trim(Trim(max_bytes=1, pinned=6))).dropped == (5 if off_days else 0), (
        "its size is another matter"
    )
    await asyncio.gather(leader.close(), follower.close())


async def test_results_of_calls_go_from_each_node_when_the_leader_says_so(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(sqlite, "EXPIRY_STEP", 3)
    log, a, b, c = server.url("lab"), *(tmp_path / f"{name}.db" for name in "abc")
    leader, follower = ledger(log, a), ledger(log, b)
    await leader.open()
    for number in range(10):
        await leader.append([], [TableWrite("call", f"ann/{number}", CallResult("d", number, Raw(b"{}")))])
    await rebuild_index(make_shared_log(log), c)
    taking_over = asyncio.create_task(follower.open())
    await leader.expire_calls(7)
    # Ann calls this operation again.
    await leader.append([], [TableWrite("call", "ann/1", CallResult("d", 20, Raw(b"{}")))])
    await rebuild_index(make_shared_log(log), c)
    sleep(leader)
    await taking_over
    kept = [f"ann/{number}" for number in (1, 7, 8, 9)]
    for db in (a, b, c):
        assert told(db, "SELECT key FROM state WHERE tbl = 'call' ORDER BY key") == kept, db
        assert await difference(log, db) == "", db
    with pytest.raises(LeadershipLost):
        await leader.expire_calls(99)
    assert told(a, "SELECT key FROM state WHERE tbl = 'call' ORDER BY key") == kept
    await asyncio.gather(leader.close(), follower.close())


async def test_what_another_node_wrote_as_if_it_led_drops_nothing(server: LogServer, tmp_path: Path) -> None:
    log, made = server.url("lab"), ledger(server.url("lab"), tmp_path / "a.db")
    await made.open()
    await made.append([message(1, "ann", "agent:bob")], [])
    reader = made._log.reader
    await server.write("lab", write_trim(TrimStep(9, 9, is_last=True), "somebody", reader.end_digest))
    await made.close()
    again = ledger(log, tmp_path / "b.db")
    await again.open()
    assert [row.seq for row in await again.rows(0, 9)] == [1]
    await again.close()
    assert await difference(log, tmp_path / "b.db") == ""


class Killed(LedgerError):
    pass


class Failing(SQLiteLedger):
    """An index whose process is killed, in effect, after a number of transactions of a trim."""

    left = 0

    async def _apply_trim(self, step: TrimStep) -> retention.TrimProgress:
        if not self.left:
            raise Killed("killed")
        self.left -= 1
        return await super()._apply_trim(step)


async def test_of_a_trim_that_was_interrupted_anywhere_all_is_done_in_the_end(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_DROPPED_BYTES", 60)  # a trim takes several transactions
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.05)
    log, random = server.url("lab"), Random(18)
    dbs = [tmp_path / "a.db", tmp_path / "b.db"]
    head = rounds = interrupted = 0
    for number in range(24):
        db = dbs[number % 2]
        made = ledger(log, db, index=Failing)
        index = made._index
        assert isinstance(index, Failing)
        index.left = random.choice((0, 1, 2, 99))
        try:
            await made.open()  # this node continues the trim of the other node
            for _ in range(random.randrange(1, 12)):
                head += 1
                puts = [letter(random.randrange(1, head + 1))] if random.random() < 0.4 else []
                puts += (
                    [TableWrite("call", f"a/{head}", CallResult("d", head, Raw(b"{}")))]
                    if random.random() < 0.2
                    else []
                )
                await made.append([mixed(head)], puts)
            before = [1000 + random.randrange(head + 1) for _ in range(2)]
            trim = Trim(messages_before=before[0], records_before=before[1], pinned=head, limit=random.randrange(1, 9))
            await made.trim(trim)
            rounds += 1
        except Killed:
            interrupted += 1
        assert await difference(log, db) == "", f"also in the middle of it, round {number}"
        await made._log.shared.close()
        await made.close()
        meta, _ = await (after := ledger(log, db)).open()
        assert meta.head == head
        await after.close()
        assert await difference(log, db) == ""
    last = tmp_path / "c.db"
    await rebuild_index(make_shared_log(log), last)
    await rebuild_index(make_shared_log(log), dbs[0])
    await rebuild_index(make_shared_log(log), dbs[1])
    for db in dbs:
        assert told(db) == told(last)
        assert told(db, "SELECT key || value FROM meta WHERE key LIKE 'first%' ORDER BY key") == told(
            last, "SELECT key || value FROM meta WHERE key LIKE 'first%' ORDER BY key"
        )
    assert rounds > 5 < interrupted, (rounds, interrupted)


async def test_a_trimmed_database_moves_into_a_log_and_back(server: LogServer, tmp_path: Path) -> None:
    lab, back, log = tmp_path / "lab.db", tmp_path / "back.db", server.url("lab")
    made = SQLiteLedger(lab, new_epoch=lambda: "e1", name="lab", durability="normal")
    await made.open()
    await made.append([mixed(seq) for seq in range(1, 31)], [letter(seq) for seq in (5, 25)])
    await made.trim(Trim(messages_before=1011, records_before=1021, pinned=30))
    await made.close()
    before = (await invoke("export", "--db", lab)).out
    moved = json.loads((await invoke("cluster", "migrate", "--from", lab, "--to", log, "--json")).out)
    assert (moved["is_equal"], moved["rows"], moved["values"]) == (True, len(told(lab)), 1)
    assert "is in the log" in (await invoke("cluster", "migrate", "--from", lab, "--to", log)).out, "again"
    leader = ledger(log, tmp_path / "a.db")
    meta, _ = await leader.open()
    assert (meta.first_seq, meta.head) == (11, 30)
    await leader.close()
    await invoke("cluster", "migrate", "--from", log, "--to", back)
    assert (await invoke("export", "--db", back)).out == before


@pytest.mark.parametrize(("seq", "lacks"), [(15, 15), (24, 24)])
async def test_of_a_database_that_lacks_what_no_trim_has_dropped_no_log_is_made(
    server: LogServer, tmp_path: Path, seq: int, lacks: int
) -> None:
    lab = tmp_path / "lab.db"
    made = SQLiteLedger(lab, new_epoch=lambda: "e1", durability="normal")
    await made.open()
    await made.append([message(seq, "ann", "agent:bob") for seq in range(1, 31)], [])
    await made.trim(Trim(messages_before=1011, pinned=30))
    await made.close()
    with closing(sqlite3.connect(lab)) as connection, connection:
        connection.execute("DELETE FROM log WHERE seq = ?", (seq,))
    refused = await invoke("cluster", "migrate", "--from", lab, "--to", server.url("lab"), code=1)
    assert f"row #{lacks} is missing or damaged" in refused.err


# --- logs whose first records are dropped


def value_of(db: Path, table: str) -> list[object]:
    return told(db, f"SELECT key || value FROM state WHERE tbl = '{table}' ORDER BY key")


async def first_of(log: str) -> int:
    shared = make_shared_log(log)
    await shared.open(create=False)
    first = await shared.first()
    await shared.close()
    return first


@pytest.fixture(autouse=True)
def trims_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SMALL_TRIM_INTERVAL_S", 0.0)


@pytest.fixture
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SNAPSHOT_EVERY_RECORDS", 8)
    monkeypatch.setattr(settings, "SNAPSHOT_PAGE", 3)
    monkeypatch.setattr(settings, "LEADER_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("small_bases")
async def test_a_log_begins_later_when_nothing_before_is_needed_and_nodes_are_made_of_it(
    server: LogServer, tmp_path: Path
) -> None:
    log, a, b, c, d = server.url("lab"), *(tmp_path / f"{name}.db" for name in "abcd")
    leader, follower = ledger(log, a), ledger(log, b)
    await leader.open()
    await rebuild_index(make_shared_log(log), d)
    opening = asyncio.create_task(follower.open())
    tokens = [TableWrite("token", f"hash-{number}", Token("ann", "agent", number)) for number in range(12)]
    await leader.append([mixed(1)], tokens)
    for seq in range(2, 10):
        await leader.append([mixed(seq)], [letter(seq)])
    await leader.forget_dropped()  # each trim ends with this call, which writes a snapshot
    assert await first_of(log) == 1, "rows from before are kept"
    based = await make_and_count(log)
    for seq in range(10, 20):
        token = TableWrite("token", f"hash-{seq % 7}", None if seq == 12 else tokens[1].value)
        await leader.append([mixed(seq)], [letter(seq), token])
    await leader.trim(Trim(messages_before=1008, records_before=1015, pinned=19))
    await leader.forget_dropped()
    assert await first_of(log) == 1, "#8 is from before the base"
    await leader.trim(Trim(messages_before=1015, records_before=1015, pinned=19))
    await leader.forget_dropped()
    first = await first_of(log)
    assert 1 < first < based
    await leader.append([mixed(20)], [])
    await rebuild_index(make_shared_log(log), c)
    for db in (a, c):
        assert await difference(log, db) == "", db
        assert [value_of(db, table) for table in ("token", "dead")] == [value_of(a, it) for it in ("token", "dead")]
        assert told(db) == [15, 16, 17, 18, 19, 20]
    refused = ledger(log, d)
    with pytest.raises(UnusableLog, match=r"now begins at record .*\. Move .*d.db away"):
        await refused.open()
    assert "begins at" in await difference(log, d)
    sleep(leader)
    meta, _ = await opening
    assert (meta.first_seq, meta.head, meta.name, meta.epoch) == (15, 20, "lab", follower._log.reader.epoch)
    assert await difference(log, b) == ""
    await asyncio.gather(leader.close(), follower.close())
    fresh = ledger(log, tmp_path / "e.db")
    again, _ = await fresh.open()
    assert (again.first_seq, again.head, again.name, again.epoch) == (15, 20, "lab", meta.epoch)
    await fresh.append([mixed(21)], [])
    await fresh.close()
    await invoke("cluster", "migrate", "--from", log, "--to", tmp_path / "back.db")
    assert told(tmp_path / "back.db") == [15, 16, 17, 18, 19, 20, 21]


@pytest.mark.usefixtures("small_bases")
async def test_commits_go_on_while_a_base_is_written(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SNAPSHOT_PAGE", 50)
    log, random = server.url("lab"), Random(7)
    leader = ledger(log, tmp_path / "a.db")
    await leader.open()
    names = [f"hash-{number:03}" for number in range(600)]
    head = 0
    await leader.append([], [TableWrite("token", name, Token("ann", "agent", 0)) for name in names])

    async def commit() -> None:
        nonlocal head
        head += 1
        puts = [
            TableWrite("token", name, None if random.random() < 0.3 else Token("ann", "agent", head))
            for name in random.sample(names, 3)
        ]
        await leader.append([mixed(head)], puts)

    async def commit_on(writing: asyncio.Task[None]) -> int:
        before = head
        while not writing.done():
            await commit()
        return head - before

    meanwhile = 0
    for number in range(6):
        for _ in range(10):
            await commit()
        now = 1000 + head
        await leader.trim(Trim(messages_before=now, records_before=now, pinned=head))
        meanwhile += await commit_on(asyncio.create_task(leader.forget_dropped()))
        assert await difference(log, tmp_path / "a.db") == ""
        await rebuild_index(make_shared_log(log), made := tmp_path / f"b{number}.db")
        assert await difference(log, made) == ""
        assert [told(made), value_of(made, "token")] == [told(tmp_path / "a.db"), value_of(tmp_path / "a.db", "token")]
    assert await first_of(log) > 30
    assert meanwhile > 30, meanwhile
    await leader.close()


Append = Callable[[bytes, int], Awaitable[int]]


def fail_after(left: int, append: Append) -> Append:
    async def fail(data: bytes, after: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed("killed")
        return await append(data, after)

    return fail


async def open_or_make(log: str, db: Path) -> ReplicatedLedger:
    """Open a ledger. If the log now starts later, delete its index first, as an operator would."""
    made = ledger(log, db)
    try:
        await made.open()
    except UnusableLog:
        for file in db.parent.glob(f"{db.name}*"):
            file.unlink()
        made = ledger(log, db)
        await made.open()
    return made


@pytest.mark.usefixtures("small_bases")
async def test_a_base_that_was_interrupted_is_none_and_another_one_is_written(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, random, db = server.url("lab"), Random(3), tmp_path / "a.db"
    head = interrupted = 0
    firsts = []
    for number in range(30):
        made = await open_or_make(log, db if number % 2 else tmp_path / "b.db")
        for _ in range(4):
            head += 1
            await made.append([mixed(head)], [TableWrite("token", f"hash-{head % 11}", Token("ann", "agent", head))])
        with monkeypatch.context() as patch:
            left = random.choice((0, 1, 2, 3, 5, 99, 99))
            patch.setattr(made._log.shared, "append", fail_after(left, made._log.shared.append))
            try:
                await made.trim(Trim(messages_before=1000 + head, records_before=1000 + head, pinned=head))
                await made.forget_dropped()
            except Killed:
                interrupted += 1
                with pytest.raises(Killed):
                    await made.append([mixed(head + 1)], [])
        await made.close()
        firsts.append(await first_of(log))
        await rebuild_index(make_shared_log(log), fresh := tmp_path / f"c{number}.db")
        for it in (fresh, made.path):
            assert await difference(log, it) == "", (number, it)
        assert [told(fresh), value_of(fresh, "token")] == [told(made.path), value_of(made.path, "token")]
    assert firsts == sorted(firsts)
    assert interrupted > 5 < len(set(firsts)), (interrupted, firsts)


async def shortened(log: str, db: Path, *, until: int = 12) -> ReplicatedLedger:
    """Return a leader of a log that begins with a snapshot and has no rows."""
    leader = ledger(log, db)
    await leader.open()
    for seq in range(1, until):
        await leader.append([mixed(seq)], [TableWrite("token", f"hash-{seq}", Token("ann", "agent", seq))])
    await leader.trim(Trim(messages_before=9999, records_before=9999, pinned=until))
    await leader.forget_dropped()
    await leader.forget_dropped()
    assert await first_of(log) > until
    return leader


@pytest.mark.usefixtures("small_bases")
async def test_a_leader_to_whom_nothing_was_said_since_its_log_begins_later_leads_again(
    server: LogServer, tmp_path: Path
) -> None:
    log, db = server.url("lab"), tmp_path / "a.db"
    leader = await shortened(log, db)
    assert await difference(log, db) == ""
    await leader.close()
    meta, _ = await leader.open()
    assert (meta.head, meta.first_seq) == (11, 12)
    await leader.close()
    fresh = ledger(log, tmp_path / "b.db")
    meta, _ = await fresh.open()
    assert (meta.head, meta.first_seq, meta.stamp) == (11, 12, 1011), "no seq and no time is given out again"
    await fresh.close()


@pytest.mark.usefixtures("small_bases")
async def test_what_a_drop_that_was_killed_left_before_a_base_is_passed_over(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, db = server.url("lab"), tmp_path / "a.db"
    leader = ledger(log, db)
    await leader.open()
    for seq in range(1, 12):
        await leader.append([mixed(seq)], [TableWrite("token", f"hash-{seq}", Token("ann", "agent", seq))])
    await leader.forget_dropped()
    await server.drop("lab", 1, 2, 3)  # the server looks as if a drop had started
    async with asyncio.timeout(20):
        with pytest.raises(UnusableLog, match="records are missing"):
            await ledger(log, tmp_path / "early.db").open()
    await leader.trim(Trim(messages_before=9999, records_before=9999, pinned=12))
    await leader.close()
    for path in (tmp_path / "b.db", db):
        made = ledger(log, path)
        await made.open()
        await made.append([mixed(made._index.head + 1)], [])
        await made.close()
        assert await difference(log, path) == ""
    assert value_of(tmp_path / "b.db", "token") == value_of(tmp_path / "a.db", "token")
    again = await open_or_make(log, tmp_path / "b.db")
    await again.forget_dropped()  # the next pass finishes the drop
    assert await first_of(log) > 12
    await again.close()


@pytest.mark.usefixtures("small_bases")
async def test_a_drop_that_is_refused_keeps_nobody_from_writing(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, db = server.url("lab"), tmp_path / "a.db"
    leader = ledger(log, db)
    await leader.open()
    for seq in range(1, 12):
        await leader.append([mixed(seq)], [])
    await leader.forget_dropped()
    await leader.trim(Trim(messages_before=9999, records_before=9999, pinned=12))

    async def refuse(_: int) -> bool:
        raise LedgerError("You may not delete.")

    with monkeypatch.context() as patch:
        patch.setattr(leader._log.shared, "drop", refuse)
        await leader.forget_dropped()
    await leader.append([mixed(12)], [])
    await leader.verify()
    assert await first_of(log) == 1
    await leader.forget_dropped()
    assert await first_of(log) > 1
    await leader.close()
    assert await difference(log, db) == ""


@pytest.mark.usefixtures("small_bases")
async def test_a_node_that_is_behind_is_compared_with_what_the_log_still_has_and_is_told_where_it_begins(
    server: LogServer, tmp_path: Path
) -> None:
    log, a, b, c = server.url("lab"), *(tmp_path / f"{name}.db" for name in "abc")
    leader = ledger(log, a)
    await leader.open()
    for seq in range(1, 12):
        await leader.append([mixed(seq)], [TableWrite("call", f"ann/c{seq}", CallResult("d", seq, Raw(b"{}")))])
    await rebuild_index(make_shared_log(log), c)
    await leader.expire_calls(6)
    await leader.forget_dropped()
    await leader.append([mixed(12)], [])
    await rebuild_index(make_shared_log(log), b)  # the index has the snapshot, but not the records dropped after it
    await leader.trim(Trim(messages_before=9999, records_before=9999, pinned=13))
    await leader.forget_dropped()
    assert await first_of(log) > 1
    assert await difference(log, b) == ""
    assert await difference(log, a) == ""
    assert "the log begins at" in await difference(log, c)
    with pytest.raises(UnusableLog, match=r"Move .*c.db away"):
        await rebuild_index(make_shared_log(log), c)
    await leader.close()


@pytest.mark.usefixtures("small_bases")
async def test_a_base_is_due_sooner_in_a_log_that_fills(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SNAPSHOT_EVERY_RECORDS", 10_000)
    monkeypatch.setattr(settings, "SNAPSHOT_MIN_RECORDS", 5)
    log = server.url("lab") + ("&" if "?" in server.url("lab") else "?") + f"max_bytes={1 << 20}"
    leader = ledger(log, tmp_path / "a.db")
    await leader.open()
    head = 0
    for _ in range(40):  # several times the maximum
        for _ in range(5):
            head += 1
            await leader.append([message(head, "ann", "agent:bob", thread="t" * 3_000)], [])
        await leader.trim(Trim(messages_before=1000 + head, pinned=head))
        await leader.forget_dropped()
        await leader.trim(Trim(records_before=1000 + head, pinned=head))
        await leader.forget_dropped()
    assert await first_of(log) > 100
    await leader.close()
    assert await difference(log, tmp_path / "a.db") == ""


async def append_on(made: ReplicatedLedger, seq: int) -> None:
    for number in itertools.count(seq):
        await made.append([message(number, "ann", "agent:bob", thread="t" * 3_000)], [])


@pytest.mark.usefixtures("small_bases")
async def test_a_log_that_is_full_of_what_nobody_needs_is_led_again(server: LogServer, tmp_path: Path) -> None:
    log = server.url("lab") + ("&" if "?" in server.url("lab") else "?") + f"max_bytes={1 << 20}"
    leader = ledger(log, tmp_path / "a.db")
    await leader.open()
    for seq in range(1, 31):
        await leader.append([message(seq, "ann", "agent:bob", thread="t" * 3_000)], [])
    await leader.forget_dropped()
    await leader.trim(Trim(messages_before=1031, records_before=1031, pinned=31))
    with pytest.raises(LogFull):
        await append_on(leader, 31)
    await leader.close()
    async with asyncio.timeout(20):
        await leader.open()
    assert await first_of(log) > 30
    await leader.append([message(leader._index.head + 1, "ann", "agent:bob")], [])
    await leader.close()


async def append_on_to(made: ReplicatedLedger, seq: int, last: int) -> None:
    for number in range(seq, last + 1):
        await made.append([message(number, "ann", "agent:bob", thread="t" * 3_000)], [])


async def test_a_few_old_rows_wait_for_others_and_many_do_not(
    server: LogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SMALL_TRIM_INTERVAL_S", 1000.0)
    leader = ledger(server.url("lab"), tmp_path / "a.db")
    await leader.open()
    await append_on_to(leader, 1, 30)
    for before, limit, dropped in ((5, 9, 4), (10, 9, 0), (25, 9, 9), (25, 9, 9), (25, 9, 0)):
        done = await leader.trim(Trim(messages_before=1000 + before, pinned=30, limit=limit))
        assert done.dropped == dropped, before
    await leader.close()
