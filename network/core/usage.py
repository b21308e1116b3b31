"""Token usage of models. This module parses the usage in records, limits the reported numbers and adds them up.

It keeps three kinds of sums: per reaction, per conversation (in total and per agent), and per agent and day. Pure.
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
"""Maximum number of models in one sum. The tokens of all further models are added under the empty name."""


MAX_MODEL_CHARS = 128
"""Maximum length of a model's name in a sum, in characters. Longer names are cut."""


MAX_CLAIMANTS, MAX_MODELS_EACH = 64, 4
"""Maximum number of agents with their own sums in one conversation, and maximum number of models in each of these sums.
Tokens of further agents count only in the conversation's total."""


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
    """Tokens that one model used for requests other than the main request of a turn."""

    usage: _Usage
    model: str = ""


class _UsageBody(Struct):
    """Fields of a record's body that report tokens. A ``model_reply`` record has ``reply``, and other kinds have
    ``usage``. ``used`` assigns parts of the usage to models."""

    reply: _Reply | None = None
    usage: _Usage | None = None
    used: list[_Use] = []


_parse_body = parser_of(_UsageBody)


def parse_usage(kind: str, body: bytes) -> Mapping[str, TokenUsage] | None:
    """Return the tokens that a record reports, by model. The empty name stands for an unnamed model. Return None if the
    body is invalid or reports no tokens."""
    report = _parse_body(body)
    if report is None:
        return None
    reply = report.reply if kind == "model_reply" else None
    parts = [(part.model, TokenUsage(1, *msgspec.structs.astuple(part.usage))) for part in report.used]
    usage = reply.usage if reply is not None else report.usage
    # The total includes the parts that are assigned to models. Count only the remainder, or these parts would count
    # twice.
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
            # Cut the names and limit their number, because a record may contain any text as the name of a model.
            tokens = _add(tokens, model[:MAX_MODEL_CHARS], part)
    return tokens or None


def charge(change: ChangeSet, agent_id: str, reaction: str, spent: Mapping[str, TokenUsage], *, is_total: bool) -> None:
    """Add reported tokens to the sums of the reaction, of its conversation, and of the agent's day.

    Each number of tokens is limited to ``max_record_tokens`` per record and model, so that one false record cannot
    spoil a sum. With ``is_total``, the unnamed part of ``spent`` is the total of the whole reaction. Then the tokens
    that earlier records reported are subtracted first.
    """
    key = f"{agent_id}/{reaction}"
    opened: OpenReaction | None = change.state.get("reaction", key)
    if opened is None:
        return
    if is_total:
        named = {model: used for model, used in spent.items() if model}
        # `parse_usage` has already subtracted the named models from the total. Subtract the tokens of earlier records
        # too.
        spent = {**named, "": _subtract(spent.get("", TokenUsage()), total_usage(opened.spent))}
    most = change.rules.limits.max_record_tokens
    by_model = {model: _limit(used, most) for model, used in spent.items() if used != TokenUsage()}
    if not by_model:
        return
    # Use the root of the stored trigger, not a value from the record. An agent must not charge its tokens to another
    # conversation.
    root = opened.trigger_head.root
    budget = find_budget(change.state, change.facts, root, opened.trigger_head)
    claims = budget.claims
    # Limit the number of agents: any participant may answer, and each name is stored with the budget.
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
    """Return the usage on ``day``. ``newest`` is the stored usage of the newest day, so the usage of all other days
    counts as empty."""
    return newest.spent if newest is not None and newest.day == day else {}


def total_usage(spent: Mapping[str, TokenUsage]) -> TokenUsage:
    """Return the sum of the token usage of all models."""
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
    """Subtract a known part from a total. No result is below zero: the known part may be larger than the total, because
    middleware may report fewer tokens than the reply used."""
    _calls, *tokens = (
        max(0, count) for count in map(sub, msgspec.structs.astuple(total), msgspec.structs.astuple(known))
    )
    return TokenUsage(0, *tokens)
