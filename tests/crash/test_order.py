"""Tests of promise P3: every reader sees the same order, whatever connections break in between. docs/promises.md."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.crash.peers import Heard, Peer
from tests.support.counts import Note
from tests.support.node import Node, node_process
from tests.support.wire import WireSession

MOST_UNANSWERED = 64


@dataclass(frozen=True)
class Line:
    """A message as a reader received it. ``number`` counts its sender's messages."""

    seq: int
    sender_id: str
    number: int


Reading = dict[str, list[Line]]
"""Messages of one reader by thread, each in order of arrival."""


@dataclass(frozen=True)
class Place:
    """A thread and the address for messages to it."""

    thread_id: str
    to: str
    reply_to: int | None = None


async def _make_places(host: WireSession, peers: Iterable[Peer], count: int) -> list[Place]:
    """Create channels and reply threads, half of each. Every peer may write to all of them."""
    places = []
    for number in range(count // 2):
        await host.call("channels.create", {"name": f"c{number}"})
        places.append(Place(f"channel:c{number}", f"channel:c{number}"))
    await asyncio.gather(*(_join_all(peer, places) for peer in peers))
    for _ in range(count - len(places)):
        start = (await host.send("broadcast", "what do you think?"))["seq"]
        places.append(Place(f"thread:{start}", "broadcast", start))
    return places


async def _join_all(peer: Peer, places: Iterable[Place]) -> None:
    await peer.come_back()
    for place in places:
        await peer.call("channels.join", name=place.to.partition(":")[2])


async def _write(peer: Peer, places: Sequence[Place], random: Random, *, messages: int, losses: int) -> int:
    """Send ``messages`` messages to each place, in one sequence over all places. Return the number of dropped
    connections.
    """
    turns = [place for place in places for _ in range(messages)]
    random.shuffle(turns)
    cuts = set(random.sample(range(len(turns)), losses))
    for number, place in enumerate(turns):
        reply = {} if place.reply_to is None else {"reply_to": place.reply_to}
        await peer.send(f"m{number}", place.to, number, **reply)
        if number in cuts:
            await peer.lose()
            await peer.come_back()
        await peer.until(lambda: peer.unanswered < MOST_UNANSWERED)
    await peer.settled()
    assert len(peer.stored) == len(turns), "some were refused"
    return len(cuts)


async def _read(peer: Peer, random: Random, *, total: int, losses: int) -> int:
    """Read until everything was received. Return the number of dropped connections."""
    for limit in sorted(random.sample(range(total), losses)):
        await peer.until(lambda limit=limit: len(peer.heard) >= limit)  # type: ignore[misc]
        await peer.lose()
        await peer.come_back()
    seen: set[int] = set()
    read = 0

    def has_everything() -> bool:
        nonlocal read
        seen.update(heard.seq for heard in itertools.islice(peer.heard, read, None))
        read = len(peer.heard)
        return len(seen) >= total

    await peer.until(has_everything)
    return losses


def _reading(heard: Iterable[Heard], threads: set[str]) -> tuple[Reading, int]:
    """Return the threads with each message at its first arrival, and the number of repeated deliveries."""
    reading: Reading = {}
    seen: set[int] = set()
    repeats = 0
    for one in heard:
        repeats += one.seq in seen
        if one.seq not in seen and one.thread_id in threads:
            reading.setdefault(one.thread_id, []).append(Line(one.seq, one.sender_id, one.content))
        seen.add(one.seq)
    return reading, repeats


async def _read_history(session: WireSession, places: Iterable[Place]) -> Reading:
    reading: Reading = {}
    for place in places:
        lines: list[Line] = []
        before: dict[str, Any] = {}
        has_more = True
        while has_more:
            page = await session.call("network.history", {"thread_id": place.thread_id, "limit": 500, **before})
            lines[:0] = [Line(found["seq"], found["sender_id"], found["content"]) for found in page["messages"]]
            before, has_more = {"before": lines[0].seq}, page["has_more"]
        reading[place.thread_id] = lines
    return reading


def _count_inversions(reading: Reading) -> int:
    """Count neighbors in the wrong order: by seq in each thread, and by the sender's own count over all threads."""
    inversions = sum(
        earlier.seq >= later.seq for lines in reading.values() for earlier, later in itertools.pairwise(lines)
    )
    last: dict[str, int] = {}
    for line in sorted(itertools.chain(*reading.values()), key=lambda line: line.seq):
        inversions += line.number <= last.get(line.sender_id, -1)
        last[line.sender_id] = line.number
    return inversions


async def _prove(
    node: Node, note: Note, *, threads: int, senders: int, messages: int, losses: int, senders_read: bool
) -> None:
    random = Random(threads)
    total = threads * senders * messages
    host = await node.agent("host")
    writers = [Peer(node, f"s{number}", ack_every=32 if senders_read else 0) for number in range(senders)]
    cursor, floor, late = Peer(node, "cursor", keeps_cursor=True, ack_every=64), Peer(node, "floor"), Peer(node, "late")
    readers = [cursor, floor, late]
    places = await _make_places(host, (*writers, *readers), threads)
    await late.leave()
    to_hear = total + sum(
        place.reply_to is not None for place in places
    )  # the sum includes the messages that start the reply threads
    cuts = await asyncio.gather(
        *(_write(peer, places, random, messages=messages, losses=losses) for peer in writers),
        *(_read(peer, random, total=to_hear, losses=losses) for peer in (cursor, floor)),
    )
    await late.come_back()
    await _read(late, random, total=to_hear, losses=0)

    names = {place.thread_id for place in places}
    history = await _read_history(host, places)
    readings = {"history": history}
    repeats = {}
    for reader in readers:
        readings[reader.agent_id], repeats[reader.agent_id] = _reading(reader.heard, names)
    if senders_read:
        for writer in writers:
            await _read(writer, random, total=to_hear - threads * messages, losses=0)
            own = [
                Heard(answer["seq"], 1, writer.agent_id, "", answer["thread_id"], int(message_id[1:]))
                for message_id, (answer, *_) in writer.answers.items()
                if message_id[0] == "m"
            ]
            heard = sorted([*writer.heard, *own], key=lambda one: one.seq)
            readings[writer.agent_id], _ = _reading(heard, names)
    inversions = sum(_count_inversions(reading) for reading in readings.values())
    differing = [name for name, reading in readings.items() if reading != history]
    note(
        threads=threads, senders=senders, messages=sum(map(len, history.values())), reconnects=sum(cuts), readers=len(readings),
        readers_that_differ=len(differing), inversions=inversions, delivered_again=repeats["floor"],
    )  # fmt: skip
    assert sum(map(len, history.values())) == total
    assert (differing, inversions) == ([], 0)
    assert repeats["cursor"] == 0  # a reader with its own cursor gets no message twice


async def test_every_reader_reads_the_same_order(tmp_path: Path, note: Note) -> None:
    async with node_process(
        tmp_path / "team.db", limits={"root_messages_per_s": 1_000_000, "max_uncaused_answers": 1_000_000}
    ) as node:
        await _prove(node, note, threads=10, senders=5, messages=20, losses=3, senders_read=True)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_every_reader_reads_the_same_order_of_200000_messages(tmp_path: Path, note: Note) -> None:
    async with node_process(
        tmp_path / "team.db", limits={"root_messages_per_s": 1_000_000, "max_uncaused_answers": 1_000_000}
    ) as node:
        await _prove(node, note, threads=50, senders=20, messages=200, losses=20, senders_read=False)
