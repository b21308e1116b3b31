"""Test of pages of the log: a row that the hub's state does not include yet is left for the next page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roundelay.network.core.rows import Row
from roundelay.network.operations import operators

ROWS = [Row(seq=seq, at=1, type="registered", actor="ann", data=b"{}") for seq in (7, 8)]


class Ledger:
    async def rows(self, after: int, limit: int, *, max_bytes: int | None = None) -> list[Row]:
        return [row for row in ROWS if row.seq > after][:limit]


@pytest.mark.parametrize("read", [operators.log, operators.rows])
async def test_page_ends_with_the_last_row_of_the_state(read: Any) -> None:
    hub = SimpleNamespace(
        ledger=Ledger(), state=SimpleNamespace(head=7), limits=SimpleNamespace(max_result_bytes=10**6)
    )
    hub.epoch = hub.name = "a"
    reading: Any = SimpleNamespace(hub=hub)
    page = await read(reading, after=6)
    assert (page["next"], page["head"]) == (7, 7)
    hub.state.head = 8
    page = await read(reading, after=7)
    assert (page["next"], page["head"]) == (8, 8)
