"""Tests of teams of agents: networks inside a test (`networks`), and scenarios, in a simulation or on a live network.

A scenario file is read (`file`, in the form of `form`), its agents are built (`agents`), and its steps are performed
(`steps`) on a stage (`stage`, `live_stage`). The resulting `record` is compared with the expectations (`judge`) and
reported (`report`). `run` does all of it. docs/scenarios.md shows both.
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
