"""Step 2: check the form of a frame: JSON, nesting, fields, types, and the form of ids. The content is not checked.
Pure.

The fast path decodes a frame once. The slow path looks for the error in a malformed frame, so that the refusal can
describe the error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.core.visibility import VISIBILITIES, Visibility
from roundelay.network.errors import InvalidFrame, RequestError
from roundelay.network.frames import (
    CLIENT_FRAMES,
    AckFrame,
    BatchFrame,
    CallFrame,
    ClientFrame,
    HelloFrame,
    RecordFrame,
    SendFrame,
    SignalFrame,
    encode,
    is_id,
)

_BRACKET, _QUOTE, _BACKSLASH = (
    b'["\\'  # as numbers: searching bytes for a number is several times faster than for a string of one byte
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_decoder: msgspec.json.Decoder[ClientFrame] = msgspec.json.Decoder(ClientFrame)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
MAX_NUMBER_CHARS = 1000
"""Maximum number of characters in a number. The JSON parsers of common languages accept numbers of this length. Some
refuse numbers that are a few times longer."""
_NAMES = frozenset(str(cls.__struct_config__.tag) for cls in CLIENT_FRAMES)


class FrameError(Exception):
    """Raised for a malformed frame. ``keys`` holds the valid ids of the frame, which the answer repeats."""

    def __init__(self, error: RequestError, keys: dict[str, str]) -> None:
        super().__init__(str(error))
        self.error = error
        self.keys = keys


def read_frame(data: bytes, max_depth: int, *, is_brief: bool = False) -> ClientFrame:
    """Decode and check one text frame. The caller has checked that it is valid UTF-8. Raises `FrameError`.

    NaN, lone surrogates, deep nesting, long numbers, unknown fields, wrong types and malformed ids are refused. With
    ``is_brief``, the refusal of a frame that cannot be decoded contains no explanation, only the id near the beginning
    of the frame.
    """
    # Most frames are one object, or one object inside another. Detecting such frames with `rfind` costs a fraction of
    # the decoding, while `count` alone costs as much as the decoding.
    last = data.rfind(b"{")
    is_shallow = _BRACKET not in data and (last == 0 or (max_depth > 1 and data.rfind(b"{", 0, last) == 0))
    if not is_shallow and data.count(b"{") + data.count(b"[") > max_depth and _is_too_deep(data, max_depth):
        raise FrameError(
            InvalidFrame(f"The frame is nested deeper than {max_depth}; send flatter JSON."),
            _shown_keys(data) if is_brief else _valid_keys(_fields(data)),
        )
    # Note that msgspec accepts long numbers, but Python's `json` and other parsers refuse them. One such message would
    # break clients that use those parsers.
    if len(data) > MAX_NUMBER_CHARS and _has_long_number(data):
        raise FrameError(
            InvalidFrame(f"The frame holds a number of more than {MAX_NUMBER_CHARS} characters; send it as a string."),
            _shown_keys(data) if is_brief else _valid_keys(_fields(data)),
        )
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        if is_brief:
            raise FrameError(InvalidFrame("The frame is wrong."), _shown_keys(data)) from None
        return _reread_or_refuse(data, error)
    _check_keys(frame, data)
    return frame


def is_key(text: str) -> bool:
    """Return whether a text may be a ``message_id``, ``call_id`` or ``record_id``: 1 to 128 visible ASCII
    characters."""
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text


def _check_keys(frame: ClientFrame, data: bytes) -> None:
    # Check this before the match, whose class patterns are slow: nearly every frame is a SendFrame.
    if isinstance(frame, SendFrame):
        _check_send(frame, data)
        return
    if isinstance(frame, AckFrame):
        return
    match frame:
        case CallFrame():
            if not is_key(frame.call_id):
                raise _refuse("call_id must be 1 to 128 visible ASCII characters", data)
            if not _is_object(frame.args):
                raise _refuse("args must be an object", data)
        case RecordFrame():
            _check_record(frame, data)
        case BatchFrame():
            if not is_key(frame.batch_id):
                raise _refuse("batch_id must be 1 to 128 visible ASCII characters", data)
            for part in frame.frames:
                if isinstance(part, SendFrame):
                    _check_send(part, data)
                else:
                    _check_record(part, data)
        case SignalFrame():
            if (frame.to is UNSET) == (frame.thread_id is UNSET):
                raise _refuse("a signal names either to or thread_id", data)
            if frame.trigger is not UNSET and frame.thread_id is UNSET:
                raise _refuse("trigger is allowed only with thread_id: it must be a message of that thread", data)
        case HelloFrame():
            if frame.card is not UNSET:
                _check_card(frame.card, data)
        case _:
            pass


def _check_record(frame: RecordFrame, data: bytes) -> None:
    if not is_key(frame.record_id):
        raise _refuse("record_id must be 1 to 128 visible ASCII characters", data)
    if not is_key(frame.reaction) or not is_key(frame.kind):
        raise _refuse("reaction and kind must be 1 to 128 visible ASCII characters", data)


def _check_send(frame: SendFrame, data: bytes) -> None:
    if not is_key(frame.message_id):
        raise _refuse("message_id must be 1 to 128 visible ASCII characters", data)
    if frame.conversation is not UNSET:
        if not frame.to.startswith("agent:"):
            raise _refuse("conversation is allowed only with the address of a participant", data)
        if not is_id(frame.conversation):
            raise _refuse("conversation must be lower case letters, digits, '.', '_', '-', at most 64", data)
    # Most messages have none of these fields. This test lets them skip the checks below.
    if frame.metadata is UNSET and frame.requires_response is UNSET and frame.exclude_agent_ids is UNSET:
        return
    if frame.requires_response is False:
        raise _refuse("requires_response is true or a list of ids; leave it out otherwise", data)
    if isinstance(frame.requires_response, list) and not all(map(is_id, frame.requires_response)):
        raise _refuse("requires_response contains a value that is not an id", data)
    if frame.exclude_agent_ids is not UNSET:
        if frame.to != "broadcast":
            raise _refuse("exclude_agent_ids is allowed only with the address broadcast", data)
        if not all(map(is_id, frame.exclude_agent_ids)):
            raise _refuse("exclude_agent_ids contains a value that is not an id", data)
    if frame.metadata is not UNSET and not _is_object(frame.metadata):
        raise _refuse("metadata must be an object", data)


def _check_card(card: Raw, data: bytes) -> None:
    """Check the types of those fields of a card that other participants read. The owner may put any value into the
    other fields."""
    if not _is_object(card):
        raise _refuse("card must be an object", data)
    try:
        _card.decode(card)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refuse(
            f"card is wrong: {error}; description is a text, tags are texts, tools are names or objects, "
            f"visibility is one of {', '.join(VISIBILITIES)}",
            data,
        ) from error


class _Card(Struct):
    description: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    tools: list[str | dict[str, Any]] | UnsetType = UNSET
    visibility: Visibility | UnsetType = UNSET


_card = msgspec.json.Decoder(_Card)


def _is_object(raw: Raw) -> bool:
    return bytes(raw).lstrip()[:1] == b"{"


def _refuse(what: str, data: bytes) -> FrameError:
    return FrameError(InvalidFrame(f"{what[0].upper()}{what[1:]}."), _valid_keys(_fields(data)))


def _reread_or_refuse(data: bytes, error: Exception) -> ClientFrame:
    """Raise an error that explains why a frame could not be decoded. If the only error is a duplicated field, decode
    the frame so that the last value counts."""
    if isinstance(error, msgspec.ValidationError):
        try:
            # msgspec refuses a duplicated field of a struct, but other JSON parsers use the last value. So decode the
            # frame to a dict first.
            frame = _decoder.decode(encode(_FIELDS.decode(data)))
        except msgspec.DecodeError:
            pass
        else:
            _check_keys(frame, data)
            return frame
    elif b"\\u" in data and _SURROGATE.search(data):
        _refuse_lone_surrogates(data)
    fields = _fields(data)
    keys, kind = _valid_keys(fields), _frame_name(fields)
    if isinstance(error, msgspec.ValidationError) and kind is not None and kind not in _NAMES:
        names = ", ".join(sorted(_NAMES))
        raise FrameError(InvalidFrame(f"No frame is called {kind!r}; the frames are {names}."), keys) from error
    where = f"The {kind} frame is wrong" if kind is not None else "The frame is wrong"
    raise FrameError(InvalidFrame(f"{where}: {error}."), keys) from error


def _fields(data: bytes) -> dict[str, Raw]:
    try:
        return _FIELDS.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    return dict(_readable_fields(data))


def _readable_fields(data: bytes) -> Iterator[tuple[str, Raw]]:
    """Yield those string fields of a broken frame that can be found by looking only at strings and brackets.

    An error in one field does not hide the other fields, even if that field is nested too deeply, cut off or not JSON.
    A frame may consist only of brackets. So the search ends after `MAX_TOKENS` tokens, and costs no more than reading a
    correct frame.
    """
    depth = 0
    name, expects = None, "{"
    # The ids may be before or after the error. Scanning tokens finds the ids without decoding the rest.
    for match in itertools.islice(_TOKENS.finditer(data), MAX_TOKENS):
        token = match[0]
        if token[:1] in (b"{", b"["):
            if depth == 0 and token[:1] != b"{":
                return
            depth += len(token)
            name, expects = None, "name" if depth == 1 else ""
        elif token[:1] in (b"}", b"]"):
            depth -= len(token)
            if depth <= 0:
                return
        elif depth != 1:
            continue
        elif token == b",":
            name, expects = None, "name"
        elif token == b":" and expects == ":":
            expects = "value"
        elif token[:1] == b'"' and expects == "name":
            name, expects = _string(Raw(token)), ":"
        elif token[:1] == b'"' and expects == "value" and name is not None:
            yield name, Raw(token)
            expects = ""
        else:
            expects = ""


_TOKENS = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"?|[\[{]++|[\]}]++|[:,]|[^\s"\[\]{}:,]++', re.DOTALL
)  # an unterminated string is one match; otherwise the search would start again at each of its quotes
MAX_TOKENS = 256
SHOWN_BYTES = 512
"""Number of bytes at the beginning of a frame in which a brief refusal looks for the id. Clients put the id there."""


def _shown_keys(data: bytes) -> dict[str, str]:
    return _valid_keys(dict(_readable_fields(data[:SHOWN_BYTES])))


def _string(raw: Raw | None) -> str | None:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None


def _frame_name(fields: dict[str, Raw]) -> str | None:
    name = _string(fields.get("type"))
    return name if name is None or len(name) <= 40 else name[:40]


_ID_FIELDS = {"send": "message_id", "call": "call_id", "record": "record_id", "batch": "batch_id"}


def _valid_keys(fields: dict[str, Raw]) -> dict[str, str]:
    """Return the valid id of the frame, which the answer repeats: a ``message_id``, ``call_id``, ``record_id`` or
    ``batch_id``."""
    name = _ID_FIELDS.get(_string(fields.get("type")) or "")
    for key in (name,) if name else _ID_FIELDS.values():
        value = _string(fields.get(key))
        if value is not None and is_key(value):
            return {key: value}
    return {}


def _refuse_lone_surrogates(data: bytes) -> None:
    try:
        json.dumps(json.loads(data), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "The frame holds a lone surrogate; send valid Unicode."
        raise FrameError(InvalidFrame(message), _valid_keys(_fields(data))) from None
    except (ValueError, RecursionError):  # huge numbers are valid JSON and are forwarded unchanged
        return


def _is_too_deep(data: bytes, max_depth: int) -> bool:
    # Each frame in a batch may be as deep as a single frame.
    return _is_deeper(data, max_depth + _BATCH_DEPTH if data.startswith(_BATCH) else max_depth)


_BATCH = b'{"type":"batch",'
_BATCH_DEPTH = 2


def _is_deeper(data: bytes, max_depth: int) -> bool:
    """Return whether objects and arrays outside strings are nested deeper than ``max_depth``.

    Anyone may send any frame, so the check must not cost more than decoding the frame. Therefore it operates on whole
    bytes objects and not on single characters.
    """
    steps = _outside_strings(data).translate(_STEPS, _NO_BRACKETS)
    # Replacing whole pairs runs at the speed of C. A loop over characters would cost more than decoding the frame.
    while max_depth > 0:  # remove the innermost pairs, which reduces the depth by one level
        outer = steps.replace(b"\x01\xff", b"")
        # Stop if a pass removes few pairs: someone may build a frame so that each pass removes only one pair.
        if len(outer) * 8 > len(steps) * 7:
            break
        steps, max_depth = outer, max_depth - 1
    runs = ((1 if run[0] == 1 else -1) * len(run) for run in _RUNS.findall(steps))
    return any(map(max_depth.__lt__, itertools.accumulate(runs)))


def _has_long_number(data: bytes) -> bool:
    """Return whether any number is longer than `MAX_NUMBER_CHARS`. Usually examines only a few bytes."""
    return _has_long_run(data) and _has_long_run(_outside_strings(data))


def _has_long_run(data: bytes) -> bool:
    """Return whether a run of number characters is longer than `MAX_NUMBER_CHARS`. Such a run contains a byte whose
    index is a multiple of half this length, so only these bytes are examined."""
    step = MAX_NUMBER_CHARS // 2
    seen = data[step::step]
    if len(seen.translate(None, _NUMBER)) == len(seen):
        return False
    for place, byte in enumerate(seen, 1):
        if byte in _NUMBER:
            at = place * step
            before, after = data[max(0, at - MAX_NUMBER_CHARS) : at], data[at : at + MAX_NUMBER_CHARS + 1]
            length = len(before) - len(before.rstrip(_NUMBER)) + len(after) - len(after.lstrip(_NUMBER))
            if length > MAX_NUMBER_CHARS:
                return True
    return False


_NUMBER = b"0123456789.+-eE"


def _outside_strings(data: bytes) -> bytes:
    """Return the bytes between the strings of a frame. If the frame is not JSON, the result is an approximation."""
    if _QUOTE not in data:
        return data
    # Remove escaped backslashes first. Otherwise a quote after two backslashes would look escaped.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if _BACKSLASH in data else data
    return b" ".join(plain.split(b'"')[::2])


_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(sorted({*range(256)} - {*b"{[}]"}))
_RUNS = re.compile(rb"\x01+|\xff+")
