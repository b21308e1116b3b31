"""Cost of a start: CPU seconds and memory of imports and commands, each in a new Python process.

    python bench/start_up.py [--runs 5] [--json FILE]

The output shows medians. The CPU time includes the interpreter, and memory is the maximum resident size. Bytecode is
written before the first run that counts, as in an installation. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import list_process_tree, read_process_cpu_s, read_tree_memory_kb
from servers import read_memory_kb

IMPORT_TARGET_S, ALL_TARGET_S, SEND_TARGET_S, UP_TARGET_S = 0.15, 0.35, 0.25, 0.6
MEMORY_TARGET_MB = 45.0
"""Maximum resident memory after importing everything that the package exports, in MB."""

# This code runs last in the measured process. The code does not use `ru_maxrss`, which keeps the parent's value across
# fork and exec (getrusage(2)).
REPORT = """\
import atexit, sys, time

def report():
    cpu_s = time.process_time()
    try:
        with open("/proc/self/status") as status:
            kb = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except OSError:
        import resource
        kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    print(cpu_s, kb, file=sys.stderr)

atexit.register(report)
"""
COMMAND = "import runpy; sys.argv = {argv!r}; runpy.run_module('roundelay', run_name='__main__', alter_sys=True)"


@dataclass(frozen=True)
class Subject:
    """A command or a piece of code to measure. ``max_cpu_s`` is the target in CPU seconds, or None."""

    name: str
    code: str
    max_cpu_s: float | None = None
    max_memory_mb: float | None = None

    @classmethod
    def command(cls, *arguments: str, max_cpu_s: float | None = None) -> Subject:
        name = " ".join(argument for argument in arguments if argument not in ("--url", "{url}"))
        return cls(f"roundelay {name}", COMMAND.format(argv=["roundelay", *arguments]), max_cpu_s)


SUBJECTS = (
    Subject("python, nothing imported", "pass"),
    Subject("floor: asyncio, websockets, msgspec", "import asyncio, websockets, msgspec"),
    Subject("import roundelay", "import roundelay", IMPORT_TARGET_S, MEMORY_TARGET_MB),
    Subject("from roundelay import NetworkClient", "from roundelay import NetworkClient"),
    Subject("from roundelay import *", "from roundelay import *", ALL_TARGET_S, MEMORY_TARGET_MB),
    Subject("OpenAIModel, which loads the HTTP client", "from roundelay.agents.models.openai_model import OpenAIModel"),
    Subject.command("--help"),
    Subject.command("up", "--help"),
    Subject.command("send", "--url", "{url}", "--as", "ann", "broadcast", "hello", max_cpu_s=SEND_TARGET_S),
)
NODE = ("up", "--port", "0", "--db", "{database}", "--no-open")
UP = Subject.command("up", max_cpu_s=UP_TARGET_S)
"""A node without agents. The node is measured once per run, from its start until it is ready."""
MANY_CPU_TARGET_S, MANY_MEMORY_TARGET_MB = 3.0, 200.0
TEAMS = {
    1: Subject("roundelay up, 1 agent", ""),
    10: Subject("roundelay up, 10 agents", ""),
    50: Subject("roundelay up, 50 agents", "", MANY_CPU_TARGET_S, MANY_MEMORY_TARGET_MB),
}
"""Nodes with agents. A node is measured until all its agents are ready. The values are sums over all processes, and
memory that the processes share counts once.
"""
AGENT = "  - {id: agent-NUMBER, instruction: Answer., model: {openai: {name: m, base_url: 'http://127.0.0.1:9/v1'}}}\n"


@dataclass(frozen=True)
class Cost:
    """Costs of one subject. Each list has one value per run."""

    name: str
    max_cpu_s: float | None
    max_memory_mb: float | None
    cpu_s: list[float]
    memory_mb: list[float]

    @property
    def is_met(self) -> bool:
        pairs = ((self.cpu_s, self.max_cpu_s), (self.memory_mb, self.max_memory_mb))
        return all(most is None or statistics.median(values) <= most for values, most in pairs)


def measure(runs: int, subjects: Sequence[Subject] = SUBJECTS) -> list[Cost]:
    """Run each subject once without measuring it, and then ``runs`` times. The subjects take turns, so that a slow
    minute of the machine affects all of them.
    """
    all_subjects = (*subjects, UP, *TEAMS.values())
    costs = [Cost(subject.name, subject.max_cpu_s, subject.max_memory_mb, [], []) for subject in all_subjects]
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "ROUNDELAY_HOME": f"{folder}/home"}
        for number in range(-1, runs):
            with start_node(Path(folder), environment) as (url, *started):
                results = [_run(subject, environment, url) for subject in subjects]
            results += [(started[0], started[1]), *(_start_team(Path(folder), environment, count) for count in TEAMS)]
            for cost, (cpu_s, memory_mb) in zip(costs, results, strict=True):
                if number >= 0:
                    cost.cpu_s.append(cpu_s)
                    cost.memory_mb.append(memory_mb)
    return costs


def _start_team(folder: Path, environment: dict[str, str], count: int) -> tuple[float, float]:
    """Start a node with ``count`` agents. When it is ready, return the CPU seconds and MB of all its processes."""
    file = folder / f"team-{count}.yaml"
    file.write_text("agents:\n" + "".join(AGENT.replace("NUMBER", str(number)) for number in range(count)))
    with start_node(folder, environment, str(file)) as (_, cpu_s, memory_mb):
        return cpu_s, memory_mb


@contextmanager
def start_node(folder: Path, environment: dict[str, str], *file: str) -> Iterator[tuple[str, float, float]]:
    """Run a node. When it is ready, yield its URL, and the CPU seconds and megabytes of its processes."""
    arguments = [*(argument.format(database=folder / "node.db") for argument in NODE), *file]
    with subprocess.Popen(
        [sys.executable, "-m", "roundelay", *arguments], env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            ready = next((line for line in process.stdout if " is ready at " in line), None)
            if ready is None:
                sys.exit("the node did not start")
            cpu_s = sum(map(read_process_cpu_s, list_process_tree(process.pid)))
            # Without agents, the node is a single process. Measure the memory of this process like the memory of the
            # other commands.
            memory_kb = read_tree_memory_kb(process.pid) if file else read_memory_kb(process.pid)
            memory_mb = memory_kb / 1024
            yield ready.split(" is ready at ")[1].split()[0], cpu_s, memory_mb
        finally:
            process.terminate()


def _run(subject: Subject, environment: dict[str, str], url: str) -> tuple[float, float]:
    code = REPORT + subject.code.replace("{url}", url)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{subject.name} failed: {done.stderr}")
    cpu_s, kb = done.stderr.splitlines()[-1].split()
    return float(cpu_s), int(kb) / 1024


def format_costs(costs: Sequence[Cost]) -> str:
    lines = [f"{'median':<38}{'CPU s':>8}{'MB':>8}   CPU s, all runs"]
    for cost in costs:
        verdict = (
            "" if cost.max_cpu_s is None else f"  {'ok' if cost.is_met else 'MISSED'} (at most {cost.max_cpu_s} s)"
        )
        runs = " ".join(f"{value:.3f}" for value in sorted(cost.cpu_s))
        cpu_s, memory_mb = statistics.median(cost.cpu_s), statistics.median(cost.memory_mb)
        lines.append(f"{cost.name:<38}{cpu_s:>8.3f}{memory_mb:>8.1f}   {runs}{verdict}")
    lines.append(f"Imports with a target may take {MEMORY_TARGET_MB:g} MB at most.")
    return "\n".join(lines)


def to_json(costs: Sequence[Cost]) -> str:
    return json.dumps({"python": sys.version.split()[0], "costs": [asdict(cost) for cost in costs]}, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE; with -, print only JSON")
    options = parser.parse_args()
    costs = measure(options.runs)
    if options.json != "-":
        print(format_costs(costs))
    if options.json == "-":
        print(to_json(costs), end="")
    elif options.json:
        Path(options.json).write_text(to_json(costs), encoding="utf-8")
    sys.exit(0 if all(cost.is_met for cost in costs) else 1)


if __name__ == "__main__":
    main()
