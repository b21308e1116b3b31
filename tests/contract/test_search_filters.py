"""Tests of search filters: other forms of a word, people and time, in the hub and in the page's own search of
recordings.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient
from roundelay.network.core.search_query import read_query
from roundelay.network.errors import InvalidArguments
from roundelay.network.ledger.search import list_words
from tests.support.announced import announced_node
from tests.support.command import invoke
from tests.support.page_modules import run_module


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


async def find(client: NetworkClient, query: str, **options: object) -> list[str]:
    found = (await client.call("network.search", {"query": query, **options}))["messages"]
    return [it["content"] for it in found]


async def test_a_word_finds_its_other_forms(network: Network) -> None:
    mia = await network.join("mia", kind="human")
    for text in (
        "Two teapots",
        "A teapot",
        "It was refunded",
        "Boxes of tea",
        "Order 17",
        "Order 170",
        "We are running",
    ):
        await mia.broadcast(text)
    forms = {
        "teapot": ["Two teapots", "A teapot"],
        "TEAPOTS": ["Two teapots", "A teapot"],
        "teapots order": [],
        "refund": ["It was refunded"],
        "refunding": ["It was refunded"],
        "box": ["Boxes of tea"],
        "boxes": ["Boxes of tea"],
        "run": ["We are running"],
        "17": ["Order 17"],
        '"teapot"': ["A teapot"],
        "tea": ["Two teapots", "A teapot", "Boxes of tea"],
        '"tea"': ["Boxes of tea"],
    }
    assert {query: await find(mia, query) for query in forms} == forms


async def test_messages_are_chosen_by_person_and_time(network: Network) -> None:
    mia, ann = [await network.join(it, kind="human") for it in ("mia", "ann")]
    for number in range(3):
        await mia.broadcast(f"tea {number}")
        await ann.broadcast(f"tea from ann {number}")
    times = {it.text: it.sent_at for it in (await mia.history("broadcast")).messages}
    assert await find(mia, "tea from:ann") == [f"tea from ann {it}" for it in range(3)]
    assert await find(mia, "from:@MIA tea", limit=1) == ["tea 2"]
    assert await find(mia, "tea", sender_id="nobody") == []
    later = [it for it, at in times.items() if at >= times["tea 1"]]
    assert await find(mia, "tea", said_after=times["tea 1"]) == later
    assert await find(mia, "tea", said_before=times["tea 1"]) == [it for it in times if it not in later]
    today = datetime.fromtimestamp(times["tea 0"] / 1000, UTC).date().isoformat()
    assert len(await find(mia, f"tea after:{today}")) == 6
    assert await find(mia, f"tea before:{today}") == []
    with pytest.raises(InvalidArguments, match=r"after:yesterday is not a date\. Write it as 2026-11-27"):
        await find(mia, "tea after:yesterday")
    with pytest.raises(InvalidArguments, match="It needs 1 to 32"):
        await find(mia, "from:ann")


async def test_the_search_command_chooses_by_person_and_day(tmp_path: Path) -> None:
    async with announced_node(tmp_path) as node:
        mia, ann = await node.person("mia"), await node.person("ann")
        await mia.send("broadcast", "Two teapots for mia")
        await ann.send("broadcast", "A teapot from ann")
        first = json.loads((await invoke("history", "broadcast", "--json")).out)["messages"][0]
        today = datetime.fromtimestamp(first["sent_at"] / 1000, UTC).date()
        found = {
            query: [text for text in ("Two teapots for mia", "A teapot from ann") if text in shown.out]
            for query in ("teapot", "teapot from:ann", f"teapot after:{today}", f"teapot before:{today}")
            for shown in [await invoke("search", *query.split())]
        }
        assert found == {
            "teapot": ["Two teapots for mia", "A teapot from ann"],
            "teapot from:ann": ["A teapot from ann"],
            f"teapot after:{today}": ["Two teapots for mia", "A teapot from ann"],
            f"teapot before:{today}": [],
        }
        page = json.loads((await invoke("search", "teapots", "from:@MIA", "--json")).out)
        assert [it["content"] for it in page["messages"]] == ["Two teapots for mia"]
        assert "Nothing was found." in (await invoke("search", "teapot", "from:nobody")).out
        refused = await invoke("search", "teapot", "after:yesterday", code=1)
        assert "after:yesterday is not a date. Write it as 2026-11-27" in refused.err
        refused = await invoke("search", "from:ann", code=1)
        assert "It needs 1 to 32" in refused.err


QUERIES = [
    "teapot Teapots boxes BOX running runs refunded parties caf\u00e9s bus glass class 17 x",
    '"Tea pots" "open from:ann after:2026-11-27 Before:2026-11-28T10:30 from:@bob',
    "deploy* string during indeed \u65e5\u672c agent:x needs being user-names o'clock",
]


async def test_the_page_reads_a_query_in_the_same_way() -> None:
    here = [
        dict(zip(("terms", "sender_id", "said_after", "said_before"), read_query(it, list_words), strict=False))
        for it in QUERIES
    ]
    there = await run_module(
        'import { readQuery } from "#core/query.js";', "(queries) => queries.map(readQuery)", QUERIES
    )
    assert there == [{name: it for name, it in found.items() if it is not None} for found in here]
