"""Participants in this process: people who collect their deliveries, and agents with their runners.

Simulations and scenarios on a live network use these classes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from roundelay.agents.runner import AgentRunner
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.simulation.links import SimulatedTransport

_logger = logging.getLogger(__name__)


class Person:
    """Person in the network. Sends messages and collects all deliveries in order."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.heard: list[AnyMessage] = []
        self._listening = asyncio.create_task(self._listen(), name=f"person-{client.agent_id}")

    async def leave(self) -> None:
        """Disconnect cleanly."""
        await self.client.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            async for message in self.client:
                self.heard.append(message)
        except RoundelayError as error:
            # This error is expected at the end of a test and after a removal, so log it only for debugging.
            _logger.debug("a person has left", extra={"agent_id": self.client.agent_id, "code": error.code})


@dataclass(eq=False)
class RunningAgent:
    """Running agent. ``work`` is the task of the agent's runner."""

    client: NetworkClient
    runner: AgentRunner
    work: asyncio.Task[None]
    transport: SimulatedTransport | None = None
    """Link of the agent in a simulation, or None on a live network."""

    @classmethod
    async def start(
        cls, runner: AgentRunner, client: NetworkClient, transport: SimulatedTransport | None = None
    ) -> RunningAgent:
        """Connect an agent and run it. The runner signals when the agent is ready."""
        await client.connect()
        work = asyncio.create_task(runner.run(client), name=f"agent-{runner.agent_id}")
        return cls(client, runner, work, transport)

    async def stop(self) -> None:
        """Stop the agent cleanly. Its open reactions continue after the next start."""
        await self.runner.stop()
        await self._close()

    async def kill(self) -> None:
        """End the agent at once. In a simulation, no further frame of the agent reaches the hub."""
        if self.transport is not None:
            # Cut the connection first: a runner that is cancelled cleanly would still write its last records.
            await self.transport.kill()
        self.work.cancel()
        await self._close()

    async def _close(self) -> None:
        # A callback reports how the work ended. Here, only wait for the end before closing the client.
        await asyncio.gather(self.work, return_exceptions=True)
        await self.client.close()
