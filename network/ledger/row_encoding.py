"""Encoding of a row of the log in the file, and the places where a row is found. Each value is stored only once.

The JSON of a message begins with values that are also columns of its row. `write_columns` leaves this beginning out of
the stored JSON, and stores only the parts of the head that no column contains. `make_row` restores the beginning. The
beginning is left out only if it is exactly the text that `make_row` would write. All other rows, and rows of older
releases, are stored unchanged. No IO.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct

from roundelay.network.core.rows import MessageHead, Row

Columns = tuple[int, int, str, str, "str | None", "str | None", "str | None", "str | None", "str | None", "str | None",
                "str | None", str]  # fmt: skip
"""Type of a row's columns, in the order of `schema.LOG_COLUMNS`."""

MAX_BETWEEN = 96
"""Maximum number of bytes between the two parts of a message's beginning. `reply_to` and `cause` may stand between
these parts."""


class _HeadRest(Struct, array_like=True, gc=False):
    """The parts of a message's head that no column contains. ``root`` is 0 if the message is its own root. ``between``
    is the text between the two parts of the beginning."""

    kind: str
    sender_kind: str
    root: int
    hops: int
    cause: int | None = None
    between: str = ""


_encode_json = msgspec.json.Encoder().encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_head = msgspec.json.Decoder(MessageHead).decode
_decode_rest = msgspec.json.Decoder(_HeadRest).decode


def write_columns(row: Row) -> Columns:
    """Return the columns of a row, without its checksum."""
    label, head, data = _shorten(row)
    return (
        row.seq, row.at, row.type, row.actor, row.key or None, row.target or None, row.stream or None, label,
        json.dumps(row.excluded) if row.excluded else None, row.digest or None, head, data,
    )  # fmt: skip


def _shorten(row: Row) -> tuple[str | None, str | None, str]:
    """Return the label, head and data of a row, without the values that its other columns contain."""
    head, seq, data, key, label = row.head, row.seq, row.data, row.key, row.label
    if head is None:
        return label or None, None, data.decode()
    actor, target, stream = row.actor, row.target, row.stream
    if (
        head.seq == seq
        and head.sender_id == actor
        and head.to == target
        and head.thread_id == stream
        and head.excluded == row.excluded
        and label == str(head.label)
        and key[:2] == "m:"
    ):
        kind, sender_kind, root, hops, cause = head.kind, head.sender_kind, head.root, head.hops, head.cause
        beginning = _write_beginning(seq, key, kind, actor, sender_kind, target, stream)
        continuation = _write_continuation(root, hops, row.at)
        short = None if head.label == seq else label
        # Store 0 if the message is its own root. Most conversations consist of a single message, and a seq takes up to
        # 16 digits.
        if root == seq:
            root = 0
        # Compare bytes instead of trusting the fields. JSON with any other spelling must be stored completely and
        # returned unchanged.
        if data.startswith(whole := (beginning + continuation).encode()):
            if cause is None and kind.isalpha() and sender_kind.isalpha():  # letters need no escapes in JSON
                return short, f'["{kind}","{sender_kind}",{root},{hops}]', data[len(whole) :].decode()
            rest = _HeadRest(kind, sender_kind, root, hops, cause)
            return short, _encode_json(rest).decode(), data[len(whole) :].decode()
        if data.startswith(first := beginning.encode()):
            start, second = len(first), continuation.encode()
            # Limit the search, because the content of a message could contain the same text later.
            end = data.find(second, start, start + MAX_BETWEEN)
            if end >= 0:
                rest = _HeadRest(kind, sender_kind, root, hops, cause, data[start:end].decode())
                return short, _encode_json(rest).decode(), data[end + len(second) :].decode()
    return label or None, _encode_json(head).decode(), data.decode()


def _write_beginning(seq: int, key: str, kind: str, actor: str, sender_kind: str, target: str, stream: str) -> str:
    return (
        f'{{"seq":{seq},"message_id":"{key[2:]}","kind":"{kind}","sender_id":"{actor}","sender_kind":"{sender_kind}",'
        f'"to":"{target}","thread_id":"{stream}"'
    )


def _write_continuation(root: int, hops: int, at: int) -> str:
    return f',"root":{root},"hops":{hops},"sent_at":{at}'


def make_row(
    seq: int, at: int, type_: Any, actor: str, key: str | None, target: str | None, stream: str | None,
    label: str | None, excluded: str | None, digest: str | None, head: str | None, data: str, crc: int | None,
) -> Row:  # fmt: skip
    """Return the row for columns in the order of `schema.ROW_COLUMNS`. Raises one of `row_reader.UNREADABLE` for
    invalid columns."""
    message_head = make_head(seq, actor, target, stream, label, excluded, head)
    if head and head[0] == "[" and message_head is not None:
        kind, sender_kind, to, thread_id = (
            message_head.kind, message_head.sender_kind, message_head.to, message_head.thread_id
        )  # fmt: skip
        beginning = _write_beginning(seq, key or "", kind, actor, sender_kind, to, thread_id)
        continuation = _write_continuation(message_head.root, message_head.hops, at)
        data = f"{beginning}{_decode_rest(head).between}{continuation}{data}"
        label = label or str(seq)
    raw = data.encode()
    if crc is None:
        _check_json(raw)  # each client that receives invalid JSON would fail, and no checksum protects this row
    return Row(
        seq=seq, at=at, type=type_, actor=actor, key=key or "", target=target or "", stream=stream or "",
        label=label or "", excluded=_read_names(excluded), digest=digest or "", data=raw, head=message_head,
    )  # fmt: skip


def make_head(
    seq: int, actor: str, target: str | None, stream: str | None, label: str | None, excluded: str | None,
    head: str | None,
) -> MessageHead | None:  # fmt: skip
    """Return the head of a message from its columns. Raises the same errors as `make_row`."""
    if not head:
        return None
    if head[0] != "[":
        return _decode_head(head)
    rest = _decode_rest(head)
    return MessageHead(
        seq=seq, sender_id=actor, sender_kind=rest.sender_kind, kind=rest.kind, to=target or "", thread_id=stream or "",
        root=rest.root or seq, hops=rest.hops, label=int(label or seq), cause=rest.cause,
        excluded=_read_names(excluded),
    )  # fmt: skip


def _read_names(excluded: str | None) -> tuple[str, ...]:
    return tuple(json.loads(excluded)) if excluded else ()


# --- places


def list_places(row: Row) -> Iterator[str]:
    """Yield the places of a row. A place is a list of rows, in the order of seqs, that answers one kind of request.

    The prefixes are: ``to/`` for the row's target, ``by/`` for the sender of a message to one participant or mod,
    ``in/`` for a message's thread, ``re/`` for a record's reaction, and ``of/`` for an agent's records of one kind.
    """
    if row.target:
        yield f"to/{row.target}"
        if row.target.startswith(("agent:", "mod:")):
            yield f"by/{row.actor}"
    if row.stream:
        yield f"{'in' if row.type == 'message' else 're'}/{row.stream}"
    if row.type == "record":
        yield f"of/{row.actor}/{row.label}"


def collect_places(row: Row, places: defaultdict[str, list[int]]) -> None:
    """Add a row's seq to the list of each place in ``places``. The places are the same as those from `list_places`, but
    this function is faster for many rows."""
    seq, target, stream = row.seq, row.target, row.stream
    if row.type == "message" and target and stream:
        places[f"to/{target}"].append(seq)
        places[f"in/{stream}"].append(seq)
        if target.startswith(("agent:", "mod:")):
            places[f"by/{row.actor}"].append(seq)
    else:
        for place in list_places(row):
            places[place].append(seq)


def hash_key(actor: str, key: str) -> int:
    """Return the hash of an idempotency key. Two keys may share a hash, so the caller must also compare the row's key.

    Files depend on this hash, so it must never change. A test checks the values of the hash. The hash covers all 62
    bits of an id, even if the id begins with its time. With fewer bits, an attacker could find thousands of ids with
    the same hash within hours. Each new id would then cause a read of all earlier ones.
    """
    return _hash(f"{actor}\0{key}".encode())


def hash_bytes(actor: bytes, key: bytes) -> int:
    """Return the same hash as `hash_key`, for bytes that were read from a file and may be invalid UTF-8."""
    return _hash(b"%b\0%b" % (actor, key))


def _hash(name: bytes) -> int:
    (number,) = _NUMBER.unpack(blake2b(name, digest_size=_NUMBER.size).digest())
    return int(number >> 2)


_NUMBER = struct.Struct(">Q")
