"""Tests of failing writes, syncs and reads under a running hub: it acknowledges nothing wrong, reports the failure,
and recovers on its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from roundelay.network.ledger import opening
from tests.crash.faulty import DB, Fault, fail_and_recover
from tests.crash.lives import look
from tests.crash.power import Delete, Disk, Event, Journal, Sync, Truncate, Write, write_files
from tests.crash.sqlite_files import FULL, IOERR_FSYNC, IOERR_READ, IOERR_WRITE, OK, watched_files
from tests.support.counts import Note
from tests.support.node import Node, running_node
from tests.support.wire import get_http


@asynccontextmanager
async def _watched_node(folder: Path, journal: Journal) -> AsyncIterator[Node]:
    with watched_files(folder, journal):
        limits = {"root_messages_per_s": 100_000}
        async with running_node(db=folder / DB, durability="full", limits=limits) as node:
            yield node


@pytest.mark.parametrize(
    ("kinds", "code"),
    [((Write,), IOERR_WRITE), ((Write, Truncate), FULL), ((Sync,), IOERR_FSYNC), ((Write, Sync, Truncate, Delete), IOERR_WRITE)],
    ids=["writes", "disk_full", "syncs", "everything"],
)  # fmt: skip
async def test_a_disk_that_fails_is_survived(
    tmp_path: Path, note: Note, kinds: tuple[type[Event], ...], code: int
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    fault = Fault(kinds, code)
    journal = Journal(fault)
    async with _watched_node(home, journal) as node:
        stored = await fail_and_recover(node, fault.begin, lambda: fault.refuse(3), fault.end)
        disk = Disk()
        for event in journal.events[:]:
            disk.take(event)
    write_files(tmp_path / "crashed", disk.after("all_unsynced", Random(0)))
    found = await look(tmp_path / "crashed" / DB, "full")
    assert found is not None
    lost = sum(found.by_key.get(("alice", message_id)) != seq for message_id, seq in stored.items())
    note(refused_operations=fault.refused, acknowledged=len(stored), lost_by_a_later_power_loss=lost)
    assert lost == 0


async def test_a_page_that_cannot_be_read_stops_only_those_who_must_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With small pages, the writer has already read the few pages that it needs.
    monkeypatch.setattr(opening, "PAGE_BYTES", 4096)
    is_broken, tries = False, 0

    def fail(_: str) -> int:
        nonlocal tries
        tries += is_broken
        return IOERR_READ if is_broken else OK

    journal = Journal(fails_reads=fail)
    async with _watched_node(tmp_path, journal) as node:
        await (await node.agent("bob")).bye()
        await (await node.agent("carol")).send("agent:bob", "long ago")
        alice = await node.agent("alice")
        for n in range(200):
            frame = {"type": "send", "message_id": f"m{n}", "to": "agent:bob", "content": "x" * 2000}
            await alice.send_frame(frame)
        await alice.settle()
        tokens = node.tokens
    async with _watched_node(tmp_path, journal) as node:
        node.tokens = tokens
        carol, dave = await node.agent("carol"), await node.agent("dave")
        await carol.send("agent:dave", "before")
        await dave.message("before")
        await dave.send("agent:carol", "here")
        await carol.message("here")  # both agents are up to date, so neither reads a page any more
        is_broken = True
        bob = await node.agent("bob")
        assert await bob.closed() == 4503
        await carol.call_refused("internal", "network.history", {"thread_id": "direct:bob~carol"})
        recent = await carol.call("network.history", {"thread_id": "direct:carol~dave"})
        assert len(recent["messages"]) == 2  # the hub answers this read from memory
        assert (await get_http(node.url, "/readyz"))[0] == 200
        await carol.send("agent:dave", "meanwhile")
        await dave.message("meanwhile")
        assert tries < 20  # then bob has to try again
        is_broken = False
        bob = await node.agent("bob")
        await carol.send("agent:bob", "after")
        assert len(await bob.deliveries_until("after")) == 201


async def test_no_number_in_a_record_makes_the_ledger_fail(tmp_path: Path) -> None:
    async with _watched_node(tmp_path, Journal()) as node:
        bot = await node.agent("bot", role="reactor")
        seq = (await (await node.agent("alice")).send("agent:bot", "go"))["seq"]
        for number, trigger in enumerate((2**53, 2**63, 10**30, -1, -(10**30))):
            answer = await bot.submit_record(f"r{number}", "started", {"trigger": trigger, "manifest": [trigger]})
            assert answer["code"] == "unknown_message"
        await bot.record("r", "started", {"trigger": seq, "manifest": [10**30, -(10**30), seq]})
