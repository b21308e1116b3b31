"""What it costs to start: CPU seconds and memory of imports and commands, each in a Python process of its own.

    python bench/start_up.py [--runs 5] [--json FILE]

Shown are medians. CPU is all that the process used, the interpreter included; memory is the most that it held resident. Bytecode is
written before the first run that counts, as an installation has it. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_TARGET_S = 0.35
MEMORY_TARGET_MB = 45.0

# Runs in the measured process, after all else. Not `ru_maxrss`: across fork and exec it keeps the parent's (getrusage(2)).
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
    name: str
    code: str
    has_target: bool = False

    @classmethod
    def command(cls, *arguments: str) -> Subject:
        return cls(f"roundelay {' '.join(arguments)}", COMMAND.format(argv=["roundelay", *arguments]))


SUBJECTS = (
    Subject("python, nothing imported", "pass"),
    Subject("import roundelay", "import roundelay", has_target=True),
    Subject("from roundelay import NetworkClient", "from roundelay import NetworkClient"),
    Subject("from roundelay import *", "from roundelay import *", has_target=True),
    Subject("OpenAIModel, which loads the SDK", "from roundelay.agents.models.openai_model import OpenAIModel"),
    Subject.command("--help"),
    Subject.command("up", "--help"),
)


@dataclass(frozen=True)
class Cost:
    """One subject; one value of each per run."""

    name: str
    has_target: bool
    cpu_s: list[float]
    memory_mb: list[float]

    @property
    def is_met(self) -> bool:
        return not self.has_target or (
            statistics.median(self.cpu_s) <= CPU_TARGET_S and statistics.median(self.memory_mb) <= MEMORY_TARGET_MB
        )


def measure(runs: int, subjects: Sequence[Subject] = SUBJECTS) -> list[Cost]:
    """Run each subject once pause_hook_timer, then ``runs`` times; the subjects take turns, so that a slow minute hits all of them."""
    costs = [Cost(subject.name, subject.has_target, [], []) for subject in subjects]
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        for number in range(-1, runs):
            for subject, cost in zip(subjects, costs, strict=True):
                cpu_s, memory_mb = _run(subject, environment)
                if number >= 0:
                    cost.cpu_s.append(cpu_s)
                    cost.memory_mb.append(memory_mb)
    return costs


def _run(subject: Subject, environment: dict[str, str]) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", REPORT + subject.code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{subject.name} failed: {done.stderr}")
    cpu_s, kb = done.stderr.splitlines()[-1].split()
    return float(cpu_s), int(kb) / 1024


def format_costs(costs: Sequence[Cost]) -> str:
    lines = [f"{'median':<38}{'CPU s':>8}{'MB':>8}   CPU s, all runs"]
    for cost in costs:
        verdict = "" if not cost.has_target else "  ok" if cost.is_met else "  MISSED"
        runs = " ".join(f"{value:.3f}" for value in sorted(cost.cpu_s))
        cpu_s, memory_mb = statistics.median(cost.cpu_s), statistics.median(cost.memory_mb)
        lines.append(f"{cost.name:<38}{cpu_s:>8.3f}{memory_mb:>8.1f}   {runs}{verdict}")
    lines.append(f"Targets: at most {CPU_TARGET_S} s and {MEMORY_TARGET_MB:g} MB where it says ok or MISSED.")
    return "\n".join(lines)


def to_json(costs: Sequence[Cost]) -> str:
    targets = {"cpu_s": CPU_TARGET_S, "memory_mb": MEMORY_TARGET_MB}
    python = sys.version.split()[0]
    return (
        json.dumps({"python": python, "targets": targets, "costs": [asdict(cost) for cost in costs]}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the results there as well; - for standard output alone")
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
