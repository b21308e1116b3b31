"""`LocalTransport`: the in-process transport. It uses the same sessions and frames as a socket, within the hub's event
loop.

Used by `Network`, tests and simulations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from roundelay.network.core.entries import Peer
from roundelay.network.errors import Closed, ConnectError

from .hub import Hub

QUEUE_FRAMES = 1024
"""Number of frames that may wait for the client before the hub stops writing to its session. More frames wait in the
session's own queue."""


class LocalTransport:
    """A client's `Transport` to a hub in the same process. The hub trusts the client, so no token is needed."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def connect(self) -> LocalConnection:
        if self._hub.is_draining:
            raise Closed(1000, "this network was closed")  # 1000: the client must not reconnect
        if self._hub.loop is not asyncio.get_running_loop():
            raise ConnectError(
                "This network was opened in another event loop. Open it in the loop in which it is used: asyncio.run "
                "creates a new loop for each call, and pytest-asyncio creates a loop for each test unless loop_scope "
                "is set."
            )
        return LocalConnection(self._hub)


class LocalConnection:
    """Both ends of one in-process connection: the hub's `Connection` and the client's `Wire`."""

    def __init__(self, hub: Hub, *, administers: bool = True) -> None:
        self.peer = Peer(is_trusted=True, administers=administers)
        self.is_paused = False
        self._hub = hub
        self._frames: asyncio.Queue[bytes | Closed] = asyncio.Queue()
        self._held: list[bytes] | None = None
        self._closed: Closed | None = None
        self._session = hub.connect(self)

    @property
    def is_open(self) -> bool:
        return self._closed is None

    # --- methods for the client

    @property
    def is_full(self) -> bool:
        return self._held is not None and len(self._held) >= QUEUE_FRAMES

    def send(self, data: bytes) -> None:
        """Send one frame to the hub. Raises `Closed`."""
        if self._closed is not None:
            raise self._closed
        if self._held is not None:
            self._held.append(data)
        else:
            self._hub.receive(self._session, data)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the hub's frames until the connection closes, then raise `Closed`."""
        while True:
            frame = await self._frames.get()
            if isinstance(frame, Closed):
                raise frame
            # Resume only when half of the queue is free. Resuming after each frame would flush the session for one
            # frame at a time.
            if self.is_paused and self._frames.qsize() < QUEUE_FRAMES // 2:
                self.is_paused = False
                self._hub.resume(self._session)
            yield frame

    async def drop(self) -> None:
        """Cut the connection without a goodbye."""
        self.end(1006, "")
        self._hub.disconnect(self._session)

    # --- methods for the hub

    def write(self, payloads: list[bytes]) -> None:
        if self._closed is None:
            for payload in payloads:
                self._frames.put_nowait(payload)
            if self._frames.qsize() >= QUEUE_FRAMES:
                self.is_paused = True

    def end(self, code: int, reason: str) -> None:
        if self._closed is None:
            self._closed = Closed(code, reason)
            # Queue the end behind the written frames. The client reads these frames first, as it would over a socket.
            self._frames.put_nowait(self._closed)

    def admit(self) -> None:
        """Do nothing, because the handshake limit does not count in-process connections."""

    def pause_reading(self) -> None:
        self._held = self._held or []

    def resume_reading(self) -> None:
        held, self._held = self._held or [], None
        # Handling a frame may pause reading again. The remaining frames are then held again, in the same order.
        for at, data in enumerate(held):
            if self._held is not None:
                self._held = held[at:]
                return
            self._hub.receive(self._session, data)
