"""A whole network in one process, with time and chance of its own: the same seed gives the same ledger, byte for byte.

`simulate` runs a function on a `Simulation` (`network`): people and agents (`participants`) join it over the same
sessions and hub code as everywhere, by connections that take time and break (`links`), and their models are watched
(`models`). Agents, connections and the hub can be lost and come back, by hand or by seed (`faults`). All time comes
from the event loop (`virtual_time`), all chance from the seed, one stream for each purpose, so that a change in one
place does not shift what happens in others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roundelay.lazy import load_when_used

if TYPE_CHECKING:
    from roundelay.simulation.links import Delay
    from roundelay.simulation.network import MakeAgent, Setting, Simulation, SimulationError, simulate

__all__ = [
    "Delay",
    "MakeAgent",
    "Setting",
    "Simulation",
    "SimulationError",
    "simulate",
]

__getattr__ = load_when_used(
    __name__,
    {
        "Delay": "roundelay.simulation.links",
        **dict.fromkeys(
            ("MakeAgent", "Setting", "Simulation", "SimulationError", "simulate"), "roundelay.simulation.network"
        ),
    },
)
