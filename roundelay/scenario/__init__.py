"""Scenarios: teams of agents tested by what they say and do, in a simulation or on a network that is up. docs/scenarios.md shows them.

A file is read (`file`; `spec`, `expectations` and `values` are its form), its agents are built (`agents`), its steps are acted out (`steps`) on a stage (`simulated_stage`,
`live_stage`), what is left behind (`record`) is held against what was expected (`judge`) and told (`report`); `run` does all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from roundelay.scenario.file import Scenario, load_scenario, make_scenario
    from roundelay.scenario.run import ScenarioResult, run_live_scenario, run_scenario

__all__ = ["Scenario", "ScenarioResult", "load_scenario", "make_scenario", "run_live_scenario", "run_scenario"]

__getattr__ = load_when_used(
    __name__,
    {
        **dict.fromkeys(("Scenario", "load_scenario", "make_scenario"), "roundelay.scenario.file"),
        **dict.fromkeys(("ScenarioResult", "run_live_scenario", "run_scenario"), "roundelay.scenario.run"),
    },
)
