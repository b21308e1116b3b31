"""A client whose hub is busy for some records, or that is cut off for good at one: as a killed process is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, Overloaded


class BusyClient:
    """Refuses the first ``refusals`` records of a kind, or loses the hub before the ``cut_at``-th one (0: never)."""

    def __init__(self, client: NetworkClient, kind: str, *, refusals: int = 0, cut_at: int = 0) -> None:
        self._client = client
        self._kind = kind
        self._refusals = refusals
        self._left = cut_at
        self._cuts = cut_at > 0
        self.failure: ConnectError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def record(self, reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> Any:
        if kind == self._kind:
            self._left -= 1
            if self._cuts and self._left <= 0:
                self.failure = ConnectError("cut")
            if self._refusals:
                self._refusals -= 1
                raise Overloaded("busy", 1)
        if self.failure is not None:
            raise self.failure
        return await self._client.record(reaction, kind, body, record_id=record_id)
