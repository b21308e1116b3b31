"""Messages per second through the hub, compared with the relays of relays.py.

Each round measures every subject once, on a new server process. One sender sends pipelined messages to one receiver and
to 100 receivers, and then single messages to one receiver. A ratio compares two values of the same round, so a slow
minute of the machine affects both sides. The table shows the median of the ratios. The server's CPU time is the time of
all threads of the server's process during the timed section. The load generator (load.py) verifies that every message
is stored once and delivered once.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load import ACK_EVERY, Fleet
from machine import measure_fdatasync, read_process_cpu_s, read_written_bytes
from servers import Bench, Subject, read_figure
from table import Line
from wire import make_message_id

SIZE_BYTES = 200


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    receivers: int
    to: str
    subjects: tuple[Subject, ...]
    window: int | None = None  # maximum number of messages in flight; None uses the value of the run
    make_id: Callable[[], bytes] = make_message_id
    ack_every: int = ACK_EVERY


@dataclass(frozen=True)
class Sample:
    """Results of one subject in one round of one scenario."""

    messages_per_s: float
    server_cpu_us: float  # CPU time of the server per message sent
    server_busy: float  # share of one core; at 1.0 or more, the server was the bottleneck, as intended
    generator_busy: float
    others_busy: float  # use by other processes meanwhile, in cores; it should be 0
    delivered_p50_us: float | None = None
    delivered_p99_us: float | None = None
    stored_p50_us: float | None = None
    commits_per_1000: float | None = None  # commits per 1,000 messages, from the hub's own metrics
    file_bytes: float | None = None  # size of a durable hub's database at its end, per message
    written_bytes: float | None = None  # bytes that a durable hub wrote during the timed section, per message
    log_bytes: float | None = None  # size of a durable hub's -wal file, not per message


@dataclass(frozen=True)
class Ratio:
    name: str
    title: str
    scenario: str
    of: str
    to: str
    at_least: float | None
    aim: float | None
    measure: Callable[[Sample], float | None]
    fewer_is_better: bool = False


PLAIN, BROADCAST, BARE = Subject("plain"), Subject("broadcast"), Subject("bare")
HUBS = tuple(Subject(f"hub {durability}", durability) for durability in ("memory", "normal", "full"))
SCENARIOS = (
    Scenario("one_to_one", "one to one", 1, "agent:receiver-000", (PLAIN, BARE, *HUBS)),
    Scenario("one_to_100", "one to 100", 100, "broadcast", (PLAIN, BROADCAST, BARE, *HUBS)),
)


BY_CPU = "  the same by server CPU"


def throughput(sample: Sample) -> float | None:
    return sample.messages_per_s


def inverse_cpu(sample: Sample) -> float | None:
    return 1 / sample.server_cpu_us if sample.server_cpu_us else None


def delivered_p50(sample: Sample) -> float | None:
    return sample.delivered_p50_us


RATIOS = (
    Ratio("memory_plain", "in-memory hub / plain relay", "one_to_one", "hub memory", "plain", 2.0, 3.0, throughput),
    Ratio("memory_plain_cpu", BY_CPU, "one_to_one", "hub memory", "plain", None, None, inverse_cpu),
    Ratio("memory_bare", "in-memory hub / bare relay", "one_to_one", "hub memory", "bare", 0.55, 0.75, throughput),
    Ratio("memory_bare_cpu", BY_CPU, "one_to_one", "hub memory", "bare", None, None, inverse_cpu),
    Ratio("fan_out", "fan-out, in-memory / broadcast()", "one_to_100", "hub memory", "broadcast", 2.0, 2.8, throughput),
    Ratio("fan_out_cpu", BY_CPU, "one_to_100", "hub memory", "broadcast", None, None, inverse_cpu),
    Ratio("normal_memory", "NORMAL / in-memory", "one_to_one", "hub normal", "hub memory", 0.55, 0.7, throughput),
    Ratio("normal_memory_cpu", BY_CPU, "one_to_one", "hub normal", "hub memory", None, None, inverse_cpu),
    Ratio("full_memory", "FULL / in-memory", "one_to_one", "hub full", "hub memory", 0.45, 0.6, throughput),
    Ratio("full_memory_cpu", BY_CPU, "one_to_one", "hub full", "hub memory", None, None, inverse_cpu),
    Ratio("full_plain", "FULL / plain relay", "one_to_one", "hub full", "plain", 0.7, None, throughput),
    Ratio(
        "unpipelined", "unpipelined p50, NORMAL / in-memory", "one_to_one", "hub normal", "hub memory", 2.0, 1.5,
        delivered_p50, True,
    ),
)  # fmt: skip


class Relay:
    """Throughput, latency and CPU time of the hub with each durability, and of the relays."""

    name = "relay"
    scenarios: Sequence[Scenario] = SCENARIOS
    ratios: Sequence[Ratio] = RATIOS

    def __init__(
        self,
        bench: Bench,
        *,
        messages: int,
        window: int,
        subjects: Collection[str] = (),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create the measurement. ``subjects`` names the subjects to measure. If the collection is empty, all subjects
        are measured.
        """
        self.fdatasync_p50_us: list[float] = []  # one value per round, measured just before the round
        self._bench = bench
        self._messages = messages
        self._fanout_messages = max(messages // 20, 50)
        self._window = window
        self._subjects = subjects
        self._report = report
        self._samples: dict[str, dict[str, list[Sample]]] = {}  # scenario -> subject -> one sample per round

    def run_round(self, number: int) -> str:
        self.fdatasync_p50_us.append(measure_fdatasync(self._bench.scratch)[0])
        for scenario in self.scenarios:
            subjects = [it for it in scenario.subjects if not self._subjects or it.name in self._subjects]
            # Begin each round with a different subject, so that no subject always follows the same one.
            turn = number % len(subjects) if subjects else 0
            for subject in subjects[turn:] + subjects[:turn]:
                sample = self._measure(subject, scenario)
                self._samples.setdefault(scenario.name, {}).setdefault(subject.name, []).append(sample)
                self._report(
                    f"{scenario.title:<10}  {subject.name:<10}  "
                    f"{sample.messages_per_s:>9,.0f}/s  {sample.server_cpu_us:7.1f} us CPU  "
                    f"server {sample.server_busy:4.0%}  generator {sample.generator_busy:4.0%}  "
                    f"others {sample.others_busy:4.0%}"
                )
        return f"fdatasync p50 before this round: {self.fdatasync_p50_us[-1]:.0f} us"

    def _measure(self, subject: Subject, scenario: Scenario) -> Sample:
        """Start a subject, warm it up, measure it, and stop it."""
        is_hub, is_kept = subject.durability is not None, subject.durability in ("normal", "full")
        messages = self._messages if scenario.receivers == 1 else self._fanout_messages
        window = scenario.window or self._window
        with tempfile.TemporaryDirectory(dir=self._bench.scratch) as folder:
            db = Path(folder) / "bench.db"
            with (
                self._bench.start(subject, db) as (url, pid),
                Fleet(
                    url,
                    scenario.receivers,
                    names_stored=is_hub,
                    make_id=scenario.make_id,
                    ack_every=scenario.ack_every,
                    is_answered=not subject.name.startswith("forward"),
                ) as fleet,
            ):
                warm_up = max(messages // 10, 20)
                fleet.send_pipelined(warm_up, to=scenario.to, size_bytes=SIZE_BYTES, window=window)
                commits = read_figure(url, "commits_total") if is_hub else 0.0
                written, cpu_s = read_written_bytes(pid), read_process_cpu_s(pid)
                sent = fleet.send_pipelined(messages, to=scenario.to, size_bytes=SIZE_BYTES, window=window)
                cpu_s, written = read_process_cpu_s(pid) - cpu_s, read_written_bytes(pid) - written
                commits = read_figure(url, "commits_total") - commits if is_hub else 0.0
                others_cpu_s = sent.machine_cpu_s - cpu_s - sent.generator_cpu_s
                log_bytes = Path(f"{db}-wal").stat().st_size if is_kept else None
                # Skip this for 100 receivers, because single messages would only measure the fan-out again.
                latency, alone = None, max(messages // 40, 50) if scenario.receivers == 1 else 0
                if alone:
                    latency = fleet.send_one_by_one(alone, to=scenario.to, size_bytes=SIZE_BYTES)
            file_bytes = db.stat().st_size if is_kept else None
        return Sample(
            messages_per_s=sent.messages_per_s,
            server_cpu_us=cpu_s / messages * 1e6,
            server_busy=cpu_s / sent.elapsed_s,
            generator_busy=sent.generator_busy,
            others_busy=max(0.0, others_cpu_s / sent.elapsed_s),
            delivered_p50_us=latency.delivered_p50_us if latency else None,
            delivered_p99_us=latency.delivered_p99_us if latency else None,
            stored_p50_us=latency.stored_p50_us if latency else None,
            commits_per_1000=commits / messages * 1000 if is_hub else None,
            file_bytes=file_bytes / (warm_up + messages + alone) if file_bytes is not None else None,
            written_bytes=written / messages if is_kept else None,
            log_bytes=log_bytes,
        )

    def lines(self) -> list[Line]:
        lines: list[Line] = []
        for ratio in self.ratios:
            values = self._compute(ratio)
            if values:
                lines.append(
                    Line(
                        ratio.name,
                        ratio.title,
                        values,
                        ratio.at_least,
                        ratio.aim,
                        ratio.fewer_is_better,
                        beside=self._describe(ratio),
                    )
                )
            full = self._samples.get("one_to_one", {}).get("hub full", [])
            if ratio.name == "full_memory" and full:
                counts = [sample.commits_per_1000 or 0.0 for sample in full]
                disk = ", ".join(f"{value:.0f}" for value in self.fdatasync_p50_us)
                beside = f"one for each commit; one alone took {disk} us before the rounds"
                lines.append(Line("full_fsyncs", "  its fsyncs per 1,000 messages", counts, beside=beside))
        return lines

    def _compute(self, ratio: Ratio) -> list[float]:
        """Return the ratio of each round. The list is empty if one side was not measured."""
        of, to = self._sides(ratio)
        values = [(ratio.measure(one), ratio.measure(other)) for one, other in zip(of, to, strict=False)]
        return [one / other for one, other in values if one is not None and other]

    def _describe(self, ratio: Ratio) -> str:
        """Return the medians of both sides: the measured value, and the CPU time per message."""
        of, to = self._sides(ratio)
        if ratio.measure is delivered_p50:
            return " / ".join(f"{_median([it.delivered_p50_us for it in side]):.0f} us" for side in (of, to))
        cpu = " / ".join(f"{_median([it.server_cpu_us for it in side]):.1f} us" for side in (of, to))
        if ratio.measure is inverse_cpu:
            return f"{cpu} CPU per message"
        return " / ".join(f"{_median([it.messages_per_s for it in side]):,.0f}/s" for side in (of, to)) + f", CPU {cpu}"

    def _sides(self, ratio: Ratio) -> tuple[list[Sample], list[Sample]]:
        subjects = self._samples.get(ratio.scenario, {})
        return subjects.get(ratio.of, []), subjects.get(ratio.to, [])

    def details(self) -> dict[str, Any]:
        return {
            "messages": self._messages,
            "fanout_messages": self._fanout_messages,
            "window": self._window,
            "fdatasync_p50_us": self.fdatasync_p50_us,
            "samples": {
                scenario: {name: [asdict(sample) for sample in samples] for name, samples in subjects.items()}
                for scenario, subjects in self._samples.items()
            },
        }

    def describe(self) -> str:
        """Return a table with the medians of every subject, for a terminal."""
        lines = [
            f"{'':<12}{'subject':<12}{'messages/s':>12}{'CPU us/msg':>12}{'server':>8}{'generator':>11}{'others':>8}"
            f"{'p50 us':>9}{'p99 us':>9}{'stored p50':>12}{'commits/1000':>14}"
        ]
        for scenario in self.scenarios:
            for name, samples in self._samples.get(scenario.name, {}).items():
                optional = "".join(
                    f"{_median(values):>{width}.{digits}f}" if values[0] is not None else " " * width
                    for values, width, digits in (
                        ([it.delivered_p50_us for it in samples], 9, 0),
                        ([it.delivered_p99_us for it in samples], 9, 0),
                        ([it.stored_p50_us for it in samples], 12, 0),
                        ([it.commits_per_1000 for it in samples], 14, 1),
                    )
                )
                lines.append(
                    f"{scenario.title:<12}{name:<12}{_median([it.messages_per_s for it in samples]):>12,.0f}"
                    f"{_median([it.server_cpu_us for it in samples]):>12.1f}"
                    f"{_median([it.server_busy for it in samples]):>8.0%}"
                    f"{_median([it.generator_busy for it in samples]):>11.0%}"
                    f"{_median([it.others_busy for it in samples]):>8.0%}{optional}".rstrip()
                )
        lines += [
            "server, generator: share of one core in use. The generator reads eagerly, so it uses spare time too.",
            "others: use by other processes. If it exceeds a few percent, trust the ratios by server CPU, not the rates.",
        ]
        return "\n".join(lines)


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else 0.0
