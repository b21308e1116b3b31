"""Deliveries that wait until the program reads them, in order. The number of the participant's own messages among them
is limited.

The hub limits unacknowledged deliveries. But the participant's own messages, sent by its other sessions, need no
acknowledgement. So this queue limits them: otherwise they would fill the memory of a program that never reads
deliveries.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .acks import Delivery

MAX_OWN_WAITING, MAX_OWN_CHARS = 1000, 8 * 1024 * 1024
"""Maximum number and size in characters of the participant's own messages that wait. Beyond it, the older half is
dropped."""


class DeliveryQueue:
    """The waiting deliveries of one client. A queue belongs to the event loop in which it is first awaited."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._own: deque[tuple[Delivery, int]] = deque()
        """The waiting deliveries of own messages, with their sizes in characters."""
        self._own_chars = 0

    def put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)

    def put_own(self, delivery: Delivery, size: int) -> list[Delivery]:
        """Add a delivery of an own message. Return the older ones that it has displaced."""
        self._queue.put_nowait(delivery)
        self._own.append((delivery, size))
        self._own_chars += size
        if len(self._own) <= MAX_OWN_WAITING and self._own_chars <= MAX_OWN_CHARS:
            return []
        displaced: dict[Delivery, None] = {}
        # Drop half at once. Dropping one at a time would rebuild the queue below for every further message.
        while len(self._own) > MAX_OWN_WAITING // 2 or self._own_chars > MAX_OWN_CHARS // 2:
            oldest, oldest_size = self._own.popleft()
            self._own_chars -= oldest_size
            displaced[oldest] = None
        waiting = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for kept in waiting:
            if kept not in displaced:
                self._queue.put_nowait(kept)
        return list(displaced)

    def end(self) -> None:
        """Make every reader get None after the waiting deliveries."""
        self._queue.put_nowait(None)

    async def get(self) -> Delivery | None:
        """Return the next delivery, or None after `end`."""
        delivery = await self._queue.get()
        if self._own and delivery is self._own[0][0]:
            self._own_chars -= self._own.popleft()[1]
        if delivery is None:
            self._queue.put_nowait(None)  # for the other waiting tasks
        return delivery
