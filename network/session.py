"""One session, sans-IO: what its frames mean in the state it is in.

Step 1 (its place in the protocol: ``hello`` first) and step 2 (shape and size) of a frame's way. It never writes: the hub does
what it returns. Identity is decided in `apply`, from the log's order.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from enum import Enum
from typing import Any, Protocol

from .delivery import Outbox
from .entries import Origin, Peer
from .errors import InvalidFrame, RequestError
from .frames import ClientFrame, HelloFrame
from .pace import Pace
from .room import SessionRoom
from .shape import FrameError, read_frame
from .tables import Floor


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
    """The transport under a session; the hub writes through it. Implemented by `server` (WebSocket) and `local` (in-process)."""

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


class Outlet(Protocol):
    """What goes out to sessions leaves by this; implemented by `switchboard`."""

    deliveries: int
    """How many were queued."""

    def touch(self, session: Session) -> None:
        """Let the session's frames be written at the end of this tick."""

    def flush_session(self, session: Session) -> None:
        """Write what the connection takes, now."""

    def notice(self, sessions: Iterable[Session], kind: Any, thread_id: str | None, body: object) -> None:
        """Tell sessions something; dropped for those that do not take even their answers."""

    def end(self, session: Session, code: int, reason: str) -> None:
        """Write what is queued, then close with this code."""

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task of the hub's until it ends or the hub closes."""


class Pause(Enum):
    """Why a session is not read for now."""

    JOINING = "what follows its hello waits for its welcome"
    ANSWERS = "it does not take its answers"
    OVERLOAD = "the writer is behind"
    RATE = "its participant sends more than its rate"


class ProtocolBreach(Exception):
    """The connection ends: ``error`` is sent first, then the close code."""

    def __init__(self, code: int, error: RequestError) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


class Session:
    """The hub's side of one connection."""

    def __init__(self, session_id: str, connection: Connection, outbox: Outbox, max_depth: int) -> None:
        self.session_id = session_id
        self.connection = connection
        self.outbox = outbox
        self.state = SessionState.OPENING
        self.origin: Origin | None = None
        self.starts_at_floor = True
        self.joined_at = 0
        """The newest seq when it was welcomed: of its participant's own messages a session from the floor gets those after it."""
        self.settled_at_join = Floor(0)
        """What its participant had handled, or refused and not been given again, when it was welcomed; of a session from the floor."""
        self.said_bye = False
        self.outgoing: list[bytes] = []
        """Frames to be written at the end of this tick."""
        self.held: list[bytes] = []
        """Messages that arrived while joining."""
        self.reads_under_way = 0
        """Calls that only read, those that wait for room among them; and signals by their thread."""
        self.asked_bytes = 0
        """The frames of those calls."""
        self.results: list[bytes] = []
        """What reads gave, to be written one by one as the connection takes them."""
        self.result_written = 0
        """Bytes of the result that the connection was given last, until it has taken it."""
        self.room: SessionRoom | None = None
        """What results of this session take up; None before its first read."""
        self.owed_seq: int | None = None
        """What retention last saw it had yet to be given first, and since when (ms)."""
        self.owed_since = 0
        self.pauses: set[Pause] = set()
        self.pace = Pace(1)
        """Its participant's, from its welcome on."""
        self._max_depth = max_depth

    def read(self, data: bytes) -> ClientFrame:
        """Decode one text message. Raises `FrameError` for a frame that is answered and forgotten, `ProtocolBreach` for the end."""
        if self.origin is None:
            return self._read_hello(data)
        frame = read_frame(data, self._max_depth, is_brief=not self.pace.credit)
        if isinstance(frame, HelloFrame):
            raise FrameError(
                InvalidFrame("hello is sent once, as the first frame; this session has joined already."), {}
            )
        return frame

    def _read_hello(self, data: bytes) -> HelloFrame:
        try:
            frame = read_frame(data, self._max_depth)
        except FrameError as error:
            raise ProtocolBreach(4400, error.error) from error
        if not isinstance(frame, HelloFrame):
            raise ProtocolBreach(4400, InvalidFrame("The first frame must be hello."))
        self.state = SessionState.JOINING
        return frame

    def pause_reading(self, why: Pause) -> None:
        """Take nothing more from it, until every reason has passed."""
        self.pauses.add(why)
        self.connection.pause_reading()

    def resume_reading(self, why: Pause) -> None:
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
