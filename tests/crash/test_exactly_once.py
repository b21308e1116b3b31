"""Tests of promise P5: a handler that commits its effect together with its cursor handles each message exactly once,
whenever its process is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.counts import Note
from tests.support.node import Node, running_node

ORDERS = 6
"""Number of orders before each kill. Several orders keep the shop busy even if a slow machine delays the kill."""
SHOP = Path(__file__).parents[2] / "examples" / "exactly_once" / "shop.py"


async def start_shop(node: Node, folder: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "ROUNDELAY_HOME": str(folder / "home")}
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SHOP), node.url, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE
    )


async def read_booking(shop: asyncio.subprocess.Process) -> int:
    """Return the seq of the next order that the shop's handler starts to book."""
    assert shop.stdout is not None
    line = await asyncio.wait_for(shop.stdout.readline(), 30)
    assert line.startswith(b"booking "), line
    return int(line.split()[1])


def booked(folder: Path) -> list[int]:
    with closing(sqlite3.connect(folder / "shop.db")) as db:
        return [seq for (seq,) in db.execute("SELECT seq FROM orders ORDER BY rowid")]


async def kill_while_booking(folder: Path, kills: int) -> tuple[list[int], list[int], int]:
    """Kill the shop ``kills`` times during its work. Return the sent orders, the booked orders, and the number of
    handler runs.
    """
    chance = random.Random(5)
    runs: list[int] = []
    async with running_node() as node:
        shop = await start_shop(node, folder)
        customer = await node.agent("customer")
        await customer.call("network.watch", {"presence": True})
        await customer.expect("presence", agent_id="shop", state="online")
        sent: list[int] = []
        for _ in range(kills):
            sent += [(await customer.send("agent:shop", f"order {len(sent) + n}"))["seq"] for n in range(ORDERS)]
            for _ in range(chance.randint(1, 4)):  # somewhere between the handler's write and the end of its commit
                runs.append(await read_booking(shop))
            shop.send_signal(signal.SIGKILL)
            assert shop.stdout is not None
            runs += [
                int(line.split()[1])
                for line in (await shop.stdout.read()).splitlines(keepends=True)
                if line.endswith(b"\n")
            ]
            await shop.wait()
            shop = await start_shop(node, folder)
        while not runs or runs[-1] != sent[-1]:
            runs.append(await read_booking(shop))
        last = await customer.send("agent:shop", "the last one")
        sent.append(last["seq"])
        while runs[-1] != sent[-1]:
            runs.append(await read_booking(shop))
        while (await customer.call("network.message_status", {"seq": sent[-1]}))["recipients"][0]["state"] != "handled":
            pass  # each call is a round trip, so the loop does not block
        shop.send_signal(signal.SIGKILL)
        await shop.wait()
    return sent, booked(folder), len(runs)


async def check(folder: Path, note: Note, kills: int) -> None:
    sent, found, runs = await kill_while_booking(folder, kills)
    note(kills=kills, orders=len(sent), runs_of_the_handler=runs, rows=len(found))
    assert sorted(found) == sorted(sent)
    assert runs > len(sent), "no kill hit an uncommitted effect: this run proves nothing"


async def test_each_message_takes_effect_once_in_6_kills(tmp_path: Path, note: Note) -> None:
    await check(tmp_path, note, 6)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_each_message_takes_effect_once_in_200_kills(tmp_path: Path, note: Note) -> None:
    await check(tmp_path, note, 200)
