"""What an agent lets others see while it works: that it thinks, that it uses a tool. Sent beside the reactions, and
dropped when it gets too much."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from roundelay.network.client import NetworkClient
from roundelay.network.errors import RoundelayError

SignalKind = Literal["thinking", "tool", "delta"]

MAX_SIGNALS = 256

_logger = logging.getLogger(__name__)


class Signals:
    """Signals to send. ``put`` never waits: a full queue drops the newest, since it must never hold up a reaction."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[SignalKind, dict[str, object], str]] = asyncio.Queue(maxsize=MAX_SIGNALS)

    def put(self, kind: SignalKind, body: dict[str, object], thread_id: str) -> None:
        try:
            self._queue.put_nowait((kind, body, thread_id))
        except asyncio.QueueFull:
            pass

    async def send(self, client: NetworkClient) -> None:
        """Send them as they come, for ever."""
        while True:
            kind, body, thread_id = await self._queue.get()
            try:
                await client.signal(kind, body, thread_id=thread_id)
            except RoundelayError as error:
                _logger.debug("signal refused", extra={"kind": kind, "code": error.code})
