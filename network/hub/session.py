"""One session, the hub's side of a connection: in which state it is, what waits for it, and how fast its participant is
read.

`intake` reads what comes from it, `publisher` writes what goes to it. Decides in memory; no IO, no clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from enum import Enum
from typing import Any, Protocol

from roundelay.network.core.entries import Origin, Peer
from roundelay.network.core.tables import AckCursor

from .delivery import Outbox
from .reads import SessionReads

REFILLS_PER_S = 100
"""At full rate the clock is looked at so often: for every frame it would cost as much as to decode one."""
MAX_EXCESS_FRAMES = 64
"""How many frames beyond the rate are taken in, each to be answered, before the participant is not read for
`PAUSE_S`."""
PAUSE_S = 0.1


class SendRate:
    """What one participant may send without being looked at (``credit``, in frames), and since when it has sent too
    much.

    As `limits.next_arrival`: a rate of ``per_s`` with a burst of one second's worth, here in steps of a hundredth of
    it.
    """

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_per_s",
        "_step",
        "credit",
        "excess",
        "is_paused",
        "next_signal_at",
        "wait_ms",
    )

    def __init__(self, per_s: int) -> None:
        self.credit = 0
        self.excess = 0
        """How many frames came beyond the rate since the last pause."""
        self.wait_ms = 0
        """How long it takes until the rate allows another frame, as of the last look."""
        self.is_paused = False
        self.next_signal_at = 0.0
        """When its next signal would be due at exactly their own rate (`limits.next_arrival_or_none`)."""
        self._per_s = per_s
        self._step = max(1, per_s // REFILLS_PER_S)
        self._arrival = 0.0

    def refill(self, now: int) -> None:
        """The credit is used up: give another step's, if the rate allows it at ``now`` (ms)."""
        due = max(self._arrival, now)
        ahead = due - now - 1000.0
        if ahead > 0:
            self.wait_ms = int(ahead) + 1
            return
        self._arrival = due + 1000.0 * self._step / self._per_s
        self.credit = self._step


class SessionState(Enum):
    OPENING = "opening"
    """Connected; ``hello`` is awaited."""
    JOINING = "joining"
    """``hello`` is in the batch; frames that follow it wait."""
    LIVE = "live"
    CLOSED = "closed"


LIVE = SessionState.LIVE
"""For where it is asked for each message: to look it up in its enum costs as much as a call."""


class Connection(Protocol):
    """The transport under a session; the hub writes through it. Implemented by `server` (WebSocket) and `local`
    (in-process)."""

    peer: Peer

    @property
    def is_paused(self) -> bool:
        """The other end takes no more for now; `Hub.resume` is called when it does."""

    def write(self, payloads: list[bytes]) -> None:
        """Write these text messages as one write."""

    def end(self, code: int, reason: str) -> None:
        """Close with a code, after what was written. Idempotent."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def admit(self) -> None:
        """Its participant is known: it makes room for no newcomer any more. Idempotent."""


class SessionOutput(Protocol):
    """What goes out to sessions leaves by this; implemented by `SessionRegistry`."""

    deliveries: int
    """How many were queued."""

    def schedule_flush(self, session: Session) -> None:
        """Let the session's frames be written at the end of this tick."""

    def flush_session(self, session: Session) -> None:
        """Write what the connection takes, now."""

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        """Tell sessions something; dropped for those that do not take even their answers."""

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write what is queued, then close with this code."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task of the hub's until it ends or the hub closes."""


class PauseReason(Enum):
    """Why a session is not read for now."""

    JOINING = "what follows its hello waits for its welcome"
    ANSWERS = "it does not take its answers"
    OVERLOAD = "the writer is behind"
    RATE = "its participant sends more than its rate"


class Session:
    """The hub's side of one connection."""

    def __init__(self, session_id: str, connection: Connection, outbox: Outbox) -> None:
        self.session_id = session_id
        self.connection = connection
        self.outbox = outbox
        self.state = SessionState.OPENING
        self.origin: Origin | None = None
        self.starts_at_ack_cursor = True
        self.joined_at = 0
        """The newest seq when it was welcomed: of its participant's own messages a session from the floor gets those
        after it."""
        self.handled_at_join = AckCursor(0)
        """What its participant had handled, or refused and not been given again, when it was welcomed; of a session
        from the floor."""
        self.said_bye = False
        self.outgoing: list[bytes] = []
        """Frames to be written at the end of this tick."""
        self.is_inbox_changed = False
        """Whether it is to be told, with what is written next, that what waits for its participant has changed."""
        self.early_frames: list[bytes] = []
        """Messages that arrived while joining."""
        self.arrivals: dict[asyncio.Future[None], None] = {}
        """Reads that wait for a message to this participant: at most `max_reads`. A message to others costs them
        nothing."""
        self.reads_under_way = 0
        """Calls that only read, those that wait for room among them; and signals by their thread."""
        self.asked_bytes = 0
        """The frames of those calls."""
        self.results: list[bytes] = []
        """What reads gave, to be written one by one as the connection takes them."""
        self.result_written = 0
        """Bytes of the result that the connection was given last, until it has taken it."""
        self.room: SessionReads | None = None
        """What results of this session take up; None before its first read."""
        self.undelivered_seq: int | None = None
        """What retention last saw it had yet to be given first, and since when (ms)."""
        self.undelivered_since = 0
        self.pauses: set[PauseReason] = set()
        self.send_rate = SendRate(1)
        """Its participant's, from its welcome on."""

    def pause_reading(self, why: PauseReason) -> None:
        """Take nothing more from it, until every reason has passed."""
        self.pauses.add(why)
        self.connection.pause_reading()

    def resume_reading(self, why: PauseReason) -> None:
        """A reason has passed. Does nothing if it was none."""
        if why in self.pauses:
            self.pauses.discard(why)
            if not self.pauses:
                self.connection.resume_reading()

    def live_origin(self) -> Origin:
        """Who this session is, once welcomed."""
        if self.origin is None:
            raise RuntimeError(f"session {self.session_id} is {self.state.value}: it has no origin before its welcome")
        return self.origin
