"""Tests of the event loop of simulations: time that advances without waiting, and moments at which nothing is left to
do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from roundelay.simulation.virtual_time import SimulationLoop, Stalled, run

T = TypeVar("T")


def simulate(main: Callable[[SimulationLoop], Awaitable[T]], *, is_virtual: bool = True, horizon_s: float = 1e9) -> T:
    loop = SimulationLoop(is_virtual=is_virtual, horizon_s=horizon_s)

    async def enter() -> T:
        return await main(loop)

    return run(enter(), loop)


def test_an_hour_passes_at_once_and_timers_keep_their_order() -> None:
    async def main(loop: SimulationLoop) -> list[float]:
        woken: list[float] = []

        async def sleep(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            woken.append(loop.time())

        async with asyncio.TaskGroup() as group:
            for delay_s in (3600, 1, 60):
                group.create_task(sleep(delay_s))
        return woken

    began = time.monotonic()
    assert simulate(main) == [1, 60, 3600]
    assert time.monotonic() - began < 5


def test_a_timeout_is_over_before_what_takes_longer() -> None:
    async def main(loop: SimulationLoop) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(11)
        return loop.time()

    assert simulate(main) == 10


@pytest.mark.parametrize("is_virtual", [True, False])
def test_quiet_is_when_everything_ready_is_done_and_no_time_has_passed(is_virtual: bool) -> None:
    async def main(loop: SimulationLoop) -> tuple[list[str], bool]:
        done: list[str] = []

        async def chain() -> None:
            for step in range(20):
                await asyncio.sleep(0)
                done.append(f"step {step}")

        async def wait() -> None:
            await asyncio.sleep(0.5)
            done.append("later")

        tasks = [asyncio.create_task(chain()), asyncio.create_task(wait())]
        await loop.when_quiet()
        before = list(done)
        await loop.when_quiet(lambda: "later" in done)
        await asyncio.gather(*tasks)
        return before, done[-1] == "later"

    before, is_last = simulate(main, is_virtual=is_virtual)
    assert before == [f"step {step}" for step in range(20)]
    assert is_last


def test_who_waits_for_nothing_is_told() -> None:
    async def main(loop: SimulationLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stalled, match="nothing can happen any more"):
        simulate(main)


def test_time_that_flies_for_nothing_has_an_end() -> None:
    async def main(loop: SimulationLoop) -> None:
        for _ in itertools.count():
            await asyncio.sleep(60)

    with pytest.raises(Stalled, match="600 s"):
        simulate(main, horizon_s=600)


def test_time_stands_still_while_something_real_is_under_way() -> None:
    async def main(loop: SimulationLoop) -> float:
        async with asyncio.timeout(5):
            with loop.standing_still():
                await asyncio.to_thread(time.sleep, 0.05)
        return loop.time()

    assert simulate(main) == 0


def test_the_tasks_of_a_group_are_cancelled_in_one_order() -> None:
    async def main(loop: SimulationLoop) -> list[int]:
        ended: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                ended.append(number)

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ValueError

        async def wait_for_all() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(40):
                    group.create_task(wait(number))
                group.create_task(fail())

        with pytest.raises(ExceptionGroup):
            await wait_for_all()
        return ended

    assert simulate(main) == simulate(main)
