"""A model of a disk that can lose power: the bytes of SQLite's files that are safe at any moment, and the possible
states of the other bytes after a crash.

`Journal` records every file operation of a run in order, with the test's own marks between them. `Disk` replays the
journal up to any point. A synced byte is safe. A crash keeps none of the unsynced bytes, or a prefix that may end
within a write, or each sector of each write with a probability of one half, or one side of each write (`Loss`).
``unharmed`` is the state after a killed process: everything, because the kernel's cache survives. A deletion is safe
after the first sync of a file that was created later, because SQLite's VFS then syncs the folder.

The model does not include damage to bytes that were synced before. SQLite relies on this too
(SQLITE_IOCAP_POWERSAFE_OVERWRITE).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from roundelay.network.ledger.opening import PAGE_BYTES
from tests.crash.sqlite_files import OK

SECTOR_BYTES = 512
Loss = Literal["unharmed", "all_unsynced", "all_but_a_prefix", "a_random_half", "all_but_beginnings", "all_but_ends"]
LOSSES: tuple[Loss, ...] = ("all_unsynced", "all_but_a_prefix", "a_random_half", "all_but_beginnings", "all_but_ends")
"""Kinds of loss. The last two kinds tear every write at one place: the first sector of a page of SQLite has its
header and its index of cells, and the last sectors have the cells.
"""


@dataclass(frozen=True, slots=True)
class Write:
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Delete:
    name: str


@dataclass(frozen=True, slots=True)
class Sync:
    name: str


@dataclass(frozen=True, slots=True)
class FailedSync:
    """A failed sync. Afterwards, the kernel treats the pages as clean, and no later sync writes them:
    https://lwn.net/Articles/752063/.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A fact that the test knows from this point on."""

    what: object


Change = Write | Truncate | Delete
Event = Change | Sync | FailedSync | Mark
Decide = Callable[[Event], int]


class Journal:
    """A `Watcher` that records every operation. ``decide`` may fail an operation with one of SQLite's codes."""

    syncs_for_real = False

    def __init__(self, decide: Decide | None = None, *, fails_reads: Callable[[str], int] | None = None) -> None:
        self.events: list[Event] = []
        self.decide = decide
        self.fails_reads = fails_reads

    def mark(self, what: object) -> None:
        self.events.append(Mark(what))

    def read(self, name: str) -> int:
        return self.fails_reads(name) if self.fails_reads is not None else OK

    def write(self, name: str, offset: int, data: bytes) -> int:
        return self._take(Write(name, offset, data))

    def truncate(self, name: str, size: int) -> int:
        return self._take(Truncate(name, size))

    def sync(self, name: str) -> int:
        code = self._take(Sync(name))
        if code != OK:
            self.events.append(FailedSync(name))
        return code

    def delete(self, name: str, *, is_durable: bool) -> int:
        code = self._take(Delete(name))
        if is_durable and code == OK:
            self.events.append(Sync(name))
        return code

    def _take(self, event: Event) -> int:
        code = self.decide(event) if self.decide is not None else OK
        if code == OK:
            self.events.append(event)
        return code


class Disk:
    """The files of one folder after some events: the safe bytes, and the changes that are not safe yet."""

    def __init__(self) -> None:
        self._safe: dict[str, bytearray] = {}
        self._open: list[Change] = []
        self._lost: list[Change] = []
        self._is_new: set[str] = set()

    def copy(self) -> Disk:
        return copy.deepcopy(self)

    def take(self, event: Event) -> None:
        match event:
            case Write() | Truncate() | Delete():
                if isinstance(event, Delete) or (event.name not in self._safe and not self._has_open(event.name)):
                    self._is_new.add(event.name)
                self._open.append(event)
            case Sync():
                syncs_folder = event.name in self._is_new
                self._is_new.discard(event.name)
                waiting, self._open = self._open, []
                for change in waiting:
                    if change.name == event.name or (syncs_folder and isinstance(change, Delete)):
                        _perform(self._safe, change)
                    else:
                        self._open.append(change)
            case FailedSync():
                self._lost += [change for change in self._open if change.name == event.name]
                self._open = [change for change in self._open if change.name != event.name]
            case Mark():
                pass

    def after(self, loss: Loss, random: Random) -> dict[str, bytes]:
        """Return the files in the folder after a crash."""
        files = {name: bytearray(data) for name, data in self._safe.items()}
        match loss:
            case "unharmed":
                assert not self._lost, "the kernel's view after a failed sync is not kept"
                kept: list[Change] = list(self._open)
            case "all_unsynced":
                kept = []
            case "all_but_a_prefix":
                kept = self._open[: random.randint(0, len(self._open))]
                if kept and isinstance(kept[-1], Write):
                    kept[-1:] = _sectors(kept[-1])[: random.randint(0, len(kept[-1].data) // SECTOR_BYTES + 1)]
            case "a_random_half":
                kept = self._keep_half(random)
            case "all_but_beginnings" | "all_but_ends":
                cut = random.randint(1, PAGE_BYTES // SECTOR_BYTES - 1)
                part = slice(cut) if loss == "all_but_beginnings" else slice(cut, None)
                pieces = [_sectors(change)[part] if isinstance(change, Write) else [change] for change in self._open]
                kept = [piece for of_one in pieces for piece in of_one]
        for change in kept:
            _perform(files, change)
        return {name: bytes(data) for name, data in files.items()}

    def _has_open(self, name: str) -> bool:
        return any(change.name == name for change in self._open)

    def _keep_half(self, random: Random) -> list[Change]:
        kept: list[Change] = []
        undeleted: set[str] = set()
        for change in self._open:
            if change.name in undeleted:
                continue  # the name still means the old file, so writes to the new one are lost
            if isinstance(change, Write):
                kept += [sector for sector in _sectors(change) if random.random() < 0.5]
            elif random.random() < 0.5:
                kept.append(change)
            elif isinstance(change, Delete):
                undeleted.add(change.name)
        return kept


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a folder as a crash left them."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _sectors(write: Write) -> list[Write]:
    """Split a write into sectors, which a disk writes atomically."""
    pieces: list[Write] = []
    start = 0
    while start < len(write.data):
        end = min(len(write.data), start + SECTOR_BYTES - (write.offset + start) % SECTOR_BYTES)
        pieces.append(Write(write.name, write.offset + start, write.data[start:end]))
        start = end
    return pieces


def _perform(files: dict[str, bytearray], change: Change) -> None:
    match change:
        case Write(name, offset, data):
            file = files.setdefault(name, bytearray())
            if len(file) < offset:
                file.extend(bytes(offset - len(file)))
            file[offset : offset + len(data)] = data
        case Truncate(name, size):
            file = files.setdefault(name, bytearray())
            del file[size:]
            file.extend(bytes(size - len(file)))
        case Delete(name):
            files.pop(name, None)
