"""A scenario's network that is up elsewhere: people join it by WebSocket, and its ledger is read as an operator reads it.

Agents that are online there are used as they are; those that are not are started here. What needs a simulation (killing the hub, an agent that runs
elsewhere, faults, virtual time) is refused. Only what was said since the beginning is judged, and prompts are known by their manifests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roundelay.agents.runner import AgentRunner
from roundelay.lists import list_participants
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.errors import RoundelayError
from roundelay.scenario.file import Scenario
from roundelay.scenario.live_log import LiveLog
from roundelay.scenario.record import RunRecord
from roundelay.scenario.steps import StepFailed, Steps
from roundelay.simulation.person import Person
from roundelay.simulation.setting import MakeAgent, SimulationError


class LiveStage:
    """A network at ``url``. Use as ``async with``."""

    def __init__(self, scenario: Scenario, url: str, token: str | None, agents: Mapping[str, MakeAgent]) -> None:
        self._scenario = scenario
        self._url = url
        self._token = token
        self._agents = agents
        self._people: dict[str, Person] = {}
        self._here: dict[str, tuple[AgentRunner, NetworkClient, asyncio.Task[None]]] = {}
        self._log = LiveLog(url, token)

    async def __aenter__(self) -> LiveStage:
        await self._log.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in (*self._here, *self._people):
            await self.leave(name)
        await self._log.__aexit__()

    # --- what the engine asks for

    @property
    def ledger(self) -> bytes:
        return b""

    def clock(self) -> int:
        return system_clock()

    async def begin(self, steps: Steps) -> None:
        place = self._scenario.node
        if self._scenario.head.faults is not None:
            raise StepFailed(place, "faults need a simulation; run it without --live")
        try:
            for person in self._scenario.head.people:
                await self.join(person)
            for agent_id, choice in self._scenario.head.agents.items():
                if choice.starts:
                    await self.join(agent_id)
            for participant in self._scenario.participants:
                if participant in self._people or participant in self._here:
                    await steps.join_threads(participant)
        except RoundelayError as error:
            raise StepFailed(place, f"the network could not begin: {error.code}: {error}") from error

    async def finish(self) -> list[str]:
        return []

    async def reader(self) -> NetworkClient:
        return self._log.client

    async def describe(self, began_at: int, values: Sequence[Any]) -> RunRecord:
        return await self._log.describe(began_at, values)

    def problems(self) -> list[str]:
        return [
            f"the agent {agent_id} broke down: {task.exception()!r}"
            for agent_id, (_, _, task) in self._here.items()
            if task.done() and not task.cancelled() and task.exception() is not None
        ]

    # --- what steps do

    def client_of(self, participant: str) -> NetworkClient:
        if participant in self._people:
            return self._people[participant].client
        if participant in self._here:
            return self._here[participant][1]
        raise SimulationError(f"{participant} is not here: it runs elsewhere, or has not joined.")

    async def idle(self, at_most_s: float) -> None:
        await self._log.idle({*self._scenario.head.agents, *self._people}, at_most_s)

    async def wait_for(self, wanted: Callable[[AnyMessage], bool], at_most_s: float) -> AnyMessage:
        return await self._log.wait_for(wanted, at_most_s)

    async def kill(self, name: str) -> None:
        if name not in self._here:
            raise SimulationError(f"{name} does not run here; a running network's hub and agents are not killed.")
        _, client, work = self._here.pop(name)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await client.close()

    async def restart(self, name: str) -> None:
        if name in self._here:
            await self.kill(name)
        elif name not in self._agents or await self._is_online(name):
            raise SimulationError(f"{name} runs elsewhere; a running network's hub and agents are not restarted.")
        await self._start(name)

    async def disconnect(self, participant: str) -> None:
        raise SimulationError("Connections are cut in a simulation only; run it without --live.")

    async def join(self, participant: str) -> None:
        if participant in self._agents:
            if not await self._is_online(participant):
                await self._start(participant)
            return
        if participant in self._people:
            raise SimulationError(f"{participant} is there already.")
        client = NetworkClient(participant, self._url, kind="human", token=self._token)
        await client.connect()
        self._people[participant] = Person(client)

    async def leave(self, participant: str) -> None:
        if participant in self._people:
            await self._people.pop(participant).leave()
            return
        if participant not in self._here:
            raise SimulationError(f"{participant} is not here.")
        runner, client, work = self._here.pop(participant)
        await runner.stop()
        await asyncio.gather(work, return_exceptions=True)
        await client.close()

    async def _is_online(self, agent_id: str) -> bool:
        return any(it["agent_id"] == agent_id for it in await list_participants(self._log.client, online=True))

    async def _start(self, agent_id: str) -> None:
        runner = self._agents[agent_id]()
        client = NetworkClient(agent_id, self._url, role="reactor", card=runner.describe_card())
        await client.connect()
        work = asyncio.create_task(runner.run(client))
        self._here[agent_id] = (runner, client, work)
        await runner.ready()
