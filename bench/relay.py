"""Messages per second through the hub, beside the relays of floors.py, in one run.

    python bench/relay.py [--rounds 5] [--messages 40000] [--json FILE] [--quick]

Each round measures every subject once, on a server process of its own, started for it: one sender to one receiver and
one to 100, pipelined, then one message at a time. Shown are medians over the rounds; a ratio is taken within each
round before its median is, so that a slow minute of the machine hits both of its sides. Server CPU is what the server's
process used, all threads, during the timed section. The load generator (load.py) verifies every message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from load import Fleet, LoadError
from machine import MachineFacts, describe_machine, measure_fdatasync, pin_process, read_process_cpu_s, split_cores

HERE = Path(__file__).resolve().parent
SIZE_BYTES = 200
READY_TIMEOUT_S = 30.0

# Rates that no run reaches: what is measured is the hub, not its brakes. Everything else is as a user finds it.
HUB_CONFIG = """\
name: bench
host: 127.0.0.1
port: 0
db: {db}
durability: {durability}
limits:
  sends_per_s: 10000000
  root_messages_per_s: 10000000
"""


@dataclass(frozen=True)
class Subject:
    """One server under measurement."""

    name: str
    durability: str | None = None  # of the hub; None: a relay of floors.py

    def build_command(self, directory: Path, node: Sequence[str]) -> list[str]:
        if self.durability is None:
            return [sys.executable, str(HERE / "floors.py"), self.name]
        config = directory / "node.yaml"
        config.write_text(HUB_CONFIG.format(db=directory / "bench.db", durability=self.durability))
        return [*node, str(config)]


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    receivers: int
    to: str
    subjects: tuple[Subject, ...]


@dataclass(frozen=True)
class Sample:
    """One subject in one round of one scenario."""

    messages_per_s: float
    server_cpu_us: float  # per message sent
    server_busy: float  # share of one core, 1.0 or more: the server was the bottleneck, as it should be
    generator_busy: float
    others_busy: float  # what else ran on the machine meanwhile, in cores: it should be nothing
    delivered_p50_us: float | None = None
    delivered_p99_us: float | None = None
    stored_p50_us: float | None = None


@dataclass(frozen=True)
class Ratio:
    title: str
    scenario: str
    of: str
    to: str
    at_least: float | None
    aim: float | None
    measure: Callable[[Sample], float | None]
    fewer_is_better: bool = False


@dataclass
class Results:
    machine: MachineFacts
    rounds: int
    messages: int
    fanout_messages: int
    window: int
    server_cores: set[int]  # empty: not pinned
    fdatasync_p50_us: list[float] = field(default_factory=list)  # one per round, measured just before it
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # scenario -> subject -> one per round


PLAIN, BROADCAST, BARE = Subject("plain"), Subject("broadcast"), Subject("bare")
HUBS = tuple(Subject(f"hub {durability}", durability) for durability in ("memory", "normal", "full"))
SCENARIOS = (
    Scenario("one_to_one", "one to one", 1, "agent:receiver-000", (PLAIN, BARE, *HUBS)),
    Scenario("one_to_100", "one to 100", 100, "broadcast", (PLAIN, BROADCAST, BARE, *HUBS)),
)


def _throughput(sample: Sample) -> float | None:
    return sample.messages_per_s


def _inverse_cpu(sample: Sample) -> float | None:
    return 1 / sample.server_cpu_us if sample.server_cpu_us else None


def _delivered_p50(sample: Sample) -> float | None:
    return sample.delivered_p50_us


RATIOS = (
    Ratio("in-memory hub / plain relay", "one_to_one", "hub memory", "plain", 1.5, 3.0, _throughput),
    Ratio("  the same by server CPU", "one_to_one", "hub memory", "plain", None, None, _inverse_cpu),
    Ratio("in-memory hub / bare relay", "one_to_one", "hub memory", "bare", 0.55, 0.75, _throughput),
    Ratio("  the same by server CPU", "one_to_one", "hub memory", "bare", None, None, _inverse_cpu),
    Ratio("FULL / plain relay", "one_to_one", "hub full", "plain", 0.7, None, _throughput),
    Ratio("  the same by server CPU", "one_to_one", "hub full", "plain", None, None, _inverse_cpu),
    Ratio("NORMAL / in-memory", "one_to_one", "hub normal", "hub memory", 0.55, 0.7, _throughput),
    Ratio("FULL / in-memory", "one_to_one", "hub full", "hub memory", 0.45, 0.6, _throughput),
    Ratio("fan-out, in-memory hub / broadcast()", "one_to_100", "hub memory", "broadcast", 2.0, 2.8, _throughput),
    Ratio("  the same by server CPU", "one_to_100", "hub memory", "broadcast", None, None, _inverse_cpu),
    Ratio(
        "unpipelined p50, NORMAL / in-memory", "one_to_one", "hub normal", "hub memory", 2.0, 1.5, _delivered_p50, True
    ),
)


def run_benchmark(
    *,
    rounds: int,
    messages: int,
    window: int,
    node: Sequence[str],
    only: Sequence[str] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Results:
    """Measure every scenario and subject `rounds` times, interleaved. `node` starts a hub, given a config file."""
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        server_cores, own_cores = split_cores()
        pin_process(0, own_cores)
        results = Results(
            describe_machine(Path(scratch)), rounds, messages, max(messages // 20, 50), window, server_cores
        )
        for number in range(rounds):
            results.fdatasync_p50_us.append(measure_fdatasync(Path(scratch))[0])
            for scenario in SCENARIOS:
                subjects = [s for s in scenario.subjects if not only or s.name in only]
                # Each round begins with another subject: none always runs on the machine that the same one left behind.
                turn = number % len(subjects)
                for subject in subjects[turn:] + subjects[:turn]:
                    sample = measure(subject, scenario, results, node)
                    results.samples.setdefault(scenario.name, {}).setdefault(subject.name, []).append(sample)
                    report(
                        f"round {number + 1}/{rounds}  {scenario.title:<10}  {subject.name:<10}  "
                        f"{sample.messages_per_s:>9,.0f}/s  {sample.server_cpu_us:7.1f} us CPU  "
                        f"server {sample.server_busy:4.0%}  generator {sample.generator_busy:4.0%}  "
                        f"others {sample.others_busy:4.0%}"
                    )
    return results


def measure(subject: Subject, scenario: Scenario, results: Results, node: Sequence[str]) -> Sample:
    """Start the subject, warm it up, measure it, end it."""
    is_hub = subject.durability is not None
    pipelined = results.messages if scenario.receivers == 1 else results.fanout_messages
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="roundelay-bench-") as directory,
        start_server(subject.build_command(Path(directory), node), results.server_cores, Path(directory)) as (url, pid),
        Fleet(url, scenario.receivers, names_stored=is_hub) as fleet,
    ):
        fleet.send_pipelined(max(pipelined // 10, 20), to=scenario.to, size_bytes=SIZE_BYTES, window=results.window)
        cpu_s = read_process_cpu_s(pid)
        throughput = fleet.send_pipelined(pipelined, to=scenario.to, size_bytes=SIZE_BYTES, window=results.window)
        cpu_s = read_process_cpu_s(pid) - cpu_s
        others_cpu_s = throughput.machine_cpu_s - cpu_s - throughput.generator_cpu_s
        others_busy = max(0.0, others_cpu_s / throughput.elapsed_s)
        server_cpu_us, server_busy = cpu_s / pipelined * 1e6, cpu_s / throughput.elapsed_s
        if scenario.receivers > 1:
            return Sample(throughput.messages_per_s, server_cpu_us, server_busy, throughput.generator_busy, others_busy)
        latency = fleet.send_one_by_one(max(pipelined // 40, 50), to=scenario.to, size_bytes=SIZE_BYTES)
        return Sample(
            throughput.messages_per_s,
            server_cpu_us,
            server_busy,
            throughput.generator_busy,
            others_busy,
            latency.delivered_p50_us,
            latency.delivered_p99_us,
            latency.stored_p50_us,
        )


@contextlib.contextmanager
def start_server(
    command: Sequence[str], cores: set[int] | None = None, home: Path | None = None
) -> Iterator[tuple[str, int]]:
    """The server's URL and process id, once it has printed its ready line; it is ended on the way out."""
    # Nothing of the user's gets in, and no note of this node reaches the user's other commands.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDELAY_")}
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"ROUNDELAY_HOME": str(home)} if home is not None else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            pin_process(process.pid, cores or set())
            assert process.stdout is not None
            line = ""
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not (found := re.search(r"wss?://[^\s\"]+", line)):
                line = process.stdout.readline()
                if not line or time.monotonic() > deadline_s:
                    raise LoadError(f"no ready line from: {' '.join(command)}")
            yield found[0], process.pid
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def format_results(results: Results) -> str:
    """The table that a person reads."""
    facts = results.machine
    lines = [
        f"{facts.cpu_model}, {facts.cores} cores, {facts.kernel}, {facts.python}",
        ", ".join(f"{name} {found}" for name, found in facts.libraries.items()),
        f"{facts.filesystem}, fdatasync p50 before each round (us): "
        + ", ".join(f"{value:.0f}" for value in results.fdatasync_p50_us),
        f"{results.rounds} rounds, {results.messages:,} messages (one to 100: {results.fanout_messages:,}), "
        f"{SIZE_BYTES} bytes, window {results.window}, servers on core "
        f"{', '.join(map(str, sorted(results.server_cores))) or 'any'}, the generator on the last one",
        "",
        f"{'':<12}{'subject':<12}{'messages/s':>12}{'CPU us/msg':>12}{'server':>8}{'generator':>11}{'others':>8}"
        f"{'p50 us':>9}{'p99 us':>9}{'stored p50':>12}",
    ]
    for scenario in SCENARIOS:
        for name, samples in results.samples.get(scenario.name, {}).items():
            latency = "".join(
                f"{value:>{width}.0f}"
                for value, width in (
                    (_median([sample.delivered_p50_us for sample in samples]), 9),
                    (_median([sample.delivered_p99_us for sample in samples]), 9),
                    (_median([sample.stored_p50_us for sample in samples]), 12),
                )
                if value is not None
            )
            lines.append(
                f"{scenario.title:<12}{name:<12}{_median([s.messages_per_s for s in samples]) or 0:>12,.0f}"
                f"{_median([s.server_cpu_us for s in samples]) or 0:>12.1f}"
                f"{_median([s.server_busy for s in samples]) or 0:>8.0%}"
                f"{_median([s.generator_busy for s in samples]) or 0:>11.0%}"
                f"{_median([s.others_busy for s in samples]) or 0:>8.0%}{latency}"
            )
    lines += ["", f"{'ratio':<40}{'median':>8}{'min':>8}{'max':>8}{'target':>9}{'aim':>7}"]
    for ratio in RATIOS:
        values = compute_ratio(ratio, results)
        if not values:
            continue
        sign = "<=" if ratio.fewer_is_better else ">="
        target = f"{sign} {ratio.at_least}" if ratio.at_least is not None else ""
        verdict = "" if ratio.at_least is None else ("" if holds(ratio, statistics.median(values)) else "  missed")
        lines.append(
            f"{ratio.title:<40}{statistics.median(values):>8.2f}{min(values):>8.2f}{max(values):>8.2f}"
            f"{target:>9}{ratio.aim if ratio.aim is not None else '':>7}{verdict}"
        )
    lines += [
        "",
        "plain: recv and send of `websockets`, a coroutine step per message. broadcast: the same with broadcast().",
        "bare: routing in the protocol callback, one joined write per connection and tick, no parsing, no state.",
        "Each relay answers the sender with a frame of the size of `stored`. All on uvloop, without deflate.",
        "server, generator: share of one core in use. The generator reads eagerly: with time to spare it uses more.",
        "others: what else ran on the machine. Beyond a few percent, trust the ratios by server CPU, not the rates.",
        "p50, p99: from writing a message, nothing else in flight, to its delivery.",
    ]
    return "\n".join(lines)


def compute_ratio(ratio: Ratio, results: Results) -> list[float]:
    """The ratio in each round; empty when either side was not measured."""
    subjects = results.samples.get(ratio.scenario, {})
    pairs = zip(subjects.get(ratio.of, []), subjects.get(ratio.to, []), strict=False)
    values = [(ratio.measure(of), ratio.measure(to)) for of, to in pairs]
    return [of / to for of, to in values if of is not None and to]


def holds(ratio: Ratio, value: float) -> bool:
    if ratio.at_least is None:
        return True
    return value <= ratio.at_least if ratio.fewer_is_better else value >= ratio.at_least


def to_json(results: Results) -> str:
    ratios = {
        f"{ratio.title.strip()} ({ratio.scenario}, {ratio.of} / {ratio.to})": [round(v, 3) for v in values]
        for ratio in RATIOS
        if (values := compute_ratio(ratio, results))
    }
    plain = asdict(results) | {"server_cores": sorted(results.server_cores), "ratios": ratios}
    return json.dumps(plain, indent=2) + "\n"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=40_000, help="per round, one to one; 1/20 one to 100")
    parser.add_argument("--window", type=int, default=512, help="messages in flight when pipelined")
    parser.add_argument("--only", action="append", default=[], metavar="SUBJECT", help="plain, bare, 'hub memory', ...")
    parser.add_argument("--node", metavar="COMMAND", help="starts a node from a config file; default: roundelay up")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 4,000 messages: a look, not a measurement")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well; - for standard output alone")
    options = parser.parse_args()
    rounds, messages = (2, 4_000) if options.quick else (options.rounds, options.messages)
    try:
        results = run_benchmark(
            rounds=rounds,
            messages=messages,
            window=options.window,
            node=shlex.split(options.node) if options.node else [sys.executable, "-m", "roundelay", "up"],
            only=options.only,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except LoadError as error:
        sys.exit(f"the measurement failed: {error}")
    if options.json == "-":
        print(to_json(results), end="")
        return
    print(format_results(results))
    if options.json:
        Path(options.json).write_text(to_json(results))


if __name__ == "__main__":
    main()
