"""Claims of tasks are linearizable: histories of 20 clients, under kills of the hub and of clients."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.errors import Closed, Forbidden, InvalidArguments, RoundelayError
from roundelay.simulation.network import Simulation, simulate
from tests.support.histories import Call, is_linearizable

CLIENTS = [f"c{number:02}" for number in range(20)]
MODS = ["channels", "discovery", "tasks"]


def step(state: tuple[str, str], call: Call) -> tuple[tuple[str, str], Any]:
    """The sequential task: (state, holder), and the result of an operation."""
    kind, holder = state
    me = call.client
    if call.op == "claim":
        if kind == "open" or (kind == "claimed" and holder == me):
            return ("claimed", me), (True, me)
        return state, (False, holder if kind == "claimed" else "")
    if call.op == "release":
        if kind == "claimed":
            return (("open", ""), "open") if holder == me else (state, "refused")
        return state, kind
    if kind == "done":
        return state, "done" if holder == me else "refused"
    if kind == "open" or holder == me:
        return ("done", me), "done"
    return state, "refused"


async def perform(client: NetworkClient, op: str, task: int) -> Any:
    try:
        value = await client.call(f"tasks.{op}", {"task": task})
    except (Forbidden, InvalidArguments):
        return "refused"
    return (value["is_claimed"], value.get("holder", "")) if op == "claim" else value["state"]


class Clients:
    """Clients that call at random. ``history`` has the calls by task."""

    def __init__(
        self, join: Callable[[str], NetworkClient], now: Callable[[], float], chance: random.Random, tasks: list[int]
    ) -> None:
        self.history: dict[int, list[Call]] = {task: [] for task in tasks}
        self._join, self._now, self._chance = join, now, chance
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, name: str, operations: int) -> None:
        client = self._join(name)
        await client.connect()
        for _ in range(operations):
            # Near each other, so that calls meet at the same task.
            task = self._chance.choice(list(self.history)[:8])
            op = self._chance.choices(["claim", "release", "complete"], [6, 4, 0.3])[0]
            called, returned, result = self._now(), math.inf, None
            try:
                result = await perform(client, op, task)
                returned = self._now()
            except (Closed, RoundelayError):  # this client was killed: it never learns the result
                return
            finally:
                self.history[task].append(Call(name, op, called, returned, result))
            if self._chance.random() < 0.02 and len(self.history) > 8:
                self.history = dict(list(self.history.items())[1:] + list(self.history.items())[:1])
            await asyncio.sleep(self._chance.uniform(0, 0.02))


def record(seed: int, operations: int, kills: int) -> dict[int, list[Call]]:
    """Return the history of 20 clients that share some tasks, while the hub and clients are killed."""

    async def main(simulation: Simulation) -> dict[int, list[Call]]:
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
                # As `kill -9`: nothing more arrives, and another process begins under the same id.
                await simulation._transports[name].kill()
                await asyncio.gather(works[name], return_exceptions=True)
                works[name] = asyncio.create_task(clients.run(name, each // 2))
            await simulation.kill_hub()
            await asyncio.sleep(chance.uniform(0, 0.1))
            await simulation.restart_hub()
        await asyncio.gather(*works.values(), return_exceptions=True)
        return clients.history

    return simulate(main, mods=MODS, seed=seed)


def check(histories: dict[int, list[Call]]) -> int:
    for task, calls in histories.items():
        assert is_linearizable(calls, ("open", ""), step), (task, sorted(calls, key=lambda call: call.called))
    return sum(map(len, histories.values()))


def test_claims_of_twenty_clients_are_linearizable_under_kills() -> None:
    assert check(record(seed=1, operations=600, kills=6)) >= 500


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_thousand_claims_are_linearizable_under_kills() -> None:
    assert sum(check(record(seed=seed, operations=2000, kills=40)) for seed in range(10, 17)) >= 10_000


def test_checker_finds_a_task_that_two_clients_hold() -> None:
    both = [Call(name, "claim", called, called + 5, (True, name)) for name, called in (("c00", 0.0), ("c01", 1.0))]
    assert not is_linearizable(both, ("open", ""), step)
    released = Call("c00", "release", 3.0, math.inf, None)
    assert is_linearizable([*both, released], ("open", ""), step)
    assert not is_linearizable([*both, Call("c00", "release", 9.0, math.inf, None)], ("open", ""), step)
