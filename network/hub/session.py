"""`Session`: the hub's side of one connection. It holds the state, the queues, and the frame rate of its participant.

`intake` handles the frames that arrive from a session, and `sessions` writes frames to it. Works in memory; no IO, no
clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from enum import Enum
from typing import Any, Protocol

from roundelay.network.core.ack_cursor import AckCursor
from roundelay.network.core.entries import Origin, Peer

from .delivery import Outbox
from .read_budget import SessionReads

REFILLS_PER_S = 100
"""Number of credit refills per second at full rate. Refilling for each frame instead would require reading the clock
each time, which costs as much as decoding the frame."""
MAX_EXCESS_FRAMES = 64
"""Number of frames beyond the rate that the hub reads and refuses. After that, it reads nothing from the participant
for `PAUSE_S`."""
PAUSE_S = 0.1


class SendRate:
    """Rate limit for the frames of one participant: ``per_s`` frames per second, with a burst of one second's frames.
    All sessions of the participant share it.

    Uses the algorithm of `core.limits.next_arrival`, in steps of a hundredth of the rate. ``credit`` is the number of
    frames that may arrive before the clock must be read again.
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
        """Number of frames beyond the rate since the last pause."""
        self.wait_ms = 0
        """Delay in ms until the rate allows another frame, measured at the last refill."""
        self.is_paused = False
        self.next_signal_at = 0.0
        """Earliest time (ms) of the next signal if signals arrived exactly at their maximum rate
        (`core.limits.next_arrival_or_none`)."""
        self._per_s = per_s
        self._step = max(1, per_s // REFILLS_PER_S)
        self._arrival = 0.0

    def refill(self, now: int) -> None:
        """Grant the credit of another step if the rate allows it at ``now`` (ms). Call this method when the credit is
        used up."""
        # This is the generic cell rate algorithm (see `core.limits`), which needs one number instead of a list of
        # recent arrivals.
        due = max(self._arrival, now)
        ahead_ms = due - now - 1000.0
        if ahead_ms > 0:
            self.wait_ms = int(ahead_ms) + 1
            return
        self._arrival = due + 1000.0 * self._step / self._per_s
        self.credit = self._step


class SessionState(Enum):
    OPENING = "opening"
    """The session is connected. The hub waits for its ``hello``."""
    JOINING = "joining"
    """The ``hello`` is in the batch. Later frames wait for the welcome."""
    LIVE = "live"
    CLOSED = "closed"


LIVE = SessionState.LIVE
"""Module-level name of the enum member. The hot path uses this name, because looking up a member in its enum costs as
much as a function call."""


class Connection(Protocol):
    """The transport through which the hub writes to a session: `connection` (WebSocket) or `local` (in-process)."""

    peer: Peer

    @property
    def is_paused(self) -> bool:
        """Whether the peer accepts no more data for now. The transport calls `Hub.resume` when the peer accepts data
        again."""

    def write(self, payloads: list[bytes]) -> None:
        """Write these text messages to the connection in a single write."""

    def end(self, code: int, reason: str) -> None:
        """Close the connection with a code after all data has been written. Idempotent."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def admit(self) -> None:
        """Record that the participant is authenticated. From now on, the handshake limiter does not evict this
        connection. Idempotent."""


class SessionOutput(Protocol):
    """The part of `SessionRegistry` that `pages`, `redelivery` and `subscriptions` use."""

    deliveries: int
    """Number of deliveries queued since the start."""

    def schedule_flush(self, session: Session) -> None:
        """Flush the session at the end of this tick."""

    def flush_session(self, session: Session) -> None:
        """Write as much to the session now as its connection accepts."""

    def write(self, session: Session, frame: bytes) -> None:
        """Queue a frame that is not a delivery for the session."""

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        """Send a notice to several sessions. Sessions that do not read their answers do not receive it."""

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write all queued frames of the session, then close its connection with this code."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the hub closes."""


class PauseReason(Enum):
    """Reason why the hub does not read from a session."""

    JOINING = "frames after the hello wait for the welcome"
    ANSWERS = "the peer does not read its answers"
    OVERLOAD = "the writer is behind"
    RATE = "the participant sends beyond its rate"


class Session:
    """The hub's side of one connection."""

    def __init__(self, session_id: str, connection: Connection, outbox: Outbox) -> None:
        self.session_id = session_id
        self.connection = connection
        self.outbox = outbox
        self.state = SessionState.OPENING
        self.origin: Origin | None = None
        """Participant, token and fencing token of the session. None before its welcome."""
        self.starts_at_ack_cursor = True
        """Whether delivery started at the ack cursor. False if the client chose another cursor."""
        self.joined_at = 0
        """The head at the time of the welcome. A session that starts at the ack cursor receives messages of its own
        participant only if they are newer than this seq."""
        self.handled_at_join = AckCursor(0)
        """The messages that the participant, at the time of the welcome, had handled, or had refused and not received
        again. Set only for a session that starts at the ack cursor."""
        self.said_bye = False
        self.outgoing: list[bytes] = []
        """Frames to be written at the end of this tick of the loop, before deliveries."""
        self.is_inbox_changed = False
        """Whether the next write must include a notice that the inbox changed."""
        self.early_frames: list[bytes] = []
        """Frames that arrived while the session was joining."""
        self.arrivals: dict[asyncio.Future[None], None] = {}
        """Futures of reads that wait for a message to this participant. At most ``max_reads``."""
        # The first read creates the budget. Most sessions never read, and ten thousand idle sessions should not need
        # memory for it.
        self.reads: SessionReads | None = None
        """The session's reads in progress and their results. None before the first read."""
        self.undelivered_seq: int | None = None
        """First undelivered seq of the session when retention checked last."""
        self.undelivered_since = 0
        """Time (ms) at which retention first saw ``undelivered_seq``."""
        self.pauses: set[PauseReason] = set()
        # `Intake.release` replaces this value at the welcome, and nothing uses it before. A value saves a check for
        # None at each frame.
        self.send_rate = SendRate(1)
        """Frame rate of the participant, set at the welcome."""

    @property
    def is_reactor(self) -> bool:
        """Whether this session runs its agent's reactor. Stays true after a newer reactor has superseded this one."""
        return self.origin is not None and self.origin.fencing_token is not None

    def live_origin(self) -> Origin:
        """Return the participant and tokens of this session. Raises `RuntimeError` before the welcome."""
        if self.origin is None:
            raise RuntimeError(f"session {self.session_id} is {self.state.value}: it has no origin before its welcome")
        return self.origin

    def pause_reading(self, reason: PauseReason) -> None:
        """Stop reading from the session for a reason. Reading resumes when all reasons have been removed."""
        # Use a set of reasons, not a counter. A reason may be reported twice, and one call of `resume_reading` removes
        # it.
        self.pauses.add(reason)
        self.connection.pause_reading()

    def resume_reading(self, reason: PauseReason) -> None:
        """Remove a reason, and resume reading if no reason is left. Does nothing if the reason was not set."""
        if reason in self.pauses:
            self.pauses.discard(reason)
            if not self.pauses:
                self.connection.resume_reading()

    def wake_arrivals(self) -> None:
        """Wake the reads that wait for a message to this participant."""
        for arrival in self.arrivals:
            if not arrival.done():
                arrival.set_result(None)
        self.arrivals.clear()
