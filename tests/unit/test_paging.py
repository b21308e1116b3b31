"""Tests of reading lists page by page (network/client/paging.py): each operation continues where its last page ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from roundelay.network.client.paging import read_pages


class Hub:
    """Hub that answers calls with the given values, in order."""

    def __init__(self, *values: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._values = list(values)

    async def call(self, op: str, args: Mapping[str, Any]) -> Any:
        self.asked.append(dict(args))
        return self._values[len(self.asked) - 1]


@pytest.mark.parametrize(
    ("op", "first", "args"),
    [
        ("channels.list", {"channels": [{"name": "a"}, {"name": "b"}]}, {"after": "b"}),
        ("channels.members", {"members": ["ann", "bob"]}, {"after": "bob"}),
        ("network.dead_letters", {"dead_letters": [{"agent_id": "bob", "seq": 4}]}, {"after": "bob/4"}),
        ("network.history", {"messages": [{"seq": 4}, {"seq": 5}]}, {"before": 4}),
        ("network.inbox", {"items": [{"seq": 9}], "next": "9/x"}, {"before": "9/x"}),
        ("network.list_threads", {"threads": [{"last_seq": 9}, {"last_seq": 7}]}, {"before": 7}),
        ("network.impact", {"messages": [], "next": 40}, {"after": 40}),
        ("network.receive", {"messages": [], "next": 40}, {"after": 40, "unhandled": True}),
    ],
)
async def test_the_next_page_begins_where_the_last_one_ended(
    op: str, first: dict[str, Any], args: dict[str, Any]
) -> None:
    last = {**{name: [] for name, value in first.items() if isinstance(value, list)}, "has_more": False}
    hub = Hub({**first, "has_more": True}, last)
    assert [page async for page in read_pages(hub.call, op, {"limit": 2})] == [{**first, "has_more": True}, last]
    assert hub.asked == [{"limit": 2}, {"limit": 2, **args}]


async def test_receiving_from_a_cursor_keeps_giving_handled_messages() -> None:
    hub = Hub({"messages": [{"seq": 4}], "next": 4, "has_more": True}, {"messages": [], "next": 9, "has_more": False})
    assert len([page async for page in read_pages(hub.call, "network.receive", {"after": 3})]) == 2
    assert hub.asked[1] == {"after": 4, "unhandled": False}


async def test_an_empty_page_ends_a_list_whatever_the_hub_says_of_more() -> None:
    hub = Hub({"agents": [], "has_more": True})
    assert len([page async for page in read_pages(hub.call, "network.list_agents")]) == 1


async def test_who_leaves_the_loop_asks_for_nothing_further() -> None:
    hub = Hub({"agents": [{"agent_id": "ann"}], "has_more": True})
    async for _ in read_pages(hub.call, "network.list_agents"):
        break
    assert len(hub.asked) == 1


async def test_an_operation_without_pages_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'network\.info' has no pages\. Operations with pages: channels\.list, "):
        await anext(read_pages(Hub().call, "network.info"))
