"""Tests of `./dev bench team`: how it checks answers, compares systems and leaves peers out. The tests do not check
the measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TEAM = Path(__file__).resolve().parents[2] / "bench" / "team"
SYSTEM = """\
import contextlib
from peer import run

@contextlib.asynccontextmanager
async def open_system(job):
    async def ask(number, text):
        return f"A{number}: {number % 97 + number % 13 + (number == 2)}."
    yield ask

run(open_system)
"""


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TEAM / "driver.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env={**os.environ, **environment}
    )


def _row(system: str, number: int, cpu_s: float, *wrong: str) -> dict[str, Any]:
    counts = {"prompt_bytes": 500, "fresh_bytes": 50, "memory_mb": 20.0, "ready_mb": 10.0, "ready_cpu_s": 9.0}
    times = {"p50_s": 0.01, "wall_s": 1.0}
    return (
        {"system": system, "work": "w1", "round": number, "questions": 5, "cpu_s": cpu_s, "wrong": wrong}
        | counts
        | times
    )


def test_a_ratio_compares_systems_within_a_round(tmp_path: Path) -> None:
    """In the data, the machine is ten times slower in the second round. A system with a wrong answer and the floor
    cannot be the best peer.
    """
    rows = [
        _row("floor", 0, 0.1), _row("roundelay", 0, 3.0), _row("autogen", 0, 2.0), _row("agentscope", 0, 0.5, "7: no"),
        _row("floor", 1, 1.0), _row("roundelay", 1, 25.0), _row("autogen", 1, 50.0), _row("agentscope", 1, 20.0),
    ]  # fmt: skip
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    done = _run("--markdown", str(tmp_path / "rows.json"))
    lines = done.stdout.splitlines()
    assert "| roundelay | everything, synced | 1.38 |" in lines, done.stderr  # 3 / 2 and 25 / 20
    assert "| roundelay | 2,800 | 10.0 | 100 | 20.0 |  |  |  |  |" in lines
    assert "| agentscope | nothing | 1.00 |" in lines


def test_a_wrong_answer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "wrong_system.py").write_text(SYSTEM)
    job = {"work": "w4", "questions": 4, "base_url": "http://127.0.0.1:9/v1", "folder": str(tmp_path), "mode": ""}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "wrong_system.py"), json.dumps(job)],
        input="\n\n", capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "PYTHONPATH": str(TEAM)},
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1])["wrong"] == ["2: A2: 5."]


def test_a_peer_that_cannot_be_installed_is_left_out(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho 'no such release' >&2\nexit 1\n")
    uv.chmod(0o755)
    done = _run(
        "--quick", "--only", "w1", "--systems", "floor,langgraph", "--environments", str(tmp_path / "made"),
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    assert "left out: langgraph, which cannot be installed: no such release" in done.stderr
    assert done.returncode == 0
    assert "\nfloor " in done.stdout
    assert "\nlanggraph " not in done.stdout


@pytest.mark.full
def test_every_workload_gives_right_answers_from_roundelay(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    systems = "floor,roundelay,roundelay memory,roundelay up"
    done = _run("--quick", "--only", "w1,w2,w3,w4,w6,w7,w8", "--systems", systems, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 7 * 4
    assert all(row["prompt_bytes"] > 100 * row["questions"] for row in rows)
    assert all(row["cpu_s"] > 0 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json"]
