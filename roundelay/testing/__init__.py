"""Tests of teams of agents: networks in a test (`networks`), and scenarios, in a simulation or on a network that is up.

A scenario's file is read (`file`; `form` is what it may say), its agents are built (`agents`), its steps are acted out
(`steps`) on a stage (`stage`, `live_stage`), what is left behind (`record`) is held against what was expected (`judge`)
and told (`report`); `run` does all of it. docs/scenarios.md shows both.
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
