"""Queue of the deliveries that a program has not read yet, in order of arrival.

The hub limits the number of unacknowledged deliveries. This limit does not cover the participant's own messages from
its other sessions, because they need no acknowledgement. Therefore this queue also limits these messages. Otherwise,
they could fill the memory of a program that never reads its deliveries.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .acks import Delivery

MAX_OWN_WAITING, MAX_OWN_CHARS = 1000, 8 * 1024 * 1024
"""Maximum number, and maximum size in characters, of the participant's own messages in the queue. When a maximum is
exceeded, the older half of these messages is dropped."""


class DeliveryQueue:
    """Queue of one client's unread deliveries. A queue belongs to the event loop that first awaits it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._own: deque[tuple[Delivery, int]] = deque()
        """The participant's own messages in the queue, each with its size in characters."""
        self._own_chars = 0

    def put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)

    def put_own(self, delivery: Delivery, size: int) -> list[Delivery]:
        """Add a delivery of the participant's own message. Return the participant's older messages that were dropped to
        make room."""
        self._queue.put_nowait(delivery)
        self._own.append((delivery, size))
        self._own_chars += size
        if len(self._own) <= MAX_OWN_WAITING and self._own_chars <= MAX_OWN_CHARS:
            return []
        displaced: dict[Delivery, None] = {}
        # Drop half of the messages at once. Dropping one at a time would rebuild the queue for every further message.
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
        """End the queue: after the deliveries that it still contains, every reader receives None."""
        self._queue.put_nowait(None)

    async def get(self) -> Delivery | None:
        """Return the next delivery, or None after `end`."""
        delivery = await self._queue.get()
        if self._own and delivery is self._own[0][0]:
            self._own_chars -= self._own.popleft()[1]
        if delivery is None:
            self._queue.put_nowait(None)  # for other tasks that wait in `get`
        return delivery
