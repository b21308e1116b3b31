"""A delivery as its handler has it, and which deliveries a client has handled. `NetworkClient` sends the acknowledgements that are `due`."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from .told import AnyMessage

if TYPE_CHECKING:
    from .client import NetworkClient

MAX_REMEMBERED = 4096
"""How many handled seqs are remembered, to recognise what a new session delivers again."""


class Acks:
    """Deliveries of one client across its sessions. ``prefix``: everything delivered up to here is handled."""

    def __init__(self) -> None:
        self.prefix = 0
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._handled: dict[int, None] = {}
        self._single: list[int] = []
        self._late: set[int] = set()
        """Open ones at or below the prefix: those on another attempt, and dead letters that were taken back."""
        self._named: set[int] = set()
        """Of these, what was handled since: no prefix covers another attempt that it met on its way, so each is acknowledged by itself."""
        self._covered: list[int] = []
        """What the prefix has passed since it was last acknowledged."""
        self._prefix_is_due = False
        self._session_top = 0

    def begin_session(self, cursor: int) -> None:
        """A new session delivers again what was not acknowledged, from ``cursor``."""
        self._order = deque(seq for seq in self._order if seq in self._open)
        self._single.clear()
        self._named.clear()
        self._covered.clear()
        self._session_top = cursor
        self.prefix = max(self.prefix, cursor)
        self._prefix_is_due = False

    def take(self, seq: int) -> bool:
        """A delivery has arrived. False if it is being handled, or was: then it is only acknowledged again."""
        self._session_top = max(self._session_top, seq)
        if seq in self._open:
            return False
        if seq in self._handled:
            self._settle(seq)
            return False
        self._open.add(seq)
        self._order.append(seq)
        if seq <= self.prefix:
            self._late.add(seq)
        return True

    def handle(self, seq: int) -> None:
        """One delivery is handled."""
        if seq not in self._open:
            return
        self._open.discard(seq)
        if seq in self._late:
            self._named.add(seq)
        self._late.discard(seq)
        self._remember(seq)
        self._settle(seq)

    def handle_up_to(self, seq: int) -> None:
        for other in sorted(other for other in self._open if other <= seq):
            self.handle(other)

    def give_back(self, seq: int) -> bool:
        """One delivery failed: it is out of the order until it comes again, and no acknowledgement covers it (docs/protocol.md, Delivery).

        False if it is not open.
        """
        if seq not in self._open:
            return False
        self.drop(seq)
        return True

    def drop(self, seq: int) -> None:
        """One delivery is no longer this client's: it failed, or the hub made it a dead letter."""
        self._late.discard(seq)
        if seq in self._open:
            self._open.discard(seq)
            self._advance()

    def due(self) -> tuple[int | None, list[int]]:
        """What to acknowledge now: everything up to a seq (or None), and single ones above it."""
        prefix = self.prefix if self._prefix_is_due and self.prefix <= self._session_top else None
        if prefix is not None and self._late:  # it would acknowledge them too
            prefix, self._single = None, [*self._covered, *self._single]
        single = [seq for seq in self._single if prefix is None or seq > prefix]
        single += sorted(self._named - set(single))
        self._named.clear()
        self._prefix_is_due = False
        self._covered, self._single = [], []
        return prefix, single

    def _settle(self, seq: int) -> None:
        before = self.prefix
        self._advance()
        if self.prefix == before or seq > self.prefix:
            self._single.append(seq)

    def _advance(self) -> None:
        while self._order and self._order[0] not in self._open:
            seq = self._order.popleft()
            if seq > self.prefix:
                self.prefix = seq
                if seq in self._handled:
                    self._covered.append(seq)
                self._prefix_is_due = True

    def _remember(self, seq: int) -> None:
        self._handled[seq] = None
        if len(self._handled) > MAX_REMEMBERED:
            del self._handled[next(iter(self._handled))]


class Delivery:
    """One message, to be acknowledged: by `ack`, by `nack`, or as ``async with delivery as message`` (ack on success, nack on error)."""

    def __init__(self, client: NetworkClient, acks: Acks, message: AnyMessage, attempt: int) -> None:
        self.message = message
        self.attempt = attempt
        self._client = client
        self._acks = acks

    @property
    def is_stale(self) -> bool:
        """Whether it is from another history than the hub has now (its ledger was replaced): then `ack` and `nack` say nothing."""
        return self._acks is not self._client._acks

    async def ack(self) -> None:
        """It is handled, and will not be delivered again. Others may still be open: order does not matter."""
        if not self.is_stale:
            await self._client.ack(self.message.seq, only=True)

    async def nack(self, reason: str, retry_after_ms: int | None = None) -> None:
        """It failed; it will be delivered again, at the fifth failure it becomes a dead letter."""
        if not self.is_stale:
            await self._client.nack(self.message.seq, reason, retry_after_ms)

    async def __aenter__(self) -> AnyMessage:
        return self.message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await self.nack(f"{type(error).__name__}: {error}")
