"""Inputs and outputs of `apply`: entries, and the outcome with its rows, table writes and effects.

All types in this module are plain data. An entry identifies its session by id, because only the hub has session
objects.
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
    """Source of an entry: an accepted session, or a mod. For a mod, ``session_id`` is empty.

    ``fencing_token`` is set only for reactor sessions. ``joined_at`` is the newest seq at the time when the session
    joined.
    """

    session_id: str
    agent_id: str
    kind: Kind
    is_operator: bool = False
    fencing_token: int | None = None
    joined_at: int = 0
    token: str = ""
    """Hash of the token with which the session joined. Empty for the owner and for sessions inside the node's
    process."""


class Peer(Struct, frozen=True):
    """Properties of a connection's remote end, as reported by the transport.

    ``is_local`` is true if the peer runs on this machine, without a proxy in between. ``is_page`` is true if a web page
    in a browser opened the connection. ``is_trusted`` is true if the peer runs in the hub's own process, so that it
    needs no token. ``administers`` applies only to trusted peers: if it is true, a peer that joins as a person or a
    service becomes an operator.
    """

    is_local: bool = False
    is_page: bool = False
    is_trusted: bool = False
    administers: bool = True


# --- entries ----------------------------------------------------------------------------------------------------------


class Join(Struct, frozen=True):
    """Entry for a ``hello`` frame. ``token_hash`` and ``new_hash`` are the hashes of the frame's fields ``token`` and
    ``new_token``, or None if the frame does not have the field. ``has_live_reactor`` is true if a live session of the
    agent holds a fencing token."""

    session_id: str
    hello: HelloFrame
    token_hash: str | None
    peer: Peer
    is_owner: bool
    has_live_reactor: bool = False
    new_hash: str | None = None


class Send(Struct, frozen=True, gc=False):
    """Entry for a ``send`` frame. ``refusal`` is an error raised by a mod's ``before`` hook. It is ignored if the frame
    repeats a stored message."""

    origin: Origin
    key: tuple[str, str]
    frame: SendFrame
    refusal: RoundelayError | None = None

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame, which the answer repeats."""
        return {"message_id": self.frame.message_id}


class Record(Struct, frozen=True):
    """Entry for a ``record`` frame. For the kind ``started``, ``trigger`` comes from the body, and ``oldest`` is the
    smallest seq of the prompt. If ``usage`` is set, ``trigger`` is the trigger of the open reaction.

    ``refusal`` is an error found in the body. It is ignored if the frame repeats a stored record.
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
    """Path of the tool call to which the record belongs (`call_progress.track_calls`)."""
    wait: CallWait | None = None
    """What a tool call waits for, participants or a decision, from the body of a ``waiting`` record."""
    may_withdraw: bool = False
    """Whether the record ends a reaction that is no longer open. A dead letter may have closed the reaction."""

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame, which the answer repeats."""
        return {"record_id": self.frame.record_id}


class Group(Struct, frozen=True):
    """Entry for a ``batch`` frame: entries of one session, stored in order in one commit, up to the first refusal."""

    origin: Origin
    batch_id: str
    entries: tuple[Send | Record | RefusedFrame, ...]

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame, which the answer repeats."""
        return {"batch_id": self.batch_id}


class Operate(Struct, frozen=True):
    """Entry for a ``call`` of an operation that changes something, with decoded arguments. ``prepared`` is the result
    of the operation's IO, and ``refusal`` is an error raised by this IO. The refusal is ignored if the frame repeats an
    earlier call."""

    origin: Origin
    call_id: str
    op: str
    args: Any
    digest: str
    prepared: Any = None
    refusal: RoundelayError | None = None
    needs: tuple[str | int, ...] = ()
    """Data that the operation needs from the ledger: keys of the mod's cold values (str) and seqs of messages (int)."""

    @property
    def keys(self) -> dict[str, str]:
        """Ids of the frame, which the answer repeats."""
        return {"call_id": self.call_id}


class Nack(Struct, frozen=True):
    """Entry for a ``nack`` frame: the agent of ``origin`` has failed to handle the message ``seq``."""

    origin: Origin
    seq: int
    reason: str
    retry_after_ms: int | None


class SessionLost(Struct, frozen=True):
    """Entry for a reactor session that ended without a ``bye``. Its process may have ended, or may reconnect. The
    agent's next ``hello`` shows what happened."""

    origin: Origin


class ProcessEnded(Struct, frozen=True):
    """Entry for an agent process of this node that has ended. ``reason`` is None when the process runs again."""

    agent_id: str
    reason: str | None


class SaveAckCursors(Struct, frozen=True):
    """Entry with ack cursors to store. The entry also closes the deliveries that the cursors mark as handled."""

    writes: tuple[TableWrite, ...]


class BindCredentials(Struct, frozen=True):
    """Entry for credentials that the node itself binds. ``tokens`` maps agent ids to hashes of tokens. ``logins`` maps
    hashes of codes to one-time logins. Agents in the node's own file are bound before other clients can register their
    ids."""

    tokens: dict[str, str] = {}
    logins: dict[str, Login] = {}


class EndTakeover(Struct, frozen=True):
    """Entry for a takeover that has expired, according to the hub's clock."""

    thread_id: str


class ReachDueTime(Struct, frozen=True):
    """Entry for a due time of a mod that has passed, according to the hub's clock. ``absent_ms`` is the time in ms
    since the last session of the watched participant ended. It is 0 while the participant has a session."""

    mod: str
    key: str
    cause: int | None = None
    absent_ms: int = 0


class ModEntry(Struct, frozen=True):
    """Entry for the result of a mod's IO. ``cause`` is the seq of the message that started the IO."""

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
    """Entry for a frame that was refused before the batch. As an entry, the refusal counts against the rate, and the
    answers keep their order.

    The entry may wait for a long time, so it drops the traceback of the error. The traceback would keep the frame's
    bytes in memory, and no limit counts these bytes (`PendingEntries.bytes`).
    """

    origin: Origin
    error: RoundelayError
    keys: dict[str, str]

    def __post_init__(self) -> None:
        self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None


class Leave(Struct, frozen=True):
    """Entry for a session that said ``bye``. It is queued, so that earlier frames of the session are answered first."""

    origin: Origin


AnsweredEntry: TypeAlias = Send | Record | Group | Operate | ModEntry | RefusedFrame
"""Entries whose refusal is answered with an error. For a `ModEntry`, the answer has no receiver."""
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
    """Effect: send an encoded frame to one session."""

    session_id: str
    data: bytes


class AcceptSession(Struct, frozen=True):
    """Effect: accept a session. The session receives messages after the current end of the log."""

    origin: Origin
    hello: HelloFrame
    participant: Participant
    is_new: bool
    cancel_requests: tuple[RequestCancel, ...] = ()


class RefuseSession(Struct, frozen=True):
    """Effect: refuse a session. If ``error`` is set, send it first. Then close the connection with ``code``."""

    session_id: str
    code: int
    error: RoundelayError | None


class SendNotice(Struct, frozen=True):
    """Effect: send a notice to all sessions of ``agent_ids``, and to operators if ``to_operators`` is set.
    ``sender_id`` gets the notice without the reason. ``except_session`` gets no notice, because this session caused
    it."""

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
    """Effect: send the notice `members` to the sessions that watch presence. If ``channel`` is set, the members of this
    channel, or the messages that they may read, have changed. If ``channel`` is None, a participant was removed from
    the network. ``agent_id`` is the affected participant, if any."""

    channel: str | None
    agent_id: str | None


class MarkHandled(Struct, frozen=True):
    """Effect: record that one participant has handled one message."""

    agent_id: str
    seq: int


class ScheduleRetry(Struct, frozen=True):
    """Effect: deliver one message to one participant again, not before ``due_at`` (ms)."""

    agent_id: str
    seq: int
    attempt: int
    due_at: int


class DisconnectParticipant(Struct, frozen=True):
    """Effect: close sessions of a participant with code 4403. With ``token``, the hash of a token, close only the
    sessions that joined with this token. Otherwise close all of them."""

    agent_id: str
    reason: str
    token: str = ""


class RequestCancel(Struct, frozen=True):
    """Effect: ask an agent's reactor session to cancel a reaction."""

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
    """The results of one entry. Nothing takes effect before the commit."""

    rows: Sequence[Row] = ()
    writes: Sequence[TableWrite] = ()
    effects: Sequence[Effect] = ()

    @property
    def stores(self) -> bool:
        """Whether the ledger has to store any part of this outcome."""
        return bool(self.rows) or any(put.table not in VOLATILE_TABLES for put in self.writes)


NOTHING = Outcome()


def error_bytes(error: RoundelayError, keys: dict[str, str] | None = None) -> bytes:
    """Encode an error as an ``error`` frame. ``keys`` are the ids of the request, which the frame repeats."""
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    retry_after = UNSET if retry_after_ms is None else retry_after_ms
    return encode(ErrorFrame(code=error.code, message=str(error), retry_after_ms=retry_after, **(keys or {})))


def body_digest(*parts: bytes) -> str:
    """Return the digest of a body. Two records or two calls have the same content if their digests are equal."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
