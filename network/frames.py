"""The wire's frames as msgspec structs, and their encoding: the single source of docs/asyncapi.json.

First stop of every byte that arrives (`read_frame`, shape and size only) and last of every byte that leaves (`encode`).
``content``, ``metadata``, ``args`` and ``body`` stay raw JSON: the hub carries them, it does not read them. No IO, no state.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from .errors import InvalidFrame, RequestError

PROTOCOL_VERSION = 1
SUBPROTOCOL = "roundelay.v1"

SEQ_LIMIT = 2**53
Seq: TypeAlias = Annotated[int, Meta(ge=0, lt=SEQ_LIMIT)]
Kind: TypeAlias = Literal["agent", "human", "service"]
Role: TypeAlias = Literal["observer", "reactor"]

_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


# --- client to hub -----------------------------------------------------------------------------------------------------------


class ResumePoint(Struct, forbid_unknown_fields=True, frozen=True):
    epoch: str
    cursor: Seq


class HelloFrame(Struct, tag_field="type", tag="hello", forbid_unknown_fields=True, frozen=True, kw_only=True):
    protocol: int
    agent_id: str
    kind: Kind
    token: str | UnsetType = UNSET
    role: Role = "observer"
    fence: Seq | UnsetType = UNSET
    resume: ResumePoint | UnsetType = UNSET
    card: Raw | UnsetType = UNSET
    client: str | UnsetType = UNSET


class SendFrame(Struct, tag_field="type", tag="send", forbid_unknown_fields=True, frozen=True, kw_only=True, gc=False):
    message_id: str
    to: str
    content: Raw
    text_representation: str | UnsetType = UNSET
    reply_to: Seq | UnsetType = UNSET
    cause: Seq | UnsetType = UNSET
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


class SignalFrame(Struct, tag_field="type", tag="signal", forbid_unknown_fields=True, frozen=True, kw_only=True):
    kind: Literal["typing", "thinking", "delta", "tool"]
    body: Raw
    to: str | UnsetType = UNSET
    thread_id: str | UnsetType = UNSET


class ByeFrame(Struct, tag_field="type", tag="bye", forbid_unknown_fields=True, frozen=True):
    pass


ClientFrame: TypeAlias = (
    HelloFrame | SendFrame | AckFrame | NackFrame | CallFrame | RecordFrame | SignalFrame | ByeFrame
)
CLIENT_FRAMES: tuple[type[Struct], ...] = (
    HelloFrame,
    SendFrame,
    AckFrame,
    NackFrame,
    CallFrame,
    RecordFrame,
    SignalFrame,
    ByeFrame,
)

# --- hub to client -----------------------------------------------------------------------------------------------------------


class NetworkInfo(Struct, frozen=True):
    name: str
    epoch: str


class OpenReactionInfo(Struct, frozen=True):
    reaction: str
    trigger: int
    seq: int


class OperationInfo(Struct, frozen=True):
    op: str
    description: str
    args_schema: dict[str, Any]


class ModInfo(Struct, frozen=True):
    id: str
    operations: list[OperationInfo]


class WelcomeFrame(Struct, tag_field="type", tag="welcome", frozen=True, kw_only=True, omit_defaults=True):
    protocol: int
    server: str
    network: NetworkInfo
    agent_id: str
    kind: Kind
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


class StoredFrame(Struct, tag_field="type", tag="stored", frozen=True, kw_only=True, gc=False):
    message_id: str | UnsetType = UNSET
    record_id: str | UnsetType = UNSET
    seq: int
    thread_id: str | UnsetType = UNSET
    duplicate: bool


class WireMessage(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The ``message`` of a ``deliver`` frame, as it is stored: encoded once, whatever its fan-out."""

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


class DeliverFrame(Struct, tag_field="type", tag="deliver", frozen=True, kw_only=True):
    message: WireMessage
    attempt: int


class ResultFrame(Struct, tag_field="type", tag="result", frozen=True, kw_only=True):
    call_id: str
    value: Raw


class ErrorFrame(Struct, tag_field="type", tag="error", frozen=True, kw_only=True):
    code: str
    message: str
    message_id: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    record_id: str | UnsetType = UNSET
    retry_after_ms: int | UnsetType = UNSET


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
    kind: Literal["behind", "loop_stopped", "budget_exhausted", "dead_letter", "superseded", "draining"]
    thread_id: str | UnsetType = UNSET
    body: Any


HUB_FRAMES: tuple[type[Struct], ...] = (
    WelcomeFrame,
    StoredFrame,
    DeliverFrame,
    ResultFrame,
    ErrorFrame,
    SignalOutFrame,
    PresenceFrame,
    NoticeFrame,
)

_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Encode a frame, or anything JSON, to UTF-8 bytes."""

_decoder: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_NAMES = frozenset(str(cls.__struct_config__.tag) for cls in CLIENT_FRAMES)


def deliver_bytes(message: bytes, attempt: int = 1) -> bytes:
    """Wrap an encoded `WireMessage` as a ``deliver`` frame without decoding it."""
    return b'{"type":"deliver","attempt":%d,"message":%b}' % (attempt, message)


def is_id(text: str) -> bool:
    """Whether this may be the id of an agent, a person, a channel or a mod."""
    return _ID.match(text) is not None


def is_key(text: str) -> bool:
    """Whether this may be a ``message_id``, ``call_id`` or ``record_id``: 1 to 128 visible ASCII characters."""
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text


class FrameError(Exception):
    """A frame was refused by shape; ``keys`` holds the valid ids it carried, to be repeated in the answer."""

    def __init__(self, error: RequestError, keys: dict[str, str]) -> None:
        super().__init__(str(error))
        self.error = error
        self.keys = keys


def read_frame(data: bytes, max_depth: int) -> ClientFrame:
    """Decode and check one text frame, valid UTF-8 (the caller has checked it).

    Raises `FrameError`. Checks shape only: JSON without NaN or lone surrogates, nesting, known fields, types, the form of ids.
    """
    if data.count(b"{") + data.count(b"[") > max_depth and _depth(data) > max_depth:
        raise FrameError(
            InvalidFrame(f"The frame is nested deeper than {max_depth}; send flatter JSON."), _valid_keys(data)
        )
    try:
        frame = _decoder.decode(data)
        # msgspec skips strings inside Raw without pairing surrogate escapes
        if b"\\u" in data and _SURROGATE.search(data):
            _refuse_lone_surrogates(data)
    except (msgspec.DecodeError, RecursionError) as error:
        return _reread_or_refuse(data, error)
    _check_keys(frame, data)
    return frame


def _check_keys(frame: ClientFrame, data: bytes) -> None:
    match frame:
        case SendFrame():
            if not is_key(frame.message_id):
                raise _refuse("message_id must be 1 to 128 visible ASCII characters", data)
            if frame.requires_response is False:
                raise _refuse("requires_response is true or a list of ids; leave it out otherwise", data)
            if isinstance(frame.requires_response, list) and not all(map(is_id, frame.requires_response)):
                raise _refuse("requires_response names something that is not an id", data)
            if frame.exclude_agent_ids is not UNSET:
                if frame.to != "broadcast":
                    raise _refuse("exclude_agent_ids goes with the address broadcast only", data)
                if not all(map(is_id, frame.exclude_agent_ids)):
                    raise _refuse("exclude_agent_ids names something that is not an id", data)
            if frame.metadata is not UNSET and not _is_object(frame.metadata):
                raise _refuse("metadata must be an object", data)
        case CallFrame():
            if not is_key(frame.call_id):
                raise _refuse("call_id must be 1 to 128 visible ASCII characters", data)
            if not _is_object(frame.args):
                raise _refuse("args must be an object", data)
        case RecordFrame():
            if not is_key(frame.record_id):
                raise _refuse("record_id must be 1 to 128 visible ASCII characters", data)
            if not is_key(frame.reaction) or not is_key(frame.kind):
                raise _refuse("reaction and kind must be 1 to 128 visible ASCII characters", data)
        case SignalFrame():
            if (frame.to is UNSET) == (frame.thread_id is UNSET):
                raise _refuse("a signal names either to or thread_id", data)
        case HelloFrame():
            if frame.card is not UNSET and not _is_object(frame.card):
                raise _refuse("card must be an object", data)
        case _:
            pass


def _is_object(raw: Raw) -> bool:
    return bytes(raw).lstrip()[:1] == b"{"


def _refuse(what: str, data: bytes) -> FrameError:
    return FrameError(InvalidFrame(f"{what[0].upper()}{what[1:]}."), _valid_keys(data))


def _reread_or_refuse(data: bytes, error: Exception) -> ClientFrame:
    """The slow path of a frame that did not decode: a duplicated field counts once, the last one; else say what is wrong."""
    if isinstance(error, msgspec.ValidationError):
        try:
            frame = _decoder.decode(encode(_FIELDS.decode(data)))
        except msgspec.DecodeError:
            pass
        else:
            _check_keys(frame, data)
            return frame
    elif b"\\u" in data and _SURROGATE.search(data):
        _refuse_lone_surrogates(data)
    keys = _valid_keys(data)
    kind = _frame_name(data)
    if isinstance(error, msgspec.ValidationError) and kind is not None and kind not in _NAMES:
        known = ", ".join(sorted(_NAMES))
        raise FrameError(InvalidFrame(f"No frame is called {kind!r}; the frames are {known}."), keys) from error
    where = f"The {kind} frame is wrong" if kind is not None else "The frame is wrong"
    raise FrameError(InvalidFrame(f"{where}: {error}."), keys) from error


def _fields(data: bytes) -> dict[str, Raw]:
    try:
        return _FIELDS.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        fields = json.loads(data)  # reads lone surrogates and NaN too: what is wrong with one field hides no other
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    return {name: Raw(encode(value)) for name, value in fields.items() if isinstance(value, str) and value.isascii()}


def _string(raw: Raw | None) -> str | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None


def _frame_name(data: bytes) -> str | None:
    name = _string(_fields(data).get("type"))
    return name if name is None or len(name) <= 40 else name[:40]


def _valid_keys(data: bytes) -> dict[str, str]:
    """The ids that the answer repeats: each valid ``message_id``, ``call_id`` or ``record_id`` of the frame it belongs to."""
    fields = _fields(data)
    name = {"send": "message_id", "call": "call_id", "record": "record_id"}.get(_string(fields.get("type")) or "")
    for key in (name,) if name else ("message_id", "call_id", "record_id"):
        value = _string(fields.get(key))
        if value is not None and is_key(value):
            return {key: value}
    return {}


def _refuse_lone_surrogates(data: bytes) -> None:
    try:
        json.dumps(json.loads(data), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The frame holds a lone surrogate; send valid Unicode."
        raise FrameError(InvalidFrame(message), _valid_keys(data)) from None
    except (ValueError, RecursionError):  # huge numbers: JSON all the same, carried as it came
        return


def _depth(data: bytes) -> int:
    """The deepest nesting of objects and arrays, counted outside strings."""
    deepest = depth = 0
    for token in re.finditer(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', data, re.DOTALL):
        char = token.group()
        if char in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in b"]}":
            depth -= 1
    return deepest
