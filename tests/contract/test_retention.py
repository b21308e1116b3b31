"""Tests of `retain`: the rows that it deletes, and those that it must keep, on both ledgers with a manual clock."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from roundelay.mods import messages
from roundelay.mods.messages import MessageChanges
from roundelay.mods.tasks import Tasks
from roundelay.network.addresses import memory_of
from roundelay.network.client import NetworkClient
from roundelay.network.clock import random_id
from roundelay.network.config import Limits, Retain
from roundelay.network.errors import Closed, LedgerError, LoopStopped, UnknownMessage
from roundelay.network.hub import Hub, maintenance, retention
from roundelay.network.hub.local import LocalConnection, LocalTransport
from roundelay.network.hub.retention import DAY_MS, enforce_retention
from roundelay.network.ledger import Ledger, Trim, Trimmed
from roundelay.network.ledger.memory import MemoryLedger
from roundelay.network.ledger.sqlite import SQLiteLedger
from roundelay.network.mod import Mod

Opener = Callable[[], Ledger]
DAY = Retain(days=1)
TIMEOUT_S = 20.0


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Function that opens the same ledger again and again."""
    if request.param == "memory":
        ledger = MemoryLedger(epoch="e1")
        return lambda: ledger
    return lambda: SQLiteLedger(tmp_path / "team.db", new_epoch=lambda: "e1")


class Team:
    """A hub over a ledger, and its clients. `day` sets its clock."""

    def __init__(self, ledger: Ledger, retain: Retain, day: float, limits: Limits, mods: Sequence[Mod] = ()) -> None:
        self.day = day
        self.ledger = ledger
        self.hub = Hub(ledger, limits=limits, retain=retain, clock=self.clock, new_id=random_id, mods=mods)

    def clock(self) -> int:
        return int(self.day * DAY_MS)

    @asynccontextmanager
    async def joined(self, agent_id: str, **options: Any) -> AsyncIterator[NetworkClient]:
        async with NetworkClient(agent_id, transport=LocalTransport(self.hub), **options) as client:
            outbox = self.hub.registry.sessions[client.welcome.session_id].outbox
            while outbox.is_paging:  # noqa: ASYNC110 (nothing tells of it; until then it holds back what it may have to be given)
                await asyncio.sleep(0)
            yield client

    async def trim(self, retain: Retain = DAY) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            return await enforce_retention(retain, self.hub.registry, self.ledger, self.clock, self.hub.lock)

    @property
    def first_seq(self) -> int:
        return self.hub.registry.meta.first_seq


@asynccontextmanager
async def team(
    ledger: Ledger,
    *,
    retain: Retain = retention.KEEP_ALL,
    day: float = 1000.0,
    mods: Sequence[Mod] = (),
    **limits: int,
) -> AsyncIterator[Team]:
    running = Team(ledger, retain, day, Limits(root_messages_per_s=100_000, **limits), mods)
    await running.hub.start()
    try:
        yield running
    finally:
        await running.hub.close()


async def take(client: NetworkClient, count: int) -> list[str]:
    """Return the texts of the next deliveries, and acknowledge each."""
    texts: list[str] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for delivery in client.deliveries():
            async with delivery as message:
                texts.append(message.text)
            if len(texts) == count:
                break
        await client.call("network.info")  # the hub answers after it has processed the acks
    return texts


async def texts_of(client: NetworkClient, thread_id: str) -> list[str]:
    return [message.text for message in (await client.history(thread_id, limit=500)).messages]


# -- deleted rows


async def test_old_messages_go_and_new_ones_stay(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("bob") as bob:
        await ann.send_text("bob", "old")
        await take(bob, 1)
        it.day += 2
        stored = await ann.send_text("bob", "new")
        assert await it.trim() > 0
        assert await texts_of(ann, "direct:ann~bob") == ["new"]
        assert it.first_seq == stored.seq
        assert await it.trim() == 0


async def test_nothing_goes_before_its_day_is_over(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        await ann.broadcast("young")
        it.day += 0.99
        assert await it.trim() == 0
        assert await texts_of(ann, "broadcast") == ["young"]


@pytest.mark.parametrize(
    ("retain", "messages", "records"),
    [(Retain(days=1), [], 2), (Retain(record_days=1), ["old"], 0), (Retain(days=1, record_days=1), [], 0)],
)
async def test_records_go_apart_from_messages(
    opener: Opener, retain: Retain, messages: list[str], records: int
) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("bob", role="reactor") as bob:
        stored = await ann.send_text("bob", "old")
        await take(bob, 1)
        await bob.record("r1", "started", {"trigger": stored.seq, "manifest": [stored.seq]}, record_id="a")
        await bob.record("r1", "finished", {}, record_id="b")
        it.day += 2
        await it.trim(retain)
        assert await texts_of(ann, "direct:ann~bob") == messages
        assert len((await bob.call("network.records", {"reaction": "r1"}))["records"]) == records


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run maintenance without the usual pauses, and with a short wait after a jump of the clock."""
    monkeypatch.setattr(retention, "PERIOD_S", 0.001)
    monkeypatch.setattr(retention, "DOUBT_S", 0.2)


@pytest.mark.parametrize("leaps", ["before the start", "while it runs"])
async def test_by_a_clock_that_leaps_nothing_is_dropped_for_an_hour(
    opener: Opener, leaps: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "PERIOD_S", 0.001)
    is_running = leaps == "while it runs"
    async with team(opener()) as it, it.joined("ann") as ann:
        await ann.broadcast("kept")
    async with team(opener(), retain=DAY, day=1000 if is_running else 1030) as it, it.joined("ann") as ann:
        it.day = 1030
        async with asyncio.timeout(TIMEOUT_S):
            while "30.0 days ahead" not in caplog.text:
                await ann.call("network.info")
        for _ in range(20):
            assert await texts_of(ann, "broadcast") == ["kept"]
            await asyncio.sleep(0.001)
        assert caplog.text.count("days ahead") == 1, "it is said once"


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.usefixtures("often")
async def test_a_clock_that_was_put_right_takes_nothing(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_restarted: bool
) -> None:
    rounds, keep_within = list[Retain](), retention.enforce_retention

    async def note(retain: Retain, *more: Any) -> int:
        dropped = await keep_within(retain, *more)
        rounds.append(retain)
        return dropped

    monkeypatch.setattr(retention, "enforce_retention", note)

    async def is_kept(ann: NetworkClient) -> None:
        rounds.clear()
        async with asyncio.timeout(TIMEOUT_S):
            while DAY not in rounds:  # the hour is over
                await ann.call("network.info")
        assert await texts_of(ann, "broadcast") == ["kept", "said meanwhile"]

    async with team(opener(), retain=DAY) as it, it.joined("ann") as ann:
        await ann.broadcast("kept")
        it.day = 1030
        async with asyncio.timeout(TIMEOUT_S):
            while "30.0 days ahead" not in caplog.text:
                await ann.call("network.info")
        await ann.broadcast("said meanwhile")  # a month ahead
        it.day = 1000.1
        if not is_restarted:
            await is_kept(ann)
    async with team(opener(), retain=DAY, day=1000.1) as it, it.joined("ann") as ann:
        await is_kept(ann)


async def test_by_a_clock_that_leaps_the_size_is_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "PERIOD_S", 0.001)

    def opener() -> SQLiteLedger:
        return SQLiteLedger(tmp_path / "team.db", new_epoch=lambda: "e1")

    async with team(opener()) as it, it.joined("ann") as ann:
        for number in range(40):
            await ann.broadcast(f"{number} " + "x" * 9000)
    async with team(opener(), retain=Retain(days=1, bytes=100_000), day=1030) as it, it.joined("ann") as ann:
        async with asyncio.timeout(TIMEOUT_S):
            while (left := len(await texts_of(ann, "broadcast"))) > 20:
                pass
        assert left


@pytest.mark.usefixtures("often")
async def test_a_node_trims_by_itself(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        await ann.broadcast("old")
    async with team(opener(), retain=DAY, day=1002) as it, it.joined("ann") as ann:
        async with asyncio.timeout(TIMEOUT_S):
            while await texts_of(ann, "broadcast"):
                pass


@pytest.mark.usefixtures("often")
async def test_results_of_calls_are_forgotten_after_a_day(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        await ann.call("network.cancel", {"thread_id": "broadcast"}, call_id="c1")
        it.day += 2
        async with asyncio.timeout(TIMEOUT_S):
            while await it.ledger.cold("call", "", 10):
                await ann.call("network.info")


async def test_a_question_goes_with_its_message(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("bob") as bob, it.joined("mia", kind="human") as mia:
        await bob.send_text("mia", "old?", requires_response=True)
        it.day += 2
        new = await bob.send_text("mia", "new?", requires_response=True)
        await take(mia, 2)
        await it.trim()
        assert [item["seq"] for item in (await mia.call("network.inbox"))["items"]] == [new.seq]
    async with team(opener()) as it:
        assert list(it.hub.state.questions_of("mia")) == [new.seq]


# -- rows that are kept


async def test_what_an_open_reactions_prompt_holds_stays(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("bob", role="reactor") as bob:
        for text in ("gone", "in the prompt", "trigger"):
            stored = await ann.send_text("bob", text)
        await take(bob, 3)
        body = {"trigger": stored.seq, "manifest": [stored.seq - 1, stored.seq]}
        await bob.record("r1", "started", body, record_id="a")
        it.day += 2
        both = Retain(days=1, record_days=1)
        await it.trim(both)
        assert await texts_of(ann, "direct:ann~bob") == ["in the prompt", "trigger"]
        assert len((await bob.call("network.records", {"reaction": "r1"}))["records"]) == 1
        await bob.record("r1", "finished", {}, record_id="b")
        it.day += 2
        await it.trim(both)
        assert await texts_of(ann, "direct:ann~bob") == []


async def test_the_open_reaction_of_a_removed_agent_holds_nothing_back(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("mia", kind="human") as mia:
        async with it.joined("bob", role="reactor") as bob:
            stored = await mia.send_text("bob", "old")
            await take(bob, 1)
            await bob.record("r1", "started", {"trigger": stored.seq}, record_id="a")
        it.day += 2
        await it.trim()
        assert await texts_of(mia, "direct:bob~mia") == ["old"]
        await mia.call("network.remove", {"agent_id": "bob"})
        await it.trim()
        assert await texts_of(mia, "direct:bob~mia") == []


async def test_what_a_connected_session_has_yet_to_be_given_stays(opener: Opener) -> None:
    async with team(opener(), max_unacked=2) as it, it.joined("ann") as ann, it.joined("bob") as bob:
        for number in range(10):
            await ann.send_text("bob", str(number))
        it.day += 2
        await it.trim()
        assert await take(bob, 10) == [str(number) for number in range(10)]


async def test_a_session_that_has_nothing_to_get_holds_nothing_back(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("idle"), it.joined("ann") as ann, it.joined("bob") as bob:
        await ann.send_text("bob", "old")
        await take(bob, 1)
        it.day += 2
        await it.trim()
        assert await texts_of(ann, "direct:ann~bob") == []


async def test_a_message_that_is_to_come_again_stays(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("bob") as bob:
        await ann.send_text("bob", "again")
        await (await anext(bob.deliveries())).nack("not yet", retry_after_ms=20)
        await bob.call("network.info")
        it.day += 0.5
        await it.trim(Retain(days=1))
        it.day += 2
        await it.trim()
        delivery = await anext(bob.deliveries())
        assert (delivery.message.text, delivery.attempt) == ("again", 2)


async def test_a_budget_holds_as_long_as_its_conversation_does(opener: Opener) -> None:
    async with team(opener(), max_root_messages=3) as it, it.joined("ann") as ann:
        last = await ann.broadcast("root")
        it.day += 2
        for _ in range(2):
            last = await ann.broadcast("on", cause=last.seq)
        await it.trim()
        assert await texts_of(ann, "broadcast") == ["on", "on"]
        with pytest.raises(LoopStopped):
            await ann.broadcast("too much", cause=last.seq)
        with pytest.raises(UnknownMessage):
            await ann.broadcast("gone", cause=last.seq - 2)


# -- notices of deleted messages


async def test_who_has_everything_up_to_the_cut_misses_nothing(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        async with it.joined("bob") as bob:
            await ann.send_text("bob", "old")
            await take(bob, 1)
            cursor = bob.cursor
        it.day += 2
        await it.trim()
        await ann.send_text("bob", "new")
        for resume in (None, cursor):
            async with it.joined("bob", resume=resume) as bob:
                assert bob.welcome.resume == "full"
                async with asyncio.timeout(TIMEOUT_S):
                    assert (await anext(bob.deliveries())).message.text == "new"


async def test_who_takes_nothing_holds_what_it_is_owed_for_a_while_only(opener: Opener) -> None:
    patient = Retain(days=1, patience_minutes=30)
    async with team(opener(), max_unacked=1) as it, it.joined("ann") as ann:
        connection = LocalConnection(it.hub)
        connection.send(b'{"type":"hello","protocol":1,"agent_id":"bob","kind":"agent"}')
        frames = connection.frames()
        assert b'"welcome"' in await anext(frames)
        for number in range(3):  # the first message fills the session's window, and the others wait
            await ann.send_text("bob", f"old {number}")
        assert b"old 0" in await anext(frames)
        it.day += 2
        assert await it.trim(patient) == 3  # two registrations, and the message that bob received
        held = await texts_of(ann, "direct:ann~bob")
        it.day += 29 / (24 * 60)
        assert await it.trim(patient) == 0
        assert await texts_of(ann, "direct:ann~bob") == held
        it.day += 2 / (24 * 60)
        assert await it.trim(patient) > 0
        assert await texts_of(ann, "direct:ann~bob") == []
        with pytest.raises(Closed) as end:
            async with asyncio.timeout(TIMEOUT_S):
                await anext(frames)
        assert end.value.code == 4503
        async with it.joined("bob") as bob:
            assert bob.welcome.resume == "limited"


async def test_at_a_node_that_follows_who_is_owed_what_the_leader_dropped_is_told_at_once(opener: Opener) -> None:
    async with team(opener(), max_unacked=1) as it, it.joined("ann") as ann, it.joined("cid") as cid:
        connection = LocalConnection(it.hub)
        connection.send(b'{"type":"hello","protocol":1,"agent_id":"bob","kind":"agent"}')
        frames = connection.frames()
        assert b'"welcome"' in await anext(frames)
        for number in range(3):
            await ann.send_text("bob", f"old {number}")
        await ann.send_text("cid", "read")
        assert b"old 0" in await anext(frames)
        assert await take(cid, 1) == ["read"]
        first = (await ann.broadcast("new")).seq
        # The decision was made by another node.
        done = await it.ledger.trim(Trim(messages_before=it.clock() + DAY_MS, pinned=first))
        retention.drop_before(it.hub.registry, done.first_seq)
        with pytest.raises(Closed) as end:
            async with asyncio.timeout(TIMEOUT_S):
                await anext(frames)
        assert end.value.code == 4503
        assert await take(cid, 1) == ["new"], "who is owed nothing of it stays"
        async with it.joined("bob") as bob:
            assert (bob.welcome.resume, bob.welcome.missing_before) == ("limited", first)
            assert await take(bob, 1) == ["new"]


async def test_who_takes_nothing_is_not_ended_while_nothing_is_to_go(opener: Opener) -> None:
    async with team(opener(), max_unacked=1) as it, it.joined("ann") as ann, it.joined("bob") as bob:
        for number in range(3):
            await ann.send_text("bob", f"young {number}")
        for _ in range(2):
            it.day += 0.4
            assert await it.trim() == 0
        assert await take(bob, 3) == ["young 0", "young 1", "young 2"]


async def test_who_joins_while_the_log_is_cut_is_told(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        async with it.joined("bob"):
            pass
        await ann.send_text("bob", "old")
        it.day += 2
        is_planned, may_go = asyncio.Event(), asyncio.Event()
        trim = it.ledger.trim

        async def trim_slowly(plan: Trim) -> Trimmed:
            is_planned.set()
            await may_go.wait()
            return await trim(plan)

        it.ledger.trim = trim_slowly  # type: ignore[assignment,method-assign]
        trimming = asyncio.create_task(it.trim())
        await is_planned.wait()
        bob = NetworkClient("bob", transport=LocalTransport(it.hub))
        joining = asyncio.create_task(bob.connect())
        for _ in range(20):  # retention can only finish what needs no ack
            await asyncio.sleep(0)
        may_go.set()
        await trimming
        welcome = await joining
        if welcome.resume == "full":  # the join came first, so bob gets a notice of the deletion
            assert (await anext(aiter(bob.deliveries()))).message.text == "old"
        else:
            assert (welcome.resume, welcome.missing_before) == ("limited", it.first_seq)
        await bob.close()


async def test_nothing_is_cut_while_the_ledger_is_reopened(opener: Opener) -> None:
    async with team(opener()) as it:
        async with it.joined("ann") as ann:
            await ann.broadcast("old")
        is_opening, may_open, did = asyncio.Event(), asyncio.Event(), list[str]()
        opens, appends, trims = it.ledger.open, it.ledger.append, it.ledger.trim

        async def fail(rows: Any, puts: Any) -> None:
            it.ledger.append = appends  # type: ignore[method-assign]
            raise LedgerError("the disk is gone")

        async def open_slowly() -> Any:
            opened = await opens()
            is_opening.set()
            await may_open.wait()
            did.append("opened")
            return opened

        async def trim(plan: Trim) -> Trimmed:
            did.append("cut")
            return await trims(plan)

        it.ledger.open, it.ledger.append, it.ledger.trim = open_slowly, fail, trim  # type: ignore[method-assign]
        connection = LocalConnection(it.hub)
        connection.send(b'{"type":"hello","protocol":1,"agent_id":"bob","kind":"agent"}')
        await is_opening.wait()
        it.day += 2
        trimming = asyncio.create_task(it.trim())
        for _ in range(20):  # retention can only finish what needs no ack
            await asyncio.sleep(0)
        may_open.set()
        await trimming
        assert did[0] == "opened"
        assert it.first_seq > 1


async def test_what_was_dropped_is_not_tried_again(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        async with it.joined("bob") as bob:
            await ann.send_text("bob", "failed")
            await (await anext(bob.deliveries())).nack("no", retry_after_ms=60_000)
            await bob.call("network.info")
        it.day += 2
        await it.trim()
        async with it.joined("bob") as bob:
            assert bob.welcome.resume == "limited"
            await ann.send_text("bob", "new")
            assert await take(bob, 1) == ["new"]
            async with asyncio.timeout(10):
                while list(it.hub.state.items("attempt")):  # the hub reads the due messages, and then drops this one
                    await bob.call("network.info")
    async with team(opener()) as it:
        assert list(it.hub.state.items("attempt")) == []


# -- identities


async def test_a_repeat_is_recognised_as_long_as_the_message_is_kept(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("bob") as bob:
        await ann.broadcast("one", message_id="trimmed")
        await bob.broadcast("seen")
        assert (await take(ann, 1), await take(bob, 1)) == (["seen"], ["one"])  # nobody is owed old messages
        it.day += 2
        kept = await ann.broadcast("two", message_id="kept")
        await it.trim()
        again = await ann.broadcast("two", message_id="kept")
        assert (again.seq, again.duplicate) == (kept.seq, True)
        new = await ann.broadcast("one", message_id="trimmed")
        assert (new.seq > kept.seq, new.duplicate) == (True, False)


@pytest.mark.parametrize("last", ["message", "record"])
async def test_seqs_and_stamps_are_not_used_again_after_everything_went(opener: Opener, last: str) -> None:
    async with team(opener()) as it:
        async with it.joined("ann") as ann:
            await ann.broadcast("old")
            if last == "record":
                await ann.record("r1", "note", {}, record_id="a")
        head, epoch = it.hub.state.head, it.hub.epoch
        it.day += 2
        await it.trim(Retain(days=1, record_days=1))
        assert await it.ledger.rows(0, 10) == []
    async with team(opener(), day=999) as it, it.joined("ann") as ann:  # the clock went back in between
        assert (it.hub.state.head, it.hub.epoch) == (head, epoch)
        assert (await ann.broadcast("new")).seq == head + 1
        [message] = (await ann.history("broadcast")).messages
        assert message.sent_at >= 1000 * DAY_MS


async def test_only_records_went_and_no_seq_is_used_again(opener: Opener) -> None:
    async with team(opener()) as it, it.joined("ann") as ann:
        await ann.broadcast("kept")
        await ann.record("r1", "note", {}, record_id="a")
        head = it.hub.state.head
        it.day += 2
        await it.trim(Retain(record_days=1))
        assert await texts_of(ann, "broadcast") == ["kept"]
    async with team(opener(), day=1002) as it:
        assert it.hub.state.head == head


# -- size


def used_bytes(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        pages, free, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


async def fill(it: Team, count: int, *, size: int = 1000) -> None:
    async with it.joined("ann") as ann:
        for start in range(0, count, 500):
            await asyncio.gather(
                *(ann.broadcast(f"{number} {'x' * size}") for number in range(start, min(start + 500, count)))
            )


async def test_the_oldest_go_until_the_size_is_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with team(SQLiteLedger(path, new_epoch=random_id)) as it:
        await fill(it, 3000)
        bound = used_bytes(path) // 2
        await it.trim(Retain(bytes=bound))
        assert used_bytes(path) <= bound
        assert used_bytes(path) > bound * 0.8, "no more than had to go"
        rows = await it.ledger.rows(0, 5000)
        kept = [row.seq for row in rows]
        assert kept == list(range(kept[0], it.hub.state.head + 1)), "the oldest went"
        assert await it.trim(Retain(bytes=bound)) == 0


async def test_a_little_too_much_costs_a_little(tmp_path: Path) -> None:
    path = tmp_path / "team.db"
    async with team(SQLiteLedger(path, new_epoch=random_id)) as it:
        await fill(it, 1000)
        before = len(await it.ledger.rows(0, 5000))
        bound = used_bytes(path) - 8192
        await it.trim(Retain(bytes=bound))
        assert used_bytes(path) <= bound
        assert len(await it.ledger.rows(0, 5000)) > before * 0.9


async def test_a_bound_that_cannot_be_kept_ends(tmp_path: Path) -> None:
    async with team(SQLiteLedger(tmp_path / "team.db", new_epoch=random_id)) as it:
        await fill(it, 100)
        await it.trim(Retain(bytes=1024))  # smaller than an empty database
        assert await it.ledger.rows(0, 10) == []


async def test_in_memory_sizes_are_not_counted() -> None:
    async with team(MemoryLedger(epoch="e1")) as it:
        await fill(it, 10)
        assert await it.trim(Retain(bytes=1024)) == 0


def read_indexes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("*.search*"))


async def test_what_is_not_kept_is_in_no_search_no_index_and_no_memory(opener: Opener, tmp_path: Path) -> None:
    async with team(opener()) as it, it.joined("ann") as ann, it.joined("mia", kind="human") as mia:
        old = await mia.send("agent:ann", "plutonium")
        await take(ann, 1)
        body = {"thread_id": old.thread_id, "seqs": [old.seq], "text": "plutonium"}
        await ann.record(memory_of(old.thread_id), "memory", body, record_id="r1")
        asking = {"threads": [old.thread_id], "trigger": (await mia.send("agent:ann", "granite")).seq}
        assert [found["text"] for found in (await ann.call("network.memory", asking))["memories"]] == ["plutonium"]
        assert len((await mia.call("network.search", {"query": "plutonium"}))["messages"]) == 1
        await take(ann, 1)
        it.day += 2
        asking["trigger"] = (await mia.send("agent:ann", "basalt")).seq
        await take(ann, 1)
        assert await it.trim()
        assert b"plutonium" not in read_indexes(tmp_path)
        assert (await ann.call("network.memory", asking))["memories"] == []
        assert (await mia.call("network.search", {"query": "plutonium"}))["messages"] == []
        assert len((await mia.call("network.search", {"query": "basalt"}))["messages"]) == 1


async def test_task_is_open_again_when_its_message_went_unread(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "MODS_S", 0.02)
    async with team(opener(), mods=[Tasks()]) as it, it.joined("ann") as ann:
        async with it.joined("bob"), it.joined("cat") as cat:
            read = (await ann.call("tasks.create", {"title": "Read", "assignee": "cat"}))["task"]
            await take(cat, 1)
            async with asyncio.timeout(TIMEOUT_S):
                while not it.hub.state.ack_cursor("cat").seq:  # noqa: ASYNC110 (stored by the hub)
                    await asyncio.sleep(0.05)
        task = (await ann.call("tasks.create", {"title": "T", "pool": ["bob", "cat"]}))["task"]
        it.day += 2
        await ann.broadcast("new")
        assert await it.trim()
        assert await take(ann, 1) == [f"Task {task} (T) is open again: bob did not read its message in time."]
        found = [await ann.call("tasks.get", {"task": number}) for number in (read, task)]
        assert [(it["state"], it["assignee"]) for it in found] == [("open", "cat"), ("open", "cat")]
        async with it.joined("cat") as cat:
            assert (await take(cat, 2))[0] == "new"
            assert (await cat.call("tasks.complete", {"task": task}))["state"] == "done"


async def read_revisions(client: NetworkClient, seqs: Sequence[int]) -> list[Any]:
    """Return what the mod `messages` shows of some messages, or the codes of its refusals."""
    found: list[Any] = []
    for op, args in (
        *(("messages.edits", {"seq": seq}) for seq in seqs),
        ("messages.reactions", {"seqs": list(seqs)}),
        ("messages.pins", {"thread_id": "broadcast"}),
    ):
        try:
            found.append(await client.call(op, args))
        except UnknownMessage as error:
            found.append(error.code)
    return found


async def test_edits_reactions_and_pins_go_with_their_messages(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "MODS_S", 0.02)
    monkeypatch.setattr(messages, "MAX_PINS", 2)
    async with team(opener(), mods=[MessageChanges()]) as it, it.joined("ann") as ann:
        seqs = []
        for number in range(4):
            seqs.append((await ann.broadcast(f"text {number}")).seq)
            it.day += number == 1 and 2
        for seq in seqs:
            await ann.call("messages.react", {"seq": seq, "emoji": "+1"})
            for text in ("edited", "edited again"):
                await ann.call("messages.edit", {"seq": seq, "text": text})
        for seq in seqs[:2]:
            await ann.call("messages.pin", {"seq": seq})
        assert await it.trim()
        async with asyncio.timeout(TIMEOUT_S):
            while len(await it.ledger.cold("mod_cold", "", 100)) > 4:  # noqa: ASYNC110 (removed by the hub)
                await asyncio.sleep(0.02)
        shown = await read_revisions(ann, seqs)
        assert shown[:2] == ["unknown_message"] * 2
        assert [[version["content"] for version in edits["edits"]] for edits in shown[2:4]] == [
            [f"text {number}", "edited"] for number in (2, 3)
        ]
        assert shown[4:] == [{"reactions": {str(seq): {"+1": ["ann"]} for seq in seqs[2:]}}, {"pins": []}]
        for seq in seqs[2:]:  # the hub does not count pins of deleted messages
            await ann.call("messages.pin", {"seq": seq})
        in_memory = await read_revisions(ann, seqs)
    async with team(opener(), day=it.day, mods=[MessageChanges()]) as it, it.joined("ann") as ann:
        assert await read_revisions(ann, seqs) == in_memory
