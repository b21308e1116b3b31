"""The frames of the wire protocol as msgspec structs, and their encoding. docs/asyncapi.json is generated from this
module.

This module encodes every frame that is sent. `shape` decodes the frames that arrive. ``content``, ``metadata``,
``args`` and ``body`` stay raw JSON, because the hub passes them on without reading them. This module does no IO and has
no state.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

PROTOCOL_VERSION = 1
SUBPROTOCOL = "roundelay.v1"
LEADER = "Roundelay-Leader"
"""Name of the header in which a read replica's 503 response names the leader, as HOST:PORT."""
_ADDRESS = r"(?:[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}"
_LEADER_AT_THE_END = re.compile(rf"{LEADER}: ({_ADDRESS})\Z")
MAX_REASON_BYTES = 120
"""Maximum length of a close reason, in bytes. A close frame has room for 123 bytes (RFC 6455, 5.5)."""

SEQ_LIMIT = 2**53
Seq: TypeAlias = Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
Kind: TypeAlias = Literal["agent", "human", "service"]
Role: TypeAlias = Literal["observer", "reactor"]

ID_PATTERN = "^[a-z0-9][a-z0-9._-]{0,63}$"
ID_IN_WORDS = "a name of lower case letters, digits, '.', '_' and '-', a letter or digit first, at most 64"
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")


def is_address(text: str) -> bool:
    """Return whether a text is exactly HOST:PORT, without other parts of a URL."""
    return re.fullmatch(_ADDRESS, text) is not None


def format_lost_leadership(leader: str) -> str:
    """Return the close reason (code 4503) of a node that lost leadership. The reason contains the new leader's address
    if the address is known, valid and short enough."""
    sentence = "Another node leads now."
    # Another node supplied the leader's address. Only a valid address may be put into a header or a close reason.
    named = f"{sentence} {LEADER}: {leader}"
    return named if is_address(leader) and len(named) <= MAX_REASON_BYTES else sentence


def parse_leader(reason: str) -> str:
    """Return the leader's address from a close reason that `format_lost_leadership` wrote, or an empty text for other
    reasons."""
    match = _LEADER_AT_THE_END.search(reason)
    return match[1] if match else ""


# --- client to hub
# -----------------------------------------------------------------------------------------------------------


class ResumePoint(Struct, forbid_unknown_fields=True, frozen=True):
    epoch: str
    cursor: Seq


class HelloFrame(Struct, tag_field="type", tag="hello", forbid_unknown_fields=True, frozen=True, kw_only=True):
    protocol: int
    agent_id: str
    kind: Kind | UnsetType = UNSET
    token: str | UnsetType = UNSET
    new_token: Annotated[str, Meta(min_length=32, max_length=128)] | UnsetType = UNSET
    role: Role = "observer"
    fence: Seq | UnsetType = UNSET
    resume: ResumePoint | UnsetType = UNSET
    card: Raw | UnsetType = UNSET
    client: str | UnsetType = UNSET
    instance: Annotated[str, Meta(min_length=1, max_length=128)] | UnsetType = UNSET
    deliver: bool = True

    @property
    def joins_as(self) -> Kind:
        """The participant's kind. Raises `ValueError` if the frame has no kind and the hub has not yet filled in the
        kind that the token belongs to."""
        if self.kind is UNSET:
            raise ValueError("this hello has no kind; set the kind that its token belongs to first")
        return self.kind


class SendFrame(Struct, tag_field="type", tag="send", forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    message_id: str
    to: str
    content: Raw
    text_representation: str | UnsetType = UNSET
    reply_to: Seq | UnsetType = UNSET
    cause: Seq | UnsetType = UNSET
    conversation: str | UnsetType = UNSET
    exclude_agent_ids: list[str] | UnsetType = UNSET
    requires_response: bool | list[str] | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET


class AckFrame(Struct, tag_field="type", tag="ack", forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    seq: Seq
    only: bool = False


class NackFrame(Struct, tag_field="type", tag="nack", forbid_unknown_fields=True, frozen=True, kw_only=True):
    seq: Seq
    reason: str
    retry_after_ms: Seq | UnsetType = UNSET


class CallFrame(Struct, tag_field="type", tag="call", forbid_unknown_fields=True, frozen=True, kw_only=True):
    call_id: str
    op: str
    args: Raw


class RecordFrame(Struct, tag_field="type", tag="record", forbid_unknown_fields=True, frozen=True, kw_only=True):
    record_id: str
    reaction: str
    kind: str
    body: Raw


class BatchFrame(Struct, tag_field="type", tag="batch", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Messages and records that the hub stores in one commit, in order, up to the first refused frame."""

    batch_id: str
    frames: Annotated[list[SendFrame | RecordFrame], Meta(min_length=1)]


class SignalFrame(Struct, tag_field="type", tag="signal", forbid_unknown_fields=True, frozen=True, kw_only=True):
    kind: Literal["typing", "viewing", "thinking", "delta", "tool"]
    body: Raw
    to: str | UnsetType = UNSET
    thread_id: str | UnsetType = UNSET
    trigger: Seq | UnsetType = UNSET


class ByeFrame(Struct, tag_field="type", tag="bye", forbid_unknown_fields=True, frozen=True):
    pass


ClientFrame: TypeAlias = (
    HelloFrame | SendFrame | AckFrame | NackFrame | CallFrame | RecordFrame | BatchFrame | SignalFrame | ByeFrame
)
CLIENT_FRAMES: tuple[type[Struct], ...] = get_args(ClientFrame)

# --- hub to client
# -----------------------------------------------------------------------------------------------------------


class NetworkInfo(Struct, frozen=True):
    name: str
    epoch: str


class OpenReactionInfo(Struct, frozen=True, omit_defaults=True):
    reaction: str
    trigger: int
    seq: int
    overtaken: bool = False
    """Whether a person took over the trigger's thread after the reaction started."""


class OperationInfo(Struct, frozen=True):
    op: str
    description: str
    args_schema: dict[str, Any]
    kind: Literal["change", "read"] = "change"
    is_tool: bool | UnsetType = UNSET
    """Whether agents get this operation as a tool. False, for example, for uploads of bytes."""


class ModInfo(Struct, frozen=True):
    id: str
    operations: list[OperationInfo]


READ_ONLY_QUERY = "read_only=1"
"""URL query that requests a read-only session from a hub. Read replicas accept such sessions too."""


class Follows(Struct, frozen=True):
    """State of a read replica. ``leader`` is the leader's name, or empty if it is unknown. The replica's data includes
    everything that the network had stored at the time ``as_of`` (ms)."""

    leader: str
    as_of: int


class WelcomeFrame(Struct, tag_field="type", tag="welcome", frozen=True, kw_only=True, omit_defaults=True):
    protocol: int
    server: str
    network: NetworkInfo
    agent_id: str
    kind: Kind
    is_operator: bool = False
    is_read_only: bool = False
    follows: Follows | UnsetType = UNSET
    role: Role
    session_id: str
    fence: int | UnsetType = UNSET
    cursor: int
    head: int
    resume: Literal["new", "full", "limited"]
    missing_before: int | UnsetType = UNSET
    open_reactions: list[OpenReactionInfo] | UnsetType = UNSET
    mods: list[ModInfo]
    limits: dict[str, int]
    is_watched: bool = True
    """Whether any client currently receives signals. The notice ``watched`` reports later changes to reactors."""


class StoredFrame(Struct, tag_field="type", tag="stored", frozen=True, kw_only=True, gc=False):
    message_id: str | UnsetType = UNSET
    record_id: str | UnsetType = UNSET
    seq: int
    thread_id: str | UnsetType = UNSET
    duplicate: bool


class WireMessage(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The ``message`` of a ``deliver`` frame, as stored. The hub encodes the message once for all recipients."""

    seq: int
    message_id: str
    kind: Literal["direct", "broadcast", "channel", "mod"]
    sender_id: str
    sender_kind: str
    to: str
    thread_id: str
    reply_to: int | UnsetType = UNSET
    cause: int | UnsetType = UNSET
    root: int
    hops: int
    sent_at: int
    content: Raw
    text_representation: str | UnsetType = UNSET
    requires_response: bool | list[str] | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    edited_at: int | UnsetType = UNSET
    """Time of the last edit, in ms since the Unix epoch."""
    deleted_at: int | UnsetType = UNSET
    """Time of the deletion, in ms since the Unix epoch. The content of a deleted message is empty."""


class DeliverFrame(Struct, tag_field="type", tag="deliver", frozen=True, kw_only=True):
    message: WireMessage
    attempt: int


class ResultFrame(Struct, tag_field="type", tag="result", frozen=True, kw_only=True):
    call_id: str
    value: Raw
    as_of: int | UnsetType = UNSET
    """Time (ms) that is set only by a read replica. The result includes everything that was stored at this time."""


class ErrorFrame(Struct, tag_field="type", tag="error", frozen=True, kw_only=True):
    code: str
    message: str
    message_id: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    record_id: str | UnsetType = UNSET
    batch_id: str | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET


class BatchedFrame(Struct, tag_field="type", tag="batched", frozen=True, kw_only=True):
    """Answer to a ``batch``: one `StoredFrame` for each stored frame, and the error of the first refused frame."""

    batch_id: str
    stored: list[StoredFrame]
    error: ErrorFrame | UnsetType = UNSET


class SignalOutFrame(Struct, tag_field="type", tag="signal", frozen=True, kw_only=True):
    sender_id: str
    thread_id: str
    kind: str
    body: Raw


class PresenceFrame(Struct, tag_field="type", tag="presence", frozen=True, kw_only=True):
    agent_id: str
    state: Literal["online", "offline"]
    card: Raw | UnsetType = UNSET


class NoticeFrame(Struct, tag_field="type", tag="notice", frozen=True, kw_only=True):
    kind: Literal[
        "behind",
        "loop_stopped",
        "budget_exhausted",
        "dead_letter",
        "dead_letter_withdrawn",
        "taken",
        "given",
        "marked",
        "mod",
        "members",
        "inbox",
        "conversation_quiet",
        "damaged",
        "superseded",
        "watched",
        "draining",
    ]
    thread_id: str | UnsetType = UNSET
    body: Any


HubFrame: TypeAlias = (
    WelcomeFrame
    | StoredFrame
    | BatchedFrame
    | DeliverFrame
    | ResultFrame
    | ErrorFrame
    | SignalOutFrame
    | PresenceFrame
    | NoticeFrame
)
HUB_FRAMES: tuple[type[Struct], ...] = get_args(HubFrame)


def to_plain(value: object) -> object:
    """Convert a value of a library's own type to a plain type that JSON can represent, such as ``str`` or ``dict``.
    Raises `TypeError` for other values.

    Some libraries return instances of subclasses, which msgspec refuses. For example, LangChain's `TextAccessor` is a
    subclass of ``str``.
    """
    if isinstance(value, str):
        return str.__str__(value)  # not str(value): a subclass may override __str__
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | Set):
        return list(value)
    if isinstance(value, Integral):  # for example a numpy number
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(
        f"A {type(value).__name__} cannot be written as JSON. Use text, numbers, true, false, null, lists and objects."
    )


def plain_text(text: str) -> str:
    """Return a text as a plain ``str``, because an instance of a subclass, such as an enum, may format differently."""
    return str.__str__(text) if isinstance(text, str) else text


_encoder = msgspec.json.Encoder(enc_hook=to_plain)
encode = _encoder.encode
"""Encode a frame, or any JSON value, to UTF-8 bytes. `to_plain` converts values of libraries' own types."""


FIRST_DELIVERY = b'{"type":"deliver","attempt":1,"message":%b}'
"""Template of the ``deliver`` frame of a first attempt. The hub inserts the encoded `WireMessage` as it is."""


def deliver_bytes(message: bytes, attempt: int) -> bytes:
    """Return the ``deliver`` frame that carries an encoded `WireMessage`, with the number of the delivery attempt."""
    return b'{"type":"deliver","attempt":%d,"message":%b}' % (attempt, message)


def is_id(text: str) -> bool:
    """Return whether a text is a valid id of an agent, a person, a channel or a mod."""
    return _ID.match(text) is not None


def decode_json(data: bytes | str) -> Any:
    """Decode JSON that a hub has accepted. Integers of 4000 or more characters become floats. Raises `ValueError` for
    invalid JSON."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return json.loads(data, parse_int=lambda digits: int(digits) if len(digits) < 4000 else float(digits))
