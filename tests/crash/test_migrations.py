"""A schema step that is killed, loses its power or finds no room has not happened: the file is as before, or as after."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from roundelay.network.core.tables import Row
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import schema as migrations
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
    """From here on there is one more step."""

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
    """Open a ledger as a hub does, append these rows; gives the head that it had."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "epoch")
    try:
        meta, _ = await ledger.open()
        if rows:
            await ledger.append(rows, [])
        return meta.head
    finally:
        await ledger.close()


def _state(db: Path) -> tuple[int, frozenset[str], int, int]:
    """Version, schema, rows of the log, and how many rows have what the step wrote."""
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
                    assert await _open_and_close(crashed / DB) == rows  # and it goes on from there
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
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE name LIKE '%more' OR name LIKE '%words'")]
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
            ):  # the first reason, not what followed from it
                await _open_and_close(tmp_path / DB)
            refusals += 1
            journal.decide = None
        await _open_and_close(tmp_path / DB)
    note(refusals=refusals)
    assert refusals > 3
    version, _, *rows = _state(tmp_path / DB)
    assert (version, rows) == (AFTER, [ROWS, ROWS])


def _let_pass(writes: int) -> Callable[[Event], int]:
    """A `Decide`: after so many writes there is no room."""
    left = iter(range(writes))

    def decide(event: Event) -> int:
        return FULL if isinstance(event, Write) and next(left, None) is None else OK

    return decide


async def test_who_knows_nothing_of_closed_channels_and_cut_sessions_refuses_the_file(tmp_path: Path) -> None:
    await _open_and_close(tmp_path / DB)
    assert _state(tmp_path / DB)[0] > 2  # with schema 2 all channels were open


@pytest.mark.parametrize("sql", ["CREATE TABLE notes (text)", "PRAGMA user_version = 99"])
async def test_a_database_that_is_refused_stays_as_it_was(tmp_path: Path, sql: str) -> None:
    with closing(sqlite3.connect(tmp_path / DB)) as connection:
        connection.execute(sql)
    before = (tmp_path / DB).read_bytes()
    with pytest.raises(LedgerError, match=r"something else|upgrade Roundelay"):
        await _open_and_close(tmp_path / DB)
    assert os.listdir(tmp_path) == [DB]
    assert (tmp_path / DB).read_bytes() == before
