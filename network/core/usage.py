"""Tokens that models used, as records report them: parsed, limited and added up.

Sums are kept per reaction, per conversation (in total and per agent) and per agent and day. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import add, sub
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from roundelay.network.units import DAY_MS

from .call_progress import (
    parser_of,
)
from .change import ChangeSet
from .sending import find_budget
from .tables import DayUsage, OpenReaction, TokenUsage

USAGE_KINDS = frozenset({"model_reply", "review", "used", "finished"})
"""Kinds of records that report tokens."""


MAX_MODELS = 16
"""Maximum number of models in one sum. Further models are counted under the empty name."""


MAX_MODEL_CHARS = 128


MAX_CLAIMANTS, MAX_MODELS_EACH = 64, 4
"""Maximum number of agents with separate sums in one conversation, and of models in each sum. Others count only in the
total."""


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
    """Usage of one model in addition to the turn's own request."""

    usage: _Usage
    model: str = ""


class _UsageBody(Struct):
    """The fields of a record's body that report tokens: ``reply`` of a ``model_reply``, ``usage`` of other kinds.
    ``used`` splits a part of the usage by model."""

    reply: _Reply | None = None
    usage: _Usage | None = None
    used: list[_Use] = []


_parse_body = parser_of(_UsageBody)


def parse_usage(kind: str, body: bytes) -> Mapping[str, TokenUsage] | None:
    """Return the tokens that a record reports, by model. The empty name means an unnamed model. None if the body
    reports no tokens or does not match."""
    report = _parse_body(body)
    if report is None:
        return None
    reply = report.reply if kind == "model_reply" else None
    parts = [(part.model, TokenUsage(1, *msgspec.structs.astuple(part.usage))) for part in report.used]
    usage = reply.usage if reply is not None else report.usage
    # The total includes the parts that are split by model. Count only the remainder, or these parts would count twice.
    if usage is not None:
        rest = _subtract(
            TokenUsage(0, *msgspec.structs.astuple(usage)),
            reduce(_add_usage, (part for _, part in parts), TokenUsage()),
        )
        of_reply = msgspec.structs.replace(rest, calls=int(reply is not None))
        parts.append((reply.model if reply is not None else "", of_reply))
    tokens: dict[str, TokenUsage] = {}
    for model, part in parts:
        if part != TokenUsage():
            # Records name models freely, so names are cut and their number is bounded.
            tokens = _add(tokens, model[:MAX_MODEL_CHARS], part)
    return tokens or None


def charge(change: ChangeSet, agent_id: str, reaction: str, spent: Mapping[str, TokenUsage], *, is_total: bool) -> None:
    """Add reported tokens to the sums of the reaction, of its conversation, and of the agent's day.

    At most ``max_record_tokens`` of each model count per record, so that one false record cannot spoil a sum.
    ``is_total``: the unnamed part covers the whole reaction, so the tokens that the sum already contains are
    subtracted.
    """
    key = f"{agent_id}/{reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    if opened is None:
        return
    if is_total:
        named = {model: used for model, used in spent.items() if model}
        # `parse_usage` has already subtracted the named models from the total. The total also contains everything that
        # was counted before.
        spent = {**named, "": _subtract(spent.get("", TokenUsage()), total_usage(opened.spent))}
    most = change.rules.limits.max_record_tokens
    by_model = {model: _limit(used, most) for model, used in spent.items() if used != TokenUsage()}
    if not by_model:
        return
    # Use the stored trigger, not the record: a runner must not charge its tokens to another conversation.
    root = opened.trigger_head.root
    budget = find_budget(change.state, change.facts, root, opened.trigger_head)
    claims = budget.claims
    # A bound per conversation: anybody may answer in it, and each name is stored with its budget.
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
    """Return the usage on a day, given the newest stored day."""
    return newest.spent if newest is not None and newest.day == day else {}


def total_usage(spent: Mapping[str, TokenUsage]) -> TokenUsage:
    """Return the sum of all models."""
    return reduce(_add_usage, spent.values(), TokenUsage())


def _add(
    spent: Mapping[str, TokenUsage], model: str, used: TokenUsage, most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    if model not in spent and len(spent) >= most:
        model = ""
    return {**spent, model: _add_usage(spent.get(model, TokenUsage()), used)}


def _add_all(
    spent: Mapping[str, TokenUsage], used: Mapping[str, TokenUsage], most: int = MAX_MODELS
) -> dict[str, TokenUsage]:
    summed = dict(spent)
    for model, part in used.items():
        summed = _add(summed, model, part, most)
    return summed


def _add_usage(one: TokenUsage, other: TokenUsage) -> TokenUsage:
    return TokenUsage(*map(add, msgspec.structs.astuple(one), msgspec.structs.astuple(other)))


def _subtract(total: TokenUsage, known: TokenUsage) -> TokenUsage:
    """Return a total minus a known part, at least zero. The result could be negative, because middleware may report
    less than the reply used."""
    _calls, *tokens = (
        max(0, count) for count in map(sub, msgspec.structs.astuple(total), msgspec.structs.astuple(known))
    )
    return TokenUsage(0, *tokens)
