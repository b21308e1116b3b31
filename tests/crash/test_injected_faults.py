"""Tests of promise P1 under system faults: calls of a real hub process fail while senders are active.
docs/promises.md.

The calls fail inside the process (`faults.c`), as if the kernel had refused them. Each fault ends after a while. The
node must continue on its own, and is killed at the end.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.crash.faulty import DB, PATIENCE_S
from tests.crash.injected import KINDS, SHORT, Faults, Kind, faults_at, faults_library
from tests.crash.kept import look_through
from tests.crash.peers import Peer
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process
from tests.support.wire import get_http

__all__ = ["faults_library"]

SENDERS = 4
MESSAGES_PER_S = 200
READY_WITHIN_S = 5.0
"""Time after the end of a fault within which the node is ready again, in seconds (docs/operations.md)."""
NOTICED_WITHIN_S = 5.0
"""Time after the start of a fault within which the node reports that it is not ready, in seconds."""
HOUR_S = 3600
EAR = "ear"

Begin = Callable[[Faults, ProcessNode], None]


@dataclass(frozen=True)
class Meeting:
    """A fault, and its visible effect. ``kind`` is the kind of call that must have failed."""

    name: str
    kind: Kind
    begin: Begin
    sight: str
    """Visible effect. ``stops``: nothing is acknowledged, and the node is not ready until the end of the fault.
    ``cuts``: sessions are closed once. ``hides``: reads fail, and everything else works, or the node is not ready
    because a write also has to read. ``nothing``: no effect.
    """


def _refuse(number: int, *kinds: Kind, times: int = -1) -> Begin:
    def begin(faults: Faults, _: ProcessNode) -> None:
        for kind in kinds:
            faults.refuse(kind, number, times)

    return begin


def _lose_a_sync(faults: Faults, _: ProcessNode) -> None:
    faults.forget()
    faults.refuse("sync", errno.EIO, 1)


def _jump(by_s: int) -> Begin:
    return lambda faults, _: faults.shift_clock(by_s)


def _open_no_file(faults: Faults, _: ProcessNode) -> None:
    faults.refuse("open", errno.EMFILE)
    faults.refuse("write", errno.EIO, 1)  # after this failure, the hub must open the database again


MEETINGS = (
    Meeting("writes_fail", "write", _refuse(errno.EIO, "write"), "stops"),
    Meeting("no_space", "write", _refuse(errno.ENOSPC, "write", "truncate"), "stops"),
    Meeting("read_only", "write", _refuse(errno.EROFS, "open", "write", "truncate"), "stops"),
    Meeting("a_sync_fails_and_forgets", "sync", _lose_a_sync, "cuts"),
    Meeting("syncs_fail", "sync", _refuse(errno.EIO, "sync"), "stops"),
    Meeting("short_writes", "write", _refuse(SHORT, "write"), "nothing"),
    Meeting("reads_fail", "read", _refuse(errno.EIO, "read"), "hides"),
    Meeting("no_locks", "lock", _refuse(errno.ENOLCK, "lock"), "stops"),
    Meeting("no_files", "open", _open_no_file, "stops"),
    Meeting("full_file_table", "accept", _refuse(errno.ENFILE, "accept", times=2), "nothing"),
    Meeting("clock_ahead", "clock", _jump(5 * HOUR_S), "nothing"),
    Meeting("clock_back", "clock", _jump(-3 * HOUR_S), "nothing"),
)

LONG_MEETINGS = (*MEETINGS, Meeting("locks_held", "lock", _refuse(errno.EAGAIN, "lock"), "stops"))
"""For SQLite, a held lock looks like a refused one."""


async def _talk(peer: Peer) -> None:
    """Send at a steady rate until cancelled, even while the hub is down."""
    pause_s = SENDERS / MESSAGES_PER_S
    due_at = time.monotonic()
    number = 0
    while True:
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        due_at += pause_s
        number += 1
        await peer.send(f"m{number}", f"agent:{EAR}", number)


async def _stay(peer: Peer) -> None:
    """Reconnect immediately after each loss until cancelled."""
    while True:
        await peer.lost()
        await _until(peer.come_back_if_possible, pause_s=0.05)


@asynccontextmanager
async def _talkers(node: ProcessNode) -> AsyncIterator[tuple[list[Peer], Peer]]:
    ear, senders = Peer(node, EAR, keeps_cursor=True), [Peer(node, f"s{number}") for number in range(SENDERS)]
    peers = [ear, *senders]
    await asyncio.gather(*(peer.come_back() for peer in peers))
    staying = [asyncio.create_task(_stay(peer)) for peer in peers]
    talking = [asyncio.create_task(_talk(peer)) for peer in senders]
    try:
        yield senders, ear
        await _end(talking)
        await asyncio.gather(*(peer.settled() for peer in senders))
        sent = sum(len(peer.answers) for peer in senders)
        await ear.until(lambda: len(ear.heard_seqs) == sent)
    finally:
        await _end([*talking, *staying])


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _acknowledge_more(senders: list[Peer], ear: Peer) -> None:
    """Wait until every sender has new answers and a reader has received the messages."""
    for peer in senders:
        enough = len(peer.answers) + 5
        await peer.until(lambda peer=peer, enough=enough: len(peer.answers) >= enough)  # type: ignore[misc]
    last = max(peer.stored[f"m{len(peer.answers)}"] for peer in senders if f"m{len(peer.answers)}" in peer.stored)
    await ear.until(lambda: bool(ear.heard) and max(ear.heard_seqs) >= last)


async def _until(asks: Callable[[], Awaitable[bool]], *, pause_s: float = 0.02) -> None:
    """Poll until the condition is true, because no event reports it."""
    for _ in itertools.count():
        if await asks():
            return
        await asyncio.sleep(pause_s)


async def _welcomed(ear: Peer, times: int) -> None:
    """Wait for ``times`` further welcomes of a peer. No frame reports them: the connection may be cut before its
    first frame.
    """
    enough = len(ear.welcomes) + times

    async def has_come() -> bool:
        return len(ear.welcomes) >= enough

    async with asyncio.timeout(PATIENCE_S):
        await _until(has_come)


async def _is_ready(node: ProcessNode) -> bool:
    """Whether the node reports that it is ready. A node that accepts no connections counts as not ready."""
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            return (await get_http(node.url, "/readyz"))[0] == 200
    except (OSError, IndexError, ValueError):
        return False


async def _is_not_ready(node: ProcessNode) -> bool:
    return not await _is_ready(node)


async def _is_history_hidden(node: ProcessNode, ear: Peer) -> bool:
    """Whether the node closes a session that reads from the beginning. The newest messages are in memory."""
    first = ear.welcomes[0]
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            session = await node.connect()
            resume = {"epoch": first["network"]["epoch"], "cursor": first["cursor"]}
            await session.hello(EAR, token=node.token_of(EAR), resume=resume)
            return await session.closed() == 4503
    except (OSError, ConnectionClosed, InvalidHandshake, AssertionError):
        return False


async def _meet(
    meeting: Meeting, faults: Faults, node: ProcessNode, senders: list[Peer], ear: Peer, looks: int
) -> float:
    """Cause a fault, check its effect and remove it. Return the time until the node was ready again."""
    await _acknowledge_more(senders, ear)
    seen, refused = faults.seen(meeting.kind), faults.refused(meeting.kind)
    meeting.begin(faults, node)
    match meeting.sight:
        case "stops":
            async with asyncio.timeout(NOTICED_WITHIN_S):
                await _until(lambda: _is_not_ready(node))
            answered = sum(len(peer.answers) for peer in senders)
            for _ in range(looks):
                assert not await _is_ready(node), meeting
                await asyncio.sleep(0.05)
            assert sum(len(peer.answers) for peer in senders) == answered
        case "cuts":
            await _welcomed(ear, 1)
        case "hides":
            hidden, answers = 0, min(len(peer.answers) for peer in senders) + looks

            async def is_so() -> bool:
                nonlocal hidden
                if not await _is_ready(node):
                    return True
                hidden += await _is_history_hidden(node, ear)
                return hidden >= looks and min(len(peer.answers) for peer in senders) >= answers

            async with asyncio.timeout(PATIENCE_S):
                await _until(is_so)
        case _:
            await _acknowledge_more(senders, ear)
            async with asyncio.timeout(NOTICED_WITHIN_S):  # a connection may be refused before one is accepted
                await _until(lambda: _is_ready(node))
    if meeting.kind == "clock":
        assert faults.seen("clock") > seen
    else:
        assert faults.refused(meeting.kind) > refused, f"{meeting.name} met nothing"
    faults.lift()
    lifted_at = time.monotonic()
    async with asyncio.timeout(READY_WITHIN_S):
        await _until(lambda: _is_ready(node))
    took_s = time.monotonic() - lifted_at
    await _acknowledge_more(senders, ear)
    return took_s


async def _prove(folder: Path, library: Path, note: Note, meetings: Sequence[Meeting], *, looks: int) -> None:
    db = folder / DB
    slowest_s = 0.0
    with faults_at(library, db) as faults:
        async with node_process(db, limits={"root_messages_per_s": 100_000}, env=faults.env) as node:
            async with _talkers(node) as (senders, ear):
                for meeting in meetings:
                    try:
                        slowest_s = max(slowest_s, await _meet(meeting, faults, node, senders, ear, looks))
                    except BaseException as error:
                        error.add_note(f"at {meeting.name}")
                        raise
                await node.kill9()
                lines = node.printed.splitlines()
                await node.restart()
            await node.stop()
        refused = {f"{kind}s_refused": faults.refused(kind) for kind in KINDS if kind != "clock"}
    found = await look_through(db, senders, ear)
    note(
        faults=len(meetings),
        **refused,
        lines_logged=len(lines),
        slowest_recovery_s=round(slowest_s, 2),
        **found.counts(),
    )
    found.assert_kept()
    assert {welcome["network"]["epoch"] for peer in (ear, *senders) for welcome in peer.welcomes} == {found.epoch}
    assert not [line for line in lines if line.startswith("Traceback")]
    assert len(lines) <= 3 * len(meetings), lines


async def test_no_acknowledged_message_is_lost_by_any_fault(tmp_path: Path, note: Note, faults_library: Path) -> None:
    await _prove(tmp_path, faults_library, note, MEETINGS, looks=5)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_acknowledged_message_is_lost_by_26_long_faults_in_any_order(
    tmp_path: Path, note: Note, faults_library: Path
) -> None:
    meetings = list(LONG_MEETINGS)
    Random(1).shuffle(meetings)
    await _prove(tmp_path, faults_library, note, meetings * 2, looks=60)


_REOPENING: tuple[tuple[Kind, int], ...] = (("write", 36), ("open", 11), ("truncate", 4))
"""Kinds of calls, and the number of each that fail, one after the other."""


@pytest.mark.full
async def test_whichever_call_of_a_reopening_fails_the_history_is_the_same(
    tmp_path: Path, note: Note, faults_library: Path
) -> None:
    """A temporary failure does not start a new history, so no client gets `limited`."""
    failed = 0
    with faults_at(faults_library, tmp_path / DB) as faults:
        async with node_process(tmp_path / DB, limits={"root_messages_per_s": 100_000}, env=faults.env) as node:
            first = await node.agent("alice")
            session = first
            for kind, most in _REOPENING:
                for passing in range(most):
                    await session.send("broadcast", "x", message_id=f"{kind}{passing}")
                    before = faults.refused(kind)
                    faults.refuse("sync", errno.EIO, 1)  # after this failure, the hub must open the ledger again
                    faults.refuse(kind, errno.EIO, 1, passing=passing)
                    await session.send_frame(
                        {"type": "send", "message_id": "during", "to": "broadcast", "content": "x"}
                    )
                    assert await session.closed() == 4503
                    async with asyncio.timeout(PATIENCE_S):
                        await _until(lambda: _is_ready(node))
                    faults.lift()
                    failed += faults.refused(kind) - before
                    session = await node.agent("alice")
                    assert session.welcome["network"]["epoch"] == first.welcome["network"]["epoch"], (kind, passing)
                    assert (await session.send("broadcast", "x", message_id=f"{kind}{passing}"))["duplicate"]
    note(reopenings=sum(most for _, most in _REOPENING), calls_failed_in_them=failed)
    assert failed > 40


_CALLS = """
import fcntl, os, sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (x); INSERT INTO t VALUES (1); PRAGMA wal_checkpoint(TRUNCATE)")
db.close()
file = os.open(sys.argv[1] + "-plain", os.O_RDWR | os.O_CREAT)
os.pwrite(file, b"before", 0)
os.fsync(file)
print("ready", round(time.time()), flush=True)
sys.stdin.readline()
os.pwrite(file, b"after it", 0)
for call in (os.fsync, os.fsync, lambda file: fcntl.flock(file, fcntl.LOCK_SH)):
    try:
        print(call(file))
    except OSError as error:
        print(error.errno)
print(os.pread(file, 20, 0), os.pwrite(file, b"halved", 0), round(time.time()), flush=True)
"""


async def test_the_faults_meet_the_calls_that_sqlite_makes(tmp_path: Path, faults_library: Path) -> None:
    """Otherwise, the tests above would prove nothing."""
    with faults_at(faults_library, tmp_path / DB) as faults:
        command = [sys.executable, "-c", _CALLS, str(tmp_path / DB)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env={**os.environ, **faults.env}
        )
        assert process.stdout is not None
        word, now = (await process.stdout.readline()).split()
        assert word == b"ready"
        for kind in ("open", "read", "write", "sync", "truncate", "lock", "clock"):
            assert faults.seen(kind) > 0, kind
        faults.forget()
        faults.refuse("sync", errno.EIO, 1)
        faults.refuse("lock", errno.ENOLCK)
        faults.shift_clock(HOUR_S)
        out, _ = await process.communicate(b"go on\n")
        failed, synced, locked, rest = out.decode().splitlines()
        content, taken, later = rest.rsplit(" ", 2)
        assert (failed, synced, locked) == (str(errno.EIO), "None", str(errno.ENOLCK))
        assert content == repr(b"before\0\0")  # unsynced data is lost, but the file's size is not
        assert (taken, faults.refused("sync"), faults.refused("lock")) == ("6", 1, 1)
        assert int(later) - int(now) >= HOUR_S
