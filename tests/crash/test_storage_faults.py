"""A storage that fails under a running hub: it acknowledges nothing wrongly, says so, and recovers by itself. docs/promises.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from websockets.exceptions import InvalidStatus

from roundelay.network.ledger_sqlite import SQLiteLedger
from tests.crash.conftest import Note
from tests.crash.power import Delete, Disk, Event, Journal, Sync, Truncate, Write, write_files
from tests.crash.sqlite_files import FULL, IOERR_FSYNC, IOERR_WRITE, OK, watched_files
from tests.support.node import Node, running_node
from tests.support.wire import get_http

READY_TIMEOUT_S = 20.0
DB = "team.db"


@dataclass
class Fault:
    """A `Decide` for `Journal`: while it is ``on``, operations of some kinds get a code."""

    kinds: tuple[type[Event], ...]
    code: int
    is_on: bool = False
    limit: int | None = None
    refused: int = 0
    _waiting: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)

    def __call__(self, event: Event) -> int:
        if (
            not self.is_on
            or not isinstance(event, self.kinds)
            or (self.limit is not None and self.refused >= self.limit)
        ):
            return OK
        self.refused += 1
        for count, loop, reached in self._waiting:
            if self.refused >= count:
                loop.call_soon_threadsafe(reached.set)
        return self.code

    async def refuses(self, count: int) -> None:
        """Wait until it has refused so many operations more."""
        reached = asyncio.Event()
        self._waiting.append((self.refused + count, asyncio.get_running_loop(), reached))
        async with asyncio.timeout(READY_TIMEOUT_S):
            await reached.wait()


async def until_ready(url: str) -> None:
    """Ask ``/readyz`` until it says so, as an operator's probe does."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await get_http(url, "/readyz"))[0] != 200:  # noqa: ASYNC110 - a probe from outside can only ask
            await asyncio.sleep(0.02)


async def assert_recovering(node: Node) -> None:
    """The hub lives, is not ready, and lets nobody in."""
    assert (await get_http(node.url, "/healthz"))[0] == 200
    assert await get_http(node.url, "/readyz") == (503, "recovering\n")
    with pytest.raises(InvalidStatus) as refused:
        await node.connect()
    assert refused.value.response.status_code == 503
    assert b"try again" in refused.value.response.body


async def fail_and_recover(
    node: Node, begin: Callable[[], None], wait: Callable[[], object], end: Callable[[], None]
) -> dict[str, int]:
    """Meet a fault in the middle of a conversation; gives the seq of every acknowledged message."""
    alice, bob = await node.agent("alice"), await node.agent("bob")
    epoch, cursor = bob.welcome["network"]["epoch"], bob.welcome["cursor"]
    stored = {f"m{n}": (await alice.send("agent:bob", n, message_id=f"m{n}"))["seq"] for n in range(10)}
    begin()
    await alice.send_frame({"type": "send", "message_id": "during", "to": "agent:bob", "content": "during"})
    frames = await alice.rest()
    assert [frame for frame in frames if frame["type"] in ("stored", "error")] == []
    assert (await alice.closed(), await bob.closed()) == (4503, 4503)
    assert "during" not in [frame["message"]["content"] for frame in await bob.rest() if frame["type"] == "deliver"]
    await assert_recovering(node)
    await wait()
    await assert_recovering(node)
    end()
    await until_ready(node.url)

    alice = await node.agent("alice")
    bob = await node.agent("bob", resume={"epoch": epoch, "cursor": cursor})
    assert (alice.welcome["network"]["epoch"], bob.welcome["resume"]) == (epoch, "full")
    stored["during"] = (await alice.send("agent:bob", "during", message_id="during"))["seq"]
    for n in range(10):
        again = await alice.send("agent:bob", n, message_id=f"m{n}")
        assert (again["seq"], again["duplicate"]) == (stored[f"m{n}"], True)
    stored["after"] = (await alice.send("agent:bob", "after", message_id="after"))["seq"]
    assert await bob.contents_until("after") == [*range(10), "during"]
    return stored


async def count_lost(folder: Path, disk: Disk, stored: dict[str, int]) -> int:
    """Open what a power loss leaves, and count what is missing of one sender's."""
    write_files(folder, disk.after("all_unsynced", Random(0)))
    ledger = SQLiteLedger(folder / DB, new_epoch=lambda: "renewed")
    await ledger.open()
    found = {row.key[2:]: row.seq for row in await ledger.rows(0, 10_000)}
    await ledger.close()
    return sum(found.get(message_id) != seq for message_id, seq in stored.items())


@asynccontextmanager
async def faulty_node(folder: Path, journal: Journal) -> AsyncIterator[Node]:
    with watched_files(folder, journal):
        async with running_node(db=folder / DB, durability="full") as node:
            yield node


@pytest.mark.parametrize(
    ("kinds", "code"),
    [((Write,), IOERR_WRITE), ((Write, Truncate), FULL), ((Sync,), IOERR_FSYNC), ((Write, Sync, Truncate, Delete), IOERR_WRITE)],
    ids=["write_eio", "disk_full", "sync_eio", "everything_eio"],
)  # fmt: skip
async def test_a_failing_disk_is_survived(
    tmp_path: Path, note: Note, kinds: tuple[type[Event], ...], code: int
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    fault = Fault(kinds, code)
    journal = Journal(fault)

    def turn(*, is_on: bool) -> None:
        fault.is_on = is_on

    async with faulty_node(home, journal) as node:
        stored = await fail_and_recover(
            node, lambda: turn(is_on=True), lambda: fault.refuses(3), lambda: turn(is_on=False)
        )
        disk = Disk()
        for event in journal.events[:]:
            disk.take(event)
        lost = await count_lost(tmp_path / "crashed", disk, stored)
    note(refused_operations=fault.refused, acknowledged=len(stored), lost_by_a_later_power_loss=lost)
    assert lost == 0
