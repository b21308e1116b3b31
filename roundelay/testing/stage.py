"""The protocol `Stage` for the network on which a test acts, and its implementation for simulations.

Other implementations are in `live_stage` (a live network over WebSocket) and `processes` (a hub and agents in separate
processes). Steps, scenarios and the fixture `network` use only the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from roundelay.network.addresses import channel_address, thread_parties
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.frames import Kind
from roundelay.runs.reading import read_reactions
from roundelay.simulation.network import Setting, Simulation, SimulationError
from roundelay.simulation.participants import Person, RunningAgent
from roundelay.testing.agents import AgentPlan
from roundelay.testing.form import HUB
from roundelay.testing.record import RunRecord

READER_ID = "scenario-reader"


class Stage(Protocol):
    """Network that runs during an ``async with`` block.

    ``plans`` contains the agents that may take part. ``people`` and ``members`` are the participants that joined from
    this process. ``people`` also contains services and programs, and ``members`` contains agents. The tools of these
    agents share ``state``. Methods raise `RoundelayError` for impossible actions, and `TimeoutError`.
    """

    plans: dict[str, AgentPlan]
    people: dict[str, Person]
    members: dict[str, RunningAgent]
    state: dict[str, Any]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def clock(self) -> int:
        """Return the current time of the network, in milliseconds."""
        ...

    @property
    def messages(self) -> Sequence[AnyMessage]:
        """All messages since the start, in order."""
        ...

    async def reader(self) -> NetworkClient:
        """Return the connection of an operator."""
        ...

    async def join(self, participant: str, kind: Kind = "human") -> None:
        """Start the agent with this name and wait until it is ready. For a name without a plan, let a participant of
        this kind join."""
        ...

    async def leave(self, participant: str) -> None: ...

    async def kill(self, name: str) -> None:
        """End an agent, or the hub (`HUB`), abruptly as ``kill -9`` does."""
        ...

    async def restart(self, name: str) -> None:
        """Restart an agent or the hub. If it is running, it is killed first."""
        ...

    async def disconnect(self, participant: str) -> None:
        """Cut a participant's connection. The client reconnects automatically."""
        ...

    async def idle(self, at_most_s: float) -> None:
        """Wait until all messages to the participants are handled, and all reactions have ended or wait for a
        participant."""
        ...

    async def wait_for(self, is_wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        """Wait for the first message since the start for which ``is_wanted`` is true."""
        ...

    async def read_record(self) -> RunRecord:
        """Return the record of the run so far."""
        ...

    def problems(self) -> list[str]:
        """Return problems of the run other than failed steps."""
        ...


def client_of(stage: Stage, participant: str) -> NetworkClient:
    """Return the connection of a participant that joined from this process. Raises `SimulationError`."""
    participant_entry = stage.people.get(participant) or stage.members.get(participant)
    if participant_entry is None:
        raise SimulationError(
            f"{participant} has not joined. Add a step `join` or `restart`, unless it runs elsewhere."
        )
    return participant_entry.client


class SimulatedStage(Simulation):
    """Stage that uses a simulation."""

    def __init__(self, setting: Setting, plans: Mapping[str, AgentPlan] | None = None) -> None:
        # Let the reader join as an operator, because expectations may name operations for operators.
        super().__init__(replace(setting, operators=(*setting.operators, READER_ID)))
        self.plans = dict(plans or {})
        self._is_killed_by_step = False  # whether a step killed the hub; faults may kill and restart the hub too

    async def reader(self) -> NetworkClient:
        return await self.network.join(READER_ID, kind="service")

    async def join(self, participant: str, kind: Kind = "human") -> None:
        if participant in self.plans:
            await self.start_agent(self.plans[participant].make)
        else:
            await self.join_person(participant, kind)

    async def kill(self, name: str) -> None:
        if name != HUB:
            await super().kill(name)
            return
        # Accept a hub that a fault has killed at the same moment: this is not an error of the scenario.
        if self._is_killed_by_step and self.hub is None:
            raise SimulationError("The hub was killed already; a step `restart: hub` starts it again.")
        self._is_killed_by_step = True
        await self.kill_hub()

    async def restart(self, name: str) -> None:
        if name != HUB:
            await super().restart(name)
            return
        self._is_killed_by_step = False
        await self.kill_hub()
        await self.restart_hub()

    async def read_record(self) -> RunRecord:
        readers: dict[str, list[str]] = {}
        letters: list[dict[str, Any]] = []
        if self.hub is not None:
            state = self.hub.state
            for name, _ in state.items("channel"):
                members = state.members(name).items()
                readers[channel_address(name)] = [agent_id for agent_id, member in members if member.is_in]
            found = await self.hub.ledger.cold("dead", "", 1000)
            letters = [{"agent_id": letter.agent_id, "seq": letter.seq, "reason": letter.reason} for _, letter in found]
        for message in self.messages:
            # No list contains the readers of a direct thread, but the name of a direct thread contains both
            # participants.
            if message.kind == "direct":
                readers.setdefault(message.thread_id, list(thread_parties(message.thread_id)))
        reactions = read_reactions(self.rows)
        return RunRecord(
            list(self.messages),
            reactions,
            list(self.asked),
            letters,
            readers,
            state_before=self.setting.state,
            state=self.state,
            ended_at=self.clock(),
        )

    def problems(self) -> list[str]:
        found = [f"the agent {agent_id} crashed: {error!r}" for agent_id, error in self.broken.items()]
        most, used = self.setting.max_tokens, self.models.tokens
        # An agent may hide the model's refusal in its answer, and then the run would seem to pass.
        if most is not None and used >= most:
            found.append(f"limits.tokens: the models used {used} tokens of {most}; from then on they were refused")
        return found
