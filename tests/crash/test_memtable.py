"""Tests of the memtable: reads return the same rows, whatever was flushed already, even after a kill at any moment."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.tables import ConversationBudget, TableWrite, TriggeredReactions
from roundelay.network.ledger import KeyTaken, Ledger, LookupRequest, Span, Trim, memtable, newest_rows
from roundelay.network.ledger.integrity import check_file
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.support.counts import Note

PEOPLE = ("ann", "bob", "cid")
THREADS = ("t1", "t2", "t3")
SPANS = [Span("agent:ann", 0), Span("broadcast", 9), Span("channel:dev", 3, 40), Span("channel:dev", 60)]


def make_row(seq: int, random: Random) -> Row:
    """Return a message or a record with random sender and target."""
    actor, stream, at = random.choice(PEOPLE), random.choice(THREADS), 1000 + seq
    if random.random() < 0.3:
        key = f"r:{seq}" if random.random() < 0.5 else ""
        label = random.choice(("started", "result"))
        return Row(seq=seq, at=at, type="record", actor=actor, key=key, stream=stream, label=label, data=b'{"a":1}')
    to = random.choice(("agent:ann", "agent:bob", "broadcast", "channel:dev", "mod:tasks"))
    kind = "direct" if to.startswith("agent:") else to.partition(":")[0]
    head = MessageHead(
        seq=seq, sender_id=actor, sender_kind="agent", kind=kind, to=to, thread_id=stream, root=seq, hops=0, label=seq
    )  # fmt: skip
    return Row(
        seq=seq, at=at, type="message", actor=actor, key=f"m:{seq}", target=to, stream=stream, label=str(seq), digest="d",
        data=b'{"seq":%d,"content":{"text":"said"}}' % seq, head=head,
    )  # fmt: skip


def make_writes(batch: list[Row], earlier: list[Row], random: Random) -> list[TableWrite]:
    """Return values about new and old messages, as the hub stores them with a batch."""
    messages = [row.seq for row in (*earlier, *batch) if row.type == "message"]
    if not messages:
        return []
    seqs = [random.choice(messages), *(seq for seq in messages if seq >= batch[0].seq)]
    budgets = [TableWrite("root", str(seq), ConversationBudget(random.randrange(99), messages[-1])) for seq in seqs]
    key = f"ann/{random.choice(seqs)}"
    return [*budgets, TableWrite("triggered", key, random.choice((TriggeredReactions("r", batch[-1].seq), None)))]


async def recall_or_look_up(ledger: Ledger, request: LookupRequest) -> tuple[Any, Any]:
    facts = ledger.recall(request)
    facts = await ledger.lookup(request) if facts is None else facts
    return dict(facts.heads), facts.cold


async def ask_everything(ledger: Ledger, rows: list[Row], random: Random) -> list[Any]:
    """Call every read of a ledger with random limits."""
    end = rows[-1].seq + 1
    after, before, limit = random.randrange(end), random.randrange(1, end + 1), random.randrange(1, 40)
    keys = {(row.actor, row.key) for row in random.sample(rows, min(len(rows), 20)) if row.key} | {("ann", "m:none")}
    newest, who, among = random.random() < 0.5, random.choice(PEOPLE), random.sample(THREADS, 2)
    facts = await ledger.lookup(LookupRequest(keys, set(), set()))
    seqs = {random.randrange(end + 1) for _ in range(random.randrange(1, 4))}
    return [
        await recall_or_look_up(ledger, LookupRequest(set(), seqs, {("triggered", f"ann/{seq}") for seq in seqs})),
        {seq: await ledger.lookup_cold("root", str(seq)) for seq in seqs},
        {seq: await ledger.lookup_cold("triggered", f"ann/{seq}") for seq in seqs},
        await ledger.heads(seqs),
        await ledger.messages(seqs),
        await ledger.first_seqs(THREADS),
        await ledger.inbox_heads(SPANS, who, after, end, limit),
        sorted((key, row.seq) for key, row in facts.stored.items()),
        await ledger.inbox(SPANS, who, after, end, limit, newest=newest),
        await ledger.inbox(SPANS, who, 0, before, limit, newest=newest),
        await ledger.thread("t1", after=after, before=before, limit=limit, newest=newest),
        await ledger.thread("t2", limit=limit, newest=newest),
        await ledger.reaction("t1", after, limit),
        await ledger.reaction("t3", 0, limit, actor=who),
        await ledger.records(who, "result", after, limit),
        await ledger.records(who, "started", 0, limit, reaction="t2"),
        await ledger.threads(SPANS, who, before=before, limit=2),
        await ledger.threads(SPANS, who, among=among),
        await ledger.all_threads(limit=2),
        await ledger.all_threads(before=before, among=among),
        await ledger.newest_heads({"t1": after, "t3": 0}, limit),
    ]


@pytest.mark.parametrize(
    ("together", "cached"),
    [
        (5, 8192),
        (40, 20),
        (10_000, 50),
        *(pytest.param(*it, marks=pytest.mark.full) for it in [(1, 9), (10_000, 0), (10_000, 8192)]),
    ],
)
async def test_what_is_asked_for_is_found_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int, cached: int, note: Note
) -> None:
    """The results equal those of a ledger in memory, while rows are added and deleted and the file is opened again."""
    monkeypatch.setattr(memtable, "FLUSH_ROWS", together)
    monkeypatch.setattr(newest_rows, "MAX_ROWS", cached)
    monkeypatch.setattr(newest_rows, "MAX_VALUE_BYTES", 600 * cached)
    random, asked, taken = Random(together + cached), 0, 0
    for life in range(3):
        there = MemoryLedger(epoch="e")
        here = SQLiteLedger(tmp_path / f"{life}.db", new_epoch=lambda: "e")
        for ledger in (there, here):
            await ledger.open()
        rows: list[Row] = []
        for _ in range(60):
            match random.randrange(8):
                case 0 if len(rows) > 20:
                    at = rows[random.randrange(len(rows) // 4)].at
                    trim = Trim(messages_before=at, records_before=at - 5, pinned=rows[-1].seq)
                    assert (await here.trim(trim)).dropped == (await there.trim(trim)).dropped
                    rows = await there.rows(0, 10_000)
                case 1:
                    await here.close()
                    here = SQLiteLedger(tmp_path / f"{life}.db", new_epoch=lambda: "e")
                    await here.open()
                case _:
                    first = rows[-1].seq + 1 if rows else 1
                    batch = [make_row(seq, random) for seq in range(first, first + random.randrange(1, 9))]
                    writes = make_writes(batch, rows, random)
                    for ledger in (there, here):
                        await ledger.append(batch, writes)
                    rows += batch
            if not rows:
                continue
            seed = random.randrange(2**32)
            assert await ask_everything(here, rows, Random(seed)) == await ask_everything(there, rows, Random(seed))
            asked += 1
            keyed = random.choice([*(row for row in rows if row.key), None])
            if keyed is not None:
                with pytest.raises(KeyTaken):
                    await here.append([msgspec.structs.replace(keyed, seq=rows[-1].seq + 1)], [])
                taken += 1
        assert await here.rows(0, 10_000) == rows
        for ledger in (there, here):
            await ledger.close()
        assert check_file(tmp_path / f"{life}.db") == []
    note(compared=asked, keys_refused=taken)


_LIFE = """
import asyncio, sys
from pathlib import Path
from random import Random
from roundelay.network.ledger import memtable
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.test_memtable import make_row

memtable.FLUSH_ROWS, memtable.MIN_FLUSH_ENTRIES, memtable.FLUSH_ENTRIES_PER_ROW = 30, 3, 4

async def main():
    ledger = SQLiteLedger(Path(sys.argv[1]), new_epoch=lambda: "e")
    meta, _ = await ledger.open()
    seq, random = meta.head, Random(int(sys.argv[2]))
    while True:
        batch = [make_row(seq + 1 + number, random) for number in range(random.randrange(1, 9))]
        await ledger.append(batch, [])
        seq = batch[-1].seq
        print(seq, flush=True)

asyncio.run(main())
"""


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_every_row_found(tmp_path: Path, note: Note) -> None:
    _kill_again_and_again(tmp_path, 12, note)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_200_kills_leave_every_row_found(tmp_path: Path, note: Note) -> None:
    _kill_again_and_again(tmp_path, 200, note)


def _kill_again_and_again(path: Path, kills: int, note: Note) -> None:
    (path / "home").mkdir()
    db = path / "home" / "team.db"
    random, acknowledged, between = Random(4), 0, 0
    for number in range(kills):
        with subprocess.Popen([sys.executable, "-c", _LIFE, str(db), str(number)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(random.randrange(1, 40)):
                acknowledged = int(process.stdout.readline())
            process.kill()
            acknowledged = [acknowledged, *map(int, process.stdout.read().split())][-1]
        looked_at = db
        if number % 4:  # otherwise the next start finds the file as this open leaves it after a flush
            shutil.copytree(path / "home", path / "copy")
            looked_at = path / "copy" / "team.db"
        assert check_file(looked_at) == []
        flushed_to, head = _read_marks(looked_at)
        assert head >= acknowledged
        between += 0 < flushed_to < head
        asyncio.run(_find_all(looked_at, head, random))
        assert _read_marks(looked_at) == (head, head)
        assert check_file(looked_at) == []
        shutil.rmtree(path / "copy", ignore_errors=True)
    note(kills=kills, rows=head, kills_with_rows_in_both=between)
    assert between > kills // 3


async def _find_all(db: Path, head: int, random: Random) -> None:
    here, there = SQLiteLedger(db, new_epoch=lambda: "another"), MemoryLedger(epoch="e")
    await here.open()
    await there.open()
    rows = await here.rows(0, 100_000)
    assert [row.seq for row in rows] == list(range(1, head + 1))
    await there.append(rows, [])
    for _ in range(5):
        seed = random.randrange(2**32)
        assert await ask_everything(here, rows, Random(seed)) == await ask_everything(there, rows, Random(seed))
    keyed = [row for row in rows if row.key]
    facts = await here.lookup(LookupRequest({(row.actor, row.key) for row in keyed}, set(), set()))
    assert {row.seq for row in facts.stored.values()} == {row.seq for row in keyed}
    for row in (*keyed[-5:], random.choice(keyed)):
        with pytest.raises(KeyTaken):
            await here.append([msgspec.structs.replace(row, seq=head + 1)], [])
    await here.close()
    await there.close()


def _read_marks(db: Path) -> tuple[int, int]:
    """Return the seq up to which the indexes are flushed, and the newest seq."""
    with closing(sqlite3.connect(db)) as connection:
        flushed_to = connection.execute("SELECT value FROM meta WHERE key = 'placed_to'").fetchone()[0]
        return int(flushed_to), connection.execute("SELECT max(seq) FROM log").fetchone()[0]
