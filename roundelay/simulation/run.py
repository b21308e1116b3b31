"""Runs a simulation, in an event loop of its own (`simulate`) or in one that is there (`open_simulation`)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from roundelay.agents import threads
from roundelay.simulation.network import Simulation
from roundelay.simulation.setting import Setting, SimulationError
from roundelay.simulation.virtual_time import SimulationLoop, run

T = TypeVar("T")

GARBAGE_THRESHOLD = 50_000
"""How many new objects the garbage collector waits for while a simulation runs: it makes many that stay, and looking through them took a fifth."""


def simulate(main: Callable[[Simulation], Awaitable[T]], setting: Setting | None = None, **options: Any) -> T:
    """Run ``main`` on a new simulation and give what it gives. Options are those of `Setting`, and go before it: ``simulate(main, seed=7)``.

    It has an event loop of its own, so it is not called from inside of one. Raises what ``main`` raises, and `virtual_time.Stalled`.
    """
    chosen = replace(setting or Setting(), **options)

    async def enter() -> T:
        async with open_simulation(chosen) as simulation:
            return await main(simulation)

    if asyncio._get_running_loop() is not None:
        raise SimulationError(
            "A simulation has an event loop of its own: call it from a plain function, not from a coroutine."
        )
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE_THRESHOLD, *thresholds[1:])
    try:
        return run(enter(), SimulationLoop(is_virtual=chosen.is_virtual, horizon_s=chosen.horizon_s))
    finally:
        gc.set_threshold(*thresholds)


@asynccontextmanager
async def open_simulation(setting: Setting) -> AsyncIterator[Simulation]:
    """A simulation for the length of an ``async with``, inside a `SimulationLoop`; for one's own loop. Else see `simulate`."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimulationLoop):
        raise SimulationError(
            "A simulation runs in a loop of its own: call simulate(main), or roundelay.simulation.virtual_time.run."
        )
    if setting.is_virtual:
        threads.run_inline.set(True)
    simulation = Simulation(setting, loop)
    await simulation.restart_hub()
    try:
        yield simulation
    finally:
        await simulation.close()
