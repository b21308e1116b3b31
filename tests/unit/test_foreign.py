"""Tests of isolated calls of foreign code: their ends and threads are bounded, whatever the code does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from roundelay.agents import isolation as foreign
from roundelay.agents import isolation as threads
from roundelay.agents.isolation import CallCrashed, CallTimedOut, describe_error, run_isolated


async def test_what_it_gives_and_raises_comes_through() -> None:
    async def give() -> int:
        return 3

    async def fail() -> int:
        raise KeyError("x")

    async def leave() -> int:
        raise SystemExit(3)

    assert await run_isolated(give, name="give") == 3
    with pytest.raises(KeyError):
        await run_isolated(fail, name="fail")
    with pytest.raises(CallCrashed) as broken:
        await run_isolated(leave, name="leave")
    assert describe_error(broken.value) == "SystemExit: 3"


async def test_it_is_cancelled_when_its_time_is_over_or_its_caller_is_cancelled() -> None:
    ended: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hang")

    with pytest.raises(CallTimedOut):
        await run_isolated(hang, name="hang", timeout_s=0.01)
    task = asyncio.create_task(run_isolated(hang, name="hang"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["hang", "hang"]


async def test_what_swallows_its_cancellation_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign, "GRACE_S", 0.01)
    release = asyncio.Event()

    async def cling() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with asyncio.timeout(5):
        with pytest.raises(CallTimedOut):
            await run_isolated(cling, name="cling", timeout_s=0.01)
    assert caplog.messages == ["work continues after its cancellation"]
    release.set()
    await asyncio.wait(foreign._abandoned, timeout=5)
    assert not foreign._abandoned


async def test_threads_of_sync_tools_are_bounded_and_handed_on_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(threads._slots, "", threads._ThreadSlots(2))
    release, begun = threading.Event(), list[int]()

    def work(number: int) -> int:
        begun.append(number)
        release.wait(5)
        return number

    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(threads.run_in_thread(lambda n=n: work(n), "work")) for n in range(5)]  # type: ignore[misc]
        await asyncio.sleep(0.02)
        assert sorted(begun) == [0, 1]
        tasks[2].cancel()
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:2] + results[3:] == [0, 1, 3, 4]
    assert isinstance(results[2], asyncio.CancelledError)
    assert sorted(begun) == [0, 1, 3, 4]
    async with asyncio.timeout(5):  # all threads are free again
        again = [threads.run_in_thread(lambda n=n: work(n), "work") for n in range(4)]  # type: ignore[misc]
        assert await asyncio.gather(*again) == [0, 1, 2, 3]
