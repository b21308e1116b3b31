"""All measurements of the network, in one run and one table.

    ./dev bench [--quick] [--rounds 5] [--only MEASURE ...] [--json FILE]
    ./dev bench --markdown FILE

Each round takes every measurement once. The table shows the medians of all rounds. A ratio compares two values of the
same round. The second command prints the table of a stored run. docs/performance.md explains the results.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from history import History, write_history
from machine import describe_machine, pin_process, split_cores
from outside import Outside
from relay import Relay
from report import Results, make_parser, pick_size, tell, tell_results
from resume import Resume
from servers import DEFAULT_NODE, Bench
from table import Line
from wire import LoadError

MEASURES = (Relay.name, Outside.name, Resume.name)


class Measure(Protocol):
    """A family of measurements, implemented in its own module."""

    name: str

    def run_round(self, number: int) -> str:
        """Measure once. Return a summary in one line."""

    def lines(self) -> list[Line]:
        """Return the lines of the table. Call this only after `run_round`."""

    def details(self) -> dict[str, Any]:
        """Return all measured values as plain data."""


@dataclass(frozen=True)
class Size:
    """Amount of work in a run."""

    rounds: int
    messages: int
    """Number of messages from one sender to one receiver. With 100 receivers, a twentieth of this number is sent."""
    ledger_messages: int
    missed: int
    returns: int
    subjects: tuple[str, ...] = ()
    """Names of the relays and hubs to measure. If the tuple is empty, all relays and hubs are measured."""


SIZES = {
    "full": Size(5, 40_000, 300_000, 500, 20),
    "quick": Size(1, 4_000, 20_000, 500, 5),
    "tiny": Size(1, 300, 1_200, 100, 2, ("broadcast", "hub memory", "hub full")),
}


def run(size: Size, names: Sequence[str], *, rounds: int, window: int, node: Sequence[str]) -> Results:
    """Take the named measurements ``rounds`` times, in turns. Return the results as plain data. Raises `LoadError`."""
    started_s = time.monotonic()
    # Do not use the system's temporary folder, which may be in memory. The disk is part of the measurement.
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        server_cores, own_cores = split_cores()
        pin_process(0, own_cores)
        bench = Bench(node, Path(scratch), frozenset(server_cores))
        machine = describe_machine(Path(scratch))
        history = None
        if Resume.name in names:
            tell(f"a node writes {size.ledger_messages:,} messages, to measure the cost of a long ledger")
            history = write_history(bench, size.ledger_messages, size.missed)
        measures = _make_measures(bench, size, names, window, history)
        for number in range(rounds):
            for measure in measures:
                tell(f"round {number + 1}/{rounds}  {measure.name}: {measure.run_round(number)}")
        lines = [line for measure in measures for line in measure.lines()]
        described = [measure.describe() for measure in measures if isinstance(measure, Relay)]
        return {
            "machine": asdict(machine),
            "rounds": rounds,
            "size": asdict(size),
            "server_cores": sorted(server_cores),
            "took_s": round(time.monotonic() - started_s),
            "table": [line.to_plain() for line in lines],
            "subjects": "\n".join(described),
            "details": {measure.name: measure.details() for measure in measures},
        }


def _make_measures(
    bench: Bench, size: Size, names: Sequence[str], window: int, history: History | None
) -> list[Measure]:
    measures: list[Measure] = []
    if Relay.name in names:
        measures.append(Relay(bench, messages=size.messages, window=window, subjects=size.subjects, report=tell))
    if Outside.name in names:
        measures.append(Outside(bench, messages=size.messages, subjects=size.subjects, report=tell))
    if history is not None and Resume.name in names:
        measures.append(Resume(bench, history, size.returns))
    return measures


def describe_run(results: Results) -> str:
    """Return a description of the machine and of the run."""
    facts, size = results["machine"], results["size"]
    cores = ", ".join(map(str, results["server_cores"])) or "any"
    return "\n".join(
        [
            f"{facts['cpu_model']}, {facts['cores']} cores, {facts['kernel']}, {facts['python']}",
            ", ".join(f"{name} {found}" for name, found in facts["libraries"].items()),
            f"{facts['filesystem']}, fdatasync p50 {facts['fdatasync_p50_us']:.0f} us, p99 {facts['fdatasync_p99_us']:.0f} us",
            f"{results['rounds']} rounds of {size['messages']:,} messages of 200 bytes, {results['took_s']} s; "
            f"servers on core {cores}, the load on the last one",
        ]
    )


def main() -> None:
    quick, rounds = "a short run of two minutes, whose values are not reliable", "number of rounds"
    parser = make_parser(__doc__, SIZES, quick=quick, rounds=rounds)
    parser.add_argument(
        "--only", action="append", default=[], choices=MEASURES, help="take only this measurement; may be repeated"
    )
    parser.add_argument(
        "--subject",
        action="append",
        default=[],
        metavar="NAME",
        help="subject of relay, such as plain or 'hub full'; may be repeated",
    )
    parser.add_argument("--messages", type=int, help="messages per round from one sender to one receiver")
    parser.add_argument("--window", type=int, default=512, help="messages in flight when pipelined")
    parser.add_argument(
        "--node", metavar="COMMAND", help="command that starts a node from a config file; default: roundelay up"
    )
    options = parser.parse_args()
    given = {"messages": options.messages, "subjects": tuple(options.subject)}
    size = replace(pick_size(options, SIZES), **{name: value for name, value in given.items() if value})

    def measure() -> Results:
        return run(
            size,
            options.only or MEASURES,
            rounds=options.rounds or size.rounds,
            window=options.window,
            node=shlex.split(options.node) if options.node else DEFAULT_NODE,
        )

    tell_results(options, measure, describe_run, failure=LoadError)


if __name__ == "__main__":
    main()
