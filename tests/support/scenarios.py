"""Run the shipped scenarios with many seeds, for tests of determinism. ``python -m tests.support.scenarios FIRST
COUNT`` prints a digest of each ledger.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roundelay.network.config import load_yaml
from roundelay.testing import Scenario, ScenarioResult, make_scenario, run_scenario

FOLDER = Path(__file__).parents[2] / "examples" / "scenarios"
SHIPPED = sorted(FOLDER.glob("*.scenario.yaml"))
FAULTS = {"drops": 3, "agent_kills": 2, "hub_restarts": 1, "model_failures": 0.05, "within": "4s", "away": "1s"}


def read_plain(path: Path) -> dict[str, Any]:
    """Load a scenario as plain values that a test can change."""
    value = load_yaml(path).plain()
    assert isinstance(value, dict)
    return dict(value)


def with_faults(path: Path) -> Scenario:
    """Return a shipped scenario with random losses of connections, agents and the hub. Tests compare only its ledger."""
    plain = read_plain(path)
    steps = [step for step in plain["steps"] if not {"kill", "restart"} & step.keys()]
    return make_scenario({**plain, "faults": FAULTS, "limits": {}, "steps": _patient(steps)}, path)


def _patient(steps: list[Any]) -> list[Any]:
    """Replace waits for messages, because a fault may delay or lose them. A wait for idle becomes long, and a wait
    for a message that later steps refer to may take an hour.
    """
    kept: list[Any] = []
    for step in steps:
        if "save" in step and "wait" in step:
            kept.append({**step, "wait": {**step["wait"], "at_most": "1h"}})
        elif isinstance(step.get("wait"), Mapping) and "message" in step["wait"]:
            kept.append({"wait": "2s"})
        elif "repeat" in step:
            kept.append({"repeat": {**step["repeat"], "steps": _patient(step["repeat"]["steps"])}})
        else:
            kept.append({"wait": {"until": "idle", "at_most": "1h"}} if step.get("wait") == "idle" else step)
    return kept


def digest(result: ScenarioResult) -> str:
    return hashlib.sha256(result.ledger).hexdigest()


def list_digests(first: int, count: int) -> Iterator[str]:
    for path in SHIPPED:
        calm, faulty = make_scenario(read_plain(path), path), with_faults(path)
        for seed in range(first, first + count):
            for kind, scenario in (("calm", calm), ("faults", faulty)):
                result = run_scenario(scenario, seed=seed)
                failure = f" {result.failure.step}: {result.failure.reason}" if result.failure is not None else ""
                yield f"{path.name} {seed} {kind} {digest(result)} {len(result.record.messages)}{failure}"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for line in list_digests(int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
