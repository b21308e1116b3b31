"""Claims of tasks are linearizable: histories of 20 clients, under kills of the hub and of clients."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.errors import Closed, RoundelayError
from roundelay.simulation.network import Simulation, simulate
from tests.support.histories import Call, is_linearizable
from tests.support.history_clients import TASK_OPS, check, perform, task_step

CLIENTS = [f"c{number:02}" for number in range(20)]
MODS = ["channels", "discovery", "tasks"]


class Clients:
    """Clients that make random calls. ``history`` has the calls by task."""

    def __init__(
        self, join: Callable[[str], NetworkClient], now: Callable[[], float], chance: random.Random, tasks: list[int]
    ) -> None:
        self.history: dict[str, list[Call]] = {f"tasks/{task}": [] for task in tasks}
        self._join, self._now, self._chance = join, now, chance
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, name: str, operations: int) -> None:
        client = self._join(name)
        await client.connect()
        for _ in range(operations):
            # Choose among few tasks, so that calls meet at the same task.
            task = self._chance.choice(list(self.history)[:8])
            op = self._chance.choices(list(TASK_OPS), list(TASK_OPS.values()))[0]
            called, returned, result = self._now(), math.inf, None
            try:
                result = await perform(client, f"tasks.{op}", {"task": int(task.partition("/")[2])})
                returned = self._now()
            except (Closed, RoundelayError):  # this client was killed, so it never learns the result
                return
            finally:
                self.history[task].append(Call(name, op, called, returned, result))
            if self._chance.random() < 0.02 and len(self.history) > 8:
                self.history = dict(list(self.history.items())[1:] + list(self.history.items())[:1])
            await asyncio.sleep(self._chance.uniform(0, 0.02))


def record(seed: int, operations: int, kills: int) -> dict[str, list[Call]]:
    """Return the history of 20 clients that share some tasks, while the hub and clients are killed."""

    async def main(simulation: Simulation) -> dict[str, list[Call]]:
        chance = simulation.chance("histories")
        lead = (await simulation.join_person("lead")).client
        for name in CLIENTS:  # whom a task names must be registered
            client = simulation.network.client(name)
            await client.connect()
            await client.close()
        count = max(8, operations // 25)
        tasks = [(await lead.call("tasks.create", {"title": f"T{it}", "pool": CLIENTS}))["task"] for it in range(count)]
        clients = Clients(lambda name: simulation.network.client(name), lambda: simulation.elapsed_s, chance, tasks)
        each = operations // len(CLIENTS)
        works = {name: asyncio.create_task(clients.run(name, each)) for name in CLIENTS}
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.05, 0.3))
            name = chance.choice(CLIENTS)
            if not works[name].done():
                # As with `kill -9`, nothing more arrives, and another process starts with the same ID.
                await simulation._transports[name].kill()
                await asyncio.gather(works[name], return_exceptions=True)
                works[name] = asyncio.create_task(clients.run(name, each // 2))
            await simulation.kill_hub()
            await asyncio.sleep(chance.uniform(0, 0.1))
            await simulation.restart_hub()
        await asyncio.gather(*works.values(), return_exceptions=True)
        return clients.history

    return simulate(main, mods=MODS, seed=seed)


def test_claims_of_twenty_clients_are_linearizable_under_kills() -> None:
    assert check(record(seed=1, operations=600, kills=6)) >= 500


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_thousand_claims_are_linearizable_under_kills() -> None:
    assert sum(check(record(seed=seed, operations=2000, kills=40)) for seed in range(10, 17)) >= 10_000


def test_checker_finds_a_task_that_two_clients_hold() -> None:
    both = [Call(name, "claim", called, called + 5, [True, name]) for name, called in (("c00", 0.0), ("c01", 1.0))]
    assert not is_linearizable(both, ("open", ""), task_step)
    released = Call("c00", "release", 3.0, math.inf, None)
    assert is_linearizable([*both, released], ("open", ""), task_step)
    assert not is_linearizable([*both, Call("c00", "release", 9.0, math.inf, None)], ("open", ""), task_step)
