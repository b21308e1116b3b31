"""A whole network in one process, with time and chance of its own: the same seed gives the same ledger, byte for byte.

`simulate` runs a function on a `Simulation`: people and agents join it over the same sessions and hub code as everywhere; connections, agents and
the hub itself can be lost and come back. All time comes from the event loop (`virtual_time`), all chance from the seed, one stream for each purpose,
so that a change in one place does not shift what happens in others. The scenario engine stands on it, and anybody's tests may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from roundelay.simulation.links import Delay
    from roundelay.simulation.network import Simulation
    from roundelay.simulation.run import open_simulation, simulate
    from roundelay.simulation.setting import MakeAgent, Setting, SimulationError

__all__ = [
    "Delay",
    "MakeAgent",
    "Setting",
    "Simulation",
    "SimulationError",
    "open_simulation",
    "simulate",
]

__getattr__ = load_when_used(
    __name__,
    {
        "Delay": "roundelay.simulation.links",
        "MakeAgent": "roundelay.simulation.setting",
        "Setting": "roundelay.simulation.setting",
        "Simulation": "roundelay.simulation.network",
        "SimulationError": "roundelay.simulation.setting",
        "open_simulation": "roundelay.simulation.run",
        "simulate": "roundelay.simulation.run",
    },
)
