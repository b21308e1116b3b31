"""Measures the hub like an external program that knows only docs/protocol.md.

The measurement differs from relay.py in four ways that make the hub look slower. Message ids are random, so they are
scattered in the index of the ledger. Each receiver acknowledges once per read with deliveries, like the network's
client, instead of every 64 messages. The relay only forwards messages and does not answer its sender. Some scenarios
have only 8 messages in flight, as in conversations, so fewer messages share a write and a commit. relay.py contains the
measurement itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from relay import BY_CPU, HUBS, Ratio, Relay, Sample, Scenario, delivered_p50, inverse_cpu, throughput
from servers import Bench, Subject
from table import Line
from wire import make_random_id

FEW, MANY = 8, 512
FORWARD, FORWARD_ALL = Subject("forward"), Subject("forward-all")
TO_ONE, TO_ALL = "agent:receiver-000", "broadcast"
ONE = Scenario("outside", "outside", 1, TO_ONE, (FORWARD, *HUBS), MANY, make_random_id, 1)
ALL = Scenario("outside_all", "out to 100", 100, TO_ALL, (FORWARD_ALL, HUBS[0]), MANY, make_random_id, 1)
SCENARIOS = (
    ONE,
    replace(ONE, name="outside_few", title="of 8", window=FEW),
    # Use ordered ids here, to isolate the effect of random ids.
    Scenario("outside_ordered", "ordered", 1, TO_ONE, HUBS[1:], MANY, ack_every=1),
    ALL,
    replace(ALL, name="outside_all_few", title="100, of 8", window=FEW),
)


def _ratios() -> list[Ratio]:
    """Return the ratios by rate and by CPU time. The bounds apply only to the rates."""
    memory, normal, full = (hub.name for hub in HUBS)
    found = []
    for scenario, ending, bounds in (("outside", "", True), ("outside_few", ", 8 in flight", False)):
        for name, title, of, to, at_least, aim in (
            ("memory", "in-memory hub / forward-only relay", memory, FORWARD.name, 2.0, 3.0),
            ("normal", "NORMAL / in-memory", normal, memory, 0.55, 0.7),
            ("full", "FULL / in-memory", full, memory, 0.45, 0.6),
            ("normal_full", "NORMAL / FULL", normal, full, None, None),
        ):
            wanted = (at_least, aim) if bounds else (None, None)
            found.append(Ratio(f"{scenario}_{name}", f"{title}{ending}", scenario, of, to, *wanted, throughput))
            found.append(Ratio(f"{scenario}_{name}_cpu", BY_CPU, scenario, of, to, None, None, inverse_cpu))
    for scenario, ending, wanted in (
        ("outside_all", "", (2.5, 4.0)),
        ("outside_all_few", ", 8 in flight", (None, None)),
    ):
        title = f"fan-out, in-memory / forward-only broadcast(){ending}"
        found.append(Ratio(scenario, title, scenario, memory, FORWARD_ALL.name, *wanted, throughput))
        found.append(Ratio(f"{scenario}_cpu", BY_CPU, scenario, memory, FORWARD_ALL.name, None, None, inverse_cpu))
    title = "unpipelined p50, NORMAL / in-memory"
    return [*found, Ratio("outside_alone", title, "outside", normal, memory, 2.0, None, delivered_p50, True)]


class Outside(Relay):
    """Throughput, latency, CPU time and bytes of the hub with each durability, measured from outside."""

    name = "outside"
    scenarios = SCENARIOS
    ratios = _ratios()

    def __init__(
        self,
        bench: Bench,
        *,
        messages: int,
        subjects: Collection[str] = (),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(bench, messages=messages, window=MANY, subjects=subjects, report=report)

    def lines(self) -> list[Line]:
        lines = super().lines()
        for hub in HUBS[1:]:
            random, ordered = (self._samples.get(name, {}).get(hub.name, []) for name in ("outside", "outside_ordered"))
            if not random or not ordered:
                continue
            ratios = [one.server_cpu_us / other.server_cpu_us for one, other in zip(random, ordered, strict=True)]
            title = f"{hub.name[4:].upper()}, random ids / ordered ones, by server CPU"
            lines.append(Line(f"outside_ids_{hub.name[4:]}", title, ratios, fewer_is_better=True))
            for ids, samples in (("random", random), ("ordered", ordered)):
                lines.append(self._bytes_line(f"outside_bytes_{hub.name[4:]}_{ids}", f"  its file, {ids} ids", samples))
        return lines

    def _bytes_line(self, name: str, title: str, samples: list[Sample]) -> Line:
        written = max(it.written_bytes or 0.0 for it in samples)
        log = max(it.log_bytes or 0 for it in samples)
        beside = f"{written:,.0f} bytes a message given to the disk at most, -wal {log / 1e6:.1f} MB"
        values = [it.file_bytes or 0.0 for it in samples]
        return Line(name, title, values, fewer_is_better=True, unit="bytes a message", beside=beside)
