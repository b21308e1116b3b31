"""Deliveries of a client. `Acks` records which deliveries the program has handled, and acknowledges them. `Delivery` is
one delivery.

`client` reports what arrives and what its program has handled. `Acks` writes the frames to the current connection."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType

from msgspec import UNSET, Struct

from roundelay.network.errors import Closed
from roundelay.network.frames import AckFrame, NackFrame, encode

from .transport import Wire
from .values import AnyMessage

# Deliveries in the order in which they arrived (`_order`), and what has to be acknowledged (`_due`):
#
#   session 1:  4  5  6  7  9          handled: 4 5 . 7 9   -> ack 5 (everything up to it), ack 7 alone, ack 9 alone
#                  ^ prefix            6 is refused         -> nack 6; it leaves the order, and the prefix moves to 9
#   session 2:  6 (attempt 2)  11      the hub starts at its ack cursor: `_handled` deliveries are acknowledged again
#               ^ late (`_late`): at or below the prefix, and acknowledged alone (`_named`). While it is open the prefix
#                 must not be sent, because it would cover 6. What the prefix passed (`_covered`) is acknowledged alone
#
# prefix: every delivery up to here is handled, or was refused and counts as late when it comes again. The prefix never
# goes back. A prefix above this session's newest delivery (`_session_top`) means nothing to the hub, so it is sent
# later.

MAX_REMEMBERED = 65_536
"""Number of handled seqs to remember, to recognize deliveries that a new session repeats.

A killed hub may have lost about the last second of acknowledgements, or more if it is soon killed again."""
MAX_REASON_CHARS = 2000
"""Maximum length of a reason in a nack, in characters. The hub might refuse a frame with a longer reason."""


class Acks:
    """The deliveries of one client across its sessions, until the hub's history changes."""

    def __init__(self) -> None:
        self.prefix = 0
        self.is_stale = False
        """Whether the hub now has a different history, in which these seqs mean other messages."""
        self._wire: Wire | None = None
        self._is_due = False
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._handled: dict[int, None] = {}
        self._single: list[int] = []
        self._late: set[int] = set()
        """Open deliveries at or below the prefix: repeated deliveries and restored dead letters."""
        self._named: set[int] = set()
        """Late deliveries that were handled since the last ack frame."""
        self._covered: list[int] = []
        """Handled seqs that the prefix has passed since it was last acknowledged."""
        self._prefix_is_due = False
        self._session_top = 0

    def begin_session(self, wire: Wire, cursor: int) -> None:
        """Start a session. The hub delivers everything above ``cursor`` that is not acknowledged."""
        self._wire = wire
        # Remove handled seqs from the order: the new session delivers them again if the hub has not counted them.
        self._order = deque(seq for seq in self._order if seq in self._open)
        self._single.clear()
        self._named.clear()
        self._covered.clear()
        self._session_top = cursor
        # The hub's cursor may be ahead: another session of this participant may have acknowledged more.
        self.prefix = max(self.prefix, cursor)
        self._prefix_is_due = False

    def forget_open(self) -> None:
        """Forget open deliveries. Their program has ended, and the next session delivers them again."""
        # Without a wire, a callback that is still scheduled sends nothing. In particular, it sends nothing in the next
        # session.
        self._wire, self._is_due = None, False
        self._order.clear()
        self._open.clear()
        self._late.clear()

    def receive(self, seq: int) -> bool:
        """Record a delivery. Return False if the delivery is already open or handled; a handled one is acknowledged
        again."""
        self._session_top = max(self._session_top, seq)
        if seq in self._open:
            return False
        # The acknowledgement was lost with the last session or with the hub. Acknowledge again, without showing the
        # message to the program.
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
        """Mark a delivery as handled that the hub already counts as handled. Send no acknowledgement."""
        if seq in self._open and seq not in self._late:
            self._open.discard(seq)
            is_due, covered = self._prefix_is_due, len(self._covered)
            self._advance()
            self._prefix_is_due = is_due
            del self._covered[covered:]
            self._remember(seq)

    def handle(self, seq: int, *, only: bool = False) -> None:
        """Mark everything up to ``seq`` as handled, or only that delivery with ``only``."""
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
        """Report a failed delivery. The delivery leaves the order until the hub repeats it (docs/protocol.md,
        Delivery)."""
        self.send_due()  # before the nack, because a later ack of the prefix would cover this delivery
        if seq in self._open:
            self.drop(seq)
            delay = UNSET if retry_after_ms is None else retry_after_ms
            self._send(NackFrame(seq=seq, reason=reason[:MAX_REASON_CHARS], retry_after_ms=delay))

    def drop(self, seq: int) -> None:
        """Remove an open delivery that has failed or has become a dead letter."""
        self._late.discard(seq)
        if seq in self._open:
            self._open.discard(seq)
            self._advance()

    def send_due(self) -> None:
        """Acknowledge what is handled. Without a connection nothing is sent: the next session repeats the delivery, and
        it is acknowledged then."""
        self._is_due = False
        prefix, single = self._due()
        if prefix is not None:
            self._send(AckFrame(seq=prefix))
        for seq in single:
            self._send(AckFrame(seq=seq, only=True))

    def _send_soon(self) -> None:
        """Send one frame for all deliveries that are handled within one tick of the event loop."""
        # Without this, a program that handles a batch would send a frame for each message.
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
        """Return what to acknowledge now: the seq up to which everything is handled (or None), and single seqs."""
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
        # The prefix did not reach this seq, because an earlier delivery is still open.
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
    """One message to acknowledge, with `ack`, `nack`, or ``async with delivery as message`` (ack on success, nack on
    error)."""

    def __init__(self, acks: Acks, message: AnyMessage, attempt: int) -> None:
        self.message = message
        self.attempt = attempt
        self._acks = acks

    @property
    def is_stale(self) -> bool:
        """Whether the hub's ledger was replaced after this delivery. If so, `ack` and `nack` do nothing, because the
        seq means another message."""
        return self._acks.is_stale

    async def ack(self) -> None:
        """Acknowledge the message, so that it is not delivered again. Earlier messages may still be open."""
        if not self.is_stale:
            self._acks.handle(self.message.seq, only=True)

    def mark_known(self) -> None:
        """Handle the message without an acknowledgement, because the hub already counts it as handled: a record
        ``started`` of its reaction is stored."""
        if not self.is_stale:
            self._acks.mark_known(self.message.seq)

    async def nack(self, reason: str, retry_after_ms: int | None = None) -> None:
        """Report a failure. The message is delivered again. After the fifth failure it becomes a dead letter."""
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
