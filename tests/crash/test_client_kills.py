"""Claims of tasks and writes of notes are linearizable although client processes and the hub are killed in the middle of calls."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest

from roundelay.network.client import NetworkClient
from tests.support.counts import Note
from tests.support.histories import Call
from tests.support.history_clients import SHARED, ClientProcesses, check
from tests.support.node import node_process

CLIENTS = [f"c{number:02}" for number in range(20)]


async def record(folder: Path, *, steps: int, deaths: int, hub_kills: int, seed: int) -> ClientProcesses:
    """Let 20 clients call ``steps`` operations each. Each client dies ``deaths`` times. The hub dies between their
    deaths.
    """
    async with node_process(folder / "team.db", env={"ROUNDELAY_MODS": "tasks,notes"}) as node:
        node.keeps_port = True
        for name in CLIENTS:  # participants that a task names must be registered
            await (await node.agent(name)).close()
        things = []
        async with NetworkClient("lead", node.url, token=node.token_of("lead")) as lead:
            for number in range(steps // 20 + SHARED):
                task = await lead.call("tasks.create", {"title": f"T{number}", "pool": CLIENTS})
                await lead.call("notes.create", {"name": f"n{number}", "text": "first", "thread_id": "broadcast"})
                things += [f"tasks/{task['task']}", f"notes/broadcast/n{number}"]
        clients = ClientProcesses(folder, tuple(things), steps, random.Random(seed))
        lives = asyncio.gather(*(clients.live(name, node.url, node.token_of(name), deaths) for name in CLIENTS))
        for number in range(1, hub_kills + 1):
            while clients.ends < number * deaths * len(CLIENTS) // (hub_kills + 1):
                clients.has_ended.clear()
                await clients.has_ended.wait()
            await node.kill9()
            await node.restart()
        await lives
    return clients


def judge(clients: ClientProcesses, note: Note, *, hub_kills: int) -> int:
    operations = check(clients.histories)
    calls = [call for history in clients.histories.values() for call in history]
    unknown = sum(not call.is_known for call in calls)
    note(operations=operations, client_kills=clients.kills, hub_kills=hub_kills, calls_without_answer=unknown)
    assert {call.op for call in calls} >= {"claim", "release", "read", "write", "append", "patch"}
    assert 0 < unknown <= clients.kills
    return operations


async def test_calls_of_killed_clients_are_linearizable(tmp_path: Path, note: Note) -> None:
    clients = await record(tmp_path, steps=15, deaths=1, hub_kills=1, seed=1)
    assert judge(clients, note, hub_kills=1) == 300


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_10000_calls_of_killed_clients_are_linearizable(tmp_path: Path, note: Note) -> None:
    clients = await record(tmp_path, steps=500, deaths=15, hub_kills=30, seed=2)
    assert judge(clients, note, hub_kills=30) == 10_000


def test_checker_finds_a_call_of_a_killed_client_that_happened_twice() -> None:
    killed = Call("c00", "append", 1, math.inf, None, {"text": "x"})
    once, twice = Call("c01", "read", 2, 3, [2, "first\n\nx"]), Call("c01", "read", 4, 5, [3, "first\n\nx\n\nx"])
    assert check({"notes/n": [killed, once]}) == 2
    assert check({"notes/n": [killed, Call("c01", "read", 2, 3, [1, "first"])]}) == 2
    with pytest.raises(AssertionError):
        check({"notes/n": [killed, once, twice]})
