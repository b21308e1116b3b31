"""A client's link lets go of every connection that came to nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roundelay.app import Network
from roundelay.network.client import NetworkClient, Reconnected
from roundelay.network.errors import ConnectError
from roundelay.network.hub import Hub
from roundelay.network.local import LocalConnection
from roundelay.network.transport import Closed


class CutConnection(LocalConnection):
    """A connection that ends before the hub's welcome arrives, if ``is_cut``."""

    def __init__(self, hub: Hub, *, is_cut: bool) -> None:
        super().__init__(hub)
        self.is_cut = is_cut
        self.is_dropped = False

    async def frames(self) -> AsyncIterator[bytes]:
        if self.is_cut:
            raise Closed(1006, "cut")
        async for frame in super().frames():
            yield frame

    async def drop(self) -> None:
        self.is_dropped = True
        await super().drop()


class CutTransport:
    """Its connections of these numbers, counted from 0, are cut."""

    def __init__(self, hub: Hub, cut: set[int]) -> None:
        self.connections: list[CutConnection] = []
        self._hub = hub
        self._cut = cut

    async def connect(self) -> CutConnection:
        self.connections.append(CutConnection(self._hub, is_cut=len(self.connections) in self._cut))
        return self.connections[-1]


async def test_a_connection_without_a_welcome_is_let_go_at_the_first_try() -> None:
    async with Network.open() as network:
        transport = CutTransport(network.hub, {0})
        with pytest.raises(ConnectError):
            await NetworkClient("bob", transport=transport).connect()
        assert [it.is_dropped for it in transport.connections] == [True]


@pytest.mark.parametrize("role", ["observer", "reactor"])
async def test_every_connection_that_came_to_nothing_is_let_go_on_the_way_back(role: str) -> None:
    async with Network.open() as network:
        transport = CutTransport(network.hub, {1, 2})
        async with NetworkClient("bob", transport=transport, role=role) as client:  # type: ignore[arg-type]
            transport.connections[0].end(1006, "lost")
            async for event in client.events():
                if isinstance(event, Reconnected):
                    break
            assert [it.is_dropped for it in transport.connections] == [True, True, True, False]
