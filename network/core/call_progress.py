"""Which calls of an open reaction run, and what they wait for, by the records that its agent writes. Pure."""

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


def _reads(shape: type[T]) -> Callable[[bytes], T | None]:
    """What reads a record's body as of one shape, unknown fields left out; None for a body of another."""
    decoder = msgspec.json.Decoder(shape)

    def read(body: bytes) -> T | None:
        try:
            return decoder.decode(body)
        except msgspec.DecodeError:
            return None

    return read


CALL_KINDS = frozenset({"tool_started", "tool_result", "waiting", "approval"})


PROGRESS_KINDS = frozenset({"model_reply", "tool_result"})


REPEATED_KINDS = frozenset({"started", "waiting"})
"""Of which a repeat says something: a process goes on with the reaction, and waits again."""


MAX_CALLS = 64
"""So many are told apart; with more of them a reaction is taken to be at work."""


MAX_PLACE_CHARS = 128


MAX_AWAITED = 16
"""Of one call, so many that it waits for are named."""


MAX_REQUESTS = 128
"""Maximum number of messages that ask for one decision, and of people who may give it."""


class _Call(Struct):
    turn: int = 0
    call: int = 0
    path: str = ""


_read_call = _reads(_Call)


def parse_call_place(body: bytes) -> str:
    """The place of the call that a record is about; empty for a body of another shape."""
    it = _read_call(body)
    if it is None:
        return ""
    place = f"{it.path}/{it.turn}.{it.call}" if it.path else f"{it.turn}.{it.call}"
    return place if len(place) <= MAX_PLACE_CHARS else ""


class _Vote(Struct):
    by: str = ""


class _Waiting(Struct):
    questions: dict[str, Seq] = {}
    until: int = 0
    is_approval: bool = False
    deciders: list[str] | None = None
    with_operators: bool = False
    votes: list[_Vote] = []


_read_waiting = _reads(_Waiting)


def parse_wait(body: bytes) -> CallWait | None:
    """What a ``waiting`` record says that its call waits for; None for a body of another shape."""
    it = _read_waiting(body)
    if it is None or not it.questions:
        return None
    if it.is_approval:
        copies = tuple((name, seq) for name, seq in it.questions.items() if is_id(name))
        return CallWait(
            request=next(iter(it.questions.values())),
            until=max(0, min(it.until, SEQ_LIMIT - 1)),
            copies=copies[:MAX_REQUESTS],
            with_operators=it.with_operators,
            deciders=None if it.deciders is None else tuple(filter(is_id, it.deciders[:MAX_REQUESTS])),
            voters=tuple(vote.by for vote in it.votes[:MAX_REQUESTS] if is_id(vote.by)),
        )
    return CallWait(tuple(name for name in it.questions if is_id(name))[:MAX_AWAITED])


def track_calls(opened: OpenReaction, kind: str, call: str, life: int, awaited: CallWait | None = None) -> OpenReaction:
    """The reaction after one more record, written in a process's ``life``; the same object if that changes nothing."""
    calls = opened.calls
    if kind == "started":  # a process goes on with it: until it has come to its waits again, it works
        calls = dict.fromkeys(calls, False)
    elif kind == "tool_result":
        calls = {it: waits for it, waits in calls.items() if it != call and not _is_inside(it, call)}
    elif kind in CALL_KINDS:
        if call not in calls and len(calls) >= MAX_CALLS:
            calls = {**calls, "": False}
        else:
            calls = {**calls, call: kind == "waiting"}
    awaits = opened.awaits if awaited is None else {**opened.awaits, call: awaited}
    awaits = {it: awaits[it] for it, waits in calls.items() if waits and it in awaits}
    if life == opened.life and calls == opened.calls and awaits == opened.awaits:
        return opened
    return msgspec.structs.replace(opened, life=life, calls=calls, awaits=awaits)


def is_at_work(opened: OpenReaction, life: int) -> bool:
    """Whether the process of this life was at it and did more than to wait: a model's or a tool's call was running."""
    if opened.life != life:
        return False  # it waits in the inbox for its turn
    innermost = innermost_calls(opened)
    return not innermost or not all(innermost.values())


def innermost_calls(opened: OpenReaction) -> dict[str, bool]:
    """The calls under way that have no other one inside of them, and whether each waits for somebody else."""
    return {it: waits for it, waits in opened.calls.items() if not any(_is_inside(other, it) for other in opened.calls)}


def _is_inside(place: str, outer: str) -> bool:
    """Whether a call is one of a run inside of another call."""
    return place.startswith((f"{outer}/", f"{outer}.")) if outer else False
