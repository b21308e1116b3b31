"""What a simulation is like, and what it says when it is asked for what it cannot do. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roundelay.agents.runner import AgentRunner
from roundelay.network.config import Limits
from roundelay.network.errors import RoundelayError
from roundelay.network.mod import Mod
from roundelay.network.visibility import Visibility
from roundelay.simulation.links import Delay
from roundelay.simulation.virtual_time import HORIZON_S

LINK_DELAY, MODEL_DELAY = Delay(0, 5), Delay(50, 500)

MakeAgent = Callable[[], AgentRunner]
"""Makes an agent's runner, anew for each start."""


@dataclass(frozen=True)
class Setting:
    """What a simulation is like. ``link_delay`` and ``model_delay`` are drawn anew each time; they are what makes seeds differ in order."""

    seed: int = 0
    is_virtual: bool = True
    mods: Sequence[str | Mod] = ("channels", "discovery")
    limits: Limits = field(default_factory=Limits)
    visibility: Visibility = "people"
    link_delay: Delay = LINK_DELAY
    model_delay: Delay = MODEL_DELAY
    model_failure_rate: float = 0.0
    max_tokens: int | None = None
    horizon_s: float = HORIZON_S
    """How much virtual time may pass before a run is ended as one that never would."""


class SimulationError(RoundelayError):
    """A simulation was asked for what it cannot do; the sentence says what."""

    code = "simulation"
