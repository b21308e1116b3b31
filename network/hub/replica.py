"""`ReplicaReaders`: those who read at a node that follows, as long as it does.

They are let in to a hub of their own, that stores nothing: a `Hub` over the node's index, which the ledger tells of
what has come into it. The node's own hub waits meanwhile, and begins when the node leads. What fails here ends that hub
alone: that others read is no reason not to take over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from roundelay.network.cluster.read_replica import ReadOnlyIndex
from roundelay.network.core.rows import Row
from roundelay.network.core.tables import TableWrite
from roundelay.network.errors import LedgerError

from .hub import Hub

log = logging.getLogger(__name__)

LEADS_NOW = "This node follows no longer; reconnect."
FAILED = "What this node has of the network can't be shown for the moment; reconnect."


class ReplicaReaders:
    """A `read_replica.ReadReplica`: ``make_hub`` makes the hub for readers of an index."""

    def __init__(self, make_hub: Callable[[ReadOnlyIndex], Hub]) -> None:
        self._make_hub = make_hub
        self.hub: Hub | None = None
        """The hub that readers are let in to; None while this node does not follow, or has not caught up yet."""

    @property
    def is_serving(self) -> bool:
        return self.hub is not None

    async def start(self, index: ReadOnlyIndex) -> None:
        hub = self._make_hub(index)
        try:
            await hub.start()
        except LedgerError as error:  # who follows meets it too
            log.warning("what this node follows cannot be read: %s", error)
            return
        self.hub = hub

    async def apply(self, rows: Sequence[Row], puts: Sequence[TableWrite]) -> None:
        if self.hub is not None:
            await self._tell(self.hub, self.hub.apply_followed(rows, puts))

    async def drop_before(self, first_seq: int) -> None:
        if self.hub is not None:
            await self._tell(self.hub, self.hub.drop_before(first_seq))

    async def _tell(self, hub: Hub, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:  # a defect: the state of that hub is not the ledger's any more
            log.exception("what has come into the index could not be shown")
            await self._stop(FAILED)
            return
        if hub.failed.is_set():
            await self._stop(FAILED)

    async def stop(self) -> None:
        await self._stop(LEADS_NOW)

    async def _stop(self, reason: str) -> None:
        hub, self.hub = self.hub, None
        if hub is not None:
            await hub.close(reason)
