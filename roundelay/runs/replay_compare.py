"""Compare recorded rows with replayed rows, and describe the differences. This module performs no IO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundelay.network.core.rows import Row
from roundelay.network.frames import decode_json
from roundelay.network.messages import message_from_wire
from roundelay.network.text import shorten
from roundelay.runs.reactions import describe_record

_NOT_COMPARED: Mapping[str, frozenset[str]] = {
    "started": frozenset({"config_hash", "prompt_hash"}),  # the replay compares prompts when it asks the model
    "model_reply": frozenset({"request", "used"}),  # the replay does not repeat the model calls of middleware
    "waiting": frozenset({"until"}),
    "tool_started": frozenset({"once"}),  # older logs do not have this field
    "finished": frozenset(
        {"tool_calls", "usage", "used"}
        # Calls that a restart interrupted are not counted, but a replay has no interruptions, so skip the usage too.
    ),
}
MAX_WORDS = 120


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the recording and the replay: its sequence number in the log, its agent, and its
    description."""

    text: str
    seq: int | None = None
    agent_id: str = ""
    reaction: str = ""
    turn: int | None = None

    def __str__(self) -> str:
        place = [f"at #{self.seq}"] if self.seq is not None else []
        if self.reaction:
            place.append(f"reaction {self.reaction[:12]}")
        if self.turn is not None:
            place.append(f"turn {self.turn}")
        return f"{self.text} ({', '.join(place)})" if place else self.text


def compare_rows(recorded: Row, now: Row, *, is_input: bool) -> str | None:
    """Return the difference between a recorded row and its replay, or None.

    The send time is not compared. For input, the id is not compared either, because a call may replace the message.
    """
    names = ("type", "actor", "seq", *(("stream", "label", "key") if recorded.type == "record" else ()))
    then, present = decode_json(recorded.data), decode_json(now.data)
    if any(getattr(recorded, name) != getattr(now, name) for name in names):
        return _tell_rows(recorded, now)
    if recorded.type == "message":
        return _compare_messages(recorded, now, then, present, is_input=is_input)
    if (
        recorded.type == "record" and isinstance(then, dict) and isinstance(present, dict)
    ):  # otherwise another program wrote the row
        return _compare_records(recorded, then, present)
    return _tell_rows(recorded, now) if then != present else None


def _tell_rows(recorded: Row, now: Row) -> str:
    return f"then: {describe_row(recorded)}; now: {describe_row(now)}"


def _compare_messages(
    recorded: Row, now: Row, then: Mapping[str, Any], present: Mapping[str, Any], *, is_input: bool
) -> str | None:
    for field in sorted({*then, *present} - {"sent_at"} - ({"message_id"} if is_input else set())):
        if then.get(field) != present.get(field):
            what = "is another text" if field == "content" else f"has another {field}"
            return f"{_name_message(recorded)} {what}: {_tell_apart(then.get(field), present.get(field))}"
    # The recipients excluded from a broadcast are stored outside the body, so compare them separately.
    if recorded.excluded != now.excluded:
        return f"{_name_message(recorded)} leaves out others: {_tell_apart(recorded.excluded, now.excluded)}"
    return None


def _compare_records(recorded: Row, then: Mapping[str, Any], present: Mapping[str, Any]) -> str | None:
    for field in sorted({*then, *present} - _NOT_COMPARED.get(recorded.label, frozenset())):
        was, value = then.get(field), present.get(field)
        if was == value:
            continue
        match recorded.label, field:
            case "started", "manifest":
                other = _compare_manifests(was, value)
                return f"the prompt of {recorded.actor} for #{then.get('trigger')} contains other messages: {other}"
            case "tool_result", "content":
                what = f"call {then.get('turn')}.{then.get('call')} of {recorded.actor} ({then.get('tool')})"
                return f"{what} has another result: {_tell_apart(was, value)}"
            case _:
                what = f"the record {recorded.label} of {recorded.actor}"
                return f"{what} has another {field}: {_tell_apart(was, value)}"
    return None


def _compare_manifests(was: Any, now: Any) -> str:
    then, present = (set(it) if isinstance(it, list) else set() for it in (was, now))
    gone = ", ".join(f"#{seq}" for seq in sorted(then - present))
    new = ", ".join(f"#{seq}" for seq in sorted(present - then))
    told = ([f"without {gone}"] if gone else []) + ([f"with {new}"] if new else [])
    return ", ".join(told) or "in another order"


def describe_row(row: Row) -> str:
    """Describe a row in a few words."""
    body = decode_json(row.data)
    match row.type:
        case "message":
            return f'{_name_message(row)}: "{shorten(message_from_wire(body).text, MAX_WORDS)}"'
        case "record":
            told = describe_record({"kind": row.label, "body": body})
            return f"the record {row.label} of {row.actor} ({shorten(told, MAX_WORDS)})"
        case "joined" | "left":
            return f"{body.get('agent_id')} {row.type} the channel {body.get('channel')}"
        case "registered":
            return f"the registration of {row.actor}"
        case _:
            return f"{row.type} by {row.actor}: {shorten(json.dumps(body), MAX_WORDS)}"


def describe_frame(frame: Mapping[str, Any]) -> str:
    """Describe a frame in a few words."""
    match frame["type"]:
        case "send":
            text = frame.get("text_representation") or frame.get("content")
            return f'a message to {str(frame["to"]).removeprefix("agent:")}: "{shorten(str(text), MAX_WORDS)}"'
        case "record":
            told = describe_record({"kind": frame["kind"], "body": frame["body"]})
            return f"the record {frame['kind']} ({shorten(told, MAX_WORDS)})"
        case _:
            return f"{frame.get('op')} {shorten(json.dumps(frame.get('args')), MAX_WORDS)}"


def _name_message(row: Row) -> str:
    sender = row.actor.removeprefix("mod:")
    return f"#{row.seq}, {sender} to {row.target.removeprefix('agent:')}"


def _tell_apart(was: Any, now: Any) -> str:
    """Show the parts of two values around their first difference."""
    then, present = (it if isinstance(it, str) else json.dumps(it, ensure_ascii=False) for it in (was, now))
    same = 0
    while same < min(len(then), len(present)) and then[same] == present[same]:
        same += 1
    # Skip the beginning that both values share, except a few words before the difference.
    start = max(0, same - 20)
    lead = "..." if start else ""
    return f'was "{lead}{shorten(then[start:], MAX_WORDS)}", is "{lead}{shorten(present[start:], MAX_WORDS)}"'
