"""CPU time of a turn: the reaction of an agent compared with a loop that is written by hand, with the same server.

The measured time is the CPU time of this process with all its threads (`time.process_time`). The model server and the
hub are separate processes. The loops take turns after each run or batch, so that a slow second of the machine affects
all of them. A ratio compares two values of the same round.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from chat_server import TURNS
from loops import HandWritten, Loop, OurReaction, join, look_up_blocking
from servers import HERE, Bench, Subject, start_server
from table import Line, median_of

HUB = Subject("hub full", "full")
BY_HAND, OURS, RECORDED = "by hand", "ours", "ours, recorded"
BOUNDS: dict[str, tuple[float, float | None]] = {OURS: (0.6, 0.5), RECORDED: (0.9, None)}


class TurnCost:
    """Measures the microseconds of CPU time per turn, by the kind of request and the loop. Each round has ``runs`` runs
    of each loop, of six turns each.
    """

    name = "turns"

    def __init__(self, bench: Bench, *, runs: int, at_once: int) -> None:
        self._bench = bench
        self._runs = runs
        self._at_once = at_once
        self._us: dict[str, dict[str, list[float]]] = {}

    def run_round(self, number: int) -> str:
        with start_chat_server(self._bench) as base_url, self._bench.start(HUB) as (hub_url, _pid):
            asyncio.run(self._measure(base_url, hub_url, number))
        ratios = [f"{case} {us[OURS][-1] / us[BY_HAND][-1]:.2f}" for case, us in self._us.items()]
        return f"ours / by hand: {', '.join(ratios)}"

    async def _measure(self, base_url: str, hub_url: str, number: int) -> None:
        async with AsyncExitStack() as stack:
            client, triggers = await join(hub_url, self._at_once)
            stack.push_async_callback(client.close)
            for stream in (False, True):
                loops: dict[str, Loop] = {
                    BY_HAND: HandWritten(base_url, stream=stream),
                    OURS: OurReaction(base_url, stream=stream),
                    RECORDED: OurReaction(base_url, stream=stream, client=client, triggers=triggers),
                }
                for loop in loops.values():
                    stack.push_async_callback(loop.close)
                way = "streaming" if stream else "plain"
                await self._compare(f"{way}, one by one", loops, 1, number)
                await self._compare(f"{way}, {self._at_once} at once", loops, self._at_once, number)
            blocking: dict[str, Loop] = {
                BY_HAND: HandWritten(base_url, stream=False, function=look_up_blocking),
                OURS: OurReaction(base_url, stream=False, function=look_up_blocking),
            }
            for loop in blocking.values():
                stack.push_async_callback(loop.close)
            await self._compare("plain, one by one, a tool that blocks", blocking, 1, number)

    async def _compare(self, case: str, loops: dict[str, Loop], at_once: int, number: int) -> None:
        names = list(loops)
        turn = number % len(names)
        used_s = dict.fromkeys(names, 0.0)
        batches = max(1, self._runs // at_once)
        gc.collect()
        for batch in range(-1, batches):  # the first batch is a warm-up for connections and caches of the SDK
            for name in names[turn:] + names[:turn]:
                started_s = time.process_time()
                await asyncio.gather(*(loops[name].run() for _ in range(at_once)))
                used_s[name] += time.process_time() - started_s if batch >= 0 else 0.0
        us = self._us.setdefault(case, {name: [] for name in names})
        for name in names:
            us[name].append(used_s[name] / (batches * at_once * TURNS) * 1e6)

    def lines(self) -> list[Line]:
        lines = []
        for case, us in self._us.items():
            for name in list(us)[1:]:
                ratios = [own / other for own, other in zip(us[name], us[BY_HAND], strict=True)]
                bound, aim = BOUNDS.get(name, (None, None))
                beside = f"{median_of(us[name]):.0f} us / {median_of(us[BY_HAND]):.0f} us a turn"
                title = f"{name} / by hand: {case}"
                lines.append(Line(_key(case, name), title, ratios, bound, aim, True, beside=beside))
        return lines

    def details(self) -> dict[str, Any]:
        return {"runs": self._runs, "turns": TURNS, "at_once": self._at_once, "us_per_turn": self._us}


@contextmanager
def start_chat_server(bench: Bench) -> Iterator[str]:
    """Start the server that answers model requests, and yield its base URL."""
    with start_server([sys.executable, str(HERE / "chat_server.py")], bench.server_cores) as (base_url, _pid):
        yield base_url


def _key(case: str, name: str) -> str:
    return f"{name} {case}".replace(",", "").replace(" ", "_")
