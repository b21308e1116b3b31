"""A person who hears what is delivered without having to ask for it: in simulations, and in scenarios on a network that is up."""

from __future__ import annotations

import asyncio
import logging

from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError

_logger = logging.getLogger(__name__)


class Person:
    """Somebody at the network: writes, and hears what is delivered, in order, without having to ask for it."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.heard: list[AnyMessage] = []
        self.listening = asyncio.create_task(self._listen(), name=f"person-{client.agent_id}")

    async def leave(self) -> None:
        """Go away in good order."""
        await self.client.close()
        await asyncio.gather(self.listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            async for message in self.client:
                self.heard.append(message)
        except RoundelayError as error:
            _logger.debug("a person has left", extra={"agent_id": self.client.agent_id, "code": error.code})
