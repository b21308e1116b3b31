"""Rows of the log, and heads of messages.

A `MessageHead` contains the fields of a message that the hub's rules need. The rules never see the content of a
message. The ledger stores a `Row` and returns it unchanged. No IO, no clock.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct


class MessageHead(Struct, frozen=True, kw_only=True, gc=False):
    """The fields of a stored message that rules may use. The content is not among them.

    ``label`` is a seq. The people who read the thread of the message with this seq are the audience of the message. The
    label is the message's own seq or, if no person reads the message's thread, the label of its cause. ``excluded`` are
    the ids that a broadcast excludes. A reply also has the excluded ids of its parent.
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
    """Fields of a row that are stored under its idempotency key. They suffice to distinguish a repeat from a conflict.
    The subclass `Row` has the other fields."""

    seq: int
    stream: str = ""
    digest: str = ""
    data: bytes = b"{}"

    @property
    def is_damaged(self) -> bool:
        """Whether the stored row failed its checksum. If so, only its seq is known."""
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
    "mod",
    "edited",
    "deleted",
    "damaged",
]


class Row(StoredKey, frozen=True, kw_only=True, gc=False):
    """One row of the log.

    ``actor`` and ``key`` form the idempotency key. ``key`` is empty, or a prefix (``m:``, ``r:`` or ``c:``) followed by
    an id that the client chose. ``target`` is the address whose readers receive the row. ``stream`` is the thread of a
    message or the reaction of a record, and empty for other rows. ``data`` is JSON: a message as it is delivered, or a
    record's body. A row of type ``damaged`` is never stored (`damaged_row`).
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
    """Return the placeholder for a stored row that failed its checksum."""
    return Row(seq=seq, at=0, type="damaged", actor="", data=b"")


class Span(Struct, frozen=True, gc=False):
    """A range of the rows of one target: ``after`` < seq < ``before``. If ``before`` is None, the range has no end."""

    target: str
    after: int
    before: int | None = None
    has_open_threads: bool = False
    """Whether a reply in the range is readable even if its thread began outside the range."""
