"""Which deliveries a client has handled, and how it says so to its hub: `Acks`; and a delivery as its handler has it,
`Delivery`."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from msgspec import UNSET, Struct

from roundelay.network.errors import Closed
from roundelay.network.frames import AckFrame, NackFrame, encode

from .transport import Wire
from .values import AnyMessage

# The deliveries of a client in the order in which they came (`_order`), and what is to be acknowledged (`_due`):
#
#   session 1:  4  5  6  7  9          handled: 4 5 . 7 9   -> ack 5 (everything up to it), ack 7 alone, ack 9 alone
#                  ^ prefix            6 is refused         -> nack 6; it leaves the order, and the prefix goes on to 9
#   session 2:  6 (attempt 2)  11      the hub begins at its floor: what is `_handled` is only acknowledged again
#               ^ late (`_late`): at or below the prefix. It is acknowledged by itself (`_named`). As long as it is open
#                 the prefix is not said, which would cover it: what it has passed (`_covered`) is acknowledged alone
#
# prefix: everything that was delivered up to here is handled, or was refused and is late when it comes again. It never
# goes back. A prefix above what this session was delivered (`_session_top`) says nothing to the hub: it waits until the
# session is that far.

MAX_REMEMBERED = 65_536
"""How many handled seqs are remembered, to recognise what a new session delivers again: all that a hub may not have on
its disk when it is killed, which is a second's worth, or more where it is killed again within the second."""
MAX_REASON_CHARS = 2000
"""What the hub keeps of a reason; a longer one could make a frame that it does not take."""


class Acks:
    """The deliveries of one client from one history, across its sessions."""

    def __init__(self) -> None:
        self.prefix = 0
        self.is_stale = False
        """Whether the hub has another history by now."""
        self._wire: Wire | None = None
        self._is_due = False
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._handled: dict[int, None] = {}
        self._single: list[int] = []
        self._late: set[int] = set()
        """Open ones at or below the prefix: those on another attempt, and dead letters that were taken back."""
        self._named: set[int] = set()
        """Of these, what was handled since."""
        self._covered: list[int] = []
        """What the prefix has passed since it was last acknowledged."""
        self._prefix_is_due = False
        self._session_top = 0

    def begin_session(self, wire: Wire, cursor: int) -> None:
        """A new session delivers again what was not acknowledged, from ``cursor``."""
        self._wire = wire
        self._order = deque(seq for seq in self._order if seq in self._open)
        self._single.clear()
        self._named.clear()
        self._covered.clear()
        self._session_top = cursor
        self.prefix = max(self.prefix, cursor)
        self._prefix_is_due = False

    def forget_open(self) -> None:
        """Forget what is not handled: nobody has it any more, and the next session delivers it again."""
        self._wire, self._is_due = None, False
        self._order.clear()
        self._open.clear()
        self._late.clear()

    def take(self, seq: int) -> bool:
        """A delivery has arrived. False if it is being handled, or was: then it is only acknowledged again."""
        self._session_top = max(self._session_top, seq)
        if seq in self._open:
            return False
        if seq in self._handled:
            self._settle(seq)
            self._send_soon()
            return False
        self._open.add(seq)
        self._order.append(seq)
        if seq <= self.prefix:
            self._late.add(seq)
        return True

    def handle(self, seq: int, *, only: bool = False) -> None:
        """Everything up to ``seq`` is handled, or just that one."""
        handled = self._open & {seq} if only else {other for other in self._open if other <= seq}
        for other in sorted(handled):
            self._open.discard(other)
            if other in self._late:
                self._named.add(other)
            self._late.discard(other)
            self._remember(other)
            self._settle(other)
        self._send_soon()

    def refuse(self, seq: int, reason: str, retry_after_ms: int | None = None) -> None:
        """One delivery failed: it is out of the order until it comes again, and no acknowledgement covers it
        (docs/protocol.md, Delivery)."""
        self.send_due()
        if seq in self._open:
            self.drop(seq)
            delay = UNSET if retry_after_ms is None else retry_after_ms
            self._send(NackFrame(seq=seq, reason=reason[:MAX_REASON_CHARS], retry_after_ms=delay))

    def drop(self, seq: int) -> None:
        """One delivery is no longer this client's: it failed, or the hub made it a dead letter."""
        self._late.discard(seq)
        if seq in self._open:
            self._open.discard(seq)
            self._advance()

    def send_due(self) -> None:
        """Acknowledge what is handled. Between two sessions nothing is said: the next one delivers it again, and it is
        answered then."""
        self._is_due = False
        prefix, single = self._due()
        if prefix is not None:
            self._send(AckFrame(seq=prefix))
        for seq in single:
            self._send(AckFrame(seq=seq, only=True))

    def _send_soon(self) -> None:
        """One frame for all that is handled in a tick."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.send_due)

    def _send(self, frame: Struct) -> None:
        if self._wire is not None:
            try:
                self._wire.send(encode(frame))
            except Closed:
                return  # its reader finds out

    def _due(self) -> tuple[int | None, list[int]]:
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
    """One message, to be acknowledged: by `ack`, by `nack`, or as ``async with delivery as message`` (ack on success,
    nack on error)."""

    def __init__(self, acks: Acks, message: AnyMessage, attempt: int) -> None:
        self.message = message
        self.attempt = attempt
        self._acks = acks

    @property
    def is_stale(self) -> bool:
        """Whether it is from another history than the hub has now (its ledger was replaced): then `ack` and `nack` say
        nothing."""
        return self._acks.is_stale

    async def ack(self) -> None:
        """It is handled, and will not be delivered again. Others may still be open: order does not matter."""
        if not self.is_stale:
            self._acks.handle(self.message.seq, only=True)

    async def nack(self, reason: str, retry_after_ms: int | None = None) -> None:
        """It failed; it will be delivered again, at the fifth failure it becomes a dead letter."""
        if not self.is_stale:
            self._acks.refuse(self.message.seq, reason, retry_after_ms)

    async def __aenter__(self) -> AnyMessage:
        return self.message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.ack()
        elif isinstance(error, Exception):
            await self.nack(f"{type(error).__name__}: {error}")
