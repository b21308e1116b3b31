"""Tests of promise P1 under power loss: the real ledger on a disk that forgets unsynced data. docs/promises.md.

A hub runs several times, and is stopped or killed each time, while every operation on its files is recorded. Then the
power fails at thousands of points of the recording, half of them within checkpoints. At each point, the files are
written as a crash may leave them, and the ledger is opened on them. Without syncs, the same setup must lose messages.
Otherwise, the tests would prove nothing for ``full``.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from roundelay.network.client.values import Stored
from roundelay.network.ledger.database_lock import DatabaseLock, HeadFile
from roundelay.network.ledger.sqlite import Durability
from tests.crash.lives import Answered, Found, Key, look, open_network, say_all
from tests.crash.power import LOSSES, Disk, Event, Journal, Mark, Sync, Write, write_files
from tests.crash.sqlite_files import FULL, IOERR_FSYNC, OK, watched_files
from tests.support.counts import Note

SENDERS = [f"s{number}" for number in range(20)]
LIVES = 3
DB = "team.db"
CHECKPOINT_PAGES = 60
"""Checkpoint size of these runs. The runs store too little to reach the normal size."""


@dataclass(frozen=True)
class Begun:
    """Mark of a hub that is ready."""

    epoch: str


@dataclass
class Tally:
    points: int = 0
    within_checkpoints: int = 0
    """Number of points at which a part of the log's pages was in the database but not synced."""
    acknowledged: int = 0
    lost: int = 0
    losing_points: int = 0
    damaged: int = 0
    silent: int = 0
    """Number of points that lost data although the epoch says that nothing was lost."""
    repeated: int = 0

    def counts(self, name: str) -> dict[str, Any]:
        return {
            f"{name}_crash_points": self.points,
            f"{name}_acknowledged": self.acknowledged,
            f"{name}_lost": self.lost,
            f"{name}_points_with_loss": self.losing_points,
            f"{name}_damaged_files": self.damaged,
        }


@contextmanager
def _watched_head(journal: Journal) -> Iterator[None]:
    """Record the changes to the file next to the database, which SQLite does not know."""
    begin, write = DatabaseLock.start_head, DatabaseLock.write_head
    name = f"{DB}.head"

    def start_head(files: DatabaseLock, content: HeadFile) -> None:
        begin(files, content)
        journal.write(name, 0, files.path.with_name(name).read_bytes())
        journal.sync(name)

    def write_head(files: DatabaseLock, epoch: str, head: int) -> None:
        write(files, epoch, head)
        journal.write(name, 0, files.path.with_name(name).read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseLock, "start_head", start_head)
        patch.setattr(DatabaseLock, "write_head", write_head)
        yield


def _find_checkpoints(events: Sequence[Event]) -> list[int]:
    """Return the indexes of events during checkpoints, when the database is written but not yet synced."""
    places, is_under_way = [], False
    for index, event in enumerate(events):
        if is_under_way:
            places.append(index)
        match event:
            case Write(name) if name == DB:
                is_under_way = True
            case Sync(name) if name == DB:
                is_under_way = False
    return places


class Run:
    """Several runs of one network. The network is crashed at ``points`` places after each run, half of them within
    checkpoints.
    """

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
            with watched_files(home, journal), _watched_head(journal):
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

        async with open_network(db, durability=self._durability, checkpoint_pages=CHECKPOINT_PAGES) as network:
            journal.mark(Begun(network.hub.epoch))
            sending = []
            for sender in SENDERS:
                mine = {key[1]: text for key, text in self._texts.items() if key[0] == sender}
                sending.append(say_all(await network.join(sender), mine, self._random, keep, max_pause_s=0.003))
            await asyncio.gather(*sending)

    async def _replay(self, events: list[Any]) -> None:
        points = self._random.choices(range(len(events) + 1), k=self._points - self._points // 2)
        within = _find_checkpoints(events)
        points = sorted(points + self._random.choices(within, k=self._points // 2))
        self.tally.within_checkpoints += sum(point in within for point in points)
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
        with watched_files(folder, Journal()):  # for speed: no sync has to reach a disk here
            found = await look(folder / DB, self._durability)
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
        """Let every sender repeat all its messages: stored ones keep their seq, and the others are stored now."""

        def check(key: Key, stored: Stored) -> None:
            seq = found.by_key.get(key)
            assert stored.duplicate == (seq is not None)
            assert stored.seq == seq or (seq is None and stored.seq > len(found.seqs))
            self.tally.repeated += 1

        async with open_network(db) as network:
            sending = []
            for sender in SENDERS:
                mine = {key[1]: text for key, text in self._texts.items() if key[0] == sender}
                sending.append(say_all(await network.join(sender), mine, self._random, check))
            await asyncio.gather(*sending)


async def _prove(folder: Path, note: Note, *, runs: int, sayings: int, points: int) -> None:
    tallies: dict[str, Tally] = {}
    for durability in ("full", "normal", "memory"):
        tally = tallies[durability] = Tally()
        for seed in range(runs):
            run = Run(folder / f"{durability}{seed}", durability, seed, sayings=sayings, points=points)
            one = await run.crash_everywhere()
            for name in (
                "points",
                "within_checkpoints",
                "acknowledged",
                "lost",
                "losing_points",
                "damaged",
                "silent",
                "repeated",
            ):
                setattr(tally, name, getattr(tally, name) + getattr(one, name))
        note(**tally.counts(durability), **{f"{durability}_within_checkpoints": tally.within_checkpoints})
    full, normal, off = tallies.values()
    assert full.acknowledged > 0
    assert full.within_checkpoints >= full.points // 2
    assert (full.lost, full.damaged) == (0, 0)
    assert full.repeated > 0
    assert normal.lost > 0
    assert off.lost > 0
    assert normal.damaged == 0  # NORMAL loses the newest data, but damages nothing
    assert normal.silent == 0  # every loss is detected


async def test_no_acknowledged_message_is_lost_by_power_loss(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path, note, runs=1, sayings=3, points=10)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_no_acknowledged_message_is_lost_by_power_loss_at_1000_points(tmp_path: Path, note: Note) -> None:
    await _prove(tmp_path, note, runs=4, sayings=8, points=90)


async def test_a_power_cut_at_any_write_of_a_checkpoint_loses_nothing(tmp_path: Path, note: Note) -> None:
    journal, random, home = Journal(), Random(0), tmp_path / "home"
    home.mkdir()
    sayings = {f"m{number}": "x" * 300 for number in range(40)}

    def keep(key: Key, stored: Stored) -> None:
        journal.mark(Answered(key, stored.seq))

    with watched_files(home, journal), _watched_head(journal):
        async with open_network(home / DB, checkpoint_pages=CHECKPOINT_PAGES) as network:
            journal.mark("begun")
            await say_all(await network.join("ann"), sayings, random, keep)
            journal.mark("said")
    begun, said = (journal.events.index(Mark(what)) for what in ("begun", "said"))
    within = {index for index in _find_checkpoints(journal.events) if begun < index < said}
    disk, answered, opened = Disk(), dict[Key, int](), 0
    for index, event in enumerate(journal.events[:said]):
        for loss in LOSSES if index in within else ():
            write_files(tmp_path / "crashed", disk.after(loss, random))
            with watched_files(tmp_path / "crashed", Journal()):
                found = await look(tmp_path / "crashed" / DB, "full")
            assert found is not None, f"{loss} at {index} of {begun} to {said}"
            assert (found.is_intact, answered.items() - found.by_key.items()) == (True, set())
            shutil.rmtree(tmp_path / "crashed")
            opened += 1
        disk.take(event)
        match event:
            case Mark(Answered(key, seq)):
                answered[key] = seq
    assert opened >= 50
    note(crashes_within_checkpoints=opened, acknowledged=len(answered), lost=0)


def _fail_syncs(count: int) -> Callable[[Event], int]:
    """Return a `Decide` that fails this number of syncs, and then succeeds."""
    left = iter(range(count))

    def decide(event: Event) -> int:
        return IOERR_FSYNC if isinstance(event, Sync) and next(left, None) is not None else OK

    return decide


def _fail_sometimes(random: Random) -> Callable[[Event], int]:
    """Return a `Decide` that sometimes fails a burst of syncs and writes."""
    left = 0

    def decide(event: Event) -> int:
        nonlocal left
        if not isinstance(event, Sync | Write):
            return OK
        if left == 0 and random.random() < 0.01:
            left = random.randint(1, 5)
        if left == 0:
            return OK
        left -= 1
        return IOERR_FSYNC if isinstance(event, Sync) else FULL

    return decide


async def _survive(folder: Path, decide: Callable[[Event], int], random: Random, tally: Tally) -> int:
    """Run a hub on a failing disk that then loses power at some points. Return the number of the hub's recoveries."""
    home = folder / "home"
    home.mkdir(parents=True)
    journal = Journal()
    answered: dict[Key, int] = {}

    def keep(key: Key, stored: Stored) -> None:
        journal.mark(Answered(key, stored.seq))

    with watched_files(home, journal), _watched_head(journal):
        async with open_network(home / DB, checkpoint_pages=50) as network:
            clients = [await network.join(sender) for sender in SENDERS[:5]]
            for turn in range(2):
                sayings = {f"m{turn}-{number}": "x" * random.randint(1, 2000) for number in range(10)}
                await asyncio.gather(*(say_all(client, sayings, random, keep) for client in clients))
                journal.decide = decide
            journal.decide = None
            recoveries = network.hub.registry.counts["recoveries"]
            journal.mark("closing")
    closing = journal.events.index(Mark("closing"))
    points = {*random.sample(range(closing), 5), closing}
    disk = Disk()
    for index, event in enumerate(journal.events):
        disk.take(event)
        match event:
            case Mark(Answered(key, seq)):
                answered[key] = seq
        if index in points:
            write_files(folder / "crashed", disk.after("all_unsynced", random))
            found = await look(folder / "crashed" / DB, "full")
            shutil.rmtree(folder / "crashed")
            tally.points += 1
            tally.acknowledged += len(answered)
            tally.lost += sum(found is None or found.by_key.get(key) != seq for key, seq in answered.items())
            tally.damaged += found is None or not found.is_intact
    return recoveries


async def _prove_failing_disks(folder: Path, note: Note, deciders: Sequence[Callable[[Event], int]]) -> None:
    tally, recoveries = Tally(), 0
    for number, decide in enumerate(deciders):
        recoveries += await _survive(folder / str(number), decide, Random(number), tally)
    note(disks=len(deciders), recoveries=recoveries, **tally.counts("failing_disk"))
    assert recoveries >= len(deciders)
    assert tally.acknowledged > 0
    assert (tally.lost, tally.damaged) == (0, 0)


async def test_what_is_acknowledged_after_failed_syncs_outlives_a_power_loss(tmp_path: Path, note: Note) -> None:
    await _prove_failing_disks(tmp_path, note, [_fail_syncs(count) for count in range(1, 8)])


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_what_is_acknowledged_on_100_failing_disks_outlives_a_power_loss(tmp_path: Path, note: Note) -> None:
    deciders = [_fail_syncs(count) for count in range(1, 20)] + [_fail_sometimes(Random(seed)) for seed in range(81)]
    await _prove_failing_disks(tmp_path, note, deciders)
