"""Tests of a batch of entries: its entries see each other, nothing is answered or delivered before the commit, and
repeats reveal the result of a failed commit.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.clock import random_id, system_clock
from roundelay.network.config import Limits
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import Facts, LookupRequest, TableWrite
from roundelay.network.errors import LedgerError
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection, LocalTransport
from roundelay.network.ledger import Unstorable
from roundelay.network.ledger.connection import SqliteConnection
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.mod import Change, Mod, operation


class MoodyLedger(MemoryLedger):
    """Ledger whose `append` waits while ``is_free`` is clear. ``fails`` makes it fail once, before or after it has
    stored the rows.
    """

    def __init__(self) -> None:
        super().__init__(epoch="e", name="moody")
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.is_reached = asyncio.Event()
        self.fails: str | None = None

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        self.is_reached.set()
        await self.is_free.wait()
        fails, self.fails = self.fails, None
        if fails == "before":
            raise LedgerError("the disk is full")
        await super().append(rows, puts)
        if fails == "after":
            raise LedgerError("the disk did not answer")


class Place:
    """A hub over a moody ledger, with the participants ann and bob."""

    def __init__(self) -> None:
        self.ledger = MoodyLedger()
        self.hub = Hub(self.ledger, limits=Limits(), clock=system_clock, new_id=random_id)
        self.ann, self.bob = (NetworkClient(name, transport=LocalTransport(self.hub)) for name in ("ann", "bob"))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place()
    await place.hub.start()
    async with place.ann, place.bob:
        yield place
        place.ledger.is_free.set()
    await place.hub.close()


async def test_nothing_is_answered_or_delivered_before_the_commit_has_returned(place: Place) -> None:
    heard = place.bob.__aiter__()
    arriving = asyncio.ensure_future(anext(heard))
    place.ledger.is_free.clear()
    place.ledger.is_reached.clear()
    sending = asyncio.create_task(place.ann.send_text("bob", "hi"))
    await place.ledger.is_reached.wait()
    for client in (place.ann, place.bob):
        await client.call("network.info")  # a read waits for no commit, so frames written before it have arrived
    assert (sending.done(), arriving.done()) == (False, False)
    place.ledger.is_free.set()
    assert (await sending).seq == (await arriving).seq


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_a_commit_that_failed_is_settled_by_the_senders_repeat(
    place: Place, fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = place.bob.__aiter__()
    first_seq = (await place.ann.send_text("bob", "first")).seq
    place.ledger.fails = fails
    async with asyncio.timeout(5):
        stored = await place.ann.send_text("bob", "second")  # the client gets 4503 and sends the message again
    assert stored.duplicate is (fails == "after")
    last = await place.ann.send_text("bob", "last")
    assert [(await anext(heard)).text for _ in range(3)] == ["first", "second", "last"]
    assert first_seq < stored.seq < last.seq
    assert place.hub.registry.counts["recoveries"] == 1
    assert "the ledger failed; reopening it" in caplog.text


def hello(agent_id: str) -> bytes:
    frame = {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": "agent", "role": "reactor"}
    return json.dumps(frame).encode()


async def find_frame(connection: LocalConnection, type_: str) -> dict[str, object]:
    """Return the next frame of this type, and skip the frames before."""
    async for data in connection.frames():
        frame: dict[str, object] = json.loads(data)
        if frame["type"] == type_:
            return frame
    raise AssertionError(f"no {type_} came")


class PoisonedLedger(MemoryLedger):
    """Ledger with a defect. Data that contain the word "poison" raise an error, before or after they are stored."""

    def __init__(self, when: str, error: Exception) -> None:
        super().__init__(epoch="e", name="poisoned")
        self._when = when
        self._error = error
        self.raised = 0

    async def append(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        is_poisoned = any(b"poison" in row.data for row in rows)
        if is_poisoned and self._when == "before":
            self.raised += 1
            raise self._error
        await super().append(rows, puts)
        if is_poisoned and not self.raised:
            self.raised += 1
            raise self._error


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), KeyError("x"), AssertionError(), OSError(5, "gone")], ids=repr
)
async def test_a_defect_in_a_commit_is_told_to_its_sender_alone(error: Exception) -> None:
    ledger = PoisonedLedger("before", error)
    hub = Hub(ledger, limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, bob = (NetworkClient(name, transport=LocalTransport(hub)) for name in ("ann", "bob"))
    async with asyncio.timeout(20), ann, bob:
        sessions = set(hub.registry.sessions)
        texts = ["one", "the poison", "two", "poison again", "three"]
        settled = await asyncio.gather(*(ann.send_text("bob", text) for text in texts), return_exceptions=True)
        assert [type(it).__name__ for it in settled] == ["Stored", "InternalError", "Stored", "InternalError", "Stored"]
        heard = bob.__aiter__()
        assert [(await anext(heard)).text for _ in range(3)] == ["one", "two", "three"]
        assert set(hub.registry.sessions) == sessions
        assert hub.registry.counts["recoveries"] == 0
        assert hub.is_ready
        again = await ann.send_text("bob", "and on")
        assert [row.seq for row in await ledger.rows(0, 100)][-1] == again.seq == hub.state.head
    await hub.close()


async def test_a_defect_behind_the_commit_is_settled_by_the_senders_repeat() -> None:
    ledger = PoisonedLedger("after", RuntimeError("a defect"))
    hub = Hub(ledger, limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, bob = (NetworkClient(name, transport=LocalTransport(hub)) for name in ("ann", "bob"))
    async with asyncio.timeout(20), ann, bob:
        stored = await ann.send_text("bob", "poison")
        assert (ledger.raised, hub.registry.counts["recoveries"]) == (1, 1)
        assert (await anext(bob.__aiter__())).seq == stored.seq
    await hub.close()


async def test_what_an_older_reactor_sends_in_the_batch_of_a_newer_ones_hello_is_not_stored(place: Place) -> None:
    older, newer = LocalConnection(place.hub), LocalConnection(place.hub)
    older.send(hello("bot"))
    await find_frame(older, "welcome")
    frames = (
        {"type": "send", "message_id": "late", "to": "agent:ann", "content": "too late"},
        {"type": "record", "record_id": "late", "reaction": "r", "kind": "note", "body": {}},
    )
    newer.send(hello("bot"))
    for frame in frames:
        older.send(json.dumps(frame).encode())
    await find_frame(newer, "welcome")
    for frame in frames:
        newer.send(json.dumps(frame).encode())
        assert (await find_frame(newer, "stored"))["duplicate"] is False


# -- refused entries, and the entry that causes a defect


class Asked(MemoryLedger):
    """Ledger that records the keys of its lookups."""

    def __init__(self) -> None:
        super().__init__(epoch="e")
        self.lookups: list[set[str]] = []

    async def lookup(self, wanted: LookupRequest) -> Facts:
        if wanted:
            self.lookups.append({key for _, key in wanted.keys})
        return await super().lookup(wanted)


class Seen(Mod):
    """Mod that records each message, and whose operation does what its argument says."""

    id = "seen"

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def apply(self, change: Change, message: Row) -> None:
        self.messages.append(message.key.encode())

    @operation("change")
    def keep(self, change: Change, *, what: str) -> None:
        """Store something that cannot be stored."""
        match what:
            case "a key":
                change.put("\ud800", 1)
            case "a value":
                change.set_value("mod", "seen/x", object())  # type: ignore[attr-defined]
            case "a row":
                change.write_row("record", stream="\udfff")  # type: ignore[attr-defined]
            case "a number":
                change.write_row("record", label=2**70)  # type: ignore[attr-defined]
            case _:
                raise ZeroDivisionError(what)


async def join(hub: Hub, agent_id: str) -> LocalConnection:
    connection = LocalConnection(hub)
    connection.send(hello(agent_id))
    await find_frame(connection, "welcome")
    return connection


def say(connection: LocalConnection, **frame: Any) -> None:
    connection.send(json.dumps(frame).encode())


async def test_only_who_was_refused_is_looked_up_and_nothing_is_applied_again() -> None:
    ledger, seen = Asked(), Seen()
    hub = Hub(ledger, limits=Limits(), mods=[seen], clock=system_clock, new_id=random_id)
    await hub.start()
    ann = await join(hub, "ann")
    for message_id, to in (("one", "agent:ann"), ("two", "agent:nobody"), ("three", "agent:ann")):
        say(ann, type="send", message_id=message_id, to=to, content=message_id)
    assert (await find_frame(ann, "stored"))["message_id"] == "one"
    assert (await find_frame(ann, "error"))["message_id"] == "two"
    assert (await find_frame(ann, "stored"))["message_id"] == "three"
    assert ledger.lookups == [{"m:two"}]
    assert seen.messages == [b"m:one", b"m:three"]
    await hub.close()


async def test_a_repeat_among_refused_ones_is_a_repeat_and_the_others_stay_refused() -> None:
    hub = Hub(MemoryLedger(epoch="e"), limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, _ = await join(hub, "ann"), await join(hub, "bob")
    repeated = {"type": "send", "message_id": "again", "to": "agent:bob", "content": 1}
    say(ann, **repeated)
    seq = (await find_frame(ann, "stored"))["seq"]
    participant = hub.state.present("bob")
    assert participant is not None
    hub.state.apply_writes([TableWrite("participant", "bob", msgspec.structs.replace(participant, removed_seq=seq))])
    for message_id in ("before", "again", "after"):
        say(ann, **{**repeated, "message_id": message_id})
    say(ann, type="send", message_id="last", to="agent:ann", content=1)
    assert (await find_frame(ann, "error"))["message_id"] == "before"
    stored = await find_frame(ann, "stored")
    assert (stored["message_id"], stored["seq"], stored["duplicate"]) == ("again", seq, True)
    assert (await find_frame(ann, "error"))["message_id"] == "after"
    assert (await find_frame(ann, "stored"))["message_id"] == "last"
    await hub.close()


async def test_a_repeat_beside_a_caused_message_changes_no_budget() -> None:
    ledger = MemoryLedger(epoch="e")
    hub = Hub(ledger, limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, _ = await join(hub, "ann"), await join(hub, "bob")
    repeated = {"type": "send", "message_id": "again", "to": "agent:bob", "content": 1}
    say(ann, **repeated)
    root = (await find_frame(ann, "stored"))["seq"]
    say(ann, type="send", message_id="second", to="agent:ann", content=1, cause=root)
    assert (await find_frame(ann, "stored"))["message_id"] == "second"
    participant = hub.state.present("bob")
    assert participant is not None
    hub.state.apply_writes([TableWrite("participant", "bob", msgspec.structs.replace(participant, removed_seq=root))])
    say(ann, **repeated)
    say(ann, type="send", message_id="next", to="agent:ann", content=1, cause=root)
    assert (await find_frame(ann, "stored"))["duplicate"] is True
    assert (await find_frame(ann, "stored"))["message_id"] == "next"
    assert (await ledger.lookup_cold("root", str(root))).messages == 3
    await hub.close()


async def test_recent_messages_are_answered_and_read_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SQLiteLedger(tmp_path / "team.db", new_epoch=random_id, durability="normal")
    hub = Hub(ledger, limits=Limits(), clock=system_clock, new_id=random_id)
    await hub.start()
    ann, bob = await join(hub, "ann"), await join(hub, "bob")
    hops: list[object] = []
    run = SqliteConnection.run

    async def count(connection: SqliteConnection, function: Callable[[sqlite3.Connection], Any]) -> Any:
        hops.append(function)
        return await run(connection, function)

    say(ann, type="send", message_id="one", to="agent:bob", content=1)
    stored = await find_frame(ann, "stored")
    seq, thread_id = stored["seq"], stored["thread_id"]
    answer = {"type": "send", "message_id": "two", "to": "agent:ann", "content": 2, "reply_to": seq, "cause": seq}
    with monkeypatch.context() as patch:
        patch.setattr(SqliteConnection, "run", count)
        say(bob, **answer)
        assert (await find_frame(bob, "stored"))["duplicate"] is False
        for op, args in (("history", {"thread_id": thread_id}), ("window", {"trigger": seq, "per_thread": 9})):
            say(bob, type="call", call_id=op, op=f"network.{op}", args=args)
            assert (await find_frame(bob, "result"))["call_id"] == op
        assert len(hops) == 1  # the commit
    say(bob, **answer)
    assert (await find_frame(bob, "stored"))["duplicate"] is True
    await hub.close()


@pytest.mark.parametrize("what", ["a key", "a value", "a row", "a number", "raises"])
async def test_what_cannot_be_stored_is_refused_alone_and_closes_nobodys_session(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = SQLiteLedger(tmp_path / "team.db", new_epoch=random_id, durability="normal")
    hub = Hub(ledger, limits=Limits(), mods=[Seen()], clock=system_clock, new_id=random_id)
    await hub.start()
    try:
        ann, eve = await join(hub, "ann"), await join(hub, "eve")
        async with hub.lock:  # everything that follows is one batch
            await asyncio.sleep(0)
            say(ann, type="send", message_id="before", to="agent:eve", content=1)
            say(eve, type="call", call_id="c", op="seen.keep", args={"what": what})
            say(eve, type="send", message_id="own", to="agent:ann", content=1)
            say(ann, type="send", message_id="after", to="agent:eve", content=1)
        refused = await find_frame(eve, "error")
        assert (refused["code"], refused["call_id"]) == ("internal", "c")
        [record] = [record for record in caplog.records if record.exc_info]
        assert str(vars(record)["quote"]) in str(refused["message"])
        seqs = [(await find_frame(connection, "stored"))["seq"] for connection in (ann, eve, ann)]
        assert seqs == sorted(seqs)
        assert (hub.registry.counts["recoveries"], ann.is_open, eve.is_open) == (0, True, True)
        say(eve, type="send", message_id="later", to="agent:ann", content=1)
        assert (await find_frame(eve, "stored"))["message_id"] == "later"
    finally:
        await hub.close()
    meta, _ = await ledger.open()
    assert meta.head == seqs[-1] + 1
    await ledger.close()


async def test_what_a_ledger_cannot_encode_it_says_and_stores_nothing(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "team.db", new_epoch=random_id, durability="normal")
    await ledger.open()
    good = Row(seq=1, at=1, type="registered", actor="ann")
    bad = Row(seq=2, at=1, type="registered", actor="\ud800")
    with pytest.raises(Unstorable):
        await ledger.append([good, bad], [])
    with pytest.raises(Unstorable):
        await ledger.append([good], [TableWrite("mod", "m/x", object())])
    with pytest.raises(Unstorable):
        ledger.check([bad], [])
    ledger.check([good], [TableWrite("mod", "m/x", None)])
    await ledger.append([good], [])
    assert [row.seq for row in await ledger.rows(0, 10)] == [1]
    await ledger.close()
