"""Rows of the log, and the facts about a message that rules need.

Rules decide by a `MessageHead` and never see content. The ledger stores a `Row` and returns it unchanged. No IO, no
clock.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct


class MessageHead(Struct, frozen=True, kw_only=True, gc=False):
    """The facts about a stored message that rules may use; never its content.

    ``label`` is the seq of the message whose people are the audience of this one: its own seq, or the label of its
    cause where no person reads the thread. ``excluded`` are the ids that the broadcast, or the first message of its
    reply thread, left out.
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
    """Facts stored under an idempotency key: enough to tell a repeat from a conflict. `Row` adds the rest."""

    seq: int
    stream: str = ""
    digest: str = ""
    data: bytes = b"{}"

    @property
    def is_damaged(self) -> bool:
        """Whether the stored row failed its checksum. Only its seq is known then."""
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

    ``actor`` and ``key`` form the idempotency key (``m:``, ``r:`` or ``c:`` and the client's id); ``key`` is empty for
    rows without one. ``target`` is the address whose readers receive the row. ``stream`` is the thread of a message or
    the reaction of a record. Both are empty for other rows. ``data`` is JSON: a message as it is delivered, or a
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
    """Return the stand-in for a stored row that failed its checksum."""
    return Row(seq=seq, at=0, type="damaged", actor="", data=b"")


class Span(Struct, frozen=True, gc=False):
    """A range of one target's rows: ``after`` < seq < ``before`` (None: no end)."""

    target: str
    after: int
    before: int | None = None
    has_open_threads: bool = False
    """Whether replies in the range are readable even if their thread began outside of the range."""
