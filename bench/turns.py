"""Cost of an agent without its model: CPU time of a turn, alone and with each feature, CPU time for rendering a prompt,
and memory.

    ./dev bench turns [--quick] [--rounds 5] [--only MEASURE ...] [--json FILE]
    ./dev bench turns --markdown FILE

Each round takes every measurement once. The table shows the medians of all rounds. A ratio compares two values of the
same round. The second command prints the table of a stored run. docs/performance.md explains the results.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from features import FeatureCost
from machine import MachineFacts, describe_machine, pin_process, split_cores
from prompts import Rendering
from report import Results, make_parser, pick_size, tell, tell_results
from resting import RestingAgents
from servers import DEFAULT_NODE, Bench
from turn_cost import TurnCost
from wire import LoadError

MEASURES = (TurnCost.name, FeatureCost.name, Rendering.name, RestingAgents.name)


@dataclass(frozen=True)
class Size:
    """Amount of work in a run."""

    rounds: int
    runs: int
    """Number of runs of each loop per round. Each run has six turns."""
    at_once: int
    feature_runs: int
    """Number of runs with each feature per round. Each run has six turns."""
    renderings: int
    agents: int


SIZES = {
    "full": Size(5, 200, 50, 30, 100, 500),
    "quick": Size(1, 20, 50, 10, 20, 100),
    "tiny": Size(1, 2, 2, 1, 2, 20),
}


def run(size: Size, names: Sequence[str], *, rounds: int) -> Results:
    """Take the named measurements ``rounds`` times, in turns. Return the results as plain data. Raises `LoadError`."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as scratch:
        server_cores, own_cores = split_cores()
        pin_process(0, own_cores)
        bench = Bench(DEFAULT_NODE, Path(scratch), frozenset(server_cores))
        machine = describe_machine(Path(scratch))
        measures: list[TurnCost | FeatureCost | Rendering | RestingAgents] = [
            TurnCost(bench, runs=size.runs, at_once=size.at_once),
            FeatureCost(bench, runs=size.feature_runs),
            Rendering(size.renderings),
            RestingAgents(bench, size.agents),
        ]
        chosen = [measure for measure in measures if measure.name in names]
        for number in range(rounds):
            for measure in chosen:
                tell(f"round {number + 1}/{rounds}  {measure.name}: {measure.run_round(number)}")
        return {
            "machine": asdict(machine),
            "rounds": rounds,
            "size": asdict(size),
            "took_s": round(time.monotonic() - started_s),
            "table": [line.to_plain() for measure in chosen for line in measure.lines()],
            "details": {measure.name: measure.details() for measure in chosen},
        }


def describe_run(results: Results) -> str:
    """Return a description of the machine and of the run."""
    facts, size = MachineFacts(**results["machine"]), results["size"]
    versions = ", ".join(f"{name} {facts.libraries[name]}" for name in ("openai", "pydantic", "jinja2", "websockets"))
    featured = f", {size['feature_runs']} with each feature" if "feature_runs" in size else ""
    return "\n".join(
        [
            f"{facts.cpu_model}, {facts.cores} cores, {facts.kernel}, {facts.python}",
            versions,
            f"{results['rounds']} rounds, {size['runs']} runs of six turns each{featured}, {results['took_s']} s",
        ]
    )


def main() -> None:
    quick, rounds = "a short run of one minute, whose values are not reliable", "number of rounds"
    parser = make_parser(__doc__, SIZES, quick=quick, rounds=rounds)
    parser.add_argument(
        "--only", action="append", default=[], choices=MEASURES, help="take only this measurement; may be repeated"
    )
    options = parser.parse_args()
    size = pick_size(options, SIZES)

    def measure() -> Results:
        return run(size, options.only or MEASURES, rounds=options.rounds or size.rounds)

    tell_results(options, measure, describe_run, failure=LoadError)


if __name__ == "__main__":
    main()
