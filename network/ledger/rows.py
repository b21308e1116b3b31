"""How a row of the log stands in the file: each fact once, and where it is found.

What a message is delivered as begins with what its row says in columns of their own, so that this beginning is left
out, and written again when it is read; of its head only what no column says is kept. It is left out where it is
exactly what would be written: any other row, and those of files from before, stands as it is. No IO.
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
"""Those of `schema.LOG_COLUMNS`."""

MAX_BETWEEN = 96
"""Bytes between the two parts of a beginning: what a message answers and follows from."""


class _Rest(Struct, array_like=True, gc=False):
    """What of a message's head stands in no column. ``root``: 0 for the message itself. ``between``: what its data has
    between the two parts of its beginning."""

    kind: str
    sender_kind: str
    root: int
    hops: int
    cause: int | None = None
    between: str = ""


_encode_json = msgspec.json.Encoder().encode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_head = msgspec.json.Decoder(MessageHead).decode
_decode_rest = msgspec.json.Decoder(_Rest).decode


def write_columns(row: Row) -> Columns:
    """The columns of a row, without its checksum."""
    label, head, data = _shorten(row)
    return (
        row.seq, row.at, row.type, row.actor, row.key or None, row.target or None, row.stream or None, label,
        json.dumps(row.excluded) if row.excluded else None, row.digest or None, head, data,
    )  # fmt: skip


def _shorten(row: Row) -> tuple[str | None, str | None, str]:
    """Label, head and data of a row, without what its other columns say."""
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
        begin, then = _begin(seq, key, kind, actor, sender_kind, target, stream), _go_on(root, hops, row.at)
        short = None if head.label == seq else label
        if root == seq:
            root = 0
        if data.startswith(whole := (begin + then).encode()):
            if cause is None and kind.isalpha() and sender_kind.isalpha():  # as JSON would have it
                return short, f'["{kind}","{sender_kind}",{root},{hops}]', data[len(whole) :].decode()
            said = _Rest(kind, sender_kind, root, hops, cause)
            return short, _encode_json(said).decode(), data[len(whole) :].decode()
        if data.startswith(first := begin.encode()):
            start, second = len(first), then.encode()
            end = data.find(second, start, start + MAX_BETWEEN)
            if end >= 0:
                said = _Rest(kind, sender_kind, root, hops, cause, data[start:end].decode())
                return short, _encode_json(said).decode(), data[end + len(second) :].decode()
    return label or None, _encode_json(head).decode(), data.decode()


def _begin(seq: int, key: str, kind: str, actor: str, sender_kind: str, target: str, stream: str) -> str:
    return (
        f'{{"seq":{seq},"message_id":"{key[2:]}","kind":"{kind}","sender_id":"{actor}","sender_kind":"{sender_kind}",'
        f'"to":"{target}","thread_id":"{stream}"'
    )


def _go_on(root: int, hops: int, at: int) -> str:
    return f',"root":{root},"hops":{hops},"sent_at":{at}'


def make_row(
    seq: int, at: int, type_: Any, actor: str, key: str | None, target: str | None, stream: str | None,
    label: str | None, excluded: str | None, digest: str | None, head: str | None, data: str, crc: int | None,
) -> Row:  # fmt: skip
    """The row of `schema.ROW_COLUMNS`. Raises one of `queries.UNREADABLE` for columns that are none's."""
    made = make_head(seq, actor, target, stream, label, excluded, head)
    if head and head[0] == "[" and made is not None:
        said = _decode_rest(head)
        begin = _begin(seq, key or "", made.kind, actor, made.sender_kind, made.to, made.thread_id)
        data = f"{begin}{said.between}{_go_on(made.root, made.hops, at)}{data}"
        label = label or str(seq)
    raw = data.encode()
    if crc is None:
        _check_json(raw)  # else every client that gets it would find out
    return Row(
        seq=seq, at=at, type=type_, actor=actor, key=key or "", target=target or "", stream=stream or "",
        label=label or "", excluded=_read_names(excluded), digest=digest or "", data=raw, head=made,
    )  # fmt: skip


def make_head(
    seq: int, actor: str, target: str | None, stream: str | None, label: str | None, excluded: str | None,
    head: str | None,
) -> MessageHead | None:  # fmt: skip
    """The head of a message, of its columns. Raises as `make_row` does."""
    if not head:
        return None
    if head[0] != "[":
        return _decode_head(head)
    said = _decode_rest(head)
    return MessageHead(
        seq=seq, sender_id=actor, sender_kind=said.sender_kind, kind=said.kind, to=target or "", thread_id=stream or "",
        root=said.root or seq, hops=said.hops, label=int(label or seq), cause=said.cause,
        excluded=_read_names(excluded),
    )  # fmt: skip


def _read_names(excluded: str | None) -> tuple[str, ...]:
    return tuple(json.loads(excluded)) if excluded else ()


# --- where rows are found


def list_places(row: Row) -> Iterator[str]:
    """The places that a row is found at, in the order of their seqs: ``to/`` whom it goes, ``by/`` who wrote to one
    participant or mod, ``in/`` the thread of a message, ``re/`` the reaction of a record, ``of/`` an agent's records of
    one kind."""
    if row.target:
        yield f"to/{row.target}"
        if row.target.startswith(("agent:", "mod:")):
            yield f"by/{row.actor}"
    if row.stream:
        yield f"{'in' if row.type == 'message' else 're'}/{row.stream}"
    if row.type == "record":
        yield f"of/{row.actor}/{row.label}"


def hash_key(actor: str, key: str) -> int:
    """The number that an idempotency key is found by. Whose it is says the row: two keys may have the same; a test pins
    it, since files depend on it.

    All 62 bits are the hash's, also of ids that begin with their time: with fewer, thousands of ids that have one
    number are found within hours, and each of them is looked at when the next one comes.
    """
    return _hash(f"{actor}\0{key}".encode())


def hash_bytes(actor: bytes, key: bytes) -> int:
    """`hash_key` of text as it stands in a file, where it may be no UTF-8."""
    return _hash(b"%b\0%b" % (actor, key))


def _hash(named: bytes) -> int:
    (number,) = _NUMBER.unpack(blake2b(named, digest_size=_NUMBER.size).digest())
    return int(number >> 2)


_NUMBER = struct.Struct(">Q")


def note_places(row: Row, places: defaultdict[str, list[int]]) -> None:
    """Note where a row is found: as `list_places`, of many rows at less cost."""
    seq, target, stream = row.seq, row.target, row.stream
    if row.type == "message" and target and stream:
        places[f"to/{target}"].append(seq)
        places[f"in/{stream}"].append(seq)
        if target.startswith(("agent:", "mod:")):
            places[f"by/{row.actor}"].append(seq)
    else:
        for place in list_places(row):
            places[place].append(seq)
