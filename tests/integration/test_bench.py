"""The measurements work: each runs in its smallest form against real nodes and says something sane. What they measure is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = Path(__file__).resolve().parents[2] / "bench" / "run.py"
TIMEOUT_S = 90


def _bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUN), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_every_measure_gives_its_lines(tmp_path: Path) -> None:
    kept = tmp_path / "results.json"
    done = _bench(tmp_path, "--size", "tiny", "--json", str(kept))
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(kept.read_text())
    lines = {line["name"]: line for line in results["table"]}
    assert set(lines) == {
        "full_memory", "full_memory_cpu", "full_fsyncs", "fan_out", "fan_out_cpu",
        "idle_memory", "many_idle_p50", "many_idle_p99", "participants_growth", "resume", "ledger_growth",
    }  # fmt: skip
    for line in lines.values():
        assert len(line["values"]) == 1
        assert line["values"][0] > 0
        assert line["title"] in done.stdout
    assert lines["full_fsyncs"]["median"] < 1000  # commits are shared
    assert set(results["details"]) == {"relay", "idle-memory", "many-idle", "resume", "ledger-growth"}
    assert results["machine"]["cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # nodes, ledgers: all gone

    markdown = _bench(tmp_path, "--markdown", str(kept)).stdout
    shown = [line.split(" | ")[0].strip("| ") for line in markdown.splitlines() if line.startswith("| ")]
    titles = [line["title"].strip() + (f" ({line['unit']})" if line["unit"] else "") for line in results["table"]]
    assert shown == ["measure", "---", *titles]


def test_a_server_that_does_not_start_fails_the_measurement(tmp_path: Path) -> None:
    done = _bench(tmp_path, "--size", "tiny", "--only", "many-idle", "--node", f"{sys.executable} -c pass")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the measurement failed: no ready line from" in done.stderr
