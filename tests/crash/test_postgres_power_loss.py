"""Tests of power losses of a PostgreSQL server: it loses no record that it acknowledged to a node, and loses some if
commits are not synced.

While a client appends records, `strace` records the file operations of the server's processes. Then the power fails
at many points of the recording. At each point, the folder is written as a crash may leave it (`power`) and the server
starts on it. The records of the log are compared with those acknowledged by then. docs/cluster.md.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from roundelay.app import make_shared_log
from roundelay.network.cluster import postgres
from tests.crash.power import LOSSES, Disk, Event, Mark, Sync, Truncate, Write
from tests.support.counts import Note
from tests.support.postgres import PostgresServer, postgres_server

BEFORE = 20
"""Records that are stored safely before the recording begins."""
RECORDS = 300
QUIET = {"checkpoint_timeout": "1h", "autovacuum": "off"}
"""Settings that keep the journal in one stretch, from which the whole database can be rebuilt."""
CALLS = "openat,write,pwrite64,pwritev,pwritev2,fsync,fdatasync,ftruncate,fallocate,rename,sendto"
ACKNOWLEDGED = re.compile(rb"D\0\0\0\x12\0\x01\0\0\0\x08(.{8})s\0\0\0\x04Z", re.DOTALL)
"""Protocol messages for a row with one eight-byte integer and the end of the result."""
_LINE = re.compile(r"(\d+) +(.*)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)(?:<(.*?)>)?.*")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_FD = re.compile(r"(\d+)<(.*?)>")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]


def read_trace(trace: Path, folder: Path) -> Iterator[Event]:
    """Return the file operations below the folder, in order, with a mark where each acknowledged position was begun."""
    under_way: dict[str, str] = {}
    places: dict[tuple[str, str], int] = {}
    with trace.open(encoding="ascii") as lines:
        for line in lines:
            found = _LINE.fullmatch(line.rstrip("\n"))
            assert found is not None
            process, text = found[1], _PATH.sub(lambda path: f"<{_bytes(path[1]).decode()}>", found[2])
            resumed = _RESUMED.fullmatch(text)
            if resumed is None and text.startswith("sendto("):
                yield from (Mark(int.from_bytes(it)) for it in ACKNOWLEDGED.findall(_text(text)))
            if text.endswith(" <unfinished ...>"):
                under_way[process] = text.removesuffix(" <unfinished ...>")
                continue
            if resumed is not None:
                text = under_way.pop(process, "") + resumed[1]
            yield from _read_call(text, f"{folder}/", process, places)


def _read_call(text: str, folder: str, process: str, places: dict[tuple[str, str], int]) -> Iterator[Event]:
    call = _CALL.fullmatch(text)
    if call is None or call[3].startswith("-"):
        return
    name, arguments = call[1], call[2]
    if name == "openat":
        places[process, call[3]] = 0
        if "O_TRUNC" in arguments and (call[4] or "").startswith(folder):
            yield Truncate(call[4].removeprefix(folder), 0)
        return
    if name == "rename":
        assert b"pg_wal/0" not in _text(arguments), "the journal goes on in another file, which is not followed here"
        return
    descriptor = _FD.match(arguments)
    if descriptor is None or not descriptor[2].startswith(folder):
        return
    file, last = descriptor[2].removeprefix(folder), arguments.rpartition(", ")[2]
    match name:
        case "fsync" | "fdatasync":
            yield Sync(file)
        case "ftruncate":
            yield Truncate(file, int(last))
        case "pwrite64" | "pwritev":
            yield Write(file, int(last), _text(arguments))
        case "write":
            place = process, descriptor[1]
            yield Write(file, places.get(place, 0), _text(arguments))
            places[place] = places.get(place, 0) + int(call[3])
        case _:
            raise AssertionError(f"{name} is not known here")


def _text(shown: str) -> bytes:
    return b"".join(map(_bytes, _STRING.findall(shown)))


def _bytes(shown: str) -> bytes:
    return bytes.fromhex(shown.replace("\\x", ""))


async def append(server: PostgresServer, after: int, records: list[bytes]) -> None:
    log = make_shared_log(server.url("lab"))
    await log.open()
    for number, data in enumerate(records, after):
        assert await log.append(data, number) == number + 1
    await log.close()


async def read_back(server: PostgresServer) -> list[bytes]:
    log = make_shared_log(server.url("lab"))
    await log.open(create=False)
    found, end = list[bytes](), await log.end()
    async with aclosing(cast(Any, log.follow(0))) as stored:
        while len(found) < end:
            found.append((await anext(stored)).data)
    await log.close()
    return found


def copy(one: Path, other: Path) -> None:
    """Copy a folder with its owners and modes."""
    subprocess.run(["cp", "-a", one, other], check=True)


def lay_out(server: PostgresServer, safe: Path, before: dict[str, bytes], files: dict[str, bytes]) -> None:
    data = server.folder / "data"
    shutil.rmtree(data)
    copy(safe, data)
    for name, content in files.items():
        if before.get(name) != content and (data / name).parent.exists():
            is_new = not (data / name).exists()
            (data / name).write_bytes(content)
            if is_new:
                server.give(data / name)
    (data / "postmaster.pid").unlink(missing_ok=True)


@pytest.mark.parametrize(("synchronous_commit", "points"), [("on", 100), ("off", 20)])
async def test_what_a_server_has_acknowledged_outlives_its_power(
    monkeypatch: pytest.MonkeyPatch, note: Note, synchronous_commit: str, points: int
) -> None:
    monkeypatch.setitem(postgres.SETTINGS, "synchronous_commit", synchronous_commit)
    random = Random(synchronous_commit)
    texts = [random.randbytes(random.choice((40, 300, 300, 6000))) for _ in range(RECORDS)]
    async with postgres_server(**QUIET) as server:
        data, safe, trace = (server.folder / name for name in ("data", "safe", "trace"))
        await append(server, 0, texts[:BEFORE])
        await server.stop()
        copy(data, safe)
        before = {str(it.relative_to(safe)): it.read_bytes() for it in safe.rglob("*") if it.is_file()}
        shown = ("-D", "-f", "-y", "-xx", "-s", "4000000", "-e", f"trace={CALLS}", "-o", str(trace))
        await server.start(before=["strace", *shown])
        await append(server, BEFORE, texts[BEFORE:])
        await server.kill9()
        events = list(read_trace(trace, data.resolve()))
        marks = [place for place, event in enumerate(events) if isinstance(event, Mark)]
        assert [it.what for it in events if isinstance(it, Mark)] == list(range(BEFORE + 1, RECORDS + 1))
        disk, at = Disk(), 0
        for name, content in before.items():
            disk.take(Write(name, 0, content))
            disk.take(Sync(name))
        counts = Counter(points=0, acknowledged=0, lost=0, points_with_loss=0)
        counts["syncs"] = sum(isinstance(event, Sync) for event in events[marks[0] :])
        for number, point in enumerate(sorted(random.randint(marks[0], marks[-1]) for _ in range(points))):
            for event in events[at : point + 1]:
                disk.take(event)
            at = point + 1
            known = BEFORE + sum(mark <= point for mark in marks)
            lay_out(server, safe, before, disk.after(LOSSES[number % len(LOSSES)], random))
            await server.start()
            found = await read_back(server)
            await server.kill9()
            lost = sum(number >= len(found) or found[number] != texts[number] for number in range(known))
            assert found == texts[: len(found)], "what is there is what was appended, from the beginning on"
            counts.update(points=1, acknowledged=known, lost=lost, points_with_loss=int(lost > 0))
        note(synchronous_commit=synchronous_commit, records=RECORDS, **counts)
    assert (counts["lost"] > 0) == (synchronous_commit == "off")
