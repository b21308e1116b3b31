"""System faults under a real node: `faults.c` makes calls of the node's process fail while a test controls it.

Without a compiler for the library, the tests are skipped. A fault has a kind of call (`KINDS`), an errno, and a
number of calls. A fault lasts until the test removes it.
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
"""Code instead of an errno: only half of the data is written, as by a file system with little space left."""
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
    """Faults of the processes with this `env`, for files whose path starts with ``prefix``."""

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
        """Let the next ``times`` calls of a kind fail (all by default), after ``passing`` calls that succeed."""
        self._put(kind, _PASSING, passing)
        self._put(kind, _LEFT, times)
        self._put(kind, _FAULT, errno)

    def forget(self) -> None:
        """From now on, a failed sync loses all data that was not synced before."""
        self._put_at(_FORGETS, 1)

    def shift_clock(self, by_s: int) -> None:
        """Set the wall clock to this offset from the true time."""
        self._put_at(_SHIFT, by_s)

    def lift(self) -> None:
        """Remove all faults."""
        for kind in KINDS:
            self._put(kind, _FAULT, 0)
        self._put_at(_FORGETS, 0)
        self._put_at(_SHIFT, 0)

    def seen(self, kind: Kind) -> int:
        """Return the number of calls of a kind, failed or not."""
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
    """Yield the faults of files whose path starts with ``prefix``. The control file is next to them under another
    name, or in ``folder``.
    """
    faults = Faults(library, prefix, (folder or prefix.parent) / f"faults-{prefix.name}")
    try:
        yield faults
    finally:
        faults.lift()
