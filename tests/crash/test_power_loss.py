"""P1 under power loss: the real ledger on a disk that forgets what was not synced. docs/promises.md.

A hub runs through several lives, ended in order or by a kill, while every operation on its files is written down. Then the power
fails at thousands of points of that recording: the files are laid out as a crash may leave them, and the ledger is opened on
them. The same rig must lose messages where they are not synced: else it would see nothing under ``full`` either.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from roundelay.network.errors import LedgerError
from roundelay.network.ledger_sqlite import Durability, SQLiteLedger
from roundelay.network.told import Stored
from tests.crash.conftest import Note
from tests.crash.lives import Key, open_network, say_all
from tests.crash.power import LOSSES, Disk, Journal, Mark, write_files
from tests.crash.sqlite_files import watched_files

SENDERS = [f"s{number}" for number in range(20)]
LIVES = 3
DB = "team.db"


@dataclass(frozen=True)
class Answered:
    """The mark of a `stored` that has arrived."""

    key: Key
    seq: int


@dataclass(frozen=True)
class Begun:
    """The mark of a hub that is ready."""

    epoch: str


@dataclass
class Found:
    """What a ledger holds after a crash."""

    epoch: str
    seqs: list[int]
    by_key: dict[Key, int]
    is_intact: bool


@dataclass
class Tally:
    points: int = 0
    acknowledged: int = 0
    lost: int = 0
    losing_points: int = 0
    damaged: int = 0
    silent: int = 0
    """Points that lost something under an epoch that says nothing was lost."""
    repeated: int = 0
    by_loss: dict[str, int] = field(default_factory=dict)

    def counts(self, name: str) -> dict[str, Any]:
        return {
            f"{name}_crash_points": self.points,
            f"{name}_acknowledged": self.acknowledged,
            f"{name}_lost": self.lost,
            f"{name}_points_with_loss": self.losing_points,
            f"{name}_damaged_files": self.damaged,
        }


class Run:
    """Several lives of one network, crashed at ``points`` places each time it has lived."""

    def __init__(self, folder: Path, durability: Durability, seed: int, *, sayings: int, points: int) -> None:
        self.tally = Tally()
        self._folder = folder
        self._durability = durability
        self._random = Random(seed)
        self._sayings = sayings
        self._points = points
        self._disk = Disk()
        self._answered: dict[Key, int] = {}
        self._epoch = ""
        self._texts: dict[Key, str] = {}
        self._numbers = itertools.count()

    async def crash_everywhere(self) -> Tally:
        for life in range(LIVES):
            home = self._folder / f"life{life}"
            write_files(home, self._disk.after("unharmed", self._random))
            journal = Journal()
            with watched_files(home, journal):
                await self._live(home / DB, journal, life)
            shutil.rmtree(home)
            assert sum(isinstance(event, Mark) for event in journal.events) > len(SENDERS)
            is_killed = life % 2 == 1
            end = self._random.randint(len(journal.events) // 2, len(journal.events)) if is_killed else None
            await self._replay(journal.events[:end])
        return self.tally

    async def _live(self, db: Path, journal: Journal, life: int) -> None:
        for sender in SENDERS:
            for number in range(self._sayings):
                size = self._random.choice((10, 10, 200, 200, 6000))
                self._texts[sender, f"m{life}-{number}"] = "x" * self._random.randint(1, size)

        def keep(key: Key, stored: Stored) -> None:
            before = self._answered.get(key)
            assert before is None or (stored.seq, stored.duplicate) == (before, True)
            journal.mark(Answered(key, stored.seq))

        async with open_network(db, durability=self._durability, checkpoint_pages=100) as network:
            journal.mark(Begun(network.hub.epoch))
            sending = []
            for sender in SENDERS:
                mine = {key[1]: text for key, text in self._texts.items() if key[0] == sender}
                sending.append(say_all(network, sender, mine, self._random, keep, max_pause_s=0.003))
            await asyncio.gather(*sending)

    async def _replay(self, events: list[Any]) -> None:
        points = sorted(self._random.choices(range(len(events) + 1), k=self._points))
        for index, event in enumerate(events):
            while points and points[0] == index:
                points.pop(0)
                await self._crash()
            self._disk.take(event)
            match event:
                case Mark(Answered(key, seq)):
                    self._answered[key] = seq
                case Mark(Begun(epoch)):
                    self._epoch = epoch
        for _ in points:
            await self._crash()

    async def _crash(self) -> None:
        tally = self.tally
        loss = LOSSES[tally.points % len(LOSSES)]
        folder = self._folder / "crashed"
        write_files(folder, self._disk.after(loss, self._random))
        found = await _look(folder / DB, self._durability)
        tally.points += 1
        tally.acknowledged += len(self._answered)
        lost = [key for key, seq in self._answered.items() if found is None or found.by_key.get(key) != seq]
        tally.lost += len(lost)
        tally.losing_points += bool(lost)
        tally.damaged += found is None or not found.is_intact
        if found is not None:
            tally.silent += bool(lost) and found.epoch == self._epoch
            if self._durability != "memory":
                assert found.seqs == list(range(1, len(found.seqs) + 1)), "the log has a hole"
                assert found.by_key.keys() <= self._texts.keys(), "the log holds what nobody sent"
            if self._durability == "full":
                assert not self._answered or found.epoch == self._epoch, "the epoch says that something was lost"
                if tally.points % 20 == 0:
                    await self._repeat_everything(folder / DB, found)
        shutil.rmtree(folder)

    async def _repeat_everything(self, db: Path, found: Found) -> None:
        """Every sender repeats all it ever sent: what is there keeps its seq, the rest is stored now."""

        def check(key: Key, stored: Stored) -> None:
            seq = found.by_key.get(key)
            assert stored.duplicate == (seq is not None)
            assert stored.seq == seq or (seq is None and stored.seq > len(found.seqs))
            self.tally.repeated += 1

        async with open_network(db) as network:
            sending = []
            for sender in SENDERS:
                mine = {key[1]: text for key, text in self._texts.items() if key[0] == sender}
                sending.append(say_all(network, sender, mine, self._random, check))
            await asyncio.gather(*sending)


async def _look(db: Path, durability: Durability) -> Found | None:
    """Open a ledger after a crash as a hub does, or give None when it cannot be opened."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed", durability=durability)
    try:
        meta, _ = await ledger.open()
        rows = await ledger.rows(0, 1_000_000)
    except LedgerError:
        return None
    finally:
        await ledger.close()
    connection = sqlite3.connect(db)
    try:
        is_intact = connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    except sqlite3.DatabaseError:
        is_intact = False
    finally:
        connection.close()
    messages = {(row.actor, row.key[2:]): row.seq for row in rows if row.type == "message"}
    return Found(meta.epoch, [row.seq for row in rows], messages, is_intact)


async def _prove(folder: Path, note: Note, *, runs: int, sayings: int, points: int) -> None:
    tallies: dict[str, Tally] = {}
    for durability in ("full", "normal", "memory"):
        tally = tallies[durability] = Tally()
        for seed in range(runs):
            run = Run(folder / f"{durability}{seed}", durability, seed, sayings=sayings, points=points)
            one = await run.crash_everywhere()
            for name in ("points", "acknowledged", "lost", "losing_points", "damaged", "silent", "repeated"):
                setattr(tally, name, getattr(tally, name) + getattr(one, name))
        note(**tally.counts(durability))
    full, normal, off = tallies.values()
    assert full.acknowledged > 0
    assert (full.lost, full.damaged) == (0, 0)
    assert full.repeated > 0
    assert normal.lost > 0
    assert off.lost > 0
    assert normal.damaged == 0  # NORMAL loses the newest, and breaks nothing
    assert normal.silent == 0  # and says so


async def test_no_acknowledged_message_is_lost_by_power_loss(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path, note, runs=1, sayings=3, points=20)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_no_acknowledged_message_is_lost_by_power_loss_at_1000_points(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path, note, runs=4, sayings=8, points=90)
