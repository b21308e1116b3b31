"""A scenario's network in a simulation: the stage that its steps act on by default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.scenario.file import Scenario
from roundelay.scenario.live_log import READER_ID
from roundelay.scenario.record import RunRecord, read_reactions
from roundelay.scenario.spec import HUB
from roundelay.scenario.steps import StepFailed, Steps
from roundelay.simulation.faults import FaultPlan, inject_faults
from roundelay.simulation.network import Simulation
from roundelay.simulation.setting import MakeAgent, SimulationError


class SimulatedStage:
    """A scenario's network in a simulation."""

    def __init__(self, scenario: Scenario, simulation: Simulation, agents: Mapping[str, MakeAgent]) -> None:
        self.simulation = simulation
        self._scenario = scenario
        self._agents = agents
        self._faults: asyncio.Task[list[str]] | None = None
        self._is_hub_killed = False  # by a step; the faults may do so meanwhile

    def clock(self) -> int:
        return self.simulation.clock()

    @property
    def ledger(self) -> bytes:
        """The ledger as JSON lines."""
        return self.simulation.export()

    async def begin(self, steps: Steps) -> None:
        """Let everybody join who is there from the beginning, and the threads have their members."""
        head = self._scenario.head
        place = self._scenario.node
        try:
            for person in head.people:
                await self.simulation.join_person(person)
            late = {agent_id for agent_id, choice in head.agents.items() if not choice.starts}
            for agent_id in head.agents:
                if agent_id not in late:
                    await self.join(agent_id)
            for name, thread in head.threads.items():
                first = next((who for who in thread.members if who not in late), None)
                if first is not None:
                    args = {"name": name, "history": thread.history}
                    await self.client_of(first).call("channels.create", args)
            for participant in self._scenario.participants:
                if participant not in late:
                    await steps.join_threads(participant)
            await self.simulation.idle()
            self._faults = asyncio.create_task(inject_faults(self.simulation, self._plan_faults()))
        except RoundelayError as error:
            raise StepFailed(place, f"the network could not begin: {error.code}: {error}") from error
        except TimeoutError as error:
            raise StepFailed(place, "the network was not ready within 60 s") from error

    def _plan_faults(self) -> FaultPlan:
        faults = self._scenario.head.faults
        if faults is None:
            return FaultPlan()
        return FaultPlan(faults.drops, faults.agent_kills, faults.hub_restarts, faults.within, faults.away)

    async def finish(self) -> list[str]:
        """Wait for the faults that are left, and for what they leave to be done; gives what was done. Raises `StepFailed`."""
        faults = await self._faults if self._faults is not None else []
        if faults:
            try:
                await self.simulation.idle()
            except TimeoutError as error:
                place = self._scenario.steps[-1].place
                raise StepFailed(place, "it was not idle within 60 s of the last fault") from error
        return faults

    # --- the stage of the steps

    def client_of(self, participant: str) -> NetworkClient:
        person = self.simulation.people.get(participant)
        if person is not None:
            return person.client
        member = self.simulation.members.get(participant)
        if member is None:
            raise SimulationError(f"{participant} is not there; a step `join` or `restart` brings it.")
        return member.client

    async def idle(self, at_most_s: float) -> None:
        await self.simulation.idle(at_most_s)

    async def wait_for(self, wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        return await self.simulation.wait_for(wanted, at_most_s)

    async def kill(self, name: str) -> None:
        if name != HUB:
            await self.simulation.kill(name)
            return
        if self._is_hub_killed and self.simulation.hub is None:
            raise SimulationError("The hub is killed already; a step `restart: hub` brings it back.")
        self._is_hub_killed = True
        await self.simulation.kill_hub()

    async def restart(self, name: str) -> None:
        if name == HUB:
            self._is_hub_killed = False
            await self.simulation.kill_hub()
            await self.simulation.restart_hub()
        else:
            await self.simulation.restart(name)

    async def disconnect(self, participant: str) -> None:
        await self.simulation.disconnect(participant)

    async def join(self, participant: str) -> None:
        if participant in self._agents:
            await self.simulation.start_agent(self._agents[participant])
        else:
            await self.simulation.join_person(participant)

    async def leave(self, participant: str) -> None:
        await self.simulation.leave(participant)

    # --- the end

    async def reader(self) -> NetworkClient:
        return await self.simulation.network.join(READER_ID, kind="service")

    async def describe(self, began_at: int, values: Sequence[Any]) -> RunRecord:
        """What is left of the run."""
        if self._faults is not None:
            self._faults.cancel()
        return await describe_simulation(self.simulation, began_at, values)

    def problems(self) -> list[str]:
        """What went wrong beside the steps: agents that ended by themselves, more tokens than may be used."""
        found = [f"the agent {agent_id} broke down: {error!r}" for agent_id, error in self.simulation.broken.items()]
        most, spent = self._scenario.head.limits.tokens, self.simulation.models.spent
        used = spent.prompt_tokens + spent.completion_tokens
        if most is not None and used >= most:
            found.append(f"limits.tokens: the models used {used} tokens of {most}; from then on they were refused")
        return found


async def describe_simulation(simulation: Simulation, began_at: int, values: Sequence[Any]) -> RunRecord:
    """What a simulation has left behind so far."""
    readers: dict[str, list[str]] = {}
    letters: list[dict[str, Any]] = []
    if simulation.hub is not None:
        state = simulation.hub.state
        for name, _ in state.items("channel"):
            members = state.members(name).items()
            readers[f"channel:{name}"] = [agent_id for agent_id, member in members if member.is_in]
        found = await simulation.hub.ledger.cold("dead", "", 1000)
        letters = [{"agent_id": it.agent_id, "seq": it.seq, "reason": it.reason} for _, it in found]
    for message in simulation.messages:
        if message.kind == "direct":
            readers.setdefault(message.thread_id, message.thread_id.partition(":")[2].split("~"))
    return RunRecord(
        list(simulation.messages),
        read_reactions(simulation.rows),
        list(simulation.asked),
        letters,
        readers,
        values,
        began_at,
        simulation.clock(),
    )
