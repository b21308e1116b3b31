"""Tests of `network.search` for a trigger: message heads decide which rows are read. Results equal a check of every
row, and the number of reads does not grow with the agent's past.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Raw

from roundelay.network.core.search_query import is_chosen, read_query
from roundelay.network.core.visibility import VISIBILITIES, readable_spans
from roundelay.network.errors import UnknownMessage
from roundelay.network.frames import decode_json
from roundelay.network.ledger import collect_page
from roundelay.network.ledger.search import list_words
from roundelay.network.operations import searching, views
from roundelay.network.operations.reading import Reading
from tests.support.counting_ledger import count_reads
from tests.support.counts import Note
from tests.support.random_network import EVERYBODY, RandomNetwork

QUERIES = ("said", "word1", "word1 said", "word*", "said from:tom", "said from:desk", "nothing")


async def search_anew(
    reading: Reading,
    *,
    query: str,
    trigger: int,
    thread_id: str | None = None,
    before: int | None = None,
    limit: int = 20,
    visibility: Any = None,
) -> dict[str, Any]:
    """Search by reading the rows of all messages with these words."""
    asked = read_query(query, list_words)
    view = await views.open_view(reading, trigger, visibility)
    before = min(before or trigger + 1, trigger + 1)
    participant = reading.hub.state.participant(reading.origin.agent_id)
    spans = readable_spans(reading.hub.state, participant) if participant is not None else []
    page = await reading.hub.ledger.search(
        asked.terms, spans, reading.origin.agent_id, stream=thread_id, before=before, limit=100_000
    )
    rows = await view.choose(it for it in page.rows if is_chosen(asked, it.actor, it.at))
    shown = collect_page(reversed(rows), limit, reading.hub.limits.max_result_bytes, newest=True)
    value = {"messages": [Raw(row.data) for row in shown.rows], "has_more": shown.has_more}
    return {**value, "next": shown.rows[0].seq} if shown.has_more else value


def ask(rng: Random, head: int, threads: list[str]) -> dict[str, Any]:
    args: dict[str, Any] = {"query": rng.choice(QUERIES), "limit": rng.choice((1, 3, 20, 200))}
    args["trigger"] = rng.randint(max(1, head - 6), head) if rng.random() < 0.7 else rng.randint(1, head)
    if rng.random() < 0.3:
        args["thread_id"] = rng.choice(threads)
    if rng.random() < 0.3:
        args["before"] = rng.randint(1, head + 5)
    if rng.random() < 0.6:
        args["visibility"] = rng.choice(VISIBILITIES)
    return args


def seqs_of(value: dict[str, Any]) -> list[int]:
    return [decode_json(bytes(it))["seq"] for it in value["messages"]]


@pytest.mark.parametrize("kind", ["memory", pytest.param("sqlite", marks=pytest.mark.full)])
def test_a_search_is_what_looking_at_every_row_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    note: Note,
    make_network: Callable[..., RandomNetwork],
) -> None:
    monkeypatch.setattr(searching, "SCANNED", 20)  # most of the past is no longer in memory
    monkeypatch.setattr(searching, "ROWS_AT_ONCE", 2)
    compared = found = pages = 0
    for seed in range(3 if kind == "memory" else 1):
        rng = Random(f"{seed}{kind}")
        network = make_network(rng, tmp_path / f"{seed}.db" if kind == "sqlite" else None, 3)
        for number in range(300):
            network.step()
            threads = [it.thread_id for it in network.stepped.run(network.stepped.ledger.all_threads())]
            for _ in range(2 if number > 40 else 0):
                reading = network.reading(rng.choice(EVERYBODY))
                args = ask(rng, network.hub.state.head, threads)
                try:
                    expected = network.stepped.run(search_anew(reading, **args))
                except UnknownMessage:
                    continue
                value = network.stepped.run(searching.search(reading, **args))
                assert seqs_of(value) == seqs_of(expected), (reading.origin.agent_id, args)
                compared += 1
                found += len(value["messages"])
                if value["has_more"]:  # all pages together hold all results
                    whole = network.stepped.run(search_anew(reading, **{**args, "limit": 500}))
                    seqs = seqs_of(value)
                    while value["has_more"]:
                        value = network.stepped.run(searching.search(reading, **{**args, "before": value["next"]}))
                        seqs = seqs_of(value) + seqs
                        pages += 1
                    assert seqs == seqs_of(whole), (reading.origin.agent_id, args)
    assert min(compared, found, pages) > 50, (compared, found, pages)
    note(compared=compared, found=found, further_pages=pages)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("memory", 1_000),
        *(
            pytest.param(*it, marks=pytest.mark.full)
            for it in [("memory", 10_000), ("sqlite", 1_000), ("sqlite", 10_000)]
        ),
    ],
)
def test_what_a_search_reads_does_not_grow_with_the_agents_past(
    tmp_path: Path, kind: str, most: int, note: Note, make_network: Callable[..., RandomNetwork]
) -> None:
    network = make_network(Random(1), tmp_path / "ledger.db" if kind == "sqlite" else None)
    people = [f"person{number}" for number in range(20)]
    for person in [*people, "newcomer"]:
        network.join(person, "human")
    made = 0
    for past in (100, most):
        while made < past:
            made += 1
            network.send(people[made % 20], "agent:desk", conversation=f"c{made % 500}")
        for person, shown in (("person3", 20 if past > 400 else 6), ("newcomer", 2 if past == 1000 else 1)):
            trigger = network.send(person, "agent:desk")["seq"]
            # Each reaction requests its window first.
            network.stepped.run(views.window(network.reading("desk"), trigger=trigger))
            search = searching.search(network.reading("desk"), query="said", trigger=trigger)
            value, read = count_reads(network, search)
            assert len(value["messages"]) == shown
            assert read["rows"] <= 20 + 1 + 2 * searching.ROWS_AT_ONCE, read
            assert (read["heads"], read["seqs"] <= 4000 + 12) == (0, True), read
            note(past=past, **read)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_search_finds_no_replies_to_what_was_said_before_one_came(
    tmp_path: Path, kind: str, make_network: Callable[..., RandomNetwork]
) -> None:
    network = make_network(Random(1), tmp_path / "ledger.db" if kind == "sqlite" else None)
    network.call("tom", "channels.create", name="dev", history="since_join")
    start = network.send("tom", "channel:dev")["seq"]
    network.call("bob", "channels.join", name="dev")
    network.send("tom", "channel:dev", reply_to=start)
    said = network.send("tom", "channel:dev")["seq"]
    for args in ({}, {"trigger": said}):
        found = network.stepped.run(searching.search(network.reading("bob"), query="said", **args))
        assert seqs_of(found) == [said]
