"""Inputs and outputs of `apply`: entries, and the outcome with its rows, table writes and effects.

Plain data. An entry names its session by id, because only the hub knows session objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct

from roundelay.network.errors import RoundelayError
from roundelay.network.frames import ErrorFrame, HelloFrame, Kind, RecordFrame, SendFrame, encode

from .rows import Row
from .tables import VOLATILE_TABLES, CallWait, Login, Participant, TableWrite, TokenUsage


class Origin(Struct, frozen=True):
    """Source of an entry: a welcomed session, or a mod. For a mod ``session_id`` is empty.

    ``fencing_token`` is set for reactor sessions. ``joined_at`` is the newest seq at the time of the join.
    """

    session_id: str
    agent_id: str
    kind: Kind
    is_operator: bool = False
    fencing_token: int | None = None
    joined_at: int = 0
    token: str = ""
    """Hash of the token that the session joined with. Empty for the owner, and for sessions inside the node's
    process."""


class Peer(Struct, frozen=True):
    """Properties of the other end of a connection, from the transport.

    ``is_local``: the peer runs on this machine, and no proxy is in between. ``is_page``: a page in a browser opened the
    connection. ``is_trusted``: the peer runs in the hub's own process and needs no token. ``administers``: a trusted
    peer that joins as a person or a service is an operator.
    """

    is_local: bool = False
    is_page: bool = False
    is_trusted: bool = False
    administers: bool = True


# --- entries ----------------------------------------------------------------------------------------------------------


class Join(Struct, frozen=True):
    """A ``hello`` frame. ``token_hash`` is None without a token, and ``new_hash`` is None without a new token.
    ``has_live_reactor``: a live session of the agent holds a fencing token."""

    session_id: str
    hello: HelloFrame
    token_hash: str | None
    peer: Peer
    is_owner: bool
    has_live_reactor: bool = False
    new_hash: str | None = None


class Send(Struct, frozen=True, gc=False):
    """A ``send`` frame. ``refusal`` is the error of a mod's ``before`` hook. It is ignored for a repeat."""

    origin: Origin
    key: tuple[str, str]
    frame: SendFrame
    refusal: RoundelayError | None = None

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame that the answer repeats."""
        return {"message_id": self.frame.message_id}


class Record(Struct, frozen=True):
    """A ``record`` frame. For the kind ``started``, ``trigger`` comes from the body, and ``oldest`` is the smallest seq
    of the prompt. With ``usage``, ``trigger`` is the trigger of the open reaction.

    ``refusal`` is the error in the body. It is ignored for a repeat.
    """

    origin: Origin
    frame: RecordFrame
    digest: str
    trigger: int | None = None
    oldest: int | None = None
    refusal: RoundelayError | None = None
    usage: Mapping[str, TokenUsage] | None = None
    """Tokens that the body reports, by model."""
    call: str = ""
    """Path of the call that the record belongs to (`call_progress.track_calls`)."""
    wait: CallWait | None = None
    """The wait that a ``waiting`` record reports."""
    may_withdraw: bool = False
    """Whether the record ends a reaction that is not open. Such a reaction may belong to a dead letter."""

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame that the answer repeats."""
        return {"record_id": self.frame.record_id}


class Group(Struct, frozen=True):
    """A ``batch`` frame: entries of one session, stored in one commit, in order, up to the first refusal."""

    origin: Origin
    batch_id: str
    entries: tuple[Send | Record | RefusedFrame, ...]

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame that the answer repeats."""
        return {"batch_id": self.batch_id}


class Operate(Struct, frozen=True):
    """A ``call`` of a changing operation, with decoded arguments. ``prepared`` is the result of the operation's IO, and
    ``refusal`` the error of this IO. It is ignored for a repeat."""

    origin: Origin
    call_id: str
    op: str
    args: Any
    digest: str
    prepared: Any = None
    refusal: RoundelayError | None = None
    needs: tuple[str | int, ...] = ()
    """Keys of the mod's cold values (str) and messages (int) that the operation requires."""

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame that the answer repeats."""
        return {"call_id": self.call_id}


class Nack(Struct, frozen=True):
    origin: Origin
    seq: int
    reason: str
    retry_after_ms: int | None


class SessionLost(Struct, frozen=True):
    """A reactor session ended without a ``bye``. Its process may be gone or may reconnect. The agent's next ``hello``
    shows which."""

    origin: Origin


class ProcessEnded(Struct, frozen=True):
    """The process of an agent that the node runs has ended. ``reason`` is None when the process runs again."""

    agent_id: str
    reason: str | None


class SaveAckCursors(Struct, frozen=True):
    """Ack cursors to store. Nothing else changes."""

    writes: tuple[TableWrite, ...]


class BindCredentials(Struct, frozen=True):
    """Credentials that the node itself binds: hashes of agents' tokens by id, and logins by the hashes of their codes.
    Agents in the node's own file are bound before other clients can register their ids."""

    tokens: dict[str, str] = {}
    logins: dict[str, Login] = {}


class EndTakeover(Struct, frozen=True):
    """A takeover has expired, by the hub's clock."""

    thread_id: str


class ReachDueTime(Struct, frozen=True):
    """A due time of a mod has come, by the hub's clock. ``absent_ms`` is the time since the watched participant's last
    session ended. It is 0 while the participant has a session."""

    mod: str
    key: str
    cause: int | None = None
    absent_ms: int = 0


class ModEntry(Struct, frozen=True):
    """Result of a mod's IO, which returns to the log as a new entry. ``cause`` is the seq of the message that started
    the IO."""

    mod: str
    payload: Any
    cause: int

    @property
    def origin(self) -> Origin:
        return Origin("", self.mod, "service")

    @property
    def keys(self) -> dict[str, str]:
        return {}


class RefusedFrame(Struct, frozen=True):
    """A frame that was refused before the batch. It is queued so that it is counted, and answered in order.

    The entry may wait for a long time, so it drops the traceback of the error. The traceback would keep the frame's
    bytes in memory, and no limit counts those bytes (`Pending.bytes`).
    """

    origin: Origin
    error: RoundelayError
    keys: dict[str, str]

    def __post_init__(self) -> None:
        self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None


class Leave(Struct, frozen=True):
    """A session said ``bye``. The entry is queued so that earlier frames of the session are answered first."""

    origin: Origin


AnsweredEntry: TypeAlias = Send | Record | Group | Operate | ModEntry | RefusedFrame
"""Entries whose refusal is answered with an error. Nobody receives the answer to a mod's own entry."""
Entry: TypeAlias = (
    Join
    | AnsweredEntry
    | Nack
    | SessionLost
    | Leave
    | ProcessEnded
    | SaveAckCursors
    | BindCredentials
    | EndTakeover
    | ReachDueTime
)

# --- effects ----------------------------------------------------------------------------------------------------------


class SessionReply(Struct, frozen=True, gc=False):
    """An encoded frame for one session."""

    session_id: str
    data: bytes


class AcceptSession(Struct, frozen=True):
    """A session is accepted. It receives messages from this position of the log on."""

    origin: Origin
    hello: HelloFrame
    participant: Participant
    is_new: bool
    cancel_requests: tuple[RequestCancel, ...] = ()


class RefuseSession(Struct, frozen=True):
    """A session is refused: send ``error`` first, if there is one, then close with the code."""

    session_id: str
    code: int
    error: RoundelayError | None


class SendNotice(Struct, frozen=True):
    """A notice for all sessions of these participants, and for operators with ``to_operators``. ``sender_id`` gets the
    notice without the reason. ``except_session`` gets nothing, because that session caused the notice."""

    agent_ids: frozenset[str]
    kind: Literal[
        "loop_stopped", "budget_exhausted", "dead_letter", "dead_letter_withdrawn", "taken", "given", "marked", "mod"
    ]
    thread_id: str | None
    body: dict[str, Any]
    to_operators: bool = False
    sender_id: str | None = None
    except_session: str = ""


class NotifyMembership(Struct, frozen=True):
    """The notice `members` for everyone who watches presence: the members of a channel, or the messages that they may
    read, have changed. Without a channel, somebody was removed from the network. ``agent_id`` is the affected
    participant, if there is one.
    """

    channel: str | None
    agent_id: str | None


class MarkHandled(Struct, frozen=True):
    """One participant has handled one message."""

    agent_id: str
    seq: int


class ScheduleRetry(Struct, frozen=True):
    """Deliver one message to one participant again, not before ``due_at`` (ms)."""

    agent_id: str
    seq: int
    attempt: int
    due_at: int


class DisconnectParticipant(Struct, frozen=True):
    """Close sessions of a participant with 4403: all sessions, or those of one token (given by its hash)."""

    agent_id: str
    reason: str
    token: str = ""


class RequestCancel(Struct, frozen=True):
    """Ask an agent's reactor session to cancel a reaction."""

    agent_id: str
    reaction: str
    thread_id: str
    sender_id: str


OtherEffect: TypeAlias = (
    AcceptSession
    | RefuseSession
    | SendNotice
    | NotifyMembership
    | MarkHandled
    | ScheduleRetry
    | DisconnectParticipant
    | RequestCancel
)
Effect: TypeAlias = SessionReply | OtherEffect


class Outcome(Struct, frozen=True, gc=False):
    """Everything that one entry causes. Nothing takes effect before the commit."""

    rows: Sequence[Row] = ()
    writes: Sequence[TableWrite] = ()
    effects: Sequence[Effect] = ()

    @property
    def stores(self) -> bool:
        """Whether the ledger has to store any part of the outcome."""
        return bool(self.rows) or any(put.table not in VOLATILE_TABLES for put in self.writes)


NOTHING = Outcome()


def error_bytes(error: RoundelayError, keys: dict[str, str] | None = None) -> bytes:
    """Encode the ``error`` frame of an exception. ``keys`` are ids of the request that the frame repeats."""
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    retry_after = UNSET if retry_after_ms is None else retry_after_ms
    return encode(ErrorFrame(code=error.code, message=str(error), retry_after_ms=retry_after, **(keys or {})))


def body_digest(*parts: bytes) -> str:
    """Return the digest of a body. Two records, or two calls, are the same if their digests are equal."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
