"""Tests of the cache of `network.memory`: results equal a read of all memories, and the number of reads does not grow
with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec import Raw

from roundelay.network.addresses import memory_of
from roundelay.network.core.visibility import VISIBILITIES, Visibility
from roundelay.network.errors import UnknownMessage
from roundelay.network.frames import decode_json
from roundelay.network.operations import head_cache, memories, views
from roundelay.network.operations.reading import Reading
from tests.support.counting_ledger import count_reads
from tests.support.counts import Note
from tests.support.random_network import EVERYBODY, RandomNetwork

MEMORY = "memory"


class Sum(NamedTuple):
    upto: int
    messages: int


async def read_anew(reading: Reading, thread_id: str, trigger: int, visibility: Any = None) -> dict[str, Any] | None:
    """Return the newest memory that may be shown. Read all records and the heads of all messages for it."""
    view = await views.open_view(reading, trigger, visibility)
    known: dict[int, Sum] = {}
    newest = None
    ledger = reading.hub.ledger
    page = await ledger.reaction(memory_of(thread_id), 0, 100_000, actor=reading.origin.agent_id)
    for row in page.rows:
        if row.is_damaged or row.label != MEMORY:
            continue
        body = decode_json(row.data)
        before = Sum(0, 0) if body["earlier"] is None else known.get(body["earlier"])
        heads = await ledger.heads(body["seqs"])
        await view.load(heads.values())
        if before is None or not all([await view.shows(heads.get(it)) for it in body["seqs"]]):
            continue
        made = Sum(max([before.upto, *body["seqs"]]), before.messages + len(body["seqs"]))
        if made.messages:
            known[row.seq] = made
            newest = {"thread_id": thread_id, "seq": row.seq, **made._asdict(), "text": body["text"]}
    return newest


def write(
    network: RandomNetwork, agent_id: str, thread_id: str, seqs: list[int], earlier: int | None, text: str = ""
) -> int:
    body = {"thread_id": thread_id, "seqs": seqs, "earlier": earlier, "text": text}
    network._number += 1
    frame = {"record_id": f"r{network._number}", "reaction": memory_of(thread_id), "kind": MEMORY, "body": body}
    answer = network.perform_record(agent_id, frame)
    assert answer["type"] == "stored", answer
    return int(answer["seq"])


@pytest.mark.parametrize(
    ("kind", "max_bytes"),
    [
        ("memory", head_cache.MAX_BYTES),
        ("sqlite", 3_000),
        pytest.param("memory", 3_000, marks=pytest.mark.full),
        pytest.param("sqlite", head_cache.MAX_BYTES, marks=pytest.mark.full),
    ],
)
def test_a_memory_is_what_reading_all_of_them_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    max_bytes: int,
    note: Note,
    make_network: Callable[..., RandomNetwork],
) -> None:
    """The runs include a small cache, and rows that are damaged later."""
    monkeypatch.setattr(head_cache.RecentHeads.__init__, "__defaults__", (max_bytes,))
    monkeypatch.setattr(memories, "MAX_GROUPS_AT_ONCE", 3)
    compared = found = none = 0
    for seed in range(3 if kind == "memory" else 1):
        rng = Random(f"{seed}{kind}")
        network = make_network(rng, tmp_path / f"{seed}.db" if kind == "sqlite" else None, 2)
        written: dict[tuple[str, str], list[int]] = {}

        def compare(
            network: RandomNetwork = network, rng: Random = rng, written: dict[tuple[str, str], list[int]] = written
        ) -> None:
            nonlocal compared, found, none
            agent_id, thread_id = rng.choice(list(written))
            head, visibility = network.hub.state.head, rng.choice((None, *VISIBILITIES))
            trigger = rng.randint(max(1, head - 10), head) if rng.random() < 0.7 else rng.randint(1, head)
            reading = network.reading(agent_id)
            try:
                expected = network.stepped.run(read_anew(reading, thread_id, trigger, visibility))
            except UnknownMessage:
                return
            operation = memories.memory(reading, threads=[thread_id], trigger=trigger, visibility=visibility)
            value = network.stepped.run(operation)["memories"]
            assert [decode_json(bytes(it) if isinstance(it, Raw) else it) for it in value] == (
                [expected] if expected is not None else []
            ), (agent_id, thread_id, trigger, visibility)
            compared += 1
            found += expected is not None
            none += expected is None

        for number in range(300):
            network.step()
            if number > 30 and number % 3 == 0:
                agent_id = rng.choice(EVERYBODY[:-1])
                readable = network.readable(agent_id) or [1]
                last = network.stepped.run(network.hub.ledger.messages(readable))
                thread_id = rng.choice([row.stream for row in last.values()] or ["broadcast"])
                inside = [seq for seq, row in last.items() if row.stream == thread_id] or readable
                if rng.random() < 0.3:  # some requests name messages of several threads
                    inside = readable
                seqs = sorted(rng.sample(inside, min(len(inside), rng.randint(0, 4))))
                if rng.random() < 0.1:
                    seqs.append(rng.randint(1, network.hub.state.head))
                before = written.setdefault((agent_id, thread_id), [])
                earlier = rng.choice(before[-3:]) if before and rng.random() < 0.7 else None
                before.append(write(network, agent_id, thread_id, seqs, earlier, f"memory {number}"))
            if written:
                compare()
                compare()
        if kind == "memory":
            for seq in rng.sample([seq for seqs in written.values() for seq in seqs], 20):
                network.stepped.ledger._ledger.damage(seq)
                compare()
    assert min(found, none) > 20, (compared, found, none)
    note(compared=compared, found=found, none=none)


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
def test_what_a_memory_reads_does_not_grow_with_their_number(
    tmp_path: Path, kind: str, most: int, note: Note, make_network: Callable[..., RandomNetwork]
) -> None:
    network = make_network(Random(1), tmp_path / "ledger.db" if kind == "sqlite" else None)
    thread_id = "direct:desk~tom"
    said: list[int] = []
    earlier = None
    for past in (100, most):
        while len(said) < past:
            said.append(network.send("tom", "agent:desk")["seq"])
            if len(said) % 20 == 0:
                earlier = write(network, "desk", thread_id, said[-20:], earlier, f"of {len(said)}")
        trigger = network.send("tom", "agent:desk")["seq"]
        operation = memories.memory
        args: dict[str, Any] = {"threads": [thread_id], "trigger": trigger}
        network.stepped.run(operation(network.reading("desk"), **args))
        value, read = count_reads(network, operation(network.reading("desk"), **args))
        [found] = [decode_json(bytes(it)) for it in value["memories"]]
        assert (found["text"], found["messages"]) == (f"of {past}", past)
        assert read["rows"] <= 3, read  # the trigger, its label, and the returned memory
        note(past=past, **read)


def test_under_current_a_memory_that_is_made_of_another_thread_too_is_not_given(
    make_network: Callable[..., RandomNetwork],
) -> None:
    network = make_network(Random(1))
    thread_id = "direct:desk~tom:c1"
    inside, beside = [network.send("tom", "agent:desk", conversation=it)["seq"] for it in ("c1", "c2")]
    write(network, "desk", thread_id, [inside], None, "inside")
    last = write(network, "desk", thread_id, [inside, beside], None, "both")
    write(network, "desk", thread_id, [inside], last, "from both")
    trigger = network.send("tom", "agent:desk", conversation="c1")["seq"]
    texts = {}
    shown: tuple[Visibility, ...] = ("current", "people")
    for visibility in shown:
        args: dict[str, Any] = {"threads": [thread_id], "trigger": trigger, "visibility": visibility}
        operation = memories.memory(network.reading("desk"), **args)
        texts[visibility] = [decode_json(bytes(it))["text"] for it in network.stepped.run(operation)["memories"]]
    assert texts == {"current": ["inside"], "people": ["from both"]}


def test_a_memory_of_messages_that_did_not_exist_is_none(make_network: Callable[..., RandomNetwork]) -> None:
    network = make_network(Random(1))
    said = network.send("tom", "agent:desk")["seq"]
    write(network, "desk", "direct:desk~tom", [said], None, "of one")
    write(network, "desk", "direct:desk~tom", [said, said + 3], None, "of what comes next")
    trigger = network.send("tom", "agent:desk")["seq"]
    assert trigger == said + 3
    operation = memories.memory(network.reading("desk"), threads=["direct:desk~tom"], trigger=trigger)
    assert [decode_json(bytes(it))["text"] for it in network.stepped.run(operation)["memories"]] == ["of one"]


@pytest.mark.parametrize("at_once", [1, 32])
def test_all_of_a_chain_has_to_be_shown_however_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, at_once: int, make_network: Callable[..., RandomNetwork]
) -> None:
    monkeypatch.setattr(memories, "MAX_GROUPS_AT_ONCE", at_once)
    network = make_network(Random(1))
    thread_id = "direct:desk~tom"
    secret = network.send("mia", "agent:desk")["seq"]
    said = [network.send("tom", "agent:desk")["seq"] for _ in range(5)]
    first = write(network, "desk", thread_id, said[:1], None, "of tom's")
    earlier = write(network, "desk", thread_id, [secret], first, "of mia's, too")
    for seq in said[1:]:
        earlier = write(network, "desk", thread_id, [seq], earlier, "of mia's and more of tom's")
    operation = memories.memory(network.reading("desk"), threads=[thread_id], trigger=said[-1])
    assert [decode_json(bytes(it))["text"] for it in network.stepped.run(operation)["memories"]] == ["of tom's"]
