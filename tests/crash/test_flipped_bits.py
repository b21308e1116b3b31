"""Tests of single flipped bits anywhere in a closed ledger's file: a read returns the stored data or nothing, and
`roundelay doctor` finds each flip that affects a read.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import zlib
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Raw

from roundelay.network.core.ack_cursor import AckCursor
from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.tables import (
    CallResult,
    Channel,
    ConversationBudget,
    LookupRequest,
    Member,
    Participant,
    TableWrite,
    Token,
)
from roundelay.network.errors import LedgerError
from roundelay.network.ledger.integrity import check_file, summarize
from roundelay.network.ledger.log_file import open_log
from roundelay.network.ledger.schema import LOG_COLUMNS, checksum
from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.support.counts import Note

DB = "team.db"
MESSAGES = 120


def _message(seq: int) -> Row:
    sender, name = ("ann", "bob") if seq % 3 else ("bob", "ann")
    to, kind = ("channel:dev", "channel") if seq % 5 == 0 else (f"agent:{name}", "direct")
    thread = "channel:dev" if kind == "channel" else "direct:ann~bob"
    head = MessageHead(
        seq=seq, sender_id=sender, sender_kind="agent", kind=kind, to=to, thread_id=thread, root=seq, hops=0, label=seq
    )
    return Row(
        seq=seq, at=1_700_000_000_000 + seq, type="message", actor=sender, key=f"m:{seq}", target=to, stream=thread,
        label=str(seq), data=b'{"seq":%d,"content":"%d \xc3\xa9 %s"}' % (seq, seq, b"x" * (seq % 97)), head=head,
    )  # fmt: skip


def _record(seq: int) -> Row:
    return Row(
        seq=seq, at=1_700_000_000_000 + seq, type="record", actor="bob", key=f"r:{seq}", stream="reaction", label="model_reply",
        digest="d", data=b'{"text":"%d"}' % seq,
    )  # fmt: skip


ROWS = [_record(seq) if seq % 10 == 0 else _message(seq) for seq in range(1, MESSAGES + 1)]
PUTS = [
    *(TableWrite("participant", name, Participant(name, "agent", 1)) for name in ("ann", "bob", "cid")),
    *(TableWrite("token", f"{number:064x}", Token("ann", "agent", number)) for number in range(20)),
    TableWrite("channel", "dev", Channel("dev", 1, "ann")),
    *(TableWrite("member", f"dev/{name}", Member(((1, None),))) for name in ("ann", "bob")),
    *(TableWrite("floor", name, AckCursor(5, (7, 9))) for name in ("ann", "bob")),
    *(TableWrite("root", str(seq), ConversationBudget(3, seq)) for seq in range(1, 20)),
    *(TableWrite("call", f"ann/{number}", CallResult("d", 5, Raw(b"{}"))) for number in range(10)),
]


async def _read_all(db: Path) -> dict[str, Any]:
    """Read everything that a hub may read. Raise `LedgerError` if the file cannot be read."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "new", durability="memory")
    try:
        meta, puts = await ledger.open()
        spans = [Span("agent:bob", 0), Span("channel:dev", 0)]
        facts = await ledger.lookup(
            LookupRequest(
                {(row.actor, row.key) for row in ROWS},
                set(range(1, MESSAGES + 1)),
                {("call", f"ann/{n}") for n in range(10)},
            )
        )
        return {
            "meta": meta,
            "puts": {(put.table, put.key): put.value for put in puts},
            "rows": await ledger.rows(0, 10_000),
            "inbox": (await ledger.inbox(spans, "bob", 0, 10_000, 10_000)).rows,
            "newest": (await ledger.inbox(spans, "bob", 0, 10_000, 10, newest=True)).rows,
            "thread": (await ledger.thread("direct:ann~bob", limit=1000)).rows,
            "reaction": (await ledger.reaction("reaction", 0, 1000)).rows,
            "records": (await ledger.records("bob", "model_reply", 0, 1000)).rows,
            "messages": list((await ledger.messages(range(1, MESSAGES + 1))).values()),
            "known": [row for row in facts.stored.values() if isinstance(row, Row)],
            "repeats": {key: row.seq for key, row in facts.stored.items() if not row.is_damaged},
            "heads": await ledger.heads(range(1, MESSAGES + 1)),
            "causes": facts.heads,
            "cold": facts.cold,
            "budgets": await ledger.cold("root", "", 100),
        }
    finally:
        await ledger.close()


def _read_offline(db: Path) -> list[Row]:
    with open_log(db) as log:
        return list(log.rows())


def _is_wrong(read: dict[str, Any], intact: dict[str, Any]) -> bool:
    """Whether a read returned data that was not stored. Missing data and data that is marked as damaged do not count."""
    stored = {row.seq: row for row in ROWS}
    lists = ("rows", "inbox", "newest", "thread", "reaction", "records", "messages", "known")
    rows = [row for name in lists for row in read[name] if not row.is_damaged]
    values = {**intact["puts"], **intact["cold"], **{("root", key): value for key, value in intact["budgets"]}}
    found = [*read["puts"].items(), *read["cold"].items(), *((("root", key), value) for key, value in read["budgets"])]
    heads = [*read["heads"].items(), *read["causes"].items()]
    return (
        any(row != stored.get(row.seq) for row in rows)
        or any(values.get(key) != value for key, value in found)
        or any(head != stored[seq].head for seq, head in heads)
        or any(f"{key[2:]}" != str(seq) for (_, key), seq in read["repeats"].items())
        # A meta page that looks empty starts a new history, and its clients are notified.
        or (read["meta"].epoch == intact["meta"].epoch) != (read["meta"].head >= intact["meta"].head)
        or read["meta"].first_seq != intact["meta"].first_seq
        or read["meta"].stamp > intact["meta"].stamp
    )


def _put_in_place(db: Path, data: bytes) -> None:
    Path(f"{db}.head").write_text(f"first {MESSAGES}\n")
    for suffix in ("-wal", "-shm"):
        Path(f"{db}{suffix}").unlink(missing_ok=True)
    db.write_bytes(data)


async def _make(db: Path) -> None:
    ledger = SQLiteLedger(db, new_epoch=lambda: "first", durability="full")
    await ledger.open()
    await ledger.append(ROWS, PUTS)
    await ledger.close()


async def _prove(folder: Path, note: Note, *, flips: int) -> None:
    db = folder / DB
    await _make(db)
    data = await asyncio.to_thread(db.read_bytes)
    intact, offline = await _read_all(db), _read_offline(db)
    assert (intact["rows"], offline) == (ROWS, ROWS)
    counts = Counter(flips=flips, refused=0, changed=0, rows_left_out=0, wrong=0, missed=0)
    random = Random(7)
    for _ in range(flips):
        place, bit = random.randrange(len(data)), random.randrange(8)
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        _put_in_place(db, flipped)
        try:
            problems = check_file(db)
        except LedgerError as error:
            problems = [str(error)]
        try:
            told = _read_offline(db)
            assert all(row == ROWS[row.seq - 1] for row in told if row.seq <= MESSAGES), (place, bit)
        except LedgerError:
            told = []
        try:
            read = await _read_all(db)
        except LedgerError:
            counts["refused"] += 1
            is_changed = True
        else:
            counts["wrong"] += _is_wrong(read, intact)
            counts["rows_left_out"] += sum(row.is_damaged for row in read["rows"])
            is_changed = read != intact or told != offline
            assert not _is_wrong(read, intact), (place, bit, read["meta"])
        counts["changed"] += is_changed
        counts["missed"] += is_changed and not problems
        assert problems or not is_changed, (place, bit)
    note(**counts)
    assert (counts["wrong"], counts["missed"]) == (0, 0)
    assert counts["rows_left_out"] > flips / 10


async def test_flipped_bits_change_nothing_that_is_read(
    tmp_path: Path, note: Note, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await _prove(tmp_path, note, flips=60)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_each_of_5000_flipped_bits_changes_nothing_that_is_read(
    tmp_path: Path, note: Note, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await _prove(tmp_path, note, flips=5000)


@pytest.mark.parametrize("damaged", [b"table\xf0laceplace", b"tableplaceplac\xe5"])
async def test_a_damaged_name_in_the_schema_is_reported_as_damage(tmp_path: Path, damaged: bytes) -> None:
    db = tmp_path / DB
    await _make(db)
    data = db.read_bytes()
    assert data.count(b"tableplaceplace") == 1
    _put_in_place(db, data.replace(b"tableplaceplace", damaged))
    for read in (check_file, summarize):
        with pytest.raises(LedgerError, match="damaged"):
            read(db)
    with pytest.raises(LedgerError):
        await _read_all(db)


async def test_the_checksum_of_a_row_is_the_same_in_every_version(tmp_path: Path) -> None:
    columns = (2**40, None, "é" * 40, -5, "")
    # Hand-written MessagePack: an array of five with a 64-bit integer, nil, a string of 80 bytes, a small integer and
    # an empty string.
    packed = b"\x95\xcf" + (2**40).to_bytes(8, "big") + b"\xc0\xd9\x50" + "é".encode() * 40 + b"\xfb\xa0"
    assert checksum(columns) == zlib.crc32(packed)
    await _make(tmp_path / DB)
    with closing(sqlite3.connect(tmp_path / DB)) as db:
        *stored, crc = db.execute(f"SELECT {LOG_COLUMNS}, crc FROM log WHERE seq = 3").fetchone()
    assert crc == checksum(stored) == 1010120679
