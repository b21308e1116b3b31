"""Tests that reads from the ledger's memory equal reads from its file, through edits, deletions, retention and failed
commits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from roundelay.mods.messages import MessageChanges
from roundelay.network.core.rows import Span
from roundelay.network.core.tables import LookupRequest
from roundelay.network.ledger import Trim, memtable, newest_rows
from roundelay.network.ledger.newest_rows import NewestRows
from tests.support.random_network import EVERYBODY, RandomNetwork
from tests.support.stepped_hub import SteppedHub

STEPS = 150


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_rows, "MAX_ROWS", 40)
    monkeypatch.setattr(newest_rows, "MAX_VALUE_BYTES", 12_000)
    monkeypatch.setattr(memtable, "FLUSH_ROWS", 40)
    monkeypatch.setattr(memtable, "MIN_FLUSH_ENTRIES", 8)
    create = SteppedHub.__init__
    monkeypatch.setattr(
        SteppedHub, "__init__", lambda self, limits, path: create(self, limits, path, [MessageChanges()])
    )


def revise(network: RandomNetwork) -> None:
    """Edit or delete a message as its sender, or delete old rows."""
    rng, head, run = network.rng, network.hub.state.head, network.stepped.run
    seq = rng.randint(max(1, head - 60), head)
    found = run(network.stepped.ledger.messages([seq]))
    if seq in found and rng.random() < 0.6:
        network.call(found[seq].actor, "messages.edit", seq=seq, text=f"new {head}")
    elif seq in found and rng.random() < 0.6:
        network.call(found[seq].actor, "messages.delete", seq=seq)
    if rng.random() < 0.1:
        pinned = max(1, head - rng.randrange(5, 30))
        run(network.stepped.ledger.trim(Trim(messages_before=2**60, records_before=2**60, pinned=pinned, limit=20)))


def choose_read(network: RandomNetwork) -> Callable[[], Awaitable[Any]]:
    rng, head, ledger = network.rng, network.hub.state.head, network.stepped.ledger
    after, end = sorted((rng.randint(0, head + 2), rng.randint(0, head + 2)))
    limit, newest, who, other = rng.choice((1, 2, 5, 50)), rng.random() < 0.5, *rng.sample(EVERYBODY, 2)
    seqs = [rng.randint(max(1, head - 40), head + 2) for _ in range(3)]
    first, second = sorted((who, other))
    stream = rng.choice((f"direct:{first}~{second}", "broadcast", "channel:dev", f"thread:{seqs[0]}"))
    spans = [Span(f"agent:{who}", 0, 2**62, False), Span("channel:dev", after, end, True)]
    return rng.choice(
        (
            lambda: ledger.messages(seqs),
            lambda: ledger.heads(seqs),
            lambda: ledger.thread(stream, after=after, before=end, limit=limit, newest=newest),
            lambda: ledger.inbox(spans, who, after, end, limit, newest=newest),
            lambda: ledger.inbox_heads(spans, who, after, end, limit),
            lambda: ledger.newest_heads({stream: after, "broadcast": 0}, limit),
            lambda: ledger.first_seqs([stream, "broadcast"]),
            lambda: ledger.reaction("r", after, limit),
            lambda: ledger.records(who, "note", after, limit),
            lambda: ledger.lookup_cold("root", str(seqs[0])),
        )
    )


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_reads_from_memory_equal_reads_from_the_file(tmp_path: Path, seed: int) -> None:
    network = RandomNetwork(Random(seed), tmp_path / "team.db", 3)
    run, ledger, recalled = network.stepped.run, network.stepped.ledger, 0
    file = ledger._ledger
    for step in range(STEPS):
        network.step()
        sender, head = network.rng.choice(EVERYBODY[:-1]), network.hub.state.head
        if step % 7 == 0:
            record = {"record_id": f"n{step}", "reaction": "r", "kind": "note", "body": {}}
            network.perform_record(sender, record)
        if step % 3 == 0:
            revise(network)
        for _ in range(8):
            read = choose_read(network)
            from_memory, newest = run(read()), file._newest
            file._newest = NewestRows(file._damage)  # a memtable without any rows
            from_file = run(read())
            file._newest = newest
            assert from_memory == from_file
        request = LookupRequest(set(), {max(1, head - step % 30)}, set())
        if (facts := ledger.recall(request)) is not None:
            recalled += 1
            found = run(ledger.lookup(request))
            assert (dict(facts.heads), dict(facts.cold)) == (dict(found.heads), dict(found.cold))
    assert recalled > STEPS / 10
    network.close()
