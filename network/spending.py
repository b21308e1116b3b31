"""What models cost a conversation and an agent: the tokens that records tell of, added up as they come. Pure.

Part of step 6. A runner writes them (docs/reactions.md), so the sums are as honest as it is; they bound nothing here. A runner asks for them
(`spending_operations`) and stops its next turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .change import ChangeSet, find_budget
from .tables import DAY_MS, DaySpent, OpenReaction, Spent

CHARGED = frozenset({"model_reply", "review", "finished"})
MAX_MODELS = 16
"""Of one sum; further ones count under no name."""
MAX_MODEL_CHARS = 128

_Tokens = Annotated[int, Meta(ge=0, le=10**12)]


class _Usage(Struct):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    cached_tokens: _Tokens = 0
    reasoning_tokens: _Tokens = 0


class _Reply(Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    model: str = ""


class _Told(Struct):
    """Of a record's body what is charged: ``reply`` of a ``model_reply``, ``usage`` of the other kinds."""

    reply: _Reply | None = None
    usage: _Usage | None = None


class Failure(Struct):
    """Of a ``model_failed`` record."""

    failure: str = ""
    reason: str = ""


_told = msgspec.json.Decoder(_Told)
_failure = msgspec.json.Decoder(Failure)


def read_spent(kind: str, body: bytes) -> tuple[str, Spent] | None:
    """Give the model and the tokens that a record tells of; None for nothing, or a body of another shape."""
    try:
        told = _told.decode(body)
    except msgspec.DecodeError:
        return None
    reply = told.reply if kind == "model_reply" else None
    usage = reply.usage if reply is not None else told.usage
    if usage is None:
        return None
    tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens)
    if kind != "model_reply" and not any(tokens):
        return None
    return (reply.model[:MAX_MODEL_CHARS] if reply is not None else ""), Spent(int(reply is not None), *tokens)


def read_failure(body: bytes) -> Failure | None:
    """Give why a model gave no reply; None for a body of another shape."""
    try:
        return _failure.decode(body)
    except msgspec.DecodeError:
        return None


def charge(change: ChangeSet, agent_id: str, reaction: str, spent: tuple[str, Spent], *, is_total: bool) -> None:
    """Add what a record tells of to its reaction's sum, its root's and its agent's of the day.

    ``is_total``: it is that of the whole reaction; what the sum has already is not added again.
    """
    key = f"{agent_id}/{reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    if opened is None:
        return
    model, used = spent
    if is_total:
        used = _rest(used, sum_up(opened.spent))
        if used == Spent():
            return
    root = opened.trigger_head.root
    budget = find_budget(change.state, change.facts, root)
    change.put_row("root", str(root), msgspec.structs.replace(budget, spent=_add(budget.spent, model, used)))
    change.put_row("reaction", key, msgspec.structs.replace(opened, spent=_add(opened.spent, model, used)))
    day = change.stamp // DAY_MS
    change.put_row("day", agent_id, DaySpent(day, _add(spent_on(day, change.state.get("day", agent_id)), model, used)))


def spent_on(day: int, newest: DaySpent | None) -> Mapping[str, Spent]:
    """What was spent on a day, given what is kept of the newest one."""
    return newest.spent if newest is not None and newest.day == day else {}


def sum_up(spent: Mapping[str, Spent]) -> Spent:
    """All models together."""
    total = Spent()
    for each in spent.values():
        total = _plus(total, each)
    return total


def _add(spent: Mapping[str, Spent], model: str, used: Spent) -> dict[str, Spent]:
    if model not in spent and len(spent) >= MAX_MODELS:
        model = ""
    return {**spent, model: _plus(spent.get(model, Spent()), used)}


def _plus(one: Spent, other: Spent) -> Spent:
    return Spent(*(a + b for a, b in zip(_figures(one), _figures(other), strict=True)))


def _rest(total: Spent, known: Spent) -> Spent:
    """What a total holds beyond what is known: never less than nothing, as middleware may count a reply for less than it was."""
    _calls, *tokens = (max(0, a - b) for a, b in zip(_figures(total), _figures(known), strict=True))
    return Spent(0, *tokens)


def _figures(spent: Spent) -> tuple[int, ...]:
    return spent.calls, spent.prompt_tokens, spent.completion_tokens, spent.cached_tokens, spent.reasoning_tokens
