"""Tests that the benchmarks work: each runs in its smallest form against real nodes and prints plausible values. The
tests do not judge the values.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
RUN, TURNS = BENCH / "run.py", BENCH / "turns.py"
TIMEOUT_S = 170


def _bench(folder: Path, *arguments: str, script: Path = RUN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


LINES = {
    "relay": {"full_memory", "full_memory_cpu", "full_fsyncs", "fan_out", "fan_out_cpu"},
    "outside": {
        *(f"outside_full{end}" for end in ("", "_cpu")),
        *(f"outside_few_full{end}" for end in ("", "_cpu")),
        "outside_ids_full",
        "outside_bytes_full_random",
        "outside_bytes_full_ordered",
    },
    "resume": {"resume"},
}


@pytest.mark.full
@pytest.mark.parametrize(
    "measures",
    [pytest.param(("relay", "resume"), id="two"), pytest.param(tuple(LINES), id="all")],
)
def test_a_measure_gives_its_lines(tmp_path: Path, measures: tuple[str, ...]) -> None:
    kept = tmp_path / "results.json"
    only = [word for measure in measures for word in ("--only", measure)] if len(measures) < len(LINES) else []
    done = _bench(tmp_path, "--size", "tiny", "--json", str(kept), *only)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(kept.read_text())
    lines = {line["name"]: line for line in results["table"]}
    assert set(lines) == {name for measure in measures for name in LINES[measure]}
    for line in lines.values():
        assert len(line["values"]) == 1
        assert line["values"][0] > 0
        assert line["title"] in done.stdout
    assert lines["full_fsyncs"]["median"] < 1000  # commits share their syncs
    assert set(results["details"]) == set(measures)
    assert results["machine"]["cores"] >= 1
    assert [path.name for path in tmp_path.iterdir()] == [
        "results.json"
    ]  # the benchmark has deleted its nodes and ledgers

    markdown = _bench(tmp_path, "--markdown", str(kept)).stdout
    shown = [line.split(" | ")[0].strip("| ") for line in markdown.splitlines() if line.startswith("| ")]
    titles = [line["title"].strip() + (f" ({line['unit']})" if line["unit"] else "") for line in results["table"]]
    assert shown == ["measure", "---", *titles]


def test_a_server_that_does_not_start_fails_the_measurement(tmp_path: Path) -> None:
    done = _bench(tmp_path, "--size", "tiny", "--only", "relay", "--node", f"{sys.executable} -c pass")
    assert (done.returncode, done.stdout) == (1, "")
    assert "the measurement failed: no ready line from" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("is_whole", [False, True])
def test_what_agents_cost_is_measured_and_told(tmp_path: Path, is_whole: bool) -> None:
    kept = tmp_path / "results.json"
    only = () if is_whole else ("--only", "turns", "--only", "prompt")
    done = _bench(tmp_path, "--size", "tiny", "--json", str(kept), *only, script=TURNS)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(kept.read_text())
    lines = {line["name"]: line for line in results["table"]}
    ways = [f"{way}_{times}" for way in ("plain", "streaming") for times in ("one_by_one", "2_at_once")]
    features = {name for name in lines if name.startswith("feature_")}
    assert lines.keys() - features == {
        *(f"{loop}_{way}" for loop in ("ours", "ours_recorded") for way in ways),
        "ours_plain_one_by_one_a_tool_that_blocks", "rendering", "prompt_budget",
        *(("resting_agent", "rested_agent") if is_whole else ()),
    }  # fmt: skip
    told = {"feature_references", "feature_context_sums_up", "feature_tracing", "feature_budget"}
    assert told < features if is_whole else not features
    for line in lines.values():
        assert len(line["values"]) == 1
        assert line["title"] in done.stdout
    # With few agents, the value may be noise.
    assert all(lines[name]["values"][0] > 0 for name in lines if name != "resting_agent")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

    markdown = _bench(tmp_path, "--markdown", str(kept), script=TURNS).stdout
    assert markdown.count("\n| ") == 2 + len(lines)


@pytest.mark.full
def test_most_of_a_prompt_is_that_of_the_reaction_before(tmp_path: Path) -> None:
    """docs/performance.md has the same figures. Nothing is timed, so they are equal on every machine."""
    kept = tmp_path / "results.json"
    done = _bench(tmp_path, "--json", str(kept), script=BENCH / "sharing.py")
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(kept.read_text())
    one, five, zipf = (it["shared"] for it in results["sharing"])
    assert (one >= 70, five >= 45, zipf >= 50) == (True, True, True), results["sharing"]
    growth = results["growth"]
    assert (
        growth["ledger"] < 2 * growth["said"] < growth["requests"] / 20
    )  # a message is stored once, and not once per request
    assert done.stdout.count("\n| ") == 1 + len(results["sharing"])
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
