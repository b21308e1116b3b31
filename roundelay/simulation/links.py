"""In-process connections that a simulation can delay and cut. The connections use the hub's real sessions and frames.

These connections replace `roundelay.network.hub.local`. A link delivers in order. Each link has a separate random
stream for its delays, so that the traffic of one participant does not affect the delays of another.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from roundelay.network.errors import Closed, ConnectError
from roundelay.network.hub import Hub
from roundelay.network.hub.local import LocalConnection


@dataclass(frozen=True, slots=True)
class Delay:
    """Range of durations in milliseconds."""

    low_ms: float = 0.0
    high_ms: float = 0.0

    def __bool__(self) -> bool:
        return self.high_ms > 0

    def draw_s(self, chance: random.Random) -> float:
        """Return a random duration in seconds."""
        return chance.uniform(self.low_ms, self.high_ms) / 1000


class Traffic:
    """Counters of the frames in transit on all links of a simulation, and of the clients that are trying to connect."""

    def __init__(self) -> None:
        self.under_way = 0
        self.seekers = 0


class Lane:
    """One direction of a connection. A lane delivers each item after a delay, in order."""

    def __init__(
        self, deliver: Callable[[bytes | Closed], None], delay: Delay, chance: random.Random, traffic: Traffic
    ) -> None:
        self._deliver = deliver
        self._delay = delay
        self._chance = chance
        self._traffic = traffic
        self._waiting: deque[tuple[float, bytes | Closed]] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_cut = False

    def put(self, data: bytes | Closed) -> None:
        if self._is_cut:
            return
        at = self._loop.time() + self._delay.draw_s(self._chance)
        if self._waiting:
            # A connection preserves the order, so a frame with a short delay waits for the preceding frame.
            at = max(at, self._waiting[-1][0])
        self._waiting.append((at, data))
        self._traffic.under_way += 1
        # Use one timer per lane: a timer for each frame could fire out of order at equal times.
        if len(self._waiting) == 1:
            self._loop.call_at(at, self._arrive)

    def cut(self) -> None:
        """Drop all items that are in transit."""
        self._is_cut = True
        self._traffic.under_way -= len(self._waiting)
        self._waiting.clear()

    def _arrive(self) -> None:
        now = self._loop.time()
        while self._waiting and self._waiting[0][0] <= now:
            self._traffic.under_way -= 1
            self._deliver(self._waiting.popleft()[1])
        if self._waiting:
            self._loop.call_at(self._waiting[0][0], self._arrive)


class SlowConnection(LocalConnection):
    """Connection that delays the frames in both directions."""

    def __init__(self, hub: Hub, delay: Delay, chance: random.Random, traffic: Traffic, *, administers: bool) -> None:
        super().__init__(hub, administers=administers)
        # Use two random streams: otherwise frames in one direction would change the delays in the other direction.
        up, down = (random.Random(chance.random()) for _ in range(2))  # nosec B311  # repeatable on purpose
        self._up = Lane(self._arrive_at_hub, delay, up, traffic)
        self._down = Lane(self._arrive_at_client, delay, down, traffic)

    def send(self, data: bytes) -> None:
        if self._closed is not None:
            raise self._closed
        self._up.put(data)

    def write(self, payloads: list[bytes]) -> None:
        for payload in payloads:
            self._down.put(payload)

    def end(self, code: int, reason: str) -> None:
        # The hub has ended the session, so drop frames that are still in transit to the hub.
        self._up.cut()
        if code == 1006:  # an abnormal close loses the frames in transit
            self._down.cut()
            super().end(code, reason)
        else:
            # A clean close arrives after all frames that were sent before it.
            self._down.put(Closed(code, reason))

    def _arrive_at_hub(self, data: bytes | Closed) -> None:
        # The connection may have been closed while the frame was in transit.
        if self.is_open and isinstance(data, bytes):
            super().send(data)

    def _arrive_at_client(self, data: bytes | Closed) -> None:
        if isinstance(data, Closed):
            super().end(data.code, data.reason)
        else:
            super().write([data])


class SimulatedTransport:
    """Transport of a participant to the current hub of a simulation. ``hub`` returns the hub, or None while it is down.

    With ``administers``, people and services on the transport are operators.
    """

    def __init__(
        self,
        hub: Callable[[], Hub | None],
        traffic: Traffic,
        chance: random.Random,
        delay: Delay,
        *,
        administers: bool = False,
    ) -> None:
        self._delay = delay
        self._administers = administers
        self._is_dead = False
        self._hub = hub
        self._traffic = traffic
        self._chance = chance
        self._connection: LocalConnection | None = None
        self._is_seeking = False

    async def connect(self) -> LocalConnection:
        if self._is_dead:
            # Use a clean close, which ends the client permanently: a dead process does not reconnect.
            raise Closed(1000, "this participant was killed")
        hub = self._hub()
        if hub is None or hub.is_draining:
            self._seek(True)
            raise ConnectError("The simulated hub is down.")
        self._seek(False)
        connection = (
            SlowConnection(hub, self._delay, self._chance, self._traffic, administers=self._administers)
            if self._delay
            else LocalConnection(hub, administers=self._administers)
        )
        self._connection = connection
        return connection

    async def cut(self) -> None:
        """Cut the connection without notifying either side. The client detects the loss and reconnects."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.is_open:
            # Count the client now: the network must not look idle before the client notices the loss.
            self._seek(True)
            await connection.drop()

    async def kill(self) -> None:
        """Cut the connection permanently. No further frame of its owner reaches the hub."""
        self._is_dead = True
        await self.cut()
        self._seek(False)

    def _seek(self, is_seeking: bool) -> None:
        if is_seeking != self._is_seeking:
            self._is_seeking = is_seeking
            self._traffic.seekers += 1 if is_seeking else -1
