"""Who is at a network from within this process: people who hear what is delivered, agents with their runners.

Simulations have them, and so has a scenario on a network that is up.
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
    """Somebody at the network: writes, and hears what is delivered, in order, without having to ask for it."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.heard: list[AnyMessage] = []
        self._listening = asyncio.create_task(self._listen(), name=f"person-{client.agent_id}")

    async def leave(self) -> None:
        """Go away in good order."""
        await self.client.close()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            async for message in self.client:
                self.heard.append(message)
        except RoundelayError as error:
            _logger.debug("a person has left", extra={"agent_id": self.client.agent_id, "code": error.code})


@dataclass(eq=False)
class RunningAgent:
    """An agent while it is up. ``work`` is its runner's task."""

    client: NetworkClient
    runner: AgentRunner
    work: asyncio.Task[None]
    transport: SimulatedTransport | None = None
    """Its way to the hub, in a simulation."""

    @classmethod
    async def start(
        cls, runner: AgentRunner, client: NetworkClient, transport: SimulatedTransport | None = None
    ) -> RunningAgent:
        """Connect an agent and let it run; its runner tells when it is ready."""
        await client.connect()
        work = asyncio.create_task(runner.run(client), name=f"agent-{runner.agent_id}")
        return cls(client, runner, work, transport)

    async def stop(self) -> None:
        """End in good order; what the agent had begun stays open for the next one."""
        await self.runner.stop()
        await self._close()

    async def kill(self) -> None:
        """End in the middle of whatever it does; in a simulation nothing of it reaches the hub any more."""
        if self.transport is not None:
            await self.transport.kill()
        self.work.cancel()
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(self.work, return_exceptions=True)
        await self.client.close()
