"""Edits and deletions of messages.

The log stores one row per revision. An ``edited`` row contains the new content and the content before the edit. A
``deleted`` row contains the seqs of the message's edits. When a ledger stores such a row, it also rewrites the rows
that the row names, in the same transaction. So windows, deliveries, search, exports and backups always contain the
current content. The same rows produce the same result in every ledger, so a shared log needs no additional records. No
IO, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from roundelay.network.frames import WireMessage, encode

from .rows import Row, RowType

REVISIONS: frozenset[RowType] = frozenset(("edited", "deleted"))
DELETED_TEXT = "(deleted)"
"""Text of a deleted message, for clients that do not know the field ``deleted_at``."""


class Revision(Struct, frozen=True, omit_defaults=True):
    """Body of a row of type ``edited`` or ``deleted``. ``seq`` is the seq of the revised message."""

    seq: int
    content: Raw | UnsetType = UNSET
    text_representation: str | UnsetType = UNSET
    before: Raw | UnsetType = UNSET
    """Content and text before an edit: {`content`, `text_representation`?}."""
    edits: list[int] = []
    """Seqs of the ``edited`` rows of a deleted message. Their contents are removed too."""


_read_revision = msgspec.json.Decoder(Revision).decode
_read_message = msgspec.json.Decoder(WireMessage).decode


def list_revised(change: Row) -> list[int]:
    """Return the seqs of the rows that an ``edited`` or ``deleted`` row rewrites."""
    if change.is_damaged:
        return []
    revision = _read_revision(change.data)
    return [revision.seq, *revision.edits]


def revise(row: Row, change: Row) -> Row:
    """Return a row as it is after an edit or a deletion that names it. Applying the same revision again changes
    nothing."""
    revision = _read_revision(change.data)
    if row.is_damaged or (row.type, change.type) not in _PAIRS:
        return row
    if row.type == "edited":
        # Remove the digest too: a short text could be guessed from it.
        return msgspec.structs.replace(row, data=encode(Revision(revision.seq)), digest="")
    message = _read_message(row.data)
    if message.deleted_at is not UNSET:
        return row
    if change.type == "deleted":
        message = msgspec.structs.replace(
            message,
            content=Raw(b'""'),
            text_representation=DELETED_TEXT,
            requires_response=UNSET,
            metadata=UNSET,
            deleted_at=change.at,
        )
    # If the log was copied after a message was deleted, the rows of its edits have no content.
    elif revision.content is not UNSET:
        message = msgspec.structs.replace(
            message, content=revision.content, text_representation=revision.text_representation, edited_at=change.at
        )
    return msgspec.structs.replace(row, data=encode(message))


_PAIRS = frozenset((("message", "edited"), ("message", "deleted"), ("edited", "deleted")))


def revise_all(rows: Iterable[Row], changes: Iterable[Row]) -> dict[int, Row]:
    """Return the rows that these edits and deletions change, in their new form and by seq."""
    by_seq: Mapping[int, Row] = {row.seq: row for row in rows}
    revised: dict[int, Row] = {}
    for change in changes:
        for seq in list_revised(change):
            row: Any = revised.get(seq) or by_seq.get(seq)
            if row is not None:
                revised[seq] = revise(row, change)
    return revised


def is_revised(row: Row) -> bool:
    """Return whether a row was edited or deleted after it was appended."""
    if row.type == "edited":
        return _read_revision(row.data).content is UNSET
    if row.type != "message" or not (b'"edited_at"' in row.data or b'"deleted_at"' in row.data):
        return False
    message = _read_message(row.data)
    return message.edited_at is not UNSET or message.deleted_at is not UNSET
