"""Simulate a whole network in one process. The same seed produces the same ledger, byte for byte.

`simulate` runs a function on a `Simulation` (`network`). People and agents (`participants`) use the same hub and
sessions as in a real network, over connections that are slow and can break (`links`). Their models are observed
(`models`). Agents, connections and the hub can fail and restart, on command or at random (`faults`). All time comes
from the event loop (`virtual_time`), and all randomness from the seed. Each purpose has a separate random stream, so
that a change in one place does not affect the others.
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
