"""Tests of edits and deletions as pure functions: a copied log produces the same rows, and no edit restores a deleted
text.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from roundelay.network.core.revisions import Revision, is_revised, list_revised, revise, revise_all
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.sending import message_row
from roundelay.network.frames import SendFrame, encode
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.row_encoding import make_row, write_columns

HEAD = MessageHead(
    seq=1, sender_id="ann", sender_kind="agent", kind="broadcast", to="broadcast", thread_id="broadcast", root=1, hops=0, label=1
)  # fmt: skip


def message(text: str = "secret") -> Row:
    return message_row(HEAD, SendFrame(message_id="m", to="broadcast", content=Raw(encode(text))), 5, "ann", "m:m")


def edited(seq: int, text: str, before: str) -> Row:
    body = Revision(1, content=Raw(encode(text)), before=Raw(encode({"content": before})))
    return Row(seq=seq, at=seq, type="edited", actor="ann", key=f"c:{seq}", digest="d", data=encode(body))


DELETED = Row(seq=4, at=4, type="deleted", actor="ann", data=encode(Revision(1, edits=[2, 3])))
LOG = [message("secret 1"), edited(2, "secret 2", "secret 1"), edited(3, "secret 3", "secret 2"), DELETED]


def play(rows: list[Row]) -> list[Row]:
    """Append rows one by one, each with its effect on earlier rows."""
    kept: dict[int, Row] = {}
    for row in rows:
        kept[row.seq] = row
        if row.type in ("edited", "deleted"):
            kept |= revise_all(kept.values(), [row])
    return [kept[seq] for seq in sorted(kept)]


def content(row: Row) -> Any:
    return msgspec.json.decode(row.data)["content"]


def test_copied_log_has_the_same_rows_again() -> None:
    for end in range(1, len(LOG) + 1):
        rows = play(LOG[:end])
        assert play(rows) == rows
    assert content(play(LOG[:3])[0]) == "secret 3"


def test_deletion_leaves_no_text_in_any_row() -> None:
    rows = play(LOG)
    assert all(b"secret" not in row.data and not row.digest for row in rows)
    assert [is_revised(row) for row in rows] == [True, True, True, False]


@pytest.mark.parametrize("order", [*permutations(range(1, 3))])
def test_no_edit_brings_a_deleted_text_back(order: tuple[int, ...]) -> None:
    row = revise(message(), DELETED)
    for place in order:
        row = revise(row, LOG[place])
    assert content(row) == ""


def test_revised_row_is_stored_and_read_unchanged() -> None:
    for change in LOG[1:]:
        row = revise(message(), change)
        assert make_row(*write_columns(row), crc=0) == row


def test_other_rows_are_not_revised() -> None:
    other = Row(seq=9, at=9, type="registered", actor="ann", data=b"{}")
    assert revise(other, DELETED) is other
    assert not is_revised(other)
    assert not is_revised(message('a text with "edited_at": 1'))
    assert list_revised(DELETED) == [1, 2, 3]


async def test_ledger_accepts_a_revision_of_a_missing_row() -> None:
    ledger = MemoryLedger(epoch="e")
    await ledger.open()
    await ledger.append([DELETED], [])
    assert [row.seq for row in await ledger.rows(0, 10)] == [4]
