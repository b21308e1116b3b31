"""What connections cost that say nothing: memory each, beside plain `websockets`, and how thousands of them slow the rest down.

Memory is what the server's process holds resident after so many more connections, divided by their number; the first ones, which
also bring the process to its working size, are not counted. The relay of floors.py is the yardstick: recv and send of `websockets`
without deflate, one coroutine a connection, the library's keepalive. For the slowdown, one sender and one receiver measure a node that is empty, one with a tenth of
the crowd and one with all of it. All on nodes with durability ``normal``: the disk's syncs, which swing more than what is looked for, stay out.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from crowd import Crowd
from load import Fleet
from machine import read_process_cpu_s
from servers import Bench, Subject, read_memory_kb
from table import Line, median_of

SIZE_BYTES = 200
RECEIVER = "agent:receiver-000"
HUB, PLAIN = Subject("hub normal", "normal"), Subject("plain")


class IdleMemory:
    """KiB per idle connection of the hub, over that of the plain relay."""

    name = "idle-memory"

    def __init__(self, bench: Bench, connections: int, own_cores: frozenset[int]) -> None:
        self._bench = bench
        self._connections = connections
        self._own_cores = own_cores
        self._kb: dict[str, list[float]] = {HUB.name: [], PLAIN.name: []}

    def run_round(self, number: int) -> str:
        first = max(20, self._connections // 10)
        for subject in (HUB, PLAIN) if number % 2 == 0 else (PLAIN, HUB):
            with (
                self._bench.start(subject) as (url, pid),
                Crowd.gather(url, self._connections + first, self._own_cores) as crowd,
            ):
                crowd.grow(first)
                before_kb = read_memory_kb(pid)
                crowd.grow(first + self._connections)
                self._kb[subject.name].append((read_memory_kb(pid) - before_kb) / self._connections)
        hub_kb, plain_kb = (self._kb[subject.name][-1] for subject in (HUB, PLAIN))
        return f"{self._connections:,} idle connections: hub {hub_kb:.1f} KiB each, plain {plain_kb:.1f}"

    def lines(self) -> list[Line]:
        hub, plain = self._kb[HUB.name], self._kb[PLAIN.name]
        ratios = [of / to for of, to in zip(hub, plain, strict=True) if to > 0]
        if not ratios:  # a system that does not tell
            return []
        title = f"memory per idle connection at {self._connections:,}, hub / plain"
        beside = f"{median_of(hub):.1f} KiB / {median_of(plain):.1f} KiB"
        return [Line("idle_memory", title, ratios, 1.3, 1.0, True, beside=beside)]

    def details(self) -> dict[str, Any]:
        return {"connections": self._connections, "kib_per_connection": self._kb}


@dataclass(frozen=True)
class Crowded:
    """The node at one size of the crowd."""

    connections: int
    p50_us: float
    p99_us: float
    cpu_us: float
    memory_kb: float


class ManyIdle:
    """Latency and CPU per message between two, beside a crowd of connections."""

    name = "many-idle"

    def __init__(
        self, bench: Bench, connections: int, own_cores: frozenset[int], messages: int, latency_messages: int
    ) -> None:
        self._bench = bench
        self._sizes = (0, connections // 10, connections)
        self._own_cores = own_cores
        self._messages = messages
        self._latency_messages = latency_messages
        self._rounds: list[tuple[Crowded, ...]] = []

    def run_round(self, number: int) -> str:
        turn = number % len(self._sizes)
        looks = {size: self._look(size) for size in self._sizes[turn:] + self._sizes[:turn]}
        self._rounds.append(tuple(looks[size] for size in self._sizes))
        return "; ".join(
            f"{it.connections:,} idle: p50 {it.p50_us:.0f} us, p99 {it.p99_us:.0f} us, {it.cpu_us:.1f} us CPU"
            for it in self._rounds[-1]
        )

    def _look(self, size: int) -> Crowded:
        """A node of its own for each size: on one, the later sizes would also have the longer ledger."""
        with (
            self._bench.start(HUB) as (url, pid),
            Fleet(url, 1, names_stored=True) as fleet,
            Crowd.gather(url, size, self._own_cores) as crowd,
        ):
            crowd.grow(size)
            fleet.send_pipelined(max(self._messages // 4, 50), to=RECEIVER, size_bytes=SIZE_BYTES, window=512)
            cpu_s = read_process_cpu_s(pid)
            fleet.send_pipelined(self._messages, to=RECEIVER, size_bytes=SIZE_BYTES, window=512)
            cpu_us = (read_process_cpu_s(pid) - cpu_s) / self._messages * 1e6
            latency = fleet.send_one_by_one(self._latency_messages, to=RECEIVER, size_bytes=SIZE_BYTES)
            return Crowded(size, latency.delivered_p50_us, latency.delivered_p99_us, cpu_us, read_memory_kb(pid))

    def lines(self) -> list[Line]:
        few, many = self._sizes[1:]
        empty_us = statistics.median(it[0].p50_us for it in self._rounds)
        many_us = statistics.median(it[2].p50_us for it in self._rounds)
        cpu_us = [statistics.median(it[index].cpu_us for it in self._rounds) for index in range(3)]
        p50_ratios = [it[2].p50_us / it[0].p50_us for it in self._rounds]
        p99_ms = [it[2].p99_us / 1000 for it in self._rounds]
        empty_p99_ms = statistics.median(it[0].p99_us for it in self._rounds) / 1000
        cpu_ratios = [it[2].cpu_us / it[1].cpu_us for it in self._rounds if it[1].cpu_us]
        lines = [
            Line(
                "many_idle_p50",
                f"p50 with {many:,} idle connections / with none",
                p50_ratios,
                2.0,
                fewer_is_better=True,
                beside=f"{many_us:.0f} us / {empty_us:.0f} us",
            ),
            Line(
                "many_idle_p99",
                f"p99 with {many:,} idle connections",
                p99_ms,
                5.0,
                fewer_is_better=True,
                unit="ms",
                beside=f"with none {empty_p99_ms:.2f} ms",
            ),
        ]
        if cpu_ratios:
            title = f"CPU per message, {many:,} participants / {few:,}"
            beside = f"{cpu_us[2]:.1f} us / {cpu_us[1]:.1f} us, with none {cpu_us[0]:.1f} us"
            lines.append(Line("participants_growth", title, cpu_ratios, 1.2, fewer_is_better=True, beside=beside))
        return lines

    def details(self) -> dict[str, Any]:
        return {"messages": self._messages, "rounds": [[asdict(look) for look in looks] for looks in self._rounds]}
