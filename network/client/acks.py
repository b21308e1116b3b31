"""Acknowledgements of a client's deliveries. `Acks` records which deliveries the program has handled, and sends the
acknowledgements over the current connection. `Delivery` represents one delivery to the program.

`client` calls `Acks` for each delivery that arrives and for each delivery that the program has handled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from msgspec import UNSET, Struct

from roundelay.network.errors import Closed
from roundelay.network.frames import AckFrame, NackFrame, encode

from .transport import Wire
from .values import AnyMessage

# Example: deliveries in the order in which they arrived (`_order`), and the acknowledgements to send (`_due`).
#
#   session 1:  4  5  6  7  9          handled: 4 5 . 7 9   -> ack 5 (everything up to 5), ack 7 alone, ack 9 alone
#                  ^ prefix            6 is refused         -> nack 6; 6 leaves the order, and the prefix moves to 9
#   session 2:  6 (attempt 2)  11      the hub starts at its ack cursor, so `_handled` deliveries are acknowledged again
#               ^ late (`_late`): at or below the prefix, and acknowledged alone (`_named`). While 6 is open, the prefix
#                 must not be sent, because it would acknowledge 6 too. Deliveries that the prefix has passed
#                 (`_covered`) are acknowledged alone.
#
# Prefix: every delivery up to this seq is handled, or was refused and counts as late when it arrives again. The prefix
# never goes back. The hub ignores an ack above this session's newest delivery (`_session_top`), so a higher prefix is
# sent later.

MAX_REMEMBERED = 65_536
"""Maximum number of handled seqs that are remembered to recognize repeated deliveries.

A killed hub may lose the acknowledgements of about the last second, or more if it is killed several times. The hub then
repeats these deliveries in the next session.
"""
MAX_REASON_CHARS = 2000
"""Maximum length of the reason in a nack, in characters. A hub may refuse a longer reason."""


class Acks:
    """Tracks the deliveries of one client and their acknowledgements across sessions, until the hub's history
    changes."""

    def __init__(self) -> None:
        self.prefix = 0
        self.is_stale = False
        """Whether the hub now has a different history, in which the recorded seqs belong to other messages."""
        self._wire: Wire | None = None
        self._is_due = False
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._handled: dict[int, None] = {}
        self._single: list[int] = []
        self._late: set[int] = set()
        """Open deliveries at or below the prefix: repeated deliveries and restored dead letters."""
        self._named: set[int] = set()
        """Late deliveries that were handled and are not acknowledged yet."""
        self._covered: list[int] = []
        """Handled seqs that the prefix has passed since it was sent last."""
        self._prefix_is_due = False
        self._session_top = 0

    def begin_session(self, wire: Wire, cursor: int) -> None:
        """Start a session. The hub delivers every unacknowledged message above ``cursor``."""
        self._wire = wire
        # Remove handled seqs from the order. The hub delivers them again if it has not stored their acknowledgements.
        self._order = deque(seq for seq in self._order if seq in self._open)
        self._single.clear()
        self._named.clear()
        self._covered.clear()
        self._session_top = cursor
        # The hub's cursor may be ahead, because another session of this participant may have acknowledged more.
        self.prefix = max(self.prefix, cursor)
        self._prefix_is_due = False

    def forget_open(self) -> None:
        """Forget the open deliveries, because the program that received them has ended. The next session delivers them
        again."""
        # Without a wire, a callback of `_send_soon` that is still scheduled sends nothing, not even in the next
        # session.
        self._wire, self._is_due = None, False
        self._order.clear()
        self._open.clear()
        self._late.clear()

    def receive(self, seq: int) -> bool:
        """Record a delivery that arrived. Return False if it is already open or handled. A handled delivery is
        acknowledged again."""
        self._session_top = max(self._session_top, seq)
        if seq in self._open:
            return False
        # The acknowledgement was lost with the last session or when the hub was killed. Acknowledge the delivery again,
        # and do not pass its message to the program.
        if seq in self._handled:
            self._acknowledge(seq)
            self._send_soon()
            return False
        self._open.add(seq)
        self._order.append(seq)
        if seq <= self.prefix:
            self._late.add(seq)
        return True

    def mark_known(self, seq: int) -> None:
        """Mark a delivery as handled without sending an acknowledgement, because the hub already counts it as
        handled."""
        if seq in self._open and seq not in self._late:
            self._open.discard(seq)
            is_due, covered = self._prefix_is_due, len(self._covered)
            self._advance()
            self._prefix_is_due = is_due
            del self._covered[covered:]
            self._remember(seq)

    def handle(self, seq: int, *, only: bool = False) -> None:
        """Mark every delivery up to ``seq`` as handled, or, with ``only``, just the delivery ``seq``."""
        handled = self._open & {seq} if only else {open_seq for open_seq in self._open if open_seq <= seq}
        for handled_seq in sorted(handled):
            self._open.discard(handled_seq)
            if handled_seq in self._late:
                self._named.add(handled_seq)
            self._late.discard(handled_seq)
            self._remember(handled_seq)
            self._acknowledge(handled_seq)
        self._send_soon()

    def refuse(self, seq: int, reason: str, retry_after_ms: int | None = None) -> None:
        """Report a failed delivery to the hub with a nack. The hub will deliver the message again (docs/protocol.md,
        Delivery)."""
        self.send_due()  # send acks before the nack, because a later ack of the prefix would include this delivery
        if seq in self._open:
            self.drop(seq)
            delay = UNSET if retry_after_ms is None else retry_after_ms
            self._send(NackFrame(seq=seq, reason=reason[:MAX_REASON_CHARS], retry_after_ms=delay))

    def drop(self, seq: int) -> None:
        """Remove an open delivery that failed or became a dead letter."""
        self._late.discard(seq)
        if seq in self._open:
            self._open.discard(seq)
            self._advance()

    def send_due(self) -> None:
        """Send the acknowledgements of all handled deliveries. Without a connection, nothing is sent. The next session
        then repeats these deliveries, and they are acknowledged in that session."""
        self._is_due = False
        prefix, single = self._due()
        if prefix is not None:
            self._send(AckFrame(seq=prefix))
        for seq in single:
            self._send(AckFrame(seq=seq, only=True))

    def _send_soon(self) -> None:
        """Schedule `send_due` for the next tick of the event loop, so that deliveries handled in one tick share a
        frame."""
        # If each acknowledgement were sent at once, a program that handles a batch would send one frame per message.
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.send_due)

    def _send(self, frame: Struct) -> None:
        if self._wire is not None:
            try:
                self._wire.send(encode(frame))
            except Closed:
                return  # the task that reads this connection notices the failure

    def _due(self) -> tuple[int | None, list[int]]:
        """Return the acknowledgements to send now: the prefix up to which everything is handled, or None, and single
        seqs."""
        prefix = self.prefix if self._prefix_is_due and self.prefix <= self._session_top else None
        if prefix is not None and self._late:  # the prefix would also acknowledge the late deliveries
            prefix, self._single = None, [*self._covered, *self._single]
        single = [seq for seq in self._single if prefix is None or seq > prefix]
        single += sorted(self._named - set(single))
        self._named.clear()
        self._prefix_is_due = False
        self._covered, self._single = [], []
        return prefix, single

    def _acknowledge(self, seq: int) -> None:
        before = self.prefix
        self._advance()
        # If the prefix did not reach this seq, an earlier delivery is still open.
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
    """One message that the program must acknowledge with `ack` or `nack`. ``async with delivery as message`` calls
    `ack` on success and `nack` on an error."""

    def __init__(self, acks: Acks, message: AnyMessage, attempt: int) -> None:
        self.message = message
        self.attempt = attempt
        self._acks = acks

    @property
    def is_stale(self) -> bool:
        """Whether the hub's ledger was replaced after this delivery. If so, `ack` and `nack` do nothing, because the
        seq belongs to another message now."""
        return self._acks.is_stale

    async def ack(self) -> None:
        """Acknowledge this message, so that the hub does not deliver it again. Earlier messages stay open."""
        if not self.is_stale:
            self._acks.handle(self.message.seq, only=True)

    def mark_known(self) -> None:
        """Mark the message as handled without sending an acknowledgement. The hub already counts it as handled, because
        it has stored the ``started`` record of the message's reaction."""
        if not self.is_stale:
            self._acks.mark_known(self.message.seq)

    async def nack(self, reason: str, retry_after_ms: int | None = None) -> None:
        """Report that handling the message failed. The hub delivers the message again. After the fifth failure, the
        message becomes a dead letter."""
        if not self.is_stale:
            self._acks.refuse(self.message.seq, reason, retry_after_ms)

    async def __aenter__(self) -> AnyMessage:
        return self.message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.ack()
        # A cancellation is not a failure of the message, so it must not count towards a dead letter.
        elif isinstance(error, Exception):
            await self.nack(f"{type(error).__name__}: {error}")
