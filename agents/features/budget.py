"""Middleware that enforces budgets of tokens and money per turn, reaction, conversation (root) and day.

Before each model call, the middleware reserves the expected usage. After the call, the journal records the actual
usage. If the server reports no usage, the estimate is recorded instead. The hub adds up the recorded usage
(``network.spent``). The sums therefore survive restarts, and they include the usage of other agents in the same
conversation, in any process. Reservations are local to this process. The calls of another process count only after they
end, so several processes may exceed a budget together. If a call would exceed a budget, the middleware raises
`ModelError` with the reason ``budget``. The reaction then ends with the status `stopped`, waiting callers get an
answer, and the hub notifies the readers of the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal
from weakref import WeakSet

from pydantic import Field

from roundelay.agents.isolation import retry_later
from roundelay.agents.middleware import Around, AskModel, Middleware, RunReaction
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
"""Maximum share of a conversation's budget that one other agent's records may claim."""

_NAMES = {"turn": "this turn", "reaction": "this reaction", "root": "this conversation", "day": "today"}

_Key = tuple[object, ...]
_RESERVED: dict[_Key, Decimal] = {}
"""Reserved amounts of running calls, by unit and scope. All agents of the process share this dictionary, because they
may work on the same conversation.
"""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Held:
    """Tokens of a request whose reply the hub has not recorded yet."""

    key: _Key
    tokens: Decimal


_HELD: WeakSet[_Held] = WeakSet()
"""Requests of this process within the hub's budgets of conversations. A run that ends without a release drops its own."""


class TokenLimits(Strict):
    """Maximum number of tokens of prompt and completion together, including cached tokens."""

    turn: Annotated[int, Field(ge=1)] | None = None
    reaction: Annotated[int, Field(ge=1)] | None = None
    root: Annotated[int, Field(ge=1)] | None = None
    day: Annotated[int, Field(ge=1)] | None = None


class MoneyLimits(Strict):
    """Maximum cost in US dollars."""

    turn: Annotated[Decimal, Field(gt=0)] | None = None
    reaction: Annotated[Decimal, Field(gt=0)] | None = None
    root: Annotated[Decimal, Field(gt=0)] | None = None
    day: Annotated[Decimal, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class _Claim:
    """The amount that one model call needs from one budget."""

    key: _Key
    scope: Scope
    unit: Unit
    limit: Decimal
    spent: Decimal
    needed: Decimal
    by: str = ""
    """Agent that used most of the budget. Empty if this agent itself used most of the budget."""


def _check_limits(
    tokens: TokenLimits | None, usd: MoneyLimits | None, reserve: int, prices: Mapping[str, Price] | None
) -> None:
    if tokens is None and usd is None:
        raise ValueError("must set tokens or usd")
    for name, limits in (("tokens", tokens), ("usd", usd)):
        if limits is not None and all(getattr(limits, scope) is None for scope in SCOPES):
            raise ValueError(f"{name} limits nothing: set at least one of {', '.join(SCOPES)}")
    for scope in SCOPES:
        limit = getattr(tokens, scope, None)
        if limit is not None and reserve >= limit:
            raise ValueError(f"reserve ({reserve}) must be less than the {limit} tokens for a {scope}: lower it")


class Budget(Middleware):
    """Stops an agent when its budget of ``tokens`` or ``usd`` is used up. ``reserve`` is the expected number of tokens
    of a reply.

    When an operator lets a stopped conversation continue (``network.resume_root``), the conversation gets its full
    budget once more. An agent called as a tool has its own middleware, but its usage also counts toward the budgets of
    its caller. Raises `ConfigError` for invalid options.
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
        limits_by_unit: tuple[tuple[Unit, object], ...] = (("tokens", tokens), ("usd", usd))
        for unit, limits in limits_by_unit:
            for scope in SCOPES:
                limit = getattr(limits, scope, None)
                if limit is not None:
                    self._limits[unit, scope] = Decimal(limit)
        self._asks_hub = any(scope != "turn" for _, scope in self._limits)
        self._reserve = reserve
        self._prices = Prices(prices or {})
        self._count = count
        self._turns: dict[tuple[str, str], tuple[int, dict[Unit, Decimal]]] = {}  # usage per turn, by reaction and path

    async def around_reaction(self, around: Around, proceed: RunReaction) -> Finish:
        try:
            return await proceed()
        finally:
            self._turns.pop((around.reaction, around.path), None)

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        spent = await self._ask_hub(around) if self._asks_hub else {}
        # Estimate the usage, because the provider counts tokens only after they are spent.
        expected = Usage(count_request(request.messages, request.tools, self._count), self._reserve)
        claims = [self._make_claim(around, key, spent, expected) for key in self._limits]
        # no await between this check and the reservation, or another call could reserve the same amount
        for claim in claims:
            reserved = _RESERVED.get(claim.key, Decimal(0))
            if claim.spent + reserved + claim.needed > claim.limit:
                raise ModelError(_describe_exceeded(claim, reserved), reason="budget")
        _reserve(claims, 1)
        try:
            reply = await proceed(request)
        finally:
            # Always release the reservation. The records contain the actual usage after the call, and counting both
            # amounts would refuse calls too early.
            _reserve(claims, -1)
        reply = self._add_usage(reply, expected)
        self._record_usage(around, reply)
        return reply

    def _add_usage(self, reply: ModelReply, expected: Usage) -> ModelReply:
        """Return the reply with an estimated usage if the server reports none."""
        if reply.usage.prompt_tokens or reply.usage.completion_tokens:
            return reply
        output_tokens = count_message(AssistantMessage(reply.text, reply.tool_calls), self._count)
        return replace(reply, usage=Usage(expected.prompt_tokens, output_tokens))

    async def _ask_hub(self, around: Around) -> Mapping[str, Any]:
        client = around.context.client
        args = {"seq": around.context.trigger.seq, "reaction": around.reaction}
        try:
            value: Mapping[str, Any] = await retry_later(lambda: client.call("network.spent", args))
        except UnknownOperation as error:
            sentence = "This hub does not support budgets (it lacks network.spent). Upgrade the hub."
            raise ModelError(sentence, reason="misconfigured") from error
        return value

    def _make_claim(self, around: Around, key: tuple[Unit, Scope], spent: Mapping[str, Any], expected: Usage) -> _Claim:
        unit, scope = key
        limit, by = self._limits[key], ""
        owner: object = around.agent.id
        match scope:
            case "turn":
                owner = (around.reaction, around.path)
                turn, sums = self._turns.get((around.reaction, around.path), (0, {}))
                # This process itself counts the requests of the current turn, because they are not recorded yet.
                used = sums.get(unit, Decimal(0)) if turn == around.state.turn else Decimal(0)
            case "root":
                # Each time an operator resumes a stopped conversation, the conversation gets its full budget once more.
                owner, limit = spent["root"], limit * (1 + spent["resumed"])
                used, by = self._add_up_root(around, unit, spent, limit)
            case _:
                owner = around.reaction if scope == "reaction" else owner
                used = self._add_up(around, unit, spent[f"of_{scope}"])
        # Include the network's epoch in the key, because one process may serve agents of several networks that use the
        # same ids.
        epoch = around.context.client.welcome.network.epoch
        needed = self._convert(unit, expected, 1, list_names(around.model), list_names(around.agent.model))
        needed = round(needed, 9)  # round, so that adding and removing the same amounts returns to exactly 0
        return _Claim((epoch, unit, scope, owner), scope, unit, limit, used, needed, by)

    def _add_up_root(self, around: Around, unit: Unit, spent: Mapping[str, Any], limit: Decimal) -> tuple[Decimal, str]:
        """Return the conversation's usage, and the agent that used most of the budget, or an empty string if this is
        the agent itself.

        The records of one other agent count for at most `OTHERS_SHARE` of the budget. Therefore an agent that reports
        false usage, or that runs out of control, cannot use up the budget for all agents.
        """
        by_agent: Mapping[str, Any] = spent.get("by_agent", {})  # older hubs do not report this field
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
            # The recorded usage of reviews and summaries has no model name, so use the agent's own models.
            total += self._convert(unit, usage, used["calls"], [model] if model else list_names(around.agent.model))
        return total

    def _convert(self, unit: Unit, usage: Usage, calls: int, *choices: Sequence[str]) -> Decimal:
        """Convert a usage into the budget's unit.

        Each of ``choices`` is a list of models. For money, use the first list that contains a model with a known price,
        and the most expensive model in this list. Raises `ModelError` if no price is known.
        """
        tokens = usage.prompt_tokens + usage.completion_tokens
        if unit == "tokens" or not tokens:
            return Decimal(tokens)
        for names in choices:
            costs = [cost for name in names if (cost := self._prices.cost(name, usage, calls)) is not None]
            if costs:
                # Use the most expensive model, because the fallback model that will answer is not known before the
                # call.
                return max(costs)
        sentence = (
            f'The price of the model "{" or ".join(choices[-1])}" is unknown, and a budget in dollars needs it. '
            f"Install the price list ({how_to_add('prices')}), or set the price in the budget's prices."
        )
        raise ModelError(sentence, reason="misconfigured")

    def _record_usage(self, around: Around, reply: ModelReply) -> None:
        turn, sums = self._turns.get((around.reaction, around.path), (0, {}))
        if turn != around.state.turn:
            sums = {}  # a new turn starts: only the budget per turn is reset
        for unit, scope in self._limits:
            if scope == "turn":
                used = self._convert(unit, reply.usage, 1, [reply.model], list_names(around.agent.model))
                sums = {**sums, unit: sums.get(unit, Decimal(0)) + used}
        self._turns[around.reaction, around.path] = (around.state.turn, sums)


class HubBudget(Budget):
    """Stops a conversation that has used up the hub's budget of tokens (``limits.max_root_tokens``).

    The tokens of all agents count in full: an operator who sets this budget wants no higher sum. One agent that reports
    false usage can therefore stop a conversation, but `network.resume_root` grants the budget again.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(TokenLimits(root=limit), reserve=min(1000, limit // 2))

    async def ask(
        self, around: Around, request: ModelRequest, proceed: AskModel, releases: list[Callable[[], None]]
    ) -> ModelReply:
        """Send a request if the budget has room for it, and hold its tokens until the caller calls ``releases``.

        Call ``releases`` when the reply's record is stored. Until then, the hub's sum lacks the tokens of this request.
        """
        before = set(_HELD)
        spent = await self._ask_hub(around)
        expected = Usage(count_request(request.messages, request.tools, self._count), self._reserve)
        claim = self._make_claim(around, ("tokens", "root"), spent, expected)
        # The hub may have added up the sum before it stored a record that was released meanwhile. Count both sets.
        reserved = sum((it.tokens for it in before | set(_HELD) if it.key == claim.key), Decimal(0))
        if claim.spent + reserved + claim.needed > claim.limit:
            advice = (
                f"Type /resume {spent['root']} in chat to continue, or raise limits.max_root_tokens in the node's file."
            )
            raise ModelError(f"{_describe_exceeded(claim, reserved)} {advice}", reason="budget")
        held = _Held(claim.key, claim.needed)
        _HELD.add(held)
        try:
            reply = self._add_usage(await proceed(request), expected)
        except BaseException:
            _HELD.discard(held)
            raise
        held.tokens = Decimal(reply.usage.prompt_tokens + reply.usage.completion_tokens)
        releases.append(partial(_HELD.discard, held))
        return reply

    def _add_up_root(self, around: Around, unit: Unit, spent: Mapping[str, Any], limit: Decimal) -> tuple[Decimal, str]:
        by_agent = {agent_id: self._add_up(around, unit, sums) for agent_id, sums in spent["by_agent"].items()}
        most_by = max(by_agent, key=lambda agent_id: by_agent[agent_id], default="")
        is_own = most_by == around.context.client.agent_id
        return self._add_up(around, unit, spent["of_root"]), "" if is_own else most_by


def _reserve(claims: Iterable[_Claim], sign: Literal[1, -1]) -> None:
    for claim in claims:
        reserved = _RESERVED.get(claim.key, Decimal(0)) + sign * claim.needed
        if reserved:
            _RESERVED[claim.key] = reserved
        else:
            _RESERVED.pop(claim.key, None)


def _describe_exceeded(claim: _Claim, reserved: Decimal) -> str:
    """Describe the exceeded budget with its amounts."""
    spent, limit, needed, reserved_text = (
        write_dollars(amount) if claim.unit == "usd" else f"{int(amount):,} tokens"
        for amount in (claim.spent, claim.limit, claim.needed, reserved)
    )
    in_flight = f", {reserved_text} are reserved by running calls" if reserved else ""
    # the hub hides the names of agents that this agent may not see
    by = "another agent" if claim.by.startswith("~") else claim.by
    user = f", most of them by {by}" if by else ""
    used = f"{spent} of {limit} were used{user}{in_flight}"
    return f"Budget for {_NAMES[claim.scope]} exceeded: {used}, and the next call may need {needed}."
