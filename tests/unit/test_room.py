"""Tests of the read budget for results: when a read may start, and in which order. No hub and no sockets are
involved.
"""

from __future__ import annotations

import asyncio

import pytest

from roundelay.network.config import Limits
from roundelay.network.hub.read_budget import ReadBudget, ReadSlot, SessionReads

LIMITS = Limits(max_result_bytes=1024, session_result_bytes=4096, participant_result_bytes=8192, hub_result_bytes=16384)
READ = 2048  # size in bytes that one read counts


def ask(room: ReadBudget, mine: SessionReads, who: str, begun: list[str]) -> asyncio.Task[None]:
    async def begin() -> None:
        await room.acquire(mine)
        begun.append(who)

    return asyncio.create_task(begin())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_one_read_begins_in_each_turn_of_the_loop() -> None:
    room, begun = ReadBudget(LIMITS), list[str]()
    tasks = [ask(room, room.open_session(f"a{number}", lambda: None), str(number), begun) for number in range(6)]
    counts = []
    while len(begun) < len(tasks):
        before = len(begun)
        await asyncio.sleep(0)
        counts.append(len(begun) - before)
    assert max(counts) == 1


async def test_each_bound_holds_and_participants_take_turns() -> None:
    room, begun = ReadBudget(LIMITS), list[str]()
    greedy = [room.open_session("eve", lambda: None) for _ in range(4)]
    others = [room.open_session(name, lambda: None) for name in ("ann", "bob", "cid", "dan")]
    tasks = [ask(room, mine, "eve", begun) for mine in greedy for _ in range(4)]
    await settle()
    assert (begun.count("eve"), room.used) == (4, 4 * READ)  # the limit of one participant
    tasks += [ask(room, mine, "other", begun) for mine in others for _ in range(2)]
    await settle()
    assert (begun.count("other"), room.used) == (4, 8 * READ)  # the hub's
    begun.clear()
    for mine in (greedy[0], *others):
        room.release(mine)
    await settle()
    assert room.used <= LIMITS.hub_result_bytes
    assert begun.count("eve") == 1
    assert begun.count("other") == 4
    for mine in (*greedy, *others):
        room.close_session(mine)
    assert all(
        isinstance(it, asyncio.CancelledError) or it is None
        for it in await asyncio.gather(*tasks, return_exceptions=True)
    )
    assert room.waiting == 0
    room.stop()


async def test_a_read_of_a_session_that_is_gone_does_not_begin_and_its_participants_bound_stays() -> None:
    room, begun = ReadBudget(LIMITS), list[str]()
    gone = room.open_session("ann", lambda: None)
    place = ReadSlot(room, gone)
    await place.acquire()
    place.release()  # the read waits for new rows, as `network.log` does
    room.close_session(gone)
    sessions = [room.open_session("ann", lambda: None)]
    with pytest.raises(asyncio.CancelledError):
        await place.acquire()
    sessions += [room.open_session("ann", lambda: None) for _ in range(2)]
    tasks = [ask(room, mine, "ann", begun) for mine in sessions for _ in range(2)]
    await settle()
    assert (len(begun), room.used) == (4, LIMITS.participant_result_bytes)
    for mine in sessions:
        room.close_session(mine)
    await asyncio.gather(*tasks, return_exceptions=True)
    room.stop()
