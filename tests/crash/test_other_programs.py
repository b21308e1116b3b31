"""Tests of other programs that use the database file: a program that holds a lock, and another node."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Self

from tests.crash.faulty import DB, fail_and_recover, nothing
from tests.support.command import run
from tests.support.counts import Note
from tests.support.node import node_process, running_node

_HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
for line in sys.stdin:
    db.execute({"hold": "BEGIN IMMEDIATE", "release": "ROLLBACK"}[line.strip()])
    print(line.strip(), flush=True)
"""


class _Holder:
    """A program that takes and releases SQLite's write lock."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, db: Path) -> Self:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(sys.executable, "-c", _HOLDER, str(db), stdin=pipe, stdout=pipe)
        )

    async def hold(self) -> None:
        await self._tell("hold")

    async def release(self) -> None:
        await self._tell("release")

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        assert (await self._process.stdout.readline()).decode().strip() == word


async def test_a_lock_held_by_another_program_is_waited_for_and_then_survived(tmp_path: Path, note: Note) -> None:
    async with running_node(db=tmp_path / DB, durability="full") as node:
        carol = await node.agent("carol")
        holder = await _Holder.start(tmp_path / DB)
        await holder.hold()
        await carol.send_frame({"type": "send", "message_id": "m", "to": "broadcast", "content": "held up"})
        await carol.settle()
        assert carol.unread == []  # the hub does not confirm messages that it has not stored
        await holder.release()
        await carol.expect("stored", message_id="m")

        began_at = time.monotonic()
        stored = await fail_and_recover(node, holder.hold, nothing, holder.release)
        note(held_and_recovered_s=round(time.monotonic() - began_at, 1), acknowledged=len(stored))
        await holder.end()


async def test_a_second_node_on_the_same_file_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    db = tmp_path / DB
    async with node_process(db) as node:
        alice = await node.agent("alice")
        first = await alice.send("broadcast", "one", message_id="m1")
        owner = node.owner_token
        for _ in range(2):
            refused = await run("up", "--port", "0", "--db", db, code=1)
            assert "in use by another node" in refused.err
            assert len(refused.err.strip().splitlines()) == 1, refused.err
        await alice.send("broadcast", "two")
        assert db.with_name(f"{DB}.owner").read_text().strip() == owner
        await node.kill9()  # the end of the process releases its lock
        await node.restart()
        alice = await node.agent("alice")
        assert await alice.send("broadcast", "one", message_id="m1") == first | {"duplicate": True}
