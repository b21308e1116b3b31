"""Cause random faults that are derived from the seed: lost connections, killed agents and killed hubs.

Faults run concurrently with a simulation. At the end, all killed agents and hubs have been restarted. `Setting`
configures model failures and delays.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Literal

from roundelay.simulation.network import Simulation

FaultKind = Literal["drop", "agent_kill", "hub_restart"]


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Number of faults of each kind during the first ``within_s`` seconds.

    A killed process is down for at most ``away_s`` seconds.
    """

    drops: int = 0
    agent_kills: int = 0
    hub_restarts: int = 0
    within_s: float = 10.0
    away_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its time, its kind, and the downtime of a killed process. Times are in seconds."""

    at_s: float
    kind: FaultKind
    away_s: float


def plan_faults(plan: FaultPlan, chance: random.Random) -> list[Fault]:
    """Choose the faults at random. Return them in the order of their times."""
    kinds: list[FaultKind] = ["drop"] * plan.drops
    kinds += ["agent_kill"] * plan.agent_kills
    kinds += ["hub_restart"] * plan.hub_restarts
    # Choose all faults before the run, so that events in the run cannot change the faults of a seed.
    drawn = [Fault(chance.uniform(0, plan.within_s), kind, chance.uniform(0, plan.away_s)) for kind in kinds]
    return sorted(drawn, key=lambda fault: fault.at_s)


async def inject_faults(simulation: Simulation, plan: FaultPlan) -> list[str]:
    """Cause all faults at their times, and return descriptions of the faults. Skips a fault that has no possible
    target.
    """
    chance = simulation.chance("faults")
    began_s, done = simulation.elapsed_s, list[str]()
    for fault in plan_faults(plan, chance):
        # An earlier fault may have lasted beyond the time of this fault.
        await asyncio.sleep(max(0.0, began_s + fault.at_s - simulation.elapsed_s))
        match fault.kind:
            case "drop":
                # Sort the candidates, so that the same random number selects the same victim in every run.
                connected = sorted([*simulation.members, *simulation.people])
                if connected:
                    victim = chance.choice(connected)
                    await simulation.disconnect(victim)
                    done.append(f"{victim} lost its connection")
            case "agent_kill":
                up = sorted(simulation.members)
                if up:
                    victim = chance.choice(up)
                    await simulation.kill(victim)
                    await asyncio.sleep(fault.away_s)
                    await simulation.restart(victim)
                    done.append(f"{victim} was killed")
            case "hub_restart":
                await simulation.kill_hub()
                await asyncio.sleep(fault.away_s)
                await simulation.restart_hub()
                done.append("the hub was killed")
    return done
