"""Tests that lists, histories, windows and searches agree on the readers of a message, whatever happened to a
channel's history and members. docs/protocol/messages.md.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from roundelay.network.core.rows import MessageHead
from roundelay.network.core.visibility import may_read
from roundelay.network.operations.views import window
from tests.support.counts import Note
from tests.support.random_network import EVERYBODY, RandomNetwork


def check(network: RandomNetwork, agent_id: str, counts: Counter[str]) -> None:
    heads: list[MessageHead] = [
        it.head for it in network.stepped.run(network.stepped.ledger.rows(0, 10_000)) if it.head is not None
    ]
    expected: defaultdict[str, list[int]] = defaultdict(list)
    for head in heads:
        if may_read(network.hub.state, agent_id, head):
            expected[head.thread_id].append(head.seq)
    listed, before = [], {}
    while True:  # this loop reads small pages
        page = network.call(agent_id, "network.list_threads", limit=3, **before)["value"]
        listed += page["threads"]
        if not page["has_more"]:
            break
        before = {"before": page["threads"][-1]["last_seq"]}
    told = [(it["thread_id"], it["last_seq"], it["last"]["seq"], it["messages"]) for it in listed]
    descending_key = sorted(expected.items(), key=lambda it: -it[1][-1])
    assert told == [(thread_id, seqs[-1], seqs[-1], len(seqs)) for thread_id, seqs in descending_key], agent_id
    among = network.call(agent_id, "network.list_threads", limit=500, threads=list(expected)[:100])["value"]["threads"]
    assert {(it["thread_id"], it["messages"]) for it in among} == {(it, len(seqs)) for it, seqs in expected.items()}
    for thread_id in {head.thread_id for head in heads}:
        answer = network.call(agent_id, "network.history", thread_id=thread_id, limit=500)
        shown = [it["seq"] for it in answer["value"]["messages"]] if answer["type"] == "result" else []
        assert shown == expected.get(thread_id, []), (agent_id, thread_id)
    found: list[int] = []
    for word in range(5):
        page = network.call(agent_id, "network.search", query=f"word{word}", limit=500)["value"]
        found += [it["seq"] for it in page["messages"]]
    assert sorted(found) == sorted(seq for seqs in expected.values() for seq in seqs), agent_id
    for trigger in [seq for seqs in expected.values() for seq in seqs][-3:]:
        seen = network.stepped.run(window(network.reading(agent_id), trigger=trigger, threads=100, visibility="all"))
        shown = [json.loads(bytes(it)) for thread in seen["threads"] for it in thread["messages"]]
        assert {it["seq"] for it in shown} <= {seq for seqs in expected.values() for seq in seqs}, (agent_id, trigger)
    counts["messages compared"] += sum(map(len, expected.values()))


@pytest.mark.parametrize("kind", ["memory", pytest.param("sqlite", marks=pytest.mark.full)])
def test_whoever_may_read_something_is_shown_it_by_every_operation(
    tmp_path: Path, kind: str, note: Note, make_network: Callable[..., RandomNetwork]
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(6):
        network = make_network(Random(seed), tmp_path / f"{seed}.db" if kind == "sqlite" else None)
        for number in range(200):
            network.step()
            if number % 40 == 39:
                known = [it for it in EVERYBODY if network.hub.state.participant(it) is not None]
                check(network, network.rng.choice(known), counts)
        for agent_id in EVERYBODY:
            if network.hub.state.participant(agent_id) is not None:
                check(network, agent_id, counts)
    note(**counts)


def test_a_thread_of_replies_is_listed_as_its_history_shows_it_once_the_history_is_closed(
    make_network: Callable[..., RandomNetwork],
) -> None:
    network = make_network(Random(1))
    network.call("desk", "channels.create", name="plans", history="members")
    first = network.send("desk", "channel:plans")["seq"]
    network.call("bob", "channels.join", name="plans")
    own = network.send("bob", "channel:plans", reply_to=first)["seq"]
    network.send("desk", "channel:plans", reply_to=first)
    network.call("desk", "channels.set_history", name="plans", history="since_join")
    [thread] = network.call("bob", "network.list_threads")["value"]["threads"]
    assert (thread["thread_id"], thread["last_seq"], thread["messages"]) == (f"thread:{first}", own, 1)
    history = network.call("bob", "network.history", thread_id=f"thread:{first}")["value"]["messages"]
    assert [it["seq"] for it in history] == [own]
