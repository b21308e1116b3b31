"""A client whose hub is overloaded for some records, or whose connection ends at one record as if the process had
been killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundelay.network.client import Batched, NetworkClient
from roundelay.network.errors import ConnectError, Overloaded
from roundelay.network.frames import RecordFrame, SendFrame


class BusyClient:
    """Client that refuses the first ``refusals`` records of a kind, and loses the hub before record number ``cut_at``
    (0 means never).
    """

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
        self._meet(kind)
        return await self._client.record(reaction, kind, body, record_id=record_id)

    async def store_batch(self, frames: Sequence[SendFrame | RecordFrame]) -> Batched:
        """Store the frames before a refused record, as a real hub does."""
        for index, frame in enumerate(frames):
            try:
                self._meet(frame.kind if isinstance(frame, RecordFrame) else "")
            except (Overloaded, ConnectError) as error:
                stored = await self._client.store_batch(frames[:index]) if index else Batched(())
                if isinstance(error, ConnectError):
                    raise
                return Batched(stored.stored, stored.error or error)
        return await self._client.store_batch(frames)

    def _meet(self, kind: str) -> None:
        if kind == self._kind:
            self._left -= 1
            if self._cuts and self._left <= 0:
                self.failure = ConnectError("cut")
            if self._refusals:
                self._refusals -= 1
                raise Overloaded("busy", 1)
        if self.failure is not None:
            raise self.failure
