"""Tests of schema migrations that are killed, lose power or find no space: the file is in the state before or after a
step, never in between.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import UNSET, Raw

from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.sending import message_row
from roundelay.network.core.tables import LookupRequest
from roundelay.network.errors import LedgerError
from roundelay.network.frames import SendFrame
from roundelay.network.ledger import KeyTaken, Trim, integrity, queries, retention, writes
from roundelay.network.ledger import schema as migrations
from roundelay.network.ledger.integrity import check_file
from roundelay.network.ledger.log_file import read_log
from roundelay.network.ledger.row_encoding import hash_bytes, hash_key
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.power import LOSSES, Disk, Event, Journal, Loss, Write, write_files
from tests.crash.sqlite_files import FULL, OK, watched_files
from tests.support.counts import Note

DB = "team.db"
ROWS = 200
STEP = """
CREATE TABLE more (seq INTEGER PRIMARY KEY, words TEXT NOT NULL);
ALTER TABLE log ADD COLUMN words TEXT;
UPDATE log SET words = 'about ' || seq;
INSERT INTO more SELECT seq, words FROM log;
CREATE INDEX log_words ON log (words);
"""
BEFORE = migrations.SCHEMA_VERSION
AFTER = BEFORE + 1


@pytest.fixture
def add_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that adds one more migration step."""

    def add() -> None:
        monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, STEP))
        monkeypatch.setattr(migrations, "SCHEMA_VERSION", AFTER)

    return add


def _rows() -> list[Row]:
    return [
        Row(seq=seq, at=seq, type="message", actor="ann", key=f"m:{seq}", target="broadcast", stream="broadcast", data=b"x" * 50)
        for seq in range(1, ROWS + 1)
    ]  # fmt: skip


async def _open_and_close(db: Path, rows: list[Row] | None = None) -> int:
    """Open a ledger as a hub does, and append these rows. Return the ledger's previous head."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "epoch")
    try:
        meta, _ = await ledger.open()
        if rows:
            await ledger.append(rows, [])
        return meta.head
    finally:
        await ledger.close()


def _state(db: Path) -> tuple[int, frozenset[str], int, int]:
    """Return the version, the schema, the number of rows in the log, and the number of rows that the step has
    changed.
    """
    with closing(sqlite3.connect(db)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        schema = frozenset(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))
        if not schema:
            return version, schema, 0, 0
        (rows,) = connection.execute("SELECT count(*) FROM log").fetchone()
        written = 0
        if any("CREATE TABLE more" in sql for sql in schema):
            (written,) = connection.execute("SELECT count(*) FROM more JOIN log USING (seq, words)").fetchone()
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return version, schema, rows, written


def _schema_of(version: int) -> frozenset[str]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.create_function("checksum", -1, lambda *_: 0)
        connection.create_function("hash_key", 2, lambda *_: 0)
        for step in migrations.STEPS[:version]:
            connection.executescript(step)
        return frozenset(sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))


async def _prove(folder: Path, note: Note, add_step: Callable[[], None], *, losses: tuple[Loss, ...]) -> None:
    home, journal, random = folder / "home", Journal(), Random(0)
    home.mkdir()
    with watched_files(home, journal):
        await _open_and_close(home / DB)
        made = len(journal.events)
        _, old, _, _ = _state(home / DB)
        await _open_and_close(home / DB, _rows())
        filled = len(journal.events)
        add_step()
        await _open_and_close(home / DB)
        version, new, rows, written = _state(home / DB)
    assert (version, rows, written) == (AFTER, ROWS, ROWS)
    assert old < new or len(old) < len(new)
    assert (old, new) == (_schema_of(BEFORE), _schema_of(AFTER))
    seen = dict.fromkeys(range(AFTER + 1), 0)
    disk = Disk()
    crashed = folder / "crashed"
    for index, event in enumerate(journal.events):
        if index <= made or index >= filled:
            for loss in losses:
                write_files(crashed, disk.after(loss, random))
                with watched_files(crashed, Journal()):
                    version, schema, rows, written = _state(crashed / DB)
                    assert schema == _schema_of(version)
                    assert rows == (0 if index <= made else ROWS)
                    assert written == (rows if version == AFTER else 0)
                    seen[version] += 1
                    assert await _open_and_close(crashed / DB) == rows  # the migration continues from there
                    assert _state(crashed / DB) == (AFTER, new, rows, rows)
                shutil.rmtree(crashed)
        disk.take(event)
    note(crash_points=sum(seen.values()), empty=seen[0], before=seen[BEFORE], after=seen[AFTER], between=0)
    assert min(seen.values()) > 0


async def test_a_step_that_loses_its_power_leaves_the_file_before_or_after_it(
    tmp_path: Path, note: Note, add_step: Callable[[], None]
) -> None:
    await _prove(tmp_path, note, add_step, losses=("a_random_half",))


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_step_that_is_crashed_in_every_way_leaves_the_file_before_or_after_it(
    tmp_path: Path, note: Note, add_step: Callable[[], None]
) -> None:
    await _prove(tmp_path, note, add_step, losses=("unharmed", *LOSSES))


_KILLED_EVERYWHERE = """
import os, shutil, signal, sqlite3, sys
from roundelay.network.ledger import schema as migrations

filled, copy, step, kills = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
migrations.STEPS, migrations.SCHEMA_VERSION = (*migrations.STEPS, step), migrations.SCHEMA_VERSION + 1

def migrate_with(handler):
    shutil.copy(filled, copy)
    db = sqlite3.connect(copy, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.set_progress_handler(handler, 1)
    migrations.migrate(db)
    db.set_progress_handler(None, 0)
    return db

class KillAt:
    def __init__(self, step):
        self.left = step

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

steps = []
migrate_with(lambda: steps.append(None)).close()
for kill in range(kills):
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(copy + suffix):
            os.unlink(copy + suffix)
    child = os.fork()
    if child == 0:
        migrate_with(KillAt(len(steps) * (kill + 1) // kills))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    db = sqlite3.connect(copy)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name = 'more' OR name LIKE '%words'")]
    columns = [row[1] for row in db.execute("PRAGMA table_xinfo(log)")]
    db.close()
    print(os.WTERMSIG(status), version, len(tables), "words" in columns)
"""


def test_a_process_killed_in_a_step_leaves_the_file_before_or_after_it(tmp_path: Path, note: Note) -> None:
    kills = 40
    asyncio.run(_open_and_close(tmp_path / DB, _rows()))
    script = [sys.executable, "-c", _KILLED_EVERYWHERE, str(tmp_path / DB), str(tmp_path / "copy.db"), STEP, str(kills)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    found = [tuple(line.split()) for line in done.stdout.splitlines()]
    killed = sum(signal == "9" for signal, *_ in found)
    between = [line for line in found if line[1:] not in ((str(BEFORE), "0", "False"), (str(AFTER), "2", "True"))]
    note(kills=killed, before=sum(line[1] == str(BEFORE) for line in found), between=len(between))
    assert killed == kills
    assert between == []


async def test_a_step_that_finds_no_room_says_so_and_goes_on_when_there_is(
    tmp_path: Path, note: Note, add_step: Callable[[], None]
) -> None:
    await _open_and_close(tmp_path / DB, _rows())
    before = _state(tmp_path / DB)
    add_step()
    refusals = 0
    journal = Journal()
    with watched_files(tmp_path, journal):
        while _state(tmp_path / DB) == before:
            journal.decide = _let_pass(refusals * 3)
            with pytest.raises(
                LedgerError, match="no space is left on its disk"
            ):  # the error names the first reason, and not a consequence
                await _open_and_close(tmp_path / DB)
            refusals += 1
            journal.decide = None
        await _open_and_close(tmp_path / DB)
    note(refusals=refusals)
    assert refusals > 3
    version, _, *rows = _state(tmp_path / DB)
    assert (version, rows) == (AFTER, [ROWS, ROWS])


def _let_pass(writes: int) -> Callable[[Event], int]:
    """Return a `Decide` that fails with a full disk after this number of writes."""
    left = iter(range(writes))

    def decide(event: Event) -> int:
        return FULL if isinstance(event, Write) and next(left, None) is None else OK

    return decide


async def test_who_knows_nothing_of_closed_channels_and_cut_sessions_refuses_the_file(tmp_path: Path) -> None:
    await _open_and_close(tmp_path / DB)
    assert _state(tmp_path / DB)[0] > 2  # with schema 2, all channels were open


@pytest.mark.parametrize("sql", ["CREATE TABLE notes (text)", "PRAGMA user_version = 99"])
async def test_a_database_that_is_refused_stays_as_it_was(tmp_path: Path, sql: str) -> None:
    with closing(sqlite3.connect(tmp_path / DB)) as connection:
        connection.execute(sql)
    before = (tmp_path / DB).read_bytes()
    with pytest.raises(LedgerError, match=r"of another program|Upgrade Roundelay"):
        await _open_and_close(tmp_path / DB)
    assert os.listdir(tmp_path) == [DB]
    assert (tmp_path / DB).read_bytes() == before


# --- migration to the layout that stores each fact once


def _said(seq: int, **fields: Any) -> Row:
    """Return a message as a hub stores it."""
    sender, name = ("ann", "bob") if seq % 3 else ("bob", "ann")
    to, kind, thread = (
        (f"agent:{name}", "direct", "direct:ann~bob") if seq % 5 else ("channel:dev", "channel", "channel:dev")
    )
    cause = seq - 1 if seq % 4 == 0 else None
    head = MessageHead(
        seq=seq, sender_id=sender, sender_kind="agent", kind=kind, to=to, thread_id=thread, root=cause or seq, hops=int(bool(cause)),
        label=cause or seq, cause=cause, excluded=("cid",) if seq % 7 == 0 else (),
    )  # fmt: skip
    frame = SendFrame(
        message_id=fields.pop("message_id", f"{seq:032x}"), to=to, content=Raw(b'"what \\u00e9 is said"'), reply_to=cause or UNSET, cause=cause or UNSET, **fields
    )  # fmt: skip
    return message_row(head, frame, 1_700_000_000_000 + seq, sender, f"m:{frame.message_id}")


def _recorded(seq: int) -> Row:
    return Row(seq=seq, at=1_700_000_000_000 + seq, type="record", actor="bob", key=f"r:{seq}", stream="r", label="result", digest="d", data=b'{"n":1}')  # fmt: skip


SAID = [_recorded(seq) if seq % 10 == 0 else _said(seq) for seq in range(1, ROWS + 1)]


def _write_v6(db: Path) -> None:
    """Write a file of schema version 6, the version before."""
    with closing(sqlite3.connect(db)) as connection:
        connection.create_function("checksum", -1, lambda *columns: migrations.checksum(columns))
        for step in migrations.STEPS[:6]:
            connection.executescript(step)
        for row in SAID:
            columns = (
                row.seq, row.at, row.type, row.actor, row.key or None, row.target or None, row.stream or None, row.label or None,
                json.dumps(row.excluded) if row.excluded else None, row.digest or None,
                msgspec.json.encode(row.head).decode() if row.head else None, row.data.decode(),
            )  # fmt: skip
            marks = ",".join("?" * (len(columns) + 1))
            connection.execute(
                f"INSERT INTO log ({migrations.ROW_COLUMNS}) VALUES ({marks})",
                (*columns, migrations.checksum(columns)),
            )
        meta = [("epoch", "epoch"), ("state", "clean"), ("checked_from", "1")]
        connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", [(*it, migrations.checksum(it)) for it in meta]
        )
        connection.execute("PRAGMA user_version = 6")
        connection.commit()


def _where(db: Path) -> tuple[list[Any], list[Any]]:
    """Return the keys and places of all rows by the index tables."""
    with closing(sqlite3.connect(db)) as connection:
        return (
            connection.execute(f"{queries.KEYS} ORDER BY 1, 2").fetchall(),
            connection.execute("SELECT place, seq FROM place ORDER BY 1, 2").fetchall(),
        )


async def _read_everything(db: Path) -> list[Any]:
    ledger = SQLiteLedger(db, new_epoch=lambda: "new")
    meta, _ = await ledger.open()
    assert (meta.epoch, meta.head) == ("epoch", ROWS)
    spans = [Span("agent:bob", 0), Span("channel:dev", 3, 50)]
    facts = await ledger.lookup(LookupRequest({(row.actor, row.key) for row in SAID}, {3, 4, 7}, set()))
    read = [
        await ledger.rows(0, 999), await ledger.inbox(spans, "bob", 2, 190, 33), await ledger.inbox(spans, "bob", 2, 190, 33, newest=True),
        await ledger.thread("direct:ann~bob", limit=50), await ledger.thread("channel:dev", after=9, limit=5, newest=False),
        await ledger.reaction("r", 20, 5), await ledger.reaction("r", 0, 99, actor="ann"), await ledger.records("bob", "result", 0, 9, reaction="r"),
        await ledger.threads(spans, "bob"), await ledger.threads(spans, "bob", among=["channel:dev"]), await ledger.all_threads(),
        await ledger.newest_heads({"direct:ann~bob": 5}, 9), await ledger.search(["said"], spans, "bob", limit=7),
        sorted(facts.stored.items()), sorted(facts.heads.items()),
    ]  # fmt: skip
    with pytest.raises(KeyTaken):
        await ledger.append([msgspec.structs.replace(SAID[5], seq=ROWS + 1)], [])
    await ledger.close()
    return read


async def test_a_file_of_the_version_before_says_the_same_and_finds_the_same(tmp_path: Path) -> None:
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    _write_v6(old)
    assert check_file(old) == []
    assert [row.seq for row in read_log(old)[1]] == list(range(1, ROWS + 1))  # offline commands migrate nothing
    ledger = SQLiteLedger(new, new_epoch=lambda: "epoch")
    await ledger.open()
    await ledger.append(SAID, [])
    await ledger.close()
    assert await _read_everything(old) == await _read_everything(new)
    assert read_log(old)[1] == read_log(new)[1] == SAID
    assert _where(old) == _where(new)
    assert (check_file(old), check_file(new)) == ([], [])
    assert new.stat().st_size < old.stat().st_size
    for db in (old, new):  # dropped and damaged rows are in neither table
        with closing(sqlite3.connect(db)) as connection:
            connection.execute("UPDATE log SET actor = 'bad' WHERE seq = 6")
            connection.commit()
        ledger = SQLiteLedger(db, new_epoch=lambda: "new")
        await ledger.open()
        await ledger.trim(Trim(messages_before=1_700_000_000_100, records_before=1_700_000_000_100, pinned=ROWS))
        await ledger.close()
        assert {seq for _, seq in [*_where(db)[0], *_where(db)[1]]} == set(range(100, ROWS + 1))
        assert check_file(db) == []


def test_a_process_killed_on_its_way_to_the_layout_leaves_the_file_before_or_after_it(
    tmp_path: Path, note: Note
) -> None:
    kills = 40
    _write_v6(tmp_path / DB)
    script = _KILLED_EVERYWHERE.replace('"PRAGMA table_xinfo(log)"', '"PRAGMA table_xinfo(place)"').replace(
        "(*migrations.STEPS, step), migrations.SCHEMA_VERSION + 1", "migrations.STEPS[:7], 7"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / DB), str(tmp_path / "copy.db"), "", str(kills)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    found = [tuple(line.split()) for line in done.stdout.splitlines()]
    note(killed=sum(signal == "9" for signal, *_ in found), before=sum(line[1] == "6" for line in found))
    assert [signal for signal, *_ in found] == ["9"] * kills
    assert {line[1] for line in found} <= {"6", "7"}
    shutil.copy(tmp_path / "copy.db", tmp_path / "last.db")
    with closing(sqlite3.connect(tmp_path / "last.db")) as connection:
        migrations.migrate(connection)  # the migration continues from there
    assert len(_where(tmp_path / "last.db")[0]) == ROWS


async def test_keys_with_one_hash_are_as_many_as_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker can create IDs with the same hash. Such IDs are stored, deduplicated and dropped like all others."""
    for module in (queries, writes, retention, integrity):
        monkeypatch.setattr(module, "hash_key", lambda actor, key: 5)
    ledger = SQLiteLedger(tmp_path / DB, new_epoch=lambda: "epoch")
    await ledger.open()
    rows = [_said(seq) for seq in range(1, 21)]
    await ledger.append(rows[:1], [])
    await ledger.append(rows[1:9], [])
    for row in rows[:9]:
        with pytest.raises(KeyTaken):
            await ledger.append([msgspec.structs.replace(row, seq=10)], [])
    await ledger.append(rows[9:], [])
    wanted = LookupRequest({*((row.actor, row.key) for row in rows), ("ann", "m:new")}, set(), set())
    assert (await ledger.lookup(wanted)).stored == {(row.actor, row.key): row for row in rows}
    await ledger.close()  # then only the tables say where the rows are
    await ledger.open()
    dropped = await ledger.trim(Trim(messages_before=rows[5].at, records_before=rows[5].at, pinned=20))
    assert dropped.dropped == 5
    assert (await ledger.lookup(wanted)).stored == {(row.actor, row.key): row for row in rows[5:]}
    for row in rows[5:]:  # these rows include the key that was promoted when another one was dropped
        with pytest.raises(KeyTaken):
            await ledger.append([msgspec.structs.replace(row, seq=21)], [])
    again = msgspec.structs.replace(rows[0], seq=21)
    await ledger.append([again], [])
    assert (await ledger.lookup(wanted)).stored[again.actor, again.key].seq == 21
    await ledger.close()
    assert check_file(tmp_path / DB) == []


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("UPDATE place SET seq = 4000 WHERE seq = 4 AND place GLOB 'to/*'", "the table place does not match"),
        ("DELETE FROM key WHERE seq = 4", "the table key does not match"),
        ("UPDATE key SET hash = hash + 1000 WHERE seq = 4", "the table key does not match"),
    ],
)
async def test_what_no_longer_says_where_a_row_is_is_found(tmp_path: Path, harm: str, told: str) -> None:
    ledger = SQLiteLedger(tmp_path / DB, new_epoch=lambda: "epoch")
    await ledger.open()
    await ledger.append(SAID, [])
    await ledger.close()
    with closing(sqlite3.connect(tmp_path / DB)) as connection:
        assert connection.execute(harm).rowcount == 1
        connection.commit()
    assert [told in it for it in check_file(tmp_path / DB)] == [True]


async def test_what_cannot_be_left_out_stands_as_it_was_said(tmp_path: Path) -> None:
    odd = [
        _said(1, message_id='a"b'), _said(2, message_id="\u00e9"), msgspec.structs.replace(_said(3), data=b'{"seq":3}'),
        msgspec.structs.replace(_said(4), label="9"), msgspec.structs.replace(_said(5), key=""), msgspec.structs.replace(_said(6), at=5),
        _said(7, text_representation="x", requires_response=["bob"]), msgspec.structs.replace(_said(8), target="agent:cid"),
    ]  # fmt: skip
    ledger = SQLiteLedger(tmp_path / DB, new_epoch=lambda: "epoch")
    await ledger.open()
    await ledger.append(odd, [])
    assert await ledger.rows(0, 99) == odd
    await ledger.close()


def test_the_number_of_a_key_is_the_same_in_every_version() -> None:
    random, ordered = "m:" + "f3" * 16, "m:0193583fda00" + "9" * 20
    assert hash_key("ann", random) == hash_bytes(b"ann", random.encode()) == 2301337532284949483
    assert hash_key("ann", ordered) != hash_key("bob", ordered)
    assert 0 <= hash_bytes(b"ann", b"m:01 no time" + b"\xff" * 22) < 2**62
