"""Tests of a full disk under a real hub process. The kernel itself refuses the writes. Acknowledged data stays, and
everything else waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from tests.crash.faulty import DB, assert_recovering, until_ready
from tests.crash.lives import look
from tests.crash.peers import Peer
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process

ROOM_BYTES = 300_000
MESSAGE_CHARS = 2000

Relieve = Callable[[], None]


@contextmanager
def _file_size_limit(node: ProcessNode) -> Iterator[Relieve]:
    """Prevent the files of the process from growing with RLIMIT_FSIZE, as a quota does."""
    size = max(path.stat().st_size for path in node.db.parent.glob(f"{DB}*"))
    _, hard = resource.prlimit(node.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (size + ROOM_BYTES, hard))

    def relieve() -> None:
        resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (hard, hard))

    yield relieve


@contextmanager
def _full_filesystem(node: ProcessNode) -> Iterator[Relieve]:
    """Fill the file system with another file."""
    ballast = node.db.with_name("ballast")
    free = os.statvfs(node.db.parent)
    with ballast.open("wb") as file:
        file.write(bytes(free.f_bavail * free.f_bsize - ROOM_BYTES))
    yield ballast.unlink


@contextmanager
def _small_filesystem(folder: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB, which only root can do."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@asynccontextmanager
async def _talkers(node: ProcessNode) -> AsyncIterator[tuple[Peer, Peer]]:
    """Run a sender that sends until the end of the context, and a listener."""
    sender, ear = Peer(node, "sender"), Peer(node, "ear", keeps_cursor=True)
    await asyncio.gather(sender.come_back(), ear.come_back())
    talking = asyncio.create_task(_talk(sender))
    try:
        yield sender, ear
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)


async def _talk(sender: Peer) -> None:
    for number in range(1_000_000):
        await sender.until(lambda: sender.unanswered < 20)
        await sender.send(f"m{number}", "agent:ear", f"{number} ".ljust(MESSAGE_CHARS, "x"))


@pytest.mark.parametrize(
    "fill",
    [pytest.param(_file_size_limit, id="file_size_limit"), pytest.param(_full_filesystem, id="full_filesystem")],
)
async def test_a_full_disk_is_survived_by_a_real_process(
    tmp_path: Path, note: Note, fill: Callable[[ProcessNode], contextlib.AbstractContextManager[Relieve]]
) -> None:
    with _small_filesystem(tmp_path) if fill is _full_filesystem else contextlib.nullcontext(tmp_path) as folder:
        async with (
            node_process(folder / DB, limits={"root_messages_per_s": 1_000_000}) as node,
            _talkers(node) as (sender, ear),
        ):
            await sender.until(lambda: len(sender.stored) > 20)
            with fill(node) as relieve:
                await asyncio.gather(sender.lost(), ear.lost())
                before = sender.stored
                assert sender.unanswered > 0
                await assert_recovering(node)
                relieve()
                await until_ready(node.url)
            await asyncio.gather(sender.come_back(), ear.come_back())
            await sender.until(lambda: len(sender.stored) > len(before) + 40)
            assert {message_id: sender.stored[message_id] for message_id in before} == before
        await node.stop()
        found = await look(folder / DB, "full")
    assert found is not None
    lost = sum(found.by_key.get(("sender", message_id)) != seq for message_id, seq in sender.stored.items())
    told = sum(found.by_key.get(("sender", heard.message_id)) != heard.seq for heard in ear.heard)
    note(acknowledged_before=len(before), acknowledged_in_all=len(sender.stored), lost=lost, delivered_and_lost=told)
    assert (lost, told, found.is_intact) == (0, 0, True)


async def test_a_node_on_a_full_disk_stops_in_good_order_and_starts_when_there_is_room(tmp_path: Path) -> None:
    async with node_process(tmp_path / DB, limits={"root_messages_per_s": 1_000_000}) as node:
        async with _talkers(node) as (sender, _):
            await sender.until(lambda: len(sender.stored) > 20)
            with _file_size_limit(node):
                await sender.lost()
                await assert_recovering(node)
                assert await node.stop() == 0
        await node.restart()
        await sender.come_back()
        await sender.settled()
        head: int = (await (await node.agent("visitor")).call("network.info"))["head"]
        assert head >= len(sender.stored)


async def test_a_node_that_finds_no_room_says_so_in_one_sentence(tmp_path: Path) -> None:
    up = [sys.executable, "-m", "roundelay", "up", "--port", "0", "--db", str(tmp_path / DB)]
    limited = ["sh", "-c", 'ulimit -f 16; exec "$0" "$@"', *up]
    process = await asyncio.create_subprocess_exec(*limited, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert err.decode().startswith(
        f"Error: The database {tmp_path / DB} cannot be written: the file may not grow further"
    )
    assert len(err.splitlines()) == 1, err
    assert b"rollback" not in err  # the error names the first reason, and not a consequence
