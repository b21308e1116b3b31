"""Tests of commands that read foreign files: endless databases, huge rows, and devices."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from roundelay.app import Network
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import backup, integrity, schema
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.integrity import check_file
from tests.support.command import invoke, run

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.fixture
async def db(tmp_path: Path) -> Path:
    """A ledger with one message that no process has open."""
    path = tmp_path / "team.db"
    async with Network.open(path) as network:
        await (await network.join("mia", kind="human")).broadcast("hello")
    return path


def beside(path: Path) -> set[str]:
    return {it.name for it in path.parent.iterdir() if it.name.startswith(path.name)}


def content(path: Path) -> bytes:
    return path.read_bytes()


def make_endless(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        kept = db.execute("PRAGMA journal_mode = DELETE").fetchone()
        assert kept == ("delete",)
        db.execute(f"ALTER TABLE {table} RENAME TO was_{table}")
        db.execute(f"CREATE VIEW {table} AS {ENDLESS} SELECT {', '.join(f'i AS {it}' for it in columns)} FROM n")
        db.commit()


@pytest.mark.parametrize(
    "table", ["log", *(pytest.param(it, marks=pytest.mark.full) for it in ("state", "meta", "key", "place"))]
)
async def test_a_database_with_a_view_in_the_place_of_a_table_is_refused(db: Path, table: str) -> None:
    make_endless(db, table)
    async with asyncio.timeout(60):
        for words in (
            ["doctor", "--db", str(db)],
            ["view", "--no-open", str(db)],
            ["threads", "--db", str(db)],
            ["export", "--db", str(db)],
            ["backup", "--db", str(db), str(db.with_name("copy.db"))],
        ):
            done = await run(*words, cwd=db.parent, code=None)
            assert done.code != 0, words
            assert "is a view" in done.out + done.err, (words, done.out, done.err)
    assert not db.with_name("copy.db").exists()


async def test_a_row_beyond_all_measure_is_named_and_not_read(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(db)) as file:
        file.execute("UPDATE log SET data = CAST(zeroblob(4194304) AS TEXT) WHERE seq = 2")
        file.commit()
    for module in (schema, backup, integrity):
        monkeypatch.setattr(module, "MAX_READ_BYTES", 1024 * 1024)
    try:
        problems = check_file(db)
    except LedgerError as error:
        problems = [str(error)]
    assert any("#2" in it or "larger than 1 MiB" in it or "too big" in it for it in problems), problems
    with pytest.raises(LedgerError):
        back_up(db, db.with_name("copy.db"))
    assert not db.with_name("copy.db").exists()


async def test_doctor_and_backup_put_nothing_beside_a_database_that_nobody_has_open(db: Path) -> None:
    known = beside(db)
    assert not {f"{db.name}-wal", f"{db.name}-shm"} & known
    before = content(db)
    await invoke("doctor", "--db", str(db), cwd=db.parent)
    await invoke("backup", "--db", str(db), str(db.parent / "copied.db"), cwd=db.parent)
    await invoke("threads", "--db", str(db), cwd=db.parent)
    assert (beside(db), content(db)) == (known, before)
    assert beside(db.parent / "copied.db") == {"copied.db"}


@pytest.mark.parametrize(
    "words",
    [
        ["agent", "try", "/dev/zero", "hi"], ["agent", "run", "/dev/zero"], ["up", "/dev/zero"], ["doctor", "/dev/zero"],
        ["config", "show", "/dev/zero"], ["rights", "show", "--file", "/dev/zero", "--as", "ann"], ["scenario", "run", "/dev/zero"],
    ],
)  # fmt: skip
async def test_a_device_without_end_is_refused(tmp_path: Path, words: list[str]) -> None:
    async with asyncio.timeout(30):
        done = await run(*words, cwd=tmp_path, code=None)
    assert done.code != 0
    assert "/dev/zero" in done.out + done.err
