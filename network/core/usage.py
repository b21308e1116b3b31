"""Tokens that models used, as records report them: parsed, limited, and added up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add, sub
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from roundelay.network.units import DAY_MS

from .call_progress import (
    _reads,
)
from .change import ChangeSet
from .sending import find_budget
from .tables import DayUsage, OpenReaction, TokenUsage

USAGE_KINDS = frozenset({"model_reply", "review", "used", "finished"})


MAX_MODELS = 16
"""Of one sum; further ones count under no name."""


MAX_MODEL_CHARS = 128


MAX_CLAIMANTS, MAX_MODELS_EACH = 64, 4
"""So many agents' sums are kept apart in one conversation, of so many models each; what others used counts in that
of all."""


_Tokens = Annotated[int, Meta(ge=0, le=10**12)]


class _Usage(Struct):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    cached_tokens: _Tokens = 0
    reasoning_tokens: _Tokens = 0


class _Reply(Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)
    model: str = ""


class _Use(Struct):
    """What one model was asked beside the turn's own request."""

    usage: _Usage
    model: str = ""


class _Told(Struct):
    """Of a record's body what is charged: ``reply`` of a ``model_reply``, ``usage`` of the other kinds. ``used`` is
    what of that is told by model."""

    reply: _Reply | None = None
    usage: _Usage | None = None
    used: list[_Use] = []


_read_told = _reads(_Told)


def parse_usage(kind: str, body: bytes) -> Mapping[str, TokenUsage] | None:
    """The tokens that a record tells of, by model, "" for what none is named for; None for nothing, or a body of
    another shape."""
    told = _read_told(body)
    if told is None:
        return None
    reply = told.reply if kind == "model_reply" else None
    used = [(it.model, TokenUsage(1, *msgspec.structs.astuple(it.usage))) for it in told.used]
    usage = reply.usage if reply is not None else told.usage
    if usage is not None:
        rest = _rest(
            TokenUsage(0, *msgspec.structs.astuple(usage)), reduce(_plus, (it for _, it in used), TokenUsage())
        )
        of_reply = msgspec.structs.replace(rest, calls=int(reply is not None))
        used.append((reply.model if reply is not None else "", of_reply))
    spent: dict[str, TokenUsage] = {}
    for model, it in used:
        if it != TokenUsage():
            spent = _add(spent, model[:MAX_MODEL_CHARS], it)
    return spent or None


def charge(change: ChangeSet, agent_id: str, reaction: str, spent: Mapping[str, TokenUsage], *, is_total: bool) -> None:
    """Add what a record tells of to its reaction's sum, its root's (of all, and of this agent) and its agent's of the
    day.

    A record that claims more than ``max_record_tokens`` of a model counts that.
    ``is_total``: what no model is named for is that of the whole reaction; what the sum has already is not added again.
    """
    key = f"{agent_id}/{reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    if opened is None:
        return
    if is_total:
        told = {model: it for model, it in spent.items() if model}
        # `parse_usage` has taken these out of the total, which holds what the sum has already as well.
        spent = {**told, "": _rest(spent.get("", TokenUsage()), total_usage(opened.spent))}
    most = change.rules.limits.max_record_tokens
    by_model = {model: _limit(it, most) for model, it in spent.items() if it != TokenUsage()}
    if not by_model:
        return
    root = opened.trigger_head.root
    budget = find_budget(change.state, change.facts, root, opened.trigger_head)
    claims = budget.claims
    if agent_id in claims or len(claims) < MAX_CLAIMANTS:
        claims = {**claims, agent_id: _add_all(claims.get(agent_id, {}), by_model, MAX_MODELS_EACH)}
    changed = msgspec.structs.replace(budget, spent=_add_all(budget.spent, by_model), claims=claims)
    change.set_value("root", str(root), changed)
    change.set_value("reaction", key, msgspec.structs.replace(opened, spent=_add_all(opened.spent, by_model)))
    day = change.stamp // DAY_MS
    of_day = usage_on(day, change.state.get("day", agent_id))
    change.set_value("day", agent_id, DayUsage(day, _add_all(of_day, by_model)))


def _limit(used: TokenUsage, most: int) -> TokenUsage:
    calls, *tokens = msgspec.structs.astuple(used)
    return TokenUsage(calls, *(min(count, most) for count in tokens))


def usage_on(day: int, newest: DayUsage | None) -> Mapping[str, TokenUsage]:
    """What was spent on a day, given what is kept of the newest one."""
    return newest.spent if newest is not None and newest.day == day else {}


def total_usage(spent: Mapping[str, TokenUsage]) -> TokenUsage:
    """All models together."""
    return reduce(_plus, spent.values(), TokenUsage())


def _add(
    spent: Mapping[str, TokenUsage], model: str, used: TokenUsage, most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    if model not in spent and len(spent) >= most:
        model = ""
    return {**spent, model: _plus(spent.get(model, TokenUsage()), used)}


def _add_all(
    spent: Mapping[str, TokenUsage], used: Mapping[str, TokenUsage], most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    summed = dict(spent)
    for model, it in used.items():
        summed = _add(summed, model, it, most)
    return summed


def _plus(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    return TokenUsage(*map(add, msgspec.structs.astuple(one), msgspec.structs.astuple(other)))


def _rest(total: TokenUsage, known: TokenUsage) -> TokenUsage:
    """What a total holds beyond what is known: never less than nothing, as middleware may count a reply for less than
    it was."""
    _calls, *tokens = (max(0, it) for it in map(sub, msgspec.structs.astuple(total), msgspec.structs.astuple(known)))
    return TokenUsage(0, *tokens)
