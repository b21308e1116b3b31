"""Faults of the system under a real node: what `faults.c` refuses in the node's process, told by a test while it runs.

The library is compiled where there is a compiler; elsewhere the tests that need it are skipped. A fault has a kind of call (`KINDS`), an
errno, and how many calls it meets; it lasts until it is lifted.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

SOURCE = Path(__file__).with_name("faults.c")
Kind = Literal["open", "read", "write", "sync", "truncate", "lock", "accept", "clock"]
KINDS: tuple[Kind, ...] = ("open", "read", "write", "sync", "truncate", "lock", "accept", "clock")
SHORT = -1
"""Instead of an errno: half of what is written is taken, as by a file system that has just so much room."""
_FAULT, _LEFT, _PASSING, _SEEN, _REFUSED = range(5)
_SHIFT, _FORGETS = 5 * len(KINDS), 5 * len(KINDS) + 1


@pytest.fixture(scope="session")
def faults_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `faults.c`."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("no C compiler (cc) for Linux is here to build the faults with")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return library


class Faults:
    """What the processes with this `env` are refused at the files whose path begins with ``prefix``."""

    def __init__(self, library: Path, prefix: Path, control: Path) -> None:
        control.write_bytes(bytes(8 * (_FORGETS + 1)))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 0)
        self.env = {
            "LD_PRELOAD": str(library),
            "FAULTS_PREFIX": str(prefix),
            "FAULTS_CONTROL": str(control),
        }

    def refuse(self, kind: Kind, errno: int, times: int = -1, *, passing: int = 0) -> None:
        """Let the next calls of a kind fail, all of them or so many, after so many that pass."""
        self._put(kind, _PASSING, passing)
        self._put(kind, _LEFT, times)
        self._put(kind, _FAULT, errno)

    def forget(self) -> None:
        """From now on a failed sync loses what was not synced before it."""
        self._put_at(_FORGETS, 1)

    def shift_clock(self, by_s: int) -> None:
        """Set the wall clock, so much from the true time."""
        self._put_at(_SHIFT, by_s)

    def lift(self) -> None:
        """Nothing fails any more."""
        for kind in KINDS:
            self._put(kind, _FAULT, 0)
        self._put_at(_FORGETS, 0)
        self._put_at(_SHIFT, 0)

    def seen(self, kind: Kind) -> int:
        """How many calls of a kind there were, refused or not."""
        return self._get(kind, _SEEN)

    def refused(self, kind: Kind) -> int:
        return self._get(kind, _REFUSED)

    def _get(self, kind: Kind, field: int) -> int:
        value: int = struct.unpack_from("q", self._control, 8 * (5 * KINDS.index(kind) + field))[0]
        return value

    def _put(self, kind: Kind, field: int, value: int) -> None:
        self._put_at(5 * KINDS.index(kind) + field, value)

    def _put_at(self, place: int, value: int) -> None:
        struct.pack_into("q", self._control, 8 * place, value)


@contextmanager
def faults_at(library: Path, prefix: Path, folder: Path | None = None) -> Iterator[Faults]:
    """Faults of the files that begin with a path. The control file stands beside them, under a name that does not, or in ``folder``."""
    faults = Faults(library, prefix, (folder or prefix.parent) / f"faults-{prefix.name}")
    try:
        yield faults
    finally:
        faults.lift()
