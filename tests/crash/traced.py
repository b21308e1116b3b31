"""Records file operations with `strace`, for programs that a preloaded library cannot intercept (NATS is written in
Go). The module converts system calls to the events of `power.Disk`. Names are relative to one folder, and other files
are ignored.

A call that overlaps with another one counts at its end, and a write to a socket at its start. New folders count as
safe at once. Links, mapped files and seeks are not supported, because NATS uses none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.crash.power import Disk, Event, Loss, Mark, Sync, Truncate, Write

CALLS = (
    "openat,write,writev,pwrite64,pwritev,fsync,fdatasync,sync_file_range,ftruncate,truncate,fallocate,rename,renameat,renameat2,"
    "unlink,unlinkat,link,linkat,symlinkat,copy_file_range,sendfile,creat"
)
_LINE = re.compile(r"(\d+) +(\d+\.\d+) (.*)")
_UNFINISHED = re.compile(r"(.*?) *<unfinished \.\.\.>$")
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)(.*)")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_FD = re.compile(r"^(\d+)<(.*?)>(?=[,)]|$)")

Timed = tuple[float, "Event | Named"]


def trace_command(trace: Path) -> list[str]:
    """Return the command prefix for tracing. The started process is the traced command itself. The trace is complete
    when that process's stderr has ended.
    """
    shown = ("-D", "-f", "-y", "-ttt", "-xx", "-s", "4000000", "-e", f"trace={CALLS}", "-o", str(trace))
    return ["strace", *shown]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder and its subfolders."""
    return {str(it.relative_to(folder)): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def read_trace(
    trace: Path, folder: Path, before: Mapping[str, bytes], mark: Callable[[bytes], object | None]
) -> list[Timed]:
    """Return the events of a trace with their times. ``before`` has the files at the start, which are safe. ``mark``
    returns the mark for data written to a socket, or None.
    """
    reader = _Reader(f"{folder.resolve()}/", mark)
    under_way: dict[str, str] = {}
    events: list[Timed] = [(0.0, event) for name, data in before.items() for event in reader.know(name, data)]
    with trace.open(encoding="ascii") as lines:
        for line in lines:
            found = _LINE.fullmatch(_PATH.sub(lambda path: f"<{_text(path[1]).decode()}>", line.rstrip("\n")))
            assert found is not None, line
            process, at, text = found[1], float(found[2]), found[3]
            if unfinished := _UNFINISHED.fullmatch(text):
                under_way[process] = unfinished[1]
                events += ((at, event) for event in reader.begin(unfinished[1]))
                continue
            if resumed := _RESUMED.fullmatch(text):
                begun = under_way.pop(process, None)
                if begun is None:
                    continue
                text = begun + resumed[2]
            else:
                events += ((at, event) for event in reader.begin(text))
            events += ((at, event) for event in reader.end(text))
    return events


def _text(shown: str) -> bytes:
    return bytes.fromhex("".join(_STRING.findall(shown) or [shown]).replace("\\x", ""))


@dataclass(frozen=True, slots=True)
class Named:
    """Names that refer to another file from now on, all at once. None as a target means that the name has no file."""

    changes: tuple[tuple[str, str | None], ...]


class NamedDisk:
    """A `Disk` whose files can be renamed. A sync of any file makes all earlier changes of names safe, as the
    journals of ext4 and XFS do. A crash keeps a prefix of the later changes.
    """

    def __init__(self) -> None:
        self._data = Disk()
        self._names: dict[str, str] = {}
        self._open: list[Named] = []

    def take(self, event: Event | Named) -> None:
        if isinstance(event, Named):
            self._open.append(event)
            return
        self._data.take(event)
        if isinstance(event, Sync):
            self._rename(self._names, self._open)
            self._open = []

    def after(self, loss: Loss, random: Random) -> dict[str, bytes]:
        """Return the files after a crash, by name."""
        kept = 0 if loss == "all_unsynced" else random.randint(0, len(self._open))
        names, files = dict(self._names), self._data.after(loss, random)
        self._rename(names, self._open[:kept])
        return {name: files.get(file, b"") for name, file in names.items()}

    def _rename(self, names: dict[str, str], done: list[Named]) -> None:
        for name, file in (change for named in done for change in named.changes):
            names.pop(name, None)
            if file is not None:
                names[name] = file


class _Reader:
    def __init__(self, folder: str, mark: Callable[[bytes], object | None]) -> None:
        self._folder = folder
        self._mark = mark
        self._files: dict[str, str] = {}
        """The file of each name."""
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}

    def know(self, name: str, data: bytes) -> Iterator[Event | Named]:
        """Yield the events of a file that already exists and is safe."""
        file = self._files[self._folder + name] = f"file {next(self._numbers)}"
        yield from (Named(((name, file),)), Write(file, 0, data), Sync(file))

    def begin(self, text: str) -> Iterator[Event]:
        """Yield the events of a call at its start."""
        if text.startswith(("write(", "writev(")) and "<socket:" in text[:40]:
            mark = self._mark(_text(text))
            if mark is not None:
                yield Mark(mark)

    def end(self, text: str) -> Iterator[Event | Named]:
        """Yield the events of a call at its end."""
        call = _CALL.fullmatch(text)
        if call is None or call[3].startswith("-"):
            return
        name, arguments, result = call[1], call[2], int(call[3])
        if name in ("openat", "creat"):
            yield from self._begin(arguments, result)
        elif name.startswith(("rename", "unlink")):
            yield from self._move([_text(it).decode() for it in _STRING.findall(arguments)])
        else:
            descriptor = _FD.match(arguments)
            if descriptor is not None and f"{descriptor[2]}/".startswith(self._folder):
                yield from self._change(name, self._open[int(descriptor[1])], arguments)

    def _begin(self, arguments: str, descriptor: int) -> Iterator[Event | Named]:
        path = _text(arguments).decode()
        self._open.pop(descriptor, None)
        if not f"{path}/".startswith(self._folder):
            return
        assert "O_APPEND" not in arguments, "writes that say not where"
        if "O_CREAT" in arguments and path not in self._files:
            self._files[path] = f"file {next(self._numbers)}"
            yield Named(((path.removeprefix(self._folder), self._files[path]),))
        file = self._files.get(path, "")  # an unknown path is a folder
        if "O_TRUNC" in arguments:
            yield Truncate(file, 0)
        self._open[descriptor] = _Open(file, is_synced="O_SYNC" in arguments or "O_DSYNC" in arguments)

    def _change(self, call: str, it: _Open, arguments: str) -> Iterator[Event]:
        if call in ("fsync", "fdatasync"):
            yield Sync(it.file)
        elif call == "ftruncate":
            yield Truncate(it.file, int(arguments.rpartition(", ")[2]))
        elif call == "pwrite64":
            yield Write(it.file, int(arguments.rpartition(", ")[2]), _text(arguments))
        elif call == "write":
            data = _text(arguments)
            yield Write(it.file, it.at, data)
            it.at += len(data)
        else:
            raise AssertionError(f"{call} is not known here")
        if it.is_synced and call != "fsync":
            yield Sync(it.file)

    def _move(self, paths: list[str]) -> Iterator[Named]:
        """Yield the events of a renamed file or folder, or of a removed file."""
        old, new = paths[0], paths[1] if len(paths) > 1 else None
        changes: list[tuple[str, str | None]] = []
        for path in [it for it in self._files if it == old or it.startswith(f"{old}/")]:
            file = self._files.pop(path)
            changes.append((path.removeprefix(self._folder), None))
            if new is not None:
                moved = new + path.removeprefix(old)
                self._files[moved] = file
                changes.append((moved.removeprefix(self._folder), file))
        if changes:
            yield Named(tuple(changes))


@dataclass
class _Open:
    """An open file, and the offset of its next sequential write."""

    file: str
    is_synced: bool
    at: int = 0
