"""Tests of the record queue: the order of a reaction's writes, and the writes that share a commit. The hub is a
double.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from roundelay.agents import record_queue
from roundelay.agents.record_queue import RecordQueue, Write
from roundelay.network.client import Batched, Stored
from roundelay.network.client.stored_frames import make_record
from roundelay.network.errors import BudgetExhausted, IdConflict, Overloaded, RoundelayError
from roundelay.network.frames import RecordFrame, SendFrame


class Hub:
    """Hub double that lists its commits. The double refuses a record in ``refused`` once for each listed error."""

    def __init__(self, **refused: list[RoundelayError]) -> None:
        self.commits: list[list[str]] = []
        self.refused = refused
        self.may_store = asyncio.Event()
        self.may_store.set()
        self.is_asked = asyncio.Event()

    async def record(self, name: str) -> Stored:
        done = await self._store([name])
        if done.error is not None:
            raise done.error
        return done.stored[0]

    async def store_batch(self, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        return await self._store([it.record_id for it in frames if isinstance(it, RecordFrame)])

    async def _store(self, names: list[str]) -> Batched:
        self.is_asked.set()
        await self.may_store.wait()
        stored: list[str] = []
        error: RoundelayError | None = None
        for name in names:
            if self.refused.get(name):
                error = self.refused[name].pop(0)
                break
            stored.append(name)
        if stored:
            self.commits.append(stored)
        return Batched(tuple(Stored(seq, name, duplicate=False) for seq, name in enumerate(stored)), error)

    def write(self, name: str, *, may_conflict: bool = False, is_independent: bool = False) -> Write:
        made = partial(make_record, "r", "note", {}, record_id=name)
        return Write(partial(self.record, name), made, may_conflict, is_independent)


def queue_of(hub: Hub, max_batch: int = 8, max_bytes: int = 10_000) -> RecordQueue:
    return RecordQueue(hub, max_batch, max_bytes)


async def test_writes_that_may_wait_are_stored_with_the_next_one() -> None:
    hub = Hub()
    queue = queue_of(hub)
    for name in "ab":
        await queue.write(hub.write(name), may_wait=True)
    assert hub.commits == []
    await queue.write(hub.write("c"))
    assert hub.commits == [["a", "b", "c"]]


async def test_a_write_that_waits_alone_is_stored_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_queue, "MAX_DELAY_S", 0.0)
    hub = Hub()
    queue = queue_of(hub)
    await queue.write(hub.write("a"), may_wait=True)
    await hub.is_asked.wait()
    await queue.flush()
    assert hub.commits == [["a"]]


async def test_writes_of_parallel_calls_share_a_commit() -> None:
    hub = Hub()
    queue = queue_of(hub)
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(queue.write(hub.write(name)))
    assert hub.commits == [["a", "b", "c"]]


async def test_a_write_during_a_commit_comes_after_it() -> None:
    hub = Hub()
    hub.may_store.clear()
    queue = queue_of(hub)
    first = asyncio.create_task(queue.write(hub.write("a")))
    await hub.is_asked.wait()
    second = asyncio.create_task(queue.write(hub.write("b")))
    hub.may_store.set()
    await first
    await second
    assert hub.commits == [["a"], ["b"]]


@pytest.mark.parametrize(("max_batch", "max_bytes"), [(2, 10_000), (8, 1_100)])
async def test_what_does_not_fit_into_a_batch_comes_in_several(max_batch: int, max_bytes: int) -> None:
    hub = Hub()
    queue = queue_of(hub, max_batch, max_bytes)
    await queue.write(*map(hub.write, "abcde"))
    assert hub.commits == [["a", "b"], ["c", "d"], ["e"]]


async def test_without_batches_each_write_is_stored_at_once() -> None:
    hub = Hub()
    queue = queue_of(hub, max_batch=1)
    await queue.write(hub.write("a"), may_wait=True)
    await queue.write(hub.write("b"), hub.write("c"))
    assert hub.commits == [["a"], ["b"], ["c"]]


async def test_nothing_behind_a_refused_write_is_stored() -> None:
    hub = Hub(b=[BudgetExhausted("no more")])
    queue = queue_of(hub)
    await queue.write(hub.write("a"), may_wait=True)
    refused, lost = hub.write("b"), hub.write("c")
    with pytest.raises(BudgetExhausted):
        await queue.write(refused, lost)
    assert hub.commits == [["a"]]
    assert (refused.is_refused, lost.is_refused, lost.is_stored) == (True, False, False)
    await queue.write(hub.write("d"))  # the caller that waited has received the error
    assert hub.commits == [["a"], ["d"]]


async def test_a_refusal_that_nobody_waits_for_stops_all_later_writes() -> None:
    hub = Hub(a=[BudgetExhausted("no more")])
    queue = queue_of(hub)
    await queue.write(hub.write("a"), may_wait=True)
    for _ in range(2):
        with pytest.raises(BudgetExhausted):
            await queue.flush()
    with pytest.raises(BudgetExhausted):
        await queue.write(hub.write("b"), may_wait=True)
    assert hub.commits == []
    queue.forget_failure()
    await queue.write(hub.write("c"))
    assert hub.commits == [["c"]]


async def test_a_busy_hub_is_asked_again_for_what_it_did_not_store() -> None:
    hub = Hub(b=[Overloaded("busy", 1), Overloaded("busy", 1)])
    queue = queue_of(hub)
    await queue.write(*map(hub.write, "abc"))
    assert hub.commits == [["a"], ["b", "c"]]


async def test_a_conflict_is_skipped_where_the_earlier_record_stays() -> None:
    hub = Hub(b=[IdConflict("other body")])
    queue = queue_of(hub)
    kept = hub.write("b", may_conflict=True)
    await queue.write(hub.write("a"), kept, hub.write("c"))
    assert hub.commits == [["a"], ["c"]]
    assert kept.is_duplicate


async def test_a_held_queue_writes_nothing_until_it_is_released() -> None:
    hub = Hub()
    queue = queue_of(hub)
    hub.may_store.clear()
    first = asyncio.create_task(queue.write(hub.write("a")))
    await hub.is_asked.wait()
    queue.hold()
    hub.may_store.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(asyncio.CancelledError):
        await queue.write(hub.write("b"))
    assert hub.commits == []
    queue.is_held = False
    await queue.flush()
    assert hub.commits == [["a"]]


async def test_a_value_that_is_no_json_fails_where_it_is_written() -> None:
    hub = Hub()
    queue = queue_of(hub)
    wrong = Write(partial(hub.record, "a"), partial(make_record, "r", "note", {"x": object()}, record_id="a"))
    with pytest.raises(TypeError, match="JSON"):
        await queue.write(wrong, may_wait=True)
    await queue.write(hub.write("b"))
    assert hub.commits == [["b"]]


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("error", [BudgetExhausted("no more"), Overloaded("busy"), IdConflict("taken")])
async def test_refused_independent_write_fails_alone(error: RoundelayError, max_batch: int) -> None:
    """A message that the hub refuses raises an error in the tool that sends it, and the reaction continues."""
    hub = Hub(b=[error])
    queue = queue_of(hub, max_batch)
    outcomes = await asyncio.gather(
        queue.write(hub.write("a")),
        queue.write(hub.write("b", is_independent=True)),
        queue.write(hub.write("c")),
        return_exceptions=True,
    )
    assert outcomes == [None, error, None]
    assert [name for commit in hub.commits for name in commit] == ["a", "c"]
    await queue.write(hub.write("b", is_independent=True))  # a tool may retry
    assert hub.commits[-1] == ["b"]


async def test_independent_write_returns_its_own_result() -> None:
    hub = Hub()
    queue = queue_of(hub)
    await queue.write(hub.write("a"), may_wait=True)
    write = hub.write("b", is_independent=True)
    await queue.write(write)
    assert write.stored == Stored(1, "b", duplicate=False)


async def test_unsent_message_of_a_stopped_call_is_never_sent() -> None:
    hub = Hub()
    hub.may_store.clear()
    queue = queue_of(hub)
    first = asyncio.create_task(queue.write(hub.write("a")))
    await hub.is_asked.wait()
    call = asyncio.create_task(queue.write(hub.write("message", is_independent=True)))
    record = asyncio.create_task(queue.write(hub.write("record")))
    await asyncio.sleep(0)
    call.cancel()
    record.cancel()
    hub.may_store.set()
    await first
    await queue.flush()
    assert hub.commits == [["a"], ["record"]]  # later records depend on a record


async def test_message_of_a_stopped_call_is_not_sent_after_a_busy_record() -> None:
    hub = Hub(record=[Overloaded("busy", 1)])
    queue = queue_of(hub)
    record = asyncio.create_task(queue.write(hub.write("record")))
    call = asyncio.create_task(queue.write(hub.write("message", is_independent=True)))
    await hub.is_asked.wait()
    call.cancel()
    await record
    await queue.flush()
    assert hub.commits == [["record"]]


async def test_refused_message_keeps_its_error_when_a_record_is_refused() -> None:
    message, record = Overloaded("busy"), BudgetExhausted("no more")
    hub = Hub(message=[message], record=[record])
    queue = queue_of(hub)
    refused = hub.write("record")
    outcomes = await asyncio.gather(
        queue.write(hub.write("message", is_independent=True)), queue.write(refused), return_exceptions=True
    )
    assert outcomes == [message, record]
    assert refused.is_refused
