"""Functions that build the frames for messages and records from plain values. An argument that is None leaves its field
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, Raw, UnsetType

from roundelay.network.frames import RecordFrame, SendFrame, encode


def make_send(
    to: str,
    content: Any,
    *,
    message_id: str,
    text_representation: str | None = None,
    reply_to: int | None = None,
    cause: int | None = None,
    conversation: str | None = None,
    exclude_agent_ids: Sequence[str] | None = None,
    requires_response: Literal[True] | Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> SendFrame:
    return SendFrame(
        message_id=message_id,
        to=to,
        content=Raw(encode(content)),
        text_representation=UNSET if text_representation is None else text_representation,
        reply_to=UNSET if reply_to is None else reply_to,
        cause=UNSET if cause is None else cause,
        conversation=UNSET if conversation is None else conversation,
        exclude_agent_ids=UNSET if exclude_agent_ids is None else list(exclude_agent_ids),
        requires_response=_requirement(requires_response),
        metadata=UNSET if metadata is None else Raw(encode(dict(metadata))),
    )


def make_record(reaction: str, kind: str, body: Mapping[str, Any], *, record_id: str) -> RecordFrame:
    return RecordFrame(record_id=record_id, reaction=reaction, kind=kind, body=Raw(encode(dict(body))))


def _requirement(value: Literal[True] | Sequence[str] | None) -> bool | list[str] | UnsetType:
    if value is None:
        return UNSET
    return True if value is True else list(value)
