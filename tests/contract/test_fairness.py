"""Tests of fairness: however much one participant sends, the hub accepts, stores and answers the frames of others in
turn. The hub runs in this process.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.network.core.entries import Leave, Origin
from roundelay.network.hub.connection import TURN_FRAMES
from roundelay.network.hub.pending import BATCH_COST, ENTRY_BYTES, TURN_COST, PendingEntries
from roundelay.network.ledger.memory import MemoryLedger
from tests.contract.test_bounds import Peer, masked, node, plain_connection, read_frame, running_hub
from tests.support.stepped_hub import SteppedHub, StubConnection

__all__ = ["node"]

MAX_BATCH = BATCH_COST // ENTRY_BYTES + TURN_COST // ENTRY_BYTES


class StandingLedger(MemoryLedger):
    """Ledger whose appends wait while ``may_append`` is not set. The ledger records the number of rows of each
    append.
    """

    def __init__(self) -> None:
        super().__init__(epoch="e1")
        self.batches: list[int] = []
        self.is_reached = asyncio.Event()
        self.may_append = asyncio.Event()
        self.may_append.set()

    def stand(self) -> None:
        self.may_append.clear()
        self.is_reached.clear()

    async def append(self, rows: Any, puts: Any) -> None:
        self.batches.append(len(rows))
        self.is_reached.set()
        await self.may_append.wait()
        await super().append(rows, puts)


def send(peer: Peer, message_id: str, content: object = "hi", to: str = "agent:ann") -> None:
    peer.say(type="send", message_id=message_id, to=to, content=content)


async def stored(peer: Peer, message_id: str) -> int:
    while True:
        frame = await peer.hear()
        assert frame["type"] != "error", frame
        if frame["type"] == "stored" and frame["message_id"] == message_id:
            seq: int = frame["seq"]
            return seq


@pytest.mark.parametrize("content", ["hi", "x" * 20_000], ids=["small", "large"])
async def test_a_message_waits_for_no_more_than_a_batch_of_anothers(content: str) -> None:
    ledger = StandingLedger()
    async with running_hub(ledger) as hub:
        ann, *eves = [Peer(hub) for _ in range(4)]
        await ann.join("ann")
        for eve in eves:
            await eve.join("eve")
        ledger.stand()
        send(ann, "first")
        await ledger.is_reached.wait()
        head, count = hub.state.head, 10_000 if len(content) < 100 else 1000
        for number in range(count):
            send(eves[number % len(eves)], f"m{number}", content)
        send(ann, "mine")
        ledger.may_append.set()
        assert await stored(ann, "mine") <= head + 2 * MAX_BATCH
        assert await stored(eves[(count - 1) % len(eves)], f"m{count - 1}") == head + count + 2
        assert max(ledger.batches) <= MAX_BATCH


async def test_broadcasts_count_in_a_batch_what_they_cost() -> None:
    ledger = StandingLedger()
    async with running_hub(ledger) as hub:
        ann, eve, *others = [Peer(hub) for _ in range(202)]
        for number, peer in enumerate([ann, eve, *others]):
            await peer.join(("ann", "eve")[number] if number < 2 else f"other{number}")
        ledger.stand()
        send(ann, "first")
        await ledger.is_reached.wait()
        for number in range(300):
            send(eve, f"m{number}", to="broadcast")
        ledger.may_append.set()
        await stored(eve, "m299")
        assert max(ledger.batches) < 100


async def test_who_sends_little_is_not_refused_while_another_fills_what_may_wait() -> None:
    ledger = StandingLedger()
    async with running_hub(ledger, max_pending_bytes=256 * 1024) as hub:
        ann, eve = Peer(hub), Peer(hub)
        await ann.join("ann")
        await eve.join("eve")
        ledger.may_append.clear()
        for number in range(1000):
            send(eve, f"m{number}", "x" * 1000)
        send(ann, "mine")
        pending = hub.pending
        assert pending <= 2 * 256 + 2
        ledger.may_append.set()
        await stored(ann, "mine")
        answers = [frame async for frame in heard(eve, 1000)]
        assert [frame["message_id"] for frame in answers] == [f"m{number}" for number in range(1000)]
        assert {frame.get("code", "stored") for frame in answers} == {"stored", "overloaded"}


async def heard(peer: Peer, count: int) -> Any:
    while count:
        frame = await peer.hear()
        if frame["type"] in ("stored", "error"):
            count -= 1
            yield frame


# -- frames of one connection


async def test_of_thousands_of_frames_that_are_read_at_once_a_connection_takes_a_few_in_its_turn(node: Any) -> None:
    async with plain_connection(node) as (reader, writer, connection):
        writer.write(
            masked(
                json.dumps(
                    {"type": "hello", "protocol": 1, "agent_id": "eve", "kind": "agent", "token": "t" * 43}
                ).encode()
            )
        )
        assert b'"welcome"' in await read_frame(reader)
        connection.data_received(masked(b"{}") * 5000)
        assert node.hub.pending == TURN_FRAMES
        for _ in range(5000):
            assert b'"invalid_frame"' in await read_frame(reader)


# -- frames beyond the rate


class Stage:
    """A stepped hub and its clients."""

    def __init__(self, **limits: int) -> None:
        self.hub = SteppedHub(limits)
        self.eve, self.eve_too, self.ann = self.join("eve"), self.join("eve"), self.join("ann")

    def join(self, agent_id: str) -> tuple[StubConnection, Any]:
        connection, session = self.hub.connect()
        self.hub.receive(session, {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": "agent"})
        self.hub.loop.step()
        connection.take_frames()
        return connection, session

    def say(self, data: bytes, times: int) -> None:
        connection, session = self.eve
        for _ in range(times):
            if connection.is_read:
                self.hub.hub.receive(session, data)
        self.hub.loop.step()

    def codes(self) -> Counter[str]:
        return Counter(frame["code"] for frame in self.eve[0].take_frames())


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(sends_per_s=10)
    yield stage
    stage.hub.close()


@pytest.mark.parametrize(
    "frame",
    [b"{}", b'{"type":"ack","seq":9}', b'{"type":"nack","seq":9,"reason":"no"}', b'{"type":"send","message_id":"m","to":"x","content":1}'],
)  # fmt: skip
def test_who_is_far_beyond_its_rate_is_not_read_for_a_moment(stage: Stage, frame: bytes) -> None:
    stage.say(frame, 30)
    codes = stage.codes()
    assert codes["rate_limited"] == 30 - 11  # each frame is answered, as documented
    assert stage.eve[0].is_read
    stage.say(frame, 1000)
    assert stage.codes().total() < 100
    assert (stage.eve[0].is_read, stage.eve_too[0].is_read, stage.ann[0].is_read) == (False, False, True)
    late, _ = stage.join("eve")
    assert not late.is_read
    stage.hub.loop.step(0.2)
    assert stage.eve[0].is_read
    assert stage.eve_too[0].is_read
    assert late.is_read
    stage.say(frame, 1)
    assert stage.codes()["rate_limited"] == 0


@pytest.mark.parametrize(
    "frame", [b'{"type":"ack","seq":0}', b'{"type":"signal","to":"agent:ann","kind":"typing","body":1}']
)
def test_what_is_not_answered_counts_as_well(stage: Stage, frame: bytes) -> None:
    ann, session = stage.ann
    stage.hub.receive(session, {"type": "call", "call_id": "w", "op": "network.watch", "args": {"signals": True}})
    stage.hub.loop.step()
    ann.take_frames()
    stage.say(frame, 1000)
    assert not stage.eve[0].is_read
    assert len(ann.take_frames()) == (11 if b"signal" in frame else 0)  # the hub drops signals beyond the rate


def test_reads_and_acks_of_what_was_delivered_do_not_count(stage: Stage) -> None:
    _, session = stage.ann
    for number in range(8):
        message = {"type": "send", "message_id": f"m{number}", "to": "agent:eve", "content": number}
        stage.hub.receive(session, message)
    stage.hub.loop.step()
    seqs = [frame["message"]["seq"] for frame in stage.eve[0].take_frames()]
    for seq in seqs:
        stage.say(json.dumps({"type": "ack", "seq": seq, "only": True}).encode(), 1)
    for number in range(100):
        stage.say(json.dumps({"type": "call", "call_id": f"c{number}", "op": "network.info", "args": {}}).encode(), 1)
    assert {frame["type"] for frame in stage.eve[0].take_frames()} == {"result"}
    stage.say(b"{}", 11)
    assert stage.codes() == {"invalid_frame": 11}


def test_what_is_sent_is_delivered_before_the_next_large_result_is_made(stage: Stage) -> None:
    for number in range(40):
        _, session = stage.hub.connect()
        hello = {"type": "hello", "protocol": 1, "agent_id": f"a{number}", "kind": "agent", "card": {"x": "x" * 15_000}}
        stage.hub.receive(session, hello)
    readers = [stage.join(f"reader{number}") for number in range(8)]
    stage.hub.loop.step()
    for number in range(4):
        for _, session in readers:
            call = {"type": "call", "call_id": f"c{number}", "op": "network.list_agents", "args": {}}
            stage.hub.receive(session, call)
    stage.hub.receive(stage.ann[1], {"type": "send", "message_id": "m", "to": "agent:eve", "content": "hi"})
    stage.hub.loop.step()
    assert [frame["type"] for frame in stage.eve[0].take_frames()] == ["deliver"]
    assert sum(len(connection.take_frames()) for connection, _ in readers) == 1
    stage.hub.loop.step(1.0)
    assert sum(len(connection.take_frames()) for connection, _ in readers) == 31


def test_beyond_the_rate_a_wrong_frame_is_not_looked_through(stage: Stage) -> None:
    early = b'{"type":"send","message_id":"early","content":[%s' % (b'"x",' * 1000)
    late = b'{"type":"send","content":[%s],"message_id":"late","x":1}' % b",".join([b"1"] * 1000)
    stage.say(late, 1)
    assert stage.eve[0].take_frames()[0]["message_id"] == "late"
    stage.say(b"{}", 10)
    assert stage.codes() == {"invalid_frame": 10}
    stage.say(early, 1)
    stage.say(late, 1)
    first, second = stage.eve[0].take_frames()
    assert (first["code"], first["message_id"]) == ("rate_limited", "early")
    assert (second["code"], second.get("message_id")) == ("rate_limited", None)
    assert all("sends_per_s" in frame["message"] for frame in (first, second))  # each refusal names its limit
    assert first["retry_after_ms"] > 0


# -- queues of owners


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 200, 60_000, 260_000]), st.booleans()), max_size=300))
def test_whatever_comes_each_owners_order_is_kept_and_nothing_is_lost(comings: list[tuple[int, int, bool]]) -> None:
    pending, sent, taken = (
        PendingEntries(),
        defaultdict[str, list[object]](list),
        defaultdict[str, list[object]](list),
    )

    def take() -> None:
        batch = pending.take_batch()
        assert batch
        assert len(batch) <= MAX_BATCH
        for entry in batch:
            assert isinstance(entry, Leave)
            taken[entry.origin.agent_id].append(entry)

    for owner, size, is_taken in comings:
        entry = Leave(Origin(f"s{size}", f"owner{owner}", "agent"))
        sent[entry.origin.agent_id].append(entry)
        pending.add(entry, size, extra_cost=size // 2)
        if is_taken:
            take()
    while pending:
        take()
    assert {owner: list(map(id, entries)) for owner, entries in taken.items()} == {
        owner: list(map(id, entries)) for owner, entries in sent.items()
    }
    assert pending.bytes == 0


def test_owners_have_equal_parts_of_a_batch_whatever_they_have_sent() -> None:
    pending = PendingEntries()
    for owner, count in (("eve", 5000), ("mallory", 4000), ("ann", 100)):
        for _ in range(count):
            pending.add(Leave(Origin("s", owner, "agent")), 0)
    parts = Counter(entry.origin.agent_id for entry in pending.take_batch() if isinstance(entry, Leave))
    assert parts["ann"] == 100
    assert abs(parts["eve"] - parts["mallory"]) <= TURN_COST // ENTRY_BYTES
