"""What goes into `apply` and what comes out of it: entries, and outcomes of rows, puts and effects.

Plain data. An entry names its session by id; only the hub knows sessions.
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
    """Who an entry comes from: one welcomed session, or a mod (``session_id`` empty). ``fence`` is set for reactor
    sessions, ``joined_at`` is the newest seq when the session joined."""

    session_id: str
    agent_id: str
    kind: Kind
    is_operator: bool = False
    fencing_token: int | None = None
    joined_at: int = 0
    token: str = ""
    """The hash of the token that the session joined with; empty for the owner, and within the node's process."""


class Peer(Struct, frozen=True):
    """What the transport knows of the other end.

    ``is_local``: it is on this machine, and nothing tells of a proxy between. ``is_page``: a page in a browser opened
    the connection. ``is_trusted``: it runs in the hub's own process and needs no token;
    ``administers``: what such a one joins as a person or a service is an operator.
    """

    is_local: bool = False
    is_page: bool = False
    is_trusted: bool = False
    administers: bool = True


# --- entries ----------------------------------------------------------------------------------------------------------


class Join(Struct, frozen=True):
    """A ``hello``; ``token_hash`` is None without a token, ``new_hash`` without a new one, ``is_held`` says whether a
    session of the agent holds a fence now."""

    session_id: str
    hello: HelloFrame
    token_hash: str | None
    peer: Peer
    is_owner: bool
    has_live_reactor: bool = False
    new_hash: str | None = None


class Send(Struct, frozen=True, gc=False):
    """A ``send``; ``refusal`` is what a mod's ``before`` said, which a repeat does not hear."""

    origin: Origin
    key: tuple[str, str]
    frame: SendFrame
    refusal: RoundelayError | None = None

    @property
    def keys(self) -> dict[str, str]:
        """The ids that its answer repeats."""
        return {"message_id": self.frame.message_id}


class Record(Struct, frozen=True):
    """A ``record``; ``trigger`` is the body's, for kind ``started``, and ``oldest`` the smallest seq of its manifest;
    with ``spent`` it is that of the open reaction.

    ``refusal`` says what is wrong with that body, which a repeat does not hear.
    """

    origin: Origin
    frame: RecordFrame
    digest: str
    trigger: int | None = None
    oldest: int | None = None
    refusal: RoundelayError | None = None
    usage: Mapping[str, TokenUsage] | None = None
    """The model and the tokens that the body tells of."""
    call: str = ""
    """Which call it is about (`reactions.follow`)."""
    wait: CallWait | None = None
    """What that waits for, by a ``waiting`` record."""
    may_withdraw: bool = False
    """It ends a reaction that is not open: perhaps one that was given up."""

    @property
    def keys(self) -> dict[str, str]:
        """The ids that its answer repeats."""
        return {"record_id": self.frame.record_id}


class Operate(Struct, frozen=True):
    """A ``call`` of an operation that changes something, its arguments decoded."""

    origin: Origin
    call_id: str
    op: str
    args: Any
    digest: str

    @property
    def keys(self) -> dict[str, str]:
        """The ids that its answer repeats."""
        return {"call_id": self.call_id}


class Nack(Struct, frozen=True):
    origin: Origin
    seq: int
    reason: str
    retry_after_ms: int | None


class SessionLost(Struct, frozen=True):
    """A reactor session ended without a goodbye: its process may be gone, or come back. The next ``hello`` tells
    which."""

    origin: Origin


class ProcessEnded(Struct, frozen=True):
    """The process of an agent that the node runs has ended by itself. ``reason`` is None where it works again."""

    agent_id: str
    reason: str | None


class SaveAckCursors(Struct, frozen=True):
    """Floors to be kept; changes nothing but them."""

    writes: tuple[TableWrite, ...]


class BindCredentials(Struct, frozen=True):
    """What the node itself lets in: tokens of agents, their hashes by id, that are bound before anybody could use the
    ids first, and logins by the hashes of their codes."""

    tokens: dict[str, str] = {}
    logins: dict[str, Login] = {}


class EndTakeover(Struct, frozen=True):
    """The time of a takeover is over, by the hub's clock."""

    thread_id: str


class ModEntry(Struct, frozen=True):
    """The outcome of a mod's IO, returning as an entry of its own; ``cause`` is the seq of the message that it did it
    for."""

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
    """A frame that was refused before the batch; it stands here to be answered in its order, and counted.

    It may wait long, so it forgets how its error came about: a traceback holds the frame's own bytes, which nothing
    counts (`Pending.bytes`).
    """

    origin: Origin
    error: RoundelayError
    keys: dict[str, str]

    def __post_init__(self) -> None:
        self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None


class Leave(Struct, frozen=True):
    """A session said ``bye``; it stands here so that what it sent before is answered first."""

    origin: Origin


AnsweredEntry: TypeAlias = Send | Record | Operate | ModEntry | RefusedFrame
"""What is answered with an error where it is refused; nobody hears what a mod's own entry is answered."""
Entry: TypeAlias = (
    Join | AnsweredEntry | Nack | SessionLost | Leave | ProcessEnded | SaveAckCursors | BindCredentials | EndTakeover
)

# --- effects ----------------------------------------------------------------------------------------------------------


class SessionReply(Struct, frozen=True, gc=False):
    """A frame for one session, encoded."""

    session_id: str
    data: bytes


class AcceptSession(Struct, frozen=True):
    """A session is accepted: it lives from this point of the log on."""

    origin: Origin
    hello: HelloFrame
    participant: Participant
    is_new: bool
    cancel_requests: tuple[RequestCancel, ...] = ()


class RefuseSession(Struct, frozen=True):
    """A session is not accepted: ``error`` first, if there is one, then the close code."""

    session_id: str
    code: int
    error: RoundelayError | None


class SendNotice(Struct, frozen=True):
    """A notice for every session of these participants; operators' sessions too, if asked. ``asker`` is told all
    but the reason; the session ``but`` is told nothing: it knows."""

    agent_ids: frozenset[str]
    kind: Literal[
        "loop_stopped", "budget_exhausted", "dead_letter", "dead_letter_withdrawn", "taken", "given", "marked"
    ]
    thread_id: str | None
    body: dict[str, Any]
    to_operators: bool = False
    sender_id: str | None = None
    except_session: str = ""


class NotifyMembership(Struct, frozen=True):
    """Notice `members` to those who watch presence: who is in a channel, or what its members may read, has changed;
    or, without a channel, somebody was removed from the network. ``agent_id``: whom it is about, if one is."""

    channel: str | None
    agent_id: str | None


class MarkHandled(Struct, frozen=True):
    """One message is handled by one participant."""

    agent_id: str
    seq: int


class ScheduleRetry(Struct, frozen=True):
    """One message goes to one participant again, not before ``due_at``."""

    agent_id: str
    seq: int
    attempt: int
    due_at: int


class DisconnectParticipant(Struct, frozen=True):
    """Close a participant's sessions with 4403: all, or those of one token (its hash)."""

    agent_id: str
    reason: str
    token: str = ""


class RequestCancel(Struct, frozen=True):
    """Tell an agent's reactor session to cancel a reaction."""

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
    """What one entry comes to. Nothing of it happens before the commit."""

    rows: Sequence[Row] = ()
    writes: Sequence[TableWrite] = ()
    effects: Sequence[Effect] = ()

    @property
    def stores(self) -> bool:
        """Whether anything of it is for the ledger."""
        return bool(self.rows) or any(put.table not in VOLATILE_TABLES for put in self.writes)


NOTHING = Outcome()


def error_bytes(error: RoundelayError, keys: dict[str, str] | None = None) -> bytes:
    """Encode the ``error`` frame of an exception; ``keys`` are the ids that it repeats."""
    retry_after_ms: int | None = getattr(error, "retry_after_ms", None)
    again = UNSET if retry_after_ms is None else retry_after_ms
    return encode(ErrorFrame(code=error.code, message=str(error), retry_after_ms=again, **(keys or {})))


def body_digest(*parts: bytes) -> str:
    """What makes two records, or two calls, the same."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
