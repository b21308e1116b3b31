"""Rows of the log, and the facts about a message that rules need. No IO, no clock."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct


class MessageHead(Struct, frozen=True, kw_only=True, gc=False):
    """What rules need to know of a stored message; never its content.

    ``label`` is the seq of the message whose people are this one's audience (its own, or that of a cause that had
    people). ``excluded`` are those whom a broadcast, or the message that a reply thread began with, left out.
    """

    seq: int
    sender_id: str
    sender_kind: str
    kind: str
    to: str
    thread_id: str
    root: int
    hops: int
    label: int
    cause: int | None = None
    excluded: tuple[str, ...] = ()


class StoredKey(Struct, frozen=True, gc=False):
    """What is stored under an idempotency key: of a row, what tells whether a repeat is the same. A `Row` is one."""

    seq: int
    stream: str = ""
    digest: str = ""
    data: bytes = b"{}"

    @property
    def is_damaged(self) -> bool:
        """Whether it stands in for a row that is not what was stored: of that nothing is known but the seq."""
        return not self.data


RowType: TypeAlias = Literal[
    "message",
    "record",
    "registered",
    "removed",
    "token",
    "channel",
    "joined",
    "left",
    "dead",
    "budget",
    "hold",
    "damaged",
]


class Row(StoredKey, frozen=True, kw_only=True, gc=False):
    """One entry of the log.

    ``actor`` and ``key`` are its idempotency key (``m:``, ``r:`` or ``c:`` and the client's id; empty when it has
    none). ``target`` is the address whose readers it is delivered to, ``stream`` the thread of a message or the
    reaction of a record; both are empty for other rows. ``data`` is JSON: a message as it is delivered, a record with
    its body. Of type ``damaged`` none is stored: it is a stand-in (`damaged_row`).
    """

    at: int
    type: RowType
    actor: str
    key: str = ""
    target: str = ""
    label: str = ""
    excluded: tuple[str, ...] = ()
    head: MessageHead | None = None


def damaged_row(seq: int) -> Row:
    """What is read in the place of a row that is not what was stored: its seq, and nothing else that was in it."""
    return Row(seq=seq, at=0, type="damaged", actor="", data=b"")


class Span(Struct, frozen=True, gc=False):
    """A range of one target's rows: ``after`` < seq < ``before`` (None: no end)."""

    target: str
    after: int
    before: int | None = None
    has_open_threads: bool = False
    """Whether replies in the range may be read even if the message that began their thread lies outside of it."""
