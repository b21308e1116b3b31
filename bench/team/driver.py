"""Cost of a team's answers in Roundelay and in comparable projects: CPU time, prompt bytes, memory and time.

    ./dev bench team [--rounds 5] [--only w1,w2] [--systems roundelay,langgraph] [--json FILE]
    ./dev bench team --quick
    ./dev bench team --markdown FILE

Each measurement starts a new process, and uses a fake model server. Every answer is checked. The order of the systems
rotates by round. CPU time and memory include all processes of the system and the person's client, but not the model
server. Environments are created for the comparable projects. A project that cannot be installed is left out with a
note. The exit code is 1 after a wrong answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from environments import DEFAULT_FOLDER, HERE, System, find_python, list_systems
from results import (
    Row,
    build_details,
    build_overview,
    build_summary,
    format_markdown,
    format_problems,
    format_text,
    is_right,
    read_cpu_ms,
)
from workloads import EDGE, GROWING, WORKLOADS

sys.path.insert(0, str(HERE.parent))
from machine import describe_machine, list_process_tree, read_process_cpu_s, read_tree_memory_kb

TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
QUICK_SYSTEMS = (
    "floor",
    "roundelay",
    "roundelay memory",
    "roundelay up",
    "langgraph",
    "langgraph sqlite",
    "openai-agents",
)
QUICK_WORKLOADS = ("w1", "w2")


class ModelServer:
    """The process of the fake model server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._root = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"

    @property
    def base_url(self) -> str:
        return f"{self._root}/v1"

    def read(self, path: str) -> dict[str, int]:
        """Return the counts of the model server. The path /reset starts new counts."""
        with urllib.request.urlopen(self._root + path, timeout=30) as reply:
            return json.load(reply)


@contextmanager
def start_model_server() -> Iterator[ModelServer]:
    command = [sys.executable, str(HERE / "model_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ModelServer(process)
        finally:
            process.terminate()


def read_tree_cpu_s(pid: int) -> float:
    total_s = 0.0
    for below in list_process_tree(pid):
        try:
            total_s += read_process_cpu_s(below)
        except OSError:
            continue  # the process ended meanwhile
    return total_s


def stop_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all processes that it started."""
    if process.poll() is not None:
        return  # another process may have the same id by now
    for pid in reversed(list_process_tree(process.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


class Measurement:
    """Measurement of one system with one workload: the process of the system, and the clocks at each step."""

    def __init__(self, process: subprocess.Popen[str], server: ModelServer) -> None:
        self._process = process
        self._server = server
        self.steps: list[tuple[dict[str, Any], float, dict[str, int]]] = []

    def read_step(self) -> dict[str, Any]:
        """Wait for the next report. Store the report with the CPU seconds and the model server's counts at
        that moment.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process ended or was too slow")
        report = json.loads(line)
        self.steps.append((report, read_tree_cpu_s(self._process.pid), self._server.read("/stats")))
        return report

    def continue_(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def run(self, work: str, questions: int) -> Row:
        began_s = time.monotonic()
        ready = self.read_step()
        pid = self._process.pid
        row: Row = {"ready_s": round(time.monotonic() - began_s, 3), "ready_cpu_s": round(self.steps[0][1], 3)}
        row["ready_mb"] = round(read_tree_memory_kb(pid) / 1024, 1)
        self.continue_()
        while "wall_s" not in (report := self.read_step()):
            self.continue_()
        (_, cpu_before_s, before), *marks, (_, cpu_after_s, after) = self.steps
        row |= report | {"cpu_s": round(cpu_after_s - cpu_before_s, 4), "wrong": ready["wrong"] + report["wrong"]}
        row |= {name: after[name] - before[name] for name in after}
        row["memory_mb"] = round(read_tree_memory_kb(pid) / 1024, 1)
        if work in GROWING:
            first_s, last_s = marks[0][1] - cpu_before_s, cpu_after_s - marks[1][1]
            row |= {"growth": round(last_s / first_s, 3), "last_cpu_ms": round(last_s / EDGE * 1000, 3)}
        self.continue_()
        self._process.wait(STOP_TIMEOUT_S)
        return row


def measure(server: ModelServer, system: System, python: Path, work: str, questions: int) -> Row:
    row: Row = {"system": system.name, "work": work, "questions": questions, "wrong": []}
    server.read("/reset")
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", ignore_cleanup_errors=True) as folder:
        job = {"work": work, "questions": questions, "base_url": server.base_url, "folder": folder, "mode": system.mode}
        environment = {**os.environ, "HOME": folder, "ROUNDELAY_HOME": f"{folder}/home"}
        # pip has compiled the packages of the peers, and this checkout is compiled when it is imported.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with subprocess.Popen(
            [str(python), str(system.script), json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment,
        ) as process:  # fmt: skip
            assert process.stderr is not None
            errors: list[str] = []
            stderr = process.stderr
            reader = threading.Thread(
                target=lambda: errors.extend(line for line in stderr if line.strip()), daemon=True
            )
            reader.start()
            timer = threading.Timer(TIMEOUT_S, stop_tree, [process])
            timer.start()
            try:
                row |= Measurement(process, server).run(work, questions)
            except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
                row["error"] = f"{error} {' '.join(errors[-1:]).strip()}"[:300]
            finally:
                timer.cancel()
                stop_tree(process)
    return row | {"load": round(os.getloadavg()[0], 1)}


def find_pythons(systems: list[System], folder: Path) -> dict[str, Path]:
    """Return the Python interpreter of each system that can run here. For each other system, report why it cannot
    run.
    """
    pythons: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for system in systems:
        try:
            if system.environment not in failed:
                pythons[system.name] = find_python(system.environment, folder)
        except (RuntimeError, OSError) as error:
            failed[system.environment] = str(error)
            report(f"left out: {system.environment}, which cannot be installed: {error}")
    return pythons


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def save(file: Path | None, rows: list[Row]) -> None:
    """Write the file for --json. The file is written after each round, so that an interrupted run loses
    only one round.
    """
    if file:
        machine = vars(describe_machine(Path(tempfile.gettempdir())))
        file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def run(options: argparse.Namespace) -> list[Row]:
    systems = [system for system in list_systems() if system.name in options.systems]
    pythons = find_pythons(systems, options.environments)
    systems = [system for system in systems if system.name in pythons]
    rows: list[Row] = []
    with start_model_server() as server:
        for number in range(options.rounds):
            turn = number * 5 % max(len(systems), 1)
            for work in options.only:
                for system in systems[turn:] + systems[:turn]:
                    if work in system.skip:
                        continue
                    workload = WORKLOADS[work]
                    questions = min(
                        workload.quick_questions if options.quick else workload.questions,
                        system.questions.get(work, workload.questions),
                    )
                    row = measure(server, system, pythons[system.name], work, questions) | {"round": number}
                    rows.append(row)
                    shown = f"{read_cpu_ms(row):.2f} ms of CPU an answer" if is_right(row) else "failed"
                    report(f"round {number + 1}, {work}, {system.name}: {shown}")
            save(options.json, rows)
    return rows


def split_names(known: list[str]) -> Any:
    def split(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}. Known: {', '.join(known)}.")
        return names

    return split


def main() -> None:
    names = [system.name for system in list_systems()]
    workloads = "\n".join(f"  {name}  {workload.title}" for name, workload in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nWorkloads:\n{workloads}\n\nSystems: {', '.join(names)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, help="default: 5, with --quick 1")
    parser.add_argument("--only", metavar="WORKLOADS", type=split_names(list(WORKLOADS)))
    parser.add_argument("--systems", metavar="NAMES", type=split_names(names))
    parser.add_argument(
        "--quick", action="store_true", help="run few systems with few questions, in less than two minutes"
    )
    parser.add_argument(
        "--environments", metavar="FOLDER", type=Path, default=DEFAULT_FOLDER, help="default: .suites/bench-team"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all values to FILE")
    parser.add_argument(
        "--markdown", metavar="FILE", type=Path, help="print the tables of docs/performance.md from a --json FILE"
    )
    options = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("This benchmark reads CPU and memory from /proc, which only Linux has.")
    if options.markdown:
        kept = json.loads(options.markdown.read_text())
        print(format_markdown([build(kept["rows"], list_systems()) for build in (build_overview, build_summary)]))
        return
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.only = options.only or (QUICK_WORKLOADS if options.quick else list(WORKLOADS))
    options.systems = options.systems or (QUICK_SYSTEMS if options.quick else names)
    rows = run(options)
    if not rows:
        sys.exit("There is nothing to measure: no system is left.")
    print(format_text([build_overview(rows, list_systems()), *build_details(rows, list_systems())]))
    problems = format_problems(rows)
    for problem in problems:
        report(f"not counted: {problem}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
