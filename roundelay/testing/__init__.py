"""Test teams of agents, either with networks in Python tests (`networks`) or with scenarios.

A scenario runs in a simulation or on a live network. `run` controls a run in these steps: `file` reads the scenario
file into the models of `form`, `agents` builds the agents, and `steps` performs the steps on a stage (`stage`,
`live_stage`). `judge` compares the resulting `record` with the expectations, and `report` reports the result.
docs/scenarios.md explains both kinds of tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from roundelay.testing.file import Scenario, load_scenario, make_scenario
    from roundelay.testing.networks import Messages, NetworkUnderTest, PersonUnderTest, Said, Transcript, said
    from roundelay.testing.run import ScenarioResult, run_live_scenario, run_scenario

__all__ = [
    "Messages",
    "NetworkUnderTest",
    "PersonUnderTest",
    "Said",
    "Scenario",
    "ScenarioResult",
    "Transcript",
    "load_scenario",
    "make_scenario",
    "run_live_scenario",
    "run_scenario",
    "said",
]

__getattr__ = load_when_used(
    __name__,
    {
        **dict.fromkeys(("Scenario", "load_scenario", "make_scenario"), "roundelay.testing.file"),
        **dict.fromkeys(
            ("Transcript", "Said", "said", "Messages", "PersonUnderTest", "NetworkUnderTest"),
            "roundelay.testing.networks",
        ),
        **dict.fromkeys(("ScenarioResult", "run_live_scenario", "run_scenario"), "roundelay.testing.run"),
    },
)
