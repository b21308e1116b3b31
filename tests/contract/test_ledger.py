"""Tests that every `Ledger` must pass: the behavior that the hub depends on."""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from itertools import repeat
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw

from roundelay.app import make_shared_log
from roundelay.network import platforms
from roundelay.network.cluster import settings
from roundelay.network.cluster.replicated import ReplicatedLedger
from roundelay.network.core.ack_cursor import AckCursor
from roundelay.network.core.rows import MessageHead, Row, Span, damaged_row
from roundelay.network.core.tables import (
    CallResult,
    ConversationBudget,
    LookupRequest,
    Participant,
    TableWrite,
)
from roundelay.network.errors import LedgerError
from roundelay.network.ledger import KeyTaken, Ledger, Page, SearchPage, Trim, Trimmed, memtable, opening
from roundelay.network.ledger import search as ledger_search
from roundelay.network.ledger import sqlite as ledger_sqlite
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.search import read_terms
from roundelay.network.ledger.sqlite import SqliteConnection, SQLiteLedger
from tests.support.nats import nats_server
from tests.support.postgres import postgres_server

Opener = Callable[[], Ledger]


@pytest.fixture(params=["memory", "sqlite", "replicated", pytest.param("postgres", marks=pytest.mark.full)])
async def opener(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Opener]:
    """Function that opens the same ledger again and again."""
    epochs, ids = iter(["e1", "e2", "e3"]), (it for pair in zip(map(str, range(99)), repeat("e1")) for it in pair)
    memory = MemoryLedger(epoch="e1")

    def index() -> SQLiteLedger:
        return SQLiteLedger(
            tmp_path / "ledger.db", new_epoch=lambda: next(epochs), is_index=request.param in ("replicated", "postgres")
        )

    if request.param in ("memory", "sqlite"):
        yield index if request.param == "sqlite" else lambda: memory
        return
    async with nats_server(tmp_path / "nats") if request.param == "replicated" else postgres_server() as server:
        log = server.url("lab")
        monkeypatch.setattr(settings, "SMALL_TRIM_INTERVAL_S", 0.0)
        yield lambda: ReplicatedLedger(make_shared_log(log), index(), new_id=lambda: next(ids), name="roundelay")


@pytest.fixture
async def ledger(opener: Opener) -> AsyncIterator[Ledger]:
    opened = opener()
    await opened.open()
    yield opened
    await opened.close()


def message(
    seq: int, sender: str, to: str, *, root: int | None = None, thread: str = "t", label: int | None = None
) -> Row:
    kind = {"agent": "direct", "broadcast": "broadcast", "channel": "channel", "mod": "mod"}[to.partition(":")[0]]
    head = MessageHead(
        seq=seq, sender_id=sender, sender_kind="agent", kind=kind, to=to, thread_id=thread, root=root or seq, hops=0,
        label=label or seq,
    )  # fmt: skip
    return Row(
        seq=seq, at=1000 + seq, type="message", actor=sender, key=f"m:{sender}-{seq}", target=to, stream=thread,
        label=str(head.label), digest=f"d{seq}", data=b'{"seq":%d,"content":"\\u00e9 \xc3\xa9"}' % seq, head=head,
    )  # fmt: skip


def seqs(found: list[Row] | Page | SearchPage) -> list[int]:
    return [row.seq for row in (found if isinstance(found, list) else found.rows)]


async def test_a_new_ledger_is_empty(opener: Opener) -> None:
    ledger = opener()
    meta, puts = await ledger.open()
    assert (meta.epoch, meta.head, meta.stamp, meta.first_seq, puts) == ("e1", 0, 0, 1, [])
    await ledger.close()


async def test_rows_come_back_as_they_were_appended(ledger: Ledger) -> None:
    excluded = Row(
        seq=2, at=1002, type="message", actor="ann", key="m:x", target="broadcast", stream="broadcast", label="2", excluded=("bob",),
        digest="d", data=b"{}", head=message(2, "ann", "broadcast").head,
    )  # fmt: skip
    record = Row(
        seq=3, at=1003, type="record", actor="bob", key="r:1", stream="reaction", label="started", data=b'{"a":1}'
    )
    rows = [message(1, "ann", "agent:bob"), excluded, record]
    await ledger.append(rows, [])
    assert await ledger.rows(0, 10) == rows
    assert await ledger.rows(1, 1) == [excluded]


async def test_lookup_finds_keys_heads_their_roots_and_cold_values(ledger: Ledger) -> None:
    first, second = message(1, "ann", "agent:bob"), message(2, "bob", "agent:ann", root=1)
    call = CallResult("digest", 5, Raw(b'{"x":1}'))
    await ledger.append(
        [first, second], [TableWrite("root", "1", ConversationBudget(2, 2)), TableWrite("call", "ann/c", call)]
    )
    keys = {("ann", "m:ann-1"), ("ann", "m:none"), ("bob", "m:ann-1")}
    facts = await ledger.lookup(LookupRequest(keys, {2, 99}, {("call", "ann/c"), ("call", "ann/d")}))
    assert {key: (known.seq, known.stream, known.digest) for key, known in facts.stored.items()} == {
        ("ann", "m:ann-1"): (1, "t", "d1")
    }
    assert facts.heads == {2: second.head}
    assert facts.cold == {("root", "1"): ConversationBudget(2, 2), ("call", "ann/c"): call}


async def test_the_inbox_is_the_union_of_spans_and_own_private_messages(ledger: Ledger) -> None:
    rows = [
        message(1, "ann", "agent:bob"),
        message(2, "ann", "broadcast"),
        message(3, "bob", "agent:ann"),  # bob's own
        message(4, "ann", "channel:dev"),
        message(5, "ann", "channel:dev"),
        message(6, "cid", "agent:ann"),
        message(7, "bob", "mod:tasks"),  # bob's own
        message(8, "bob", "channel:ops"),  # bob's own message, but not private
    ]
    await ledger.append(rows, [])
    spans = [Span("agent:bob", 0), Span("broadcast", 0), Span("channel:dev", 4, 6), Span("channel:dev", 7)]
    assert seqs(await ledger.inbox(spans, "bob", 0, 99, 99)) == [1, 2, 3, 5, 7]
    assert seqs(await ledger.inbox(spans, "bob", 1, 5, 99)) == [2, 3, 5]
    assert seqs(await ledger.inbox(spans, "bob", 0, 99, 2)) == [1, 2]
    assert seqs(await ledger.inbox(spans, "bob", 0, 99, 2, newest=True)) == [5, 7]
    assert seqs(await ledger.inbox([], "nobody", 0, 99, 99)) == []


async def test_a_thread_pages_both_ways(ledger: Ledger) -> None:
    await ledger.append([message(seq, "ann", "broadcast", thread="a" if seq % 2 else "b") for seq in range(1, 11)], [])
    assert seqs(await ledger.thread("a", limit=2)) == [7, 9]
    assert seqs(await ledger.thread("a", before=7, limit=2)) == [3, 5]
    assert seqs(await ledger.thread("a", after=1, limit=2, newest=False)) == [3, 5]
    assert seqs(await ledger.thread("none", limit=2)) == []


async def test_threads_are_summed_newest_first(ledger: Ledger) -> None:
    rows = [message(1, "ann", "agent:bob", thread="x"), message(2, "ann", "agent:cid", thread="y")]
    rows += [message(3, "ann", "broadcast", thread="z"), message(4, "bob", "agent:ann", thread="x")]
    await ledger.append(rows, [])
    mine = await ledger.threads([Span("agent:bob", 0), Span("broadcast", 0)], "bob")
    assert [(thread.thread_id, thread.last_seq, thread.messages) for thread in mine] == [("x", 4, 2), ("z", 3, 1)]
    everyone = await ledger.all_threads()
    assert [(thread.thread_id, thread.messages) for thread in everyone] == [("x", 2), ("z", 1), ("y", 1)]


async def test_tables_outlive_a_reopening_and_cold_ones_are_read_by_prefix(opener: Opener) -> None:
    ledger = opener()
    await ledger.open()
    bob = Participant("bob", "agent", 1, Raw(b'{"description":"b"}'), 3)
    puts = [
        TableWrite("participant", "bob", bob),
        TableWrite("floor", "bob", AckCursor(7, (9,))),
        TableWrite("floor", "ann", AckCursor(1)),
    ]
    await ledger.append(
        [message(1, "ann", "broadcast")],
        [*puts, TableWrite("dead", "b/1", None), TableWrite("root", "1", ConversationBudget(1, 1))],
    )
    await ledger.append([], [TableWrite("floor", "ann", None)])
    await ledger.close()
    again = opener()
    meta, loaded = await again.open()
    assert (meta.epoch, meta.head, meta.stamp) == ("e1", 1, 1001)
    assert sorted(loaded, key=lambda put: put.table) == [
        TableWrite("floor", "bob", AckCursor(7, (9,))),
        TableWrite("participant", "bob", bob),
    ]
    assert await again.cold("root", "", 10) == [("1", ConversationBudget(1, 1))]
    assert await again.lookup_cold("root", "1") == ConversationBudget(1, 1)
    assert await again.lookup_cold("root", "2") is None
    await again.close()


async def test_old_calls_are_forgotten(ledger: Ledger) -> None:
    old, new = CallResult("d", 100, Raw(b"{}")), CallResult("d", 200, Raw(b"{}"))
    await ledger.append([], [TableWrite("call", "a/old", old), TableWrite("call", "a/new", new)])
    await ledger.expire_calls(150)
    assert await ledger.cold("call", "", 10) == [("a/new", new)]


async def test_a_closed_ledger_refuses_to_append(opener: Opener) -> None:
    ledger = opener()
    await ledger.open()
    await ledger.close()
    with pytest.raises(LedgerError):
        await ledger.append([message(1, "ann", "broadcast")], [])


async def test_records_are_found_by_agent_and_kind(ledger: Ledger) -> None:
    kinds = ["started", "finished", "started"]
    rows = [
        Row(seq=seq, at=seq, type="record", actor="bob", key=f"r:{seq}", stream=f"x{seq}", label=kind)
        for seq, kind in enumerate(kinds, 1)
    ]
    await ledger.append(rows, [])
    assert seqs(await ledger.records("bob", "started", 0, 10)) == [1, 3]
    assert seqs(await ledger.records("bob", "started", 1, 10)) == [3]
    assert seqs(await ledger.records("ann", "started", 0, 10)) == []
    assert seqs(await ledger.records("bob", "started", 0, 10, reaction="x3")) == [3]
    assert seqs(await ledger.records("bob", "finished", 0, 10, reaction="x3")) == []


async def test_a_taken_key_is_told_and_leaves_nothing_of_its_batch(ledger: Ledger) -> None:
    def keyed(seq: int, sender: str, key: str) -> Row:
        return msgspec.structs.replace(message(seq, sender, "agent:bob"), key=key)

    await ledger.append([keyed(1, "ann", "m:a")], [])
    with pytest.raises(KeyTaken):
        await ledger.append([keyed(2, "ann", "m:b"), keyed(3, "ann", "m:a")], [])
    await ledger.append([keyed(2, "ann", "m:b"), keyed(3, "cid", "m:a")], [])
    assert seqs(await ledger.rows(0, 10)) == [1, 2, 3]


async def test_one_failing_row_leaves_nothing_of_its_batch(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    await ledger.open()
    await ledger.append([message(1, "ann", "broadcast")], [])
    with pytest.raises(LedgerError):
        await ledger.append(
            [message(2, "ann", "broadcast"), message(1, "ann", "broadcast")], [TableWrite("floor", "a", AckCursor(1))]
        )
    assert seqs(await ledger.rows(0, 10)) == [1]
    assert await ledger.lookup_cold("floor", "a") is None
    await ledger.close()


async def test_a_second_process_on_the_same_file_is_refused(tmp_path: Path) -> None:
    first = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    await first.open()
    second = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    with pytest.raises(LedgerError, match="in use by another node"):
        await second.open()
    await first.close()
    await second.open()
    await second.close()


async def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is no database, but long enough to be looked at as one" * 20)
    ledger = SQLiteLedger(tmp_path / "text.db", new_epoch=lambda: "e")
    with pytest.raises(LedgerError, match=r"text\.db"):
        await ledger.open()


async def test_an_inbox_may_have_any_number_of_spans(ledger: Ledger) -> None:
    await ledger.append([message(seq, "ann", "channel:dev") for seq in range(1, 2001)], [])
    spans = [Span("channel:dev", start, start + 2) for start in range(0, 2000, 2)]  # each span holds one message
    assert seqs(await ledger.inbox(spans, "bob", 0, 2000, 3)) == [1, 3, 5]
    assert seqs(await ledger.inbox(spans, "bob", 1000, 1004, 9)) == [1001, 1003]
    assert seqs(await ledger.inbox(spans, "bob", 0, 2000, 2, newest=True)) == [1997, 1999]
    assert [(it.thread_id, it.messages) for it in await ledger.threads(spans, "bob")] == [("t", 1000)]


async def test_overlapping_spans_give_a_message_once(ledger: Ledger) -> None:
    await ledger.append([message(1, "bob", "agent:bob")], [])
    page = await ledger.inbox([Span("agent:bob", 0), Span("agent:bob", 0, 9)], "bob", 0, 9, 9)
    assert (seqs(page), page.has_more) == ([1], False)


@pytest.mark.parametrize(("limit", "has_more"), [(2, True), (3, False), (4, False)])
async def test_a_page_says_whether_there_is_more(ledger: Ledger, limit: int, has_more: bool) -> None:
    await ledger.append([message(seq, "ann", "agent:bob") for seq in (1, 2, 3)], [])
    spans = [Span("agent:bob", 0)]
    assert (await ledger.inbox(spans, "bob", 0, 9, limit)).has_more == has_more
    assert (await ledger.inbox(spans, "bob", 0, 9, limit, newest=True)).has_more == has_more
    assert (await ledger.thread("t", limit=limit)).has_more == has_more
    assert (await ledger.thread("t", limit=limit, newest=False)).has_more == has_more


async def test_a_page_ends_before_its_bytes_but_has_one_row(ledger: Ledger) -> None:
    rows = [message(seq, "ann", "agent:bob") for seq in range(1, 7)]
    size = len(rows[0].data)
    await ledger.append(rows, [])
    spans = [Span("agent:bob", 0)]
    for room, count in ((1, 1), (size * 2, 2), (size * 3 - 1, 2), (size * 6, 6)):
        oldest, newest = list(range(1, count + 1)), list(range(7 - count, 7))
        assert seqs(await ledger.inbox(spans, "bob", 0, 9, 99, max_bytes=room)) == oldest
        assert seqs(await ledger.inbox(spans, "bob", 0, 9, 99, newest=True, max_bytes=room)) == newest
        assert seqs(await ledger.thread("t", limit=99, max_bytes=room)) == newest
        assert seqs(await ledger.thread("t", limit=99, newest=False, max_bytes=room)) == oldest
        assert seqs(await ledger.rows(0, 99, max_bytes=room)) == oldest
        assert (await ledger.thread("t", limit=99, max_bytes=room)).has_more == (count < 6)


async def test_records_are_no_messages_of_a_thread_of_their_reactions_name(ledger: Ledger) -> None:
    records = [
        Row(seq=seq, at=seq, type="record", actor="eve", key=f"r:{seq}", stream="t", label="x") for seq in (2, 3, 4)
    ]
    await ledger.append([message(1, "ann", "agent:bob"), *records], [])
    page = await ledger.thread("t", limit=1)
    assert (seqs(page), page.has_more) == ([1], False)
    page = await ledger.reaction("t", 2, 1)
    assert (seqs(page), page.has_more) == ([3], True)


async def test_heads_are_read_without_their_messages(ledger: Ledger) -> None:
    row = message(1, "ann", "agent:bob")
    await ledger.append([row, Row(seq=2, at=2, type="channel", actor="ann")], [])
    assert await ledger.heads([1, 2, 99]) == {1: row.head}


@pytest.fixture
def damage(ledger: Ledger, tmp_path: Path) -> Callable[[int], None]:
    """Return a function that flips a bit of a stored row."""

    def flip(seq: int) -> None:
        if isinstance(ledger, MemoryLedger):
            ledger.damage(seq)
            return
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as db:
            db.execute("UPDATE log SET data = char(unicode(data) + 1) || substr(data, 2) WHERE seq = ?", (seq,))
            db.commit()

    return flip


async def test_the_first_message_of_each_thread_is_found(ledger: Ledger) -> None:
    rows = [message(seq, "ann", "agent:bob", thread=f"t{seq % 3}") for seq in range(1, 9)]
    record = Row(seq=9, at=9, type="record", actor="bob", key="r:9", stream="t9", label="started")
    await ledger.append([*rows, record], [])
    assert await ledger.first_seqs(["t0", "t1", "t9", "none"]) == {"t0": 3, "t1": 1}
    assert await ledger.first_seqs([]) == {}


async def test_a_damaged_row_has_a_stand_in_in_its_place(ledger: Ledger, damage: Callable[[int], None]) -> None:
    record = Row(seq=5, at=5, type="record", actor="bob", key="r:5", stream="r", label="started")
    rows = [message(seq, "ann", "agent:bob") for seq in (1, 2, 3, 4)]
    await ledger.append([*rows, record], [])
    assert ledger.damaged == 0
    damage(2)
    damage(5)
    kept = [rows[0], damaged_row(2), rows[2], rows[3]]
    spans = [Span("agent:bob", 0)]
    for _ in range(2):
        assert await ledger.rows(0, 9) == [*kept, damaged_row(5)]
        assert await ledger.inbox(spans, "bob", 0, 9, 9) == Page(kept, has_more=False)
        assert await ledger.inbox(spans, "bob", 0, 9, 2) == Page(kept[:2], has_more=True)
        assert await ledger.thread("t", limit=3) == Page(kept[1:], has_more=True)
        assert await ledger.reaction("r", 0, 9) == Page([damaged_row(5)], has_more=False)
        assert await ledger.messages([1, 2, 99]) == {1: rows[0], 2: damaged_row(2)}
        assert await ledger.heads([1, 2, 99]) == {1: rows[0].head}
        facts = await ledger.lookup(LookupRequest({("ann", "m:ann-2"), ("bob", "r:5")}, {1, 2}, set()))
        assert {key: (it.seq, it.is_damaged) for key, it in facts.stored.items()} == {
            ("ann", "m:ann-2"): (2, True),
            ("bob", "r:5"): (5, True),
        }
        assert facts.heads == {1: rows[0].head}
        assert ledger.damaged == 2
    with pytest.raises(KeyTaken):
        await ledger.append([msgspec.structs.replace(rows[1], seq=6)], [])


def said(seq: int, text: str, sender: str = "ann", to: str = "channel:dev", thread: str = "t") -> Row:
    return msgspec.structs.replace(
        message(seq, sender, to, thread=thread), data=json.dumps({"content": text}, ensure_ascii=False).encode()
    )


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("invoice", [1, 4]),
        ("INVOICE 4711", [1]),
        ("invoi*", [1, 2, 4]),
        ("invoi", []),
        ("strasse", [3]),
        ("STRAẞE Café", [3]),
        ("cafe", [3]),
        ("京東", [3]),
        ('inv"oice OR (4711) - §t', []),
        ("data", [5]),
    ],
)
async def test_messages_are_found_by_their_words(ledger: Ledger, query: str, found: list[int]) -> None:
    record = Row(seq=6, at=1006, type="record", actor="ann", key="r:1", stream="r", label="note", data=b'"invoice"')
    data = {"text": "", "order": {"of": "data"}}
    rows = [
        said(1, "The invoice is 4711."), said(2, "two invoices"), said(3, "Straße 5, CAFÉ, 東京"), said(4, "An invoice_a"),
        msgspec.structs.replace(said(5, ""), data=json.dumps({"content": data}).encode()), record,
    ]  # fmt: skip
    await ledger.append(rows[:2], [])
    await ledger.search(read_terms(query), None, "ann", limit=9)  # later messages are found too
    await ledger.append(rows[2:], [])
    assert seqs(await ledger.search(read_terms(query), None, "ann", limit=9)) == found


async def test_a_search_sees_what_an_inbox_would_and_pages_from_the_newest(ledger: Ledger) -> None:
    rows = [
        said(1, "x", to="channel:ops"), said(2, "x", "bob", "agent:ann", "p"), said(3, "x", "bob", "agent:cid"),
        said(4, "x", "cid", "agent:bob"), said(5, "x", "ann"), said(6, "x", "ann"), said(7, "x", "ann"),
    ]  # fmt: skip
    await ledger.append(rows, [])
    spans = [Span("channel:dev", 4, 7), Span("agent:bob", 0)]
    assert seqs(await ledger.search(["x"], spans, "bob", limit=9)) == [2, 3, 4, 5, 6]
    assert seqs(await ledger.search(["x"], spans, "bob", stream="p", limit=9)) == [2]
    page = await ledger.search(["x"], spans, "bob", before=6, limit=2)
    assert (seqs(page), page.has_more) == ([4, 5], True)
    page = await ledger.search(["x"], spans, "bob", before=4, limit=2)
    assert (seqs(page), page.has_more) == ([2, 3], False)


async def test_what_a_reader_may_not_read_is_looked_through_in_parts_and_by_a_newcomer_not_at_all(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_search, "MAX_SEARCHED", 10)
    monkeypatch.setattr(ledger_search, "SEARCH_STEP", 5)
    await ledger.append([said(seq, f"apple a{seq}") for seq in range(1, 101)], [])
    newcomer = await ledger.search(["a*"], [Span("channel:dev", 100)], "bob", limit=2)
    assert (seqs(newcomer), newcomer.has_more) == ([], False)
    found, calls, before, has_more = list[int](), 0, 101, True
    while has_more:
        page = await ledger.search(["a*"], [Span("channel:dev", 0, 3)], "bob", before=before, limit=2)
        found, calls, has_more, before = found + seqs(page), calls + 1, page.has_more, page.end or before
    assert found == [1, 2]
    assert calls == 1 if isinstance(ledger, MemoryLedger) else calls >= 5


def list_indexes(folder: Path) -> list[Path]:
    return list(folder.glob("*.search*"))


async def test_a_search_that_is_given_up_leaves_the_next_one_all(ledger: Ledger) -> None:
    await ledger.append([said(seq, "granite") for seq in range(1, 1600)], [])
    for turns in range(0, 60, 5):
        given_up = asyncio.create_task(ledger.search(["granite"], None, "ann", limit=2))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
    page = await ledger.search(["granite"], None, "ann", limit=1600)
    assert len(page.rows) == 1599


async def test_what_was_dropped_is_in_no_index(opener: Opener, tmp_path: Path) -> None:
    ledger = opener()
    await ledger.open()
    await ledger.append([said(1, "plutonium"), said(2, "granite")], [])
    assert seqs(await ledger.search(["plutonium"], None, "ann", limit=9)) == [1]
    await ledger.trim(Trim(messages_before=1002, pinned=9))
    await ledger.forget_dropped()
    assert seqs(await ledger.search(["plutonium"], None, "ann", limit=9)) == []
    assert seqs(await ledger.search(["granite"], None, "ann", limit=9)) == [2]
    await ledger.close()
    for file in list_indexes(tmp_path):
        assert b"plutonium" not in file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600


def leave(path: Path, left: str) -> None:
    """Leave an index file that belongs to another ledger or is incomplete."""
    index = Path(f"{path}.search")
    if left == "of an older copy":  # a copy has another epoch
        Path(f"{path}.head").unlink()
    else:
        index.write_bytes(b"nothing" if left == "of nothing" else index.read_bytes()[:5000])


@pytest.mark.parametrize("left", ["of an older copy", "of nothing", "half"])
async def test_an_index_of_another_log_is_made_anew(tmp_path: Path, left: str) -> None:
    path, epochs = tmp_path / "ledger.db", iter(["e1", "e2"])
    ledger = SQLiteLedger(path, new_epoch=lambda: next(epochs))
    await ledger.open()
    await ledger.append([said(1, "granite")], [])
    assert seqs(await ledger.search(["granite"], None, "ann", limit=9)) == [1]
    await ledger.close()
    leave(path, left)
    ledger = SQLiteLedger(path, new_epoch=lambda: next(epochs))
    await ledger.open()
    await ledger.append([said(2, "granite")], [])
    with suppress(LedgerError):  # the next search creates the index again
        await ledger.search(["granite"], None, "ann", limit=9)
    assert seqs(await ledger.search(["granite"], None, "ann", limit=9)) == [1, 2]
    await ledger.close()


@pytest.mark.parametrize("is_linked", [False, True])
async def test_a_database_that_is_no_index_is_neither_thrown_away_nor_written(tmp_path: Path, is_linked: bool) -> None:
    other, index = tmp_path / "other.db", tmp_path / "ledger.db.search"
    with closing(sqlite3.connect(other)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE precious (a)")
    index.symlink_to(other) if is_linked else other.rename(index)
    before = (other if is_linked else index).read_bytes()
    ledger = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e1")
    await ledger.open()
    await ledger.append([said(1, "granite")], [])
    if is_linked:
        assert seqs(await ledger.search(["granite"], None, "ann", limit=9)) == [1]
    else:
        for _ in range(2):
            with pytest.raises(LedgerError, match="has the table precious"):
                await ledger.search(["granite"], None, "ann", limit=9)
    await ledger.close()
    assert (other if is_linked else index).read_bytes() == before


async def test_a_trim_says_whether_the_pin_held_it(ledger: Ledger) -> None:
    await ledger.append([message(seq, "ann", "broadcast") for seq in (1, 2, 3)], [])
    assert await ledger.trim(Trim(messages_before=1002, pinned=1)) == Trimmed(dropped=0, first_seq=1, is_pinned=True)
    assert await ledger.trim(Trim(messages_before=1002, pinned=2)) == Trimmed(dropped=1, first_seq=2, is_pinned=False)
    assert await ledger.trim(Trim(messages_before=1004, pinned=3)) == Trimmed(dropped=1, first_seq=3, is_pinned=True)


async def test_old_calls_are_forgotten_in_steps(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_sqlite, "EXPIRY_STEP", 2)
    puts = [TableWrite("call", f"a/{number}", CallResult("d", number % 2, Raw(b"{}"))) for number in range(9)]
    await ledger.append([], puts)
    await ledger.expire_calls(1)
    assert [key for key, _ in await ledger.cold("call", "", 99)] == ["a/1", "a/3", "a/5", "a/7"]


async def test_a_ledger_takes_none_of_its_own_writes_for_another_programs(
    ledger: Ledger, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.close()
    monkeypatch.setattr(opening, "CHECKPOINT_PAGES", 1)  # each write goes to the database at once
    ledger = opener()
    await ledger.open()
    await ledger.append(
        [message(seq, "ann", "broadcast") for seq in (1, 2)],
        [TableWrite("call", "a/1", CallResult("d", 1, Raw(b"{}")))],
    )
    await ledger.verify()
    await ledger.expire_calls(2)
    await ledger.verify()
    await ledger.trim(Trim(messages_before=1002, pinned=3))
    await ledger.verify()
    await ledger.close()


async def test_a_file_system_that_tells_of_no_locks_is_taken_as_it_is(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(platforms.fcntl, "fcntl", refuse)
    await ledger.verify()
    await ledger.append([message(1, "ann", "broadcast")], [])


async def test_a_long_look_does_not_hold_up_deliveries(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    await ledger.open()
    await ledger.append([message(1, "ann", "agent:bob")], [])
    may_end = threading.Event()

    def look(db: sqlite3.Connection) -> None:
        may_end.wait(20)

    looking = asyncio.create_task(ledger._run(ledger._browser, look))
    try:
        async with asyncio.timeout(10):
            assert seqs(await ledger.inbox([Span("agent:bob", 0)], "bob", 0, 9, 9)) == [1]
            assert list(await ledger.messages([1])) == [1]
            await ledger.append([message(2, "ann", "agent:bob")], [])
    finally:
        may_end.set()
        await looking
        await ledger.close()


async def test_no_commit_waits_for_a_checkpoint_of_more_than_about_ten_megabytes(tmp_path: Path) -> None:
    db, log = tmp_path / "ledger.db", tmp_path / "ledger.db-wal"
    ledger = SQLiteLedger(db, new_epoch=lambda: "e")
    await ledger.open()
    sizes = []
    for seq in range(1, 61):
        row = msgspec.structs.replace(message(seq, "ann", "broadcast"), data=b"x" * 500_000)
        await ledger.append([row], [])
        sizes.append(log.stat().st_size)  # a checkpoint holds at most the content of the log
    in_database = db.stat().st_size
    await ledger.close()
    assert max(sizes) <= 11_000_000
    assert in_database >= 20_000_000


async def test_a_commit_of_one_message_writes_at_most_four_kilobytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memtable, "FLUSH_ROWS", 32_768)
    log = tmp_path / "ledger.db-wal"
    ledger = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    await ledger.open()
    before = log.stat().st_size
    for seq in range(1, 101):
        await ledger.append(
            [message(seq, "ann", "broadcast")], [TableWrite("root", str(seq), ConversationBudget(1, seq))]
        )
    assert log.stat().st_size - before <= 100 * 4096
    await ledger.close()


async def test_a_close_that_fails_gives_the_file_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = SQLiteLedger(tmp_path / "ledger.db", new_epoch=lambda: "e")
    await ledger.open()
    closed = []

    async def fail(connection: SqliteConnection) -> None:
        closed.append(connection)
        await close(connection)
        raise sqlite3.OperationalError("disk I/O error")

    close = SqliteConnection.close
    with monkeypatch.context() as patch:
        patch.setattr(SqliteConnection, "close", fail)
        with pytest.raises(LedgerError, match="disk I/O error"):
            await ledger.close()
    assert len(closed) == 3
    await ledger.open()
    await ledger.close()
