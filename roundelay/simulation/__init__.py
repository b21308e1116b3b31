"""A whole network in one process, with its own time and randomness: the same seed gives the same ledger, byte for byte.

`simulate` runs a function on a `Simulation` (`network`). People and agents (`participants`) join it through the sessions
and the hub of every other network, over connections that take time and break (`links`). Their models are observed
(`models`). Agents, connections and the hub can be lost and come back, by hand or by seed (`faults`). All time comes from
the event loop (`virtual_time`), and all randomness from the seed. Each purpose has its own random stream, so that a change
in one place does not change the others.
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
