"""Budgets of tokens and of money: for a turn, a reaction, a root and a day. Reserved before a call of the model,
settled after it. Where the server counts nothing, the estimate counts.

What was spent is the hub's sums of the ledger's records (``network.spent``): they outlive restarts, and hold what other
agents, in whatever process, spent on the same root. Reservations are this process's: calls that are under way elsewhere
are not seen, so that a budget may be overrun by those. Exceeding one raises `ModelError` with ``budget``: the reaction
ends as `stopped`, whoever waits is told, and the hub tells the thread's readers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import Field

from roundelay.agents.isolation import retry_later
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.fallback import list_names
from roundelay.agents.models.model import AssistantMessage, ModelError, ModelReply, ModelRequest, Usage
from roundelay.agents.models.tokens import (
    Count,
    Price,
    Prices,
    count_message,
    count_request,
    estimate_tokens,
    write_dollars,
)
from roundelay.agents.options import IN_CODE, InFile, Strict, checked
from roundelay.agents.values import Finish
from roundelay.network.errors import UnknownOperation
from roundelay.network.extras import how_to_add

Scope = Literal["turn", "reaction", "root", "day"]
SCOPES: tuple[Scope, ...] = ("turn", "reaction", "root", "day")
Unit = Literal["tokens", "usd"]

OTHERS_SHARE = Decimal("0.75")
"""What the claims of one other agent may count of a conversation's budget."""

_NAMES = {"turn": "this turn", "reaction": "this reaction", "root": "this conversation", "day": "today"}

_Key = tuple[object, ...]
_RESERVED: dict[_Key, Decimal] = {}
"""What calls under way may take, by unit and what they are for: shared by all agents of the process, as a root's budget
is."""


class TokenLimits(Strict):
    """Of prompt and completion together, cached ones included."""

    turn: Annotated[int, Field(ge=1)] | None = None
    reaction: Annotated[int, Field(ge=1)] | None = None
    root: Annotated[int, Field(ge=1)] | None = None
    day: Annotated[int, Field(ge=1)] | None = None


class MoneyLimits(Strict):
    """In US dollars."""

    turn: Annotated[Decimal, Field(gt=0)] | None = None
    reaction: Annotated[Decimal, Field(gt=0)] | None = None
    root: Annotated[Decimal, Field(gt=0)] | None = None
    day: Annotated[Decimal, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class _Claim:
    """What one call needs of one budget."""

    key: _Key
    scope: Scope
    unit: Unit
    limit: Decimal
    spent: Decimal
    needed: Decimal
    by: str = ""
    """Who claims most of it, if that is another agent."""


def _check_limits(
    tokens: TokenLimits | None, usd: MoneyLimits | None, reserve: int, prices: Mapping[str, Price] | None
) -> None:
    if tokens is None and usd is None:
        raise ValueError("must have tokens or usd")
    for name, limits in (("tokens", tokens), ("usd", usd)):
        if limits is not None and all(getattr(limits, scope) is None for scope in SCOPES):
            raise ValueError(f"{name} limits nothing: say it for one of {', '.join(SCOPES)}")
    for scope in SCOPES:
        limit = getattr(tokens, scope, None)
        if limit is not None and reserve >= limit:
            raise ValueError(f"reserve ({reserve}) leaves nothing of the {limit} tokens for a {scope}: lower it")


class Budget(Middleware):
    """Stops an agent whose ``tokens`` or ``usd`` are spent. ``reserve`` is how many tokens a reply is expected to take.

    Raises `ConfigError` for options that a file could not have either.

    A root that was let go on (``network.resume_root``) has its budget once more. An agent that runs as a tool of
    another one has the middleware of its own; what it used counts in the reaction, the root and the day.
    """

    @checked(_check_limits)
    def __init__(
        self,
        tokens: Annotated[TokenLimits | Mapping[str, int] | None, InFile(TokenLimits | None)] = None,
        usd: Annotated[MoneyLimits | Mapping[str, Decimal] | None, InFile(MoneyLimits | None)] = None,
        *,
        reserve: Annotated[int, Field(ge=0)] = 1000,
        prices: Annotated[Mapping[str, Price] | None, InFile(dict[str, Price] | None)] = None,
        count: Annotated[Count, IN_CODE] = estimate_tokens,
    ) -> None:
        self._limits: dict[tuple[Unit, Scope], Decimal] = {}
        given: tuple[tuple[Unit, object], ...] = (("tokens", tokens), ("usd", usd))
        for unit, limits in given:
            for scope in SCOPES:
                limit = getattr(limits, scope, None)
                if limit is not None:
                    self._limits[unit, scope] = Decimal(limit)
        self._asks_hub = any(scope != "turn" for _, scope in self._limits)
        self._reserve = reserve
        self._prices = Prices(prices or {})
        self._count = count
        self._turns: dict[tuple[str, str], tuple[int, dict[Unit, Decimal]]] = {}  # of each run, by reaction and path

    async def around_reaction(self, around: Around, proceed: Callable[[], Awaitable[Finish]]) -> Finish:
        try:
            return await proceed()
        finally:
            self._turns.pop((around.reaction, around.path), None)

    async def around_model(
        self, around: Around, request: ModelRequest, proceed: Callable[[ModelRequest], Awaitable[ModelReply]]
    ) -> ModelReply:
        spent = await self._ask_hub(around) if self._asks_hub else {}
        asked = Usage(count_request(request.messages, request.tools, self._count), self._reserve)
        claims = [self._claim(around, key, spent, asked) for key in self._limits]
        for claim in claims:  # no await from here to the reservation
            held = _RESERVED.get(claim.key, Decimal(0))
            if claim.spent + held + claim.needed > claim.limit:
                raise ModelError(_refuse(claim, held), reason="budget")
        _reserve(claims, 1)
        try:
            reply = await proceed(request)
        finally:
            _reserve(claims, -1)
        if not reply.usage.prompt_tokens and not reply.usage.completion_tokens:  # a server that counts nothing
            written = count_message(AssistantMessage(reply.text, reply.tool_calls), self._count)
            reply = replace(reply, usage=Usage(asked.prompt_tokens, written))
        self._settle(around, reply)
        return reply

    async def _ask_hub(self, around: Around) -> Mapping[str, Any]:
        client = around.context.client
        args = {"seq": around.context.trigger.seq, "reaction": around.reaction}
        try:
            value: Mapping[str, Any] = await retry_later(lambda: client.call("network.spent", args))
        except UnknownOperation as error:
            sentence = "This hub does not add up what is spent, and a budget needs that: upgrade it."
            raise ModelError(sentence, reason="misconfigured") from error
        return value

    def _claim(self, around: Around, key: tuple[Unit, Scope], spent: Mapping[str, Any], asked: Usage) -> _Claim:
        unit, scope = key
        limit, by = self._limits[key], ""
        whose: object = around.agent.id
        match scope:
            case "turn":
                whose = (around.reaction, around.path)
                turn, sums = self._turns.get((around.reaction, around.path), (0, {}))
                used = sums.get(unit, Decimal(0)) if turn == around.state.turn else Decimal(0)
            case "root":
                whose, limit = spent["root"], limit * (1 + spent["resumed"])
                used, by = self._add_up_root(around, unit, spent, limit)
            case _:
                whose = around.reaction if scope == "reaction" else whose
                used = self._add_up(around, unit, spent[f"of_{scope}"])
        epoch = around.context.client.welcome.network.epoch
        needed = self._value(unit, asked, 1, list_names(around.model), list_names(around.agent.model))
        needed = round(needed, 9)  # so that sums of them come back to nothing
        return _Claim((epoch, unit, scope, whose), scope, unit, limit, used, needed, by)

    def _add_up_root(self, around: Around, unit: Unit, spent: Mapping[str, Any], limit: Decimal) -> tuple[Decimal, str]:
        """Give what the conversation has used, and who claims most if that is another agent. What one other
        agent's records claim counts for at most `OTHERS_SHARE` of the budget: one that lies, or goes astray, stops
        itself and not everybody."""
        by_agent: Mapping[str, Any] = spent.get("by_agent", {})  # a hub from before it kept them apart says none
        claims = {agent_id: self._add_up(around, unit, sums) for agent_id, sums in by_agent.items()}
        rest = max(Decimal(0), self._add_up(around, unit, spent["of_root"]) - sum(claims.values()))
        own = claims.pop(around.context.client.agent_id, Decimal(0))
        most = limit * OTHERS_SHARE
        used = own + (min(rest, most) if claims or own else rest) + sum(min(claim, most) for claim in claims.values())
        return used, max(claims, key=lambda agent_id: claims[agent_id], default="") if claims and max(
            claims.values()
        ) > own else ""

    def _add_up(self, around: Around, unit: Unit, sums: Mapping[str, Mapping[str, int]]) -> Decimal:
        total = Decimal(0)
        for model, used in sums.items():
            usage = Usage(*(used[field.name] for field in fields(Usage)))
            # What reviews and the like used is not told by model.
            total += self._value(unit, usage, used["calls"], [model] if model else list_names(around.agent.model))
        return total

    def _value(self, unit: Unit, usage: Usage, calls: int, *choices: Sequence[str]) -> Decimal:
        """Give what a usage counts. Money is by the dearest of several models, of the first ``choices`` of them that
        have a known price. Raises `ModelError` where none has one."""
        tokens = usage.prompt_tokens + usage.completion_tokens
        if unit == "tokens" or not tokens:
            return Decimal(tokens)
        for names in choices:
            costs = [cost for name in names if (cost := self._prices.cost(name, usage, calls)) is not None]
            if costs:
                return max(costs)
        sentence = (
            f'No price is known of the model "{" or ".join(choices[-1])}", and a budget in dollars needs it. Add the '
            f"price list ({how_to_add('prices')}), or set it under the budget's prices."
        )
        raise ModelError(sentence, reason="misconfigured")

    def _settle(self, around: Around, reply: ModelReply) -> None:
        turn, sums = self._turns.get((around.reaction, around.path), (0, {}))
        if turn != around.state.turn:
            sums = {}
        for unit, scope in self._limits:
            if scope == "turn":
                used = self._value(unit, reply.usage, 1, [reply.model], list_names(around.agent.model))
                sums = {**sums, unit: sums.get(unit, Decimal(0)) + used}
        self._turns[around.reaction, around.path] = (around.state.turn, sums)


def _reserve(claims: Iterable[_Claim], sign: Literal[1, -1]) -> None:
    for claim in claims:
        held = _RESERVED.get(claim.key, Decimal(0)) + sign * claim.needed
        if held:
            _RESERVED[claim.key] = held
        else:
            _RESERVED.pop(claim.key, None)


def _refuse(claim: _Claim, reserved: Decimal) -> str:
    """Say which budget it is, and how it stands."""
    spent, limit, needed, held = (
        write_dollars(amount) if claim.unit == "usd" else f"{int(amount):,} tokens"
        for amount in (claim.spent, claim.limit, claim.needed, reserved)
    )
    under_way = f", {held} are reserved by calls under way" if reserved else ""
    by = "another agent" if claim.by.startswith("~") else claim.by  # of whom the hub does not tell the name
    most_by = f", most of them by {by}" if by else ""
    used = f"{spent} of {limit} were used{most_by}{under_way}"
    return f"The budget for {_NAMES[claim.scope]} is spent: {used}, and the next call may take {needed}."
