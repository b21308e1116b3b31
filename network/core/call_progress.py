"""The running calls of an open reaction, and what each call waits for, according to the reaction's records.

The hub uses this information in two ways. When a process is lost, a failure is counted only for the reactions that the
process was working on. Screens show what an agent is doing. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from roundelay.network.frames import SEQ_LIMIT, Seq, is_id

from .tables import (
    CallWait,
    OpenReaction,
)

T = TypeVar("T")


def parser_of(shape: type[T]) -> Callable[[bytes], T | None]:
    """Return a parser for the body of a record. The parser ignores unknown fields. It returns None for a body that does
    not match the shape."""
    decoder = msgspec.json.Decoder(shape)

    def read(body: bytes) -> T | None:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError:
            return None

    return read


# `OpenReaction.calls` contains each call without a result. The value is True if the call waits for somebody else.
#
#   record              change of `calls`
#   started, again      all False: the process resumes, and counts as working until its calls wait again
#   tool_started 1.0    1.0: False
#   waiting 1.0         1.0: True
#   approval 1.0        1.0: False     somebody has decided, so the call continues
#   tool_result 1.0     remove 1.0 and all calls inside it (1.0/2.1)
#
# `OpenReaction.life` identifies the process that wrote the newest record. `Participant.life` identifies the process
# that holds the fencing token. A process was working on a reaction if both values identify this process and at least
# one innermost call does not wait. If the reaction has no running tool call, a model call was running.

CALL_KINDS = frozenset({"tool_started", "tool_result", "waiting", "approval"})
"""Kinds of records that report the state of a tool call."""


PROGRESS_KINDS = frozenset({"model_reply", "tool_result"})
"""Kinds of records that prove progress of a reaction. They reset the failure count of the reaction's trigger."""


REPEATED_KINDS = frozenset({"started", "waiting"})
"""Kinds of records that may repeat: a process resumes the reaction, or a call waits again."""


MAX_CALLS = 64
"""Maximum number of calls that are tracked per reaction. A reaction with more calls always counts as working."""


MAX_PLACE_CHARS = 128
"""Maximum length of the path of a tool call, in characters."""


MAX_AWAITED = 16
"""Maximum number of participants listed in a `CallWait`."""


MAX_REQUESTS = 128
"""Maximum number of messages that ask for the same decision. Also the maximum number of people who may decide."""


class _Call(Struct):
    turn: int = 0
    call: int = 0
    path: str = ""


_read_call = parser_of(_Call)


def parse_call_place(body: bytes) -> str:
    """Return the path of the call to which a record belongs. Return an empty string if the body does not match."""
    call = _read_call(body)
    if call is None:
        return ""
    position = f"{call.path}/{call.turn}.{call.call}" if call.path else f"{call.turn}.{call.call}"
    return position if len(position) <= MAX_PLACE_CHARS else ""


class _Vote(Struct):
    by: str = ""


class _Waiting(Struct):
    questions: dict[str, Seq] = {}
    until: int = 0
    is_approval: bool = False
    deciders: list[str] | None = None
    with_operators: bool = False
    votes: list[_Vote] = []


_read_waiting = parser_of(_Waiting)


def parse_wait(body: bytes) -> CallWait | None:
    """Return the wait that a ``waiting`` record reports. Return None if the body does not match."""
    waiting = _read_waiting(body)
    if waiting is None or not waiting.questions:
        return None
    if waiting.is_approval:
        copies = tuple((name, seq) for name, seq in waiting.questions.items() if is_id(name))
        return CallWait(
            request=next(iter(waiting.questions.values())),
            until=max(0, min(waiting.until, SEQ_LIMIT - 1)),
            copies=copies[:MAX_REQUESTS],
            with_operators=waiting.with_operators,
            deciders=None if waiting.deciders is None else tuple(filter(is_id, waiting.deciders[:MAX_REQUESTS])),
            voters=tuple(vote.by for vote in waiting.votes[:MAX_REQUESTS] if is_id(vote.by)),
        )
    return CallWait(tuple(name for name in waiting.questions if is_id(name))[:MAX_AWAITED])


def track_calls(opened: OpenReaction, kind: str, call: str, life: int, awaited: CallWait | None = None) -> OpenReaction:
    """Return the reaction as changed by one more record. ``life`` identifies the process that wrote the record. Return
    the same object if the record changes nothing."""
    calls = opened.calls
    if kind == "started":  # a process resumes the reaction, and counts as working until its calls wait again
        calls = dict.fromkeys(calls, False)
    elif kind == "tool_result":
        calls = {place: waits for place, waits in calls.items() if place != call and not _is_inside(place, call)}
    elif kind in CALL_KINDS:
        # Calls beyond the maximum share the empty path, which never waits. So the reaction counts as working until it
        # ends.
        if call not in calls and len(calls) >= MAX_CALLS:
            calls = {**calls, "": False}
        else:
            calls = {**calls, call: kind == "waiting"}
    awaits = opened.awaits if awaited is None else {**opened.awaits, call: awaited}
    # Remove a wait when its call ends or continues. Otherwise the inbox would list a decision that is no longer needed.
    awaits = {place: awaits[place] for place, waits in calls.items() if waits and place in awaits}
    if life == opened.life and calls == opened.calls and awaits == opened.awaits:
        return opened
    return msgspec.structs.replace(opened, life=life, calls=calls, awaits=awaits)


def is_at_work(opened: OpenReaction, life: int) -> bool:
    """Return whether the process ``life`` was working on a reaction. A process works if it runs a model call, or a tool
    call that does not wait for someone else."""
    if opened.life != life:
        return False  # another process wrote the newest record of the reaction
    innermost = innermost_calls(opened)
    return not innermost or not all(innermost.values())


def innermost_calls(opened: OpenReaction) -> dict[str, bool]:
    """Return the running calls of a reaction that contain no other running call. The value says whether the call
    waits."""
    return {
        place: waits
        for place, waits in opened.calls.items()
        if not any(_is_inside(other, place) for other in opened.calls)
    }


def _is_inside(place: str, outer: str) -> bool:
    """Return whether a call was made by a run inside another call."""
    return place.startswith((f"{outer}/", f"{outer}.")) if outer else False
