"""Tests of `network.list_threads`: it reads the ends of all threads at once, and equals a read of each thread."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from roundelay.network.addresses import thread_start
from roundelay.network.frames import decode_json
from roundelay.network.ledger import find_newest_message
from roundelay.network.operations import conversation
from roundelay.network.operations.conversation import list_threads
from roundelay.network.operations.read_state import describe_message_line
from roundelay.network.operations.reading import Reading, reads
from tests.support.counting_ledger import count_reads
from tests.support.counts import Note
from tests.support.random_network import EVERYBODY, RandomNetwork


async def read_words(reading: Reading, thread_id: str) -> str:
    """Return the first words of a thread by reading the thread itself."""
    ledger, start = reading.hub.ledger, thread_start(thread_id)
    rows = list((await ledger.messages([start])).values()) if start is not None else []
    rows += (await ledger.thread(thread_id, limit=conversation.FIRST_LOOKED_AT, newest=False)).rows
    row = next((it for it in rows if not it.is_damaged and reads(reading, it.head)), None)
    return describe_message_line(row)["text"] if row is not None else ""


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_list_is_what_reading_each_thread_gives(tmp_path: Path, kind: str, note: Note) -> None:
    compared = quoted = 0
    for seed in range(3):
        rng = Random(f"{seed}{kind}")
        network = RandomNetwork(rng, tmp_path / f"{seed}.db" if kind == "sqlite" else None, 4)
        for _ in range(250):
            network.step()
        if kind == "memory":
            for seq in rng.sample(range(20, network.hub.state.head), 30):
                network.stepped.ledger._ledger.damage(seq)
        for agent_id in EVERYBODY:
            reading = network.reading(agent_id)
            pages, before = list[dict[str, Any]](), None
            while True:
                found = network.stepped.run(list_threads(reading, before=before, limit=rng.choice((3, 20))))
                pages += [decode_json(it) for it in found["threads"]]
                if not found["has_more"]:
                    break
                before = pages[-1]["last_seq"]
            for entry in pages:
                thread_id = str(entry["thread_id"])
                newest = network.stepped.run(find_newest_message(network.hub.ledger, thread_id, entry["last_seq"] + 1))
                assert newest is not None
                assert entry["last"] == describe_message_line(newest)
                words = network.stepped.run(read_words(reading, thread_id))
                title = str(entry["title"])
                if conversation._is_quoted(reading, thread_id):
                    assert title.endswith(f" · {words}" if words else f"replies to #{thread_start(thread_id)}"), entry
                    quoted += 1
                else:
                    assert " · " not in title
                compared += 1
        network.close()
    assert min(compared, quoted) > 100
    note(compared=compared, quoted=quoted)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_list_of_titled_threads_is_read_a_few_at_once(tmp_path: Path, kind: str, note: Note) -> None:
    network = RandomNetwork(Random(1), tmp_path / "ledger.db" if kind == "sqlite" else None)
    for number in range(120):
        network.send("tom", "agent:desk", conversation=f"c{number % 60}")
    found, read = count_reads(network, list_threads(network.reading("tom"), limit=50))
    assert len(found["threads"]) == 50
    assert read["rows"] <= 2 * 51, read  # one row for the first and one for the newest message of each thread
    assert read["calls"] <= 16, read
    note(**read)
    network.close()
