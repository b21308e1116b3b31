"""Sum model usage and cost from records, by groups (`read_cost`) or for a chat (`read_usage`).

Only records that the caller may see are counted: operators see all records, and an agent sees its own.
``network.usage`` lists model replies, the usage of tools and middleware, reviews, and the ends of reactions. The record
of a reaction's end repeats the sum of the reaction's other records, so only usage beyond that sum is counted.
`cost_text` draws the tables.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, get_args

from pydantic import BaseModel

from roundelay.agents.models.model import ModelUse, Usage
from roundelay.agents.models.tokens import Prices
from roundelay.network.client import NetworkClient
from roundelay.runs.node_source import LiveSource, read_concurrently
from roundelay.runs.source import ReadableSource

By = Literal["agent", "model", "thread", "root", "reaction", "turn", "call", "day"]
GROUPS: tuple[By, ...] = get_args(By)
USED = "used"

HEADS: dict[By, tuple[str, ...]] = {
    "agent": ("agent", "model"),
    "model": ("model",),
    "thread": ("thread", "agent", "model"),
    "root": ("root", "agent", "model"),
    "reaction": ("reaction", "asked in", "agent", "model"),
    "turn": ("reaction", "agent", "turn", "model"),
    "call": ("record", "agent", "turn", "model"),
    "day": ("day", "agent", "model"),
}
"""Headings of the columns that name a group, for each way of grouping."""


class UsedCall(BaseModel):
    """Token usage of one record, except the usage that the record lists by model (``used``).

    ``path`` is empty unless an agent ran inside a call.
    """

    seq: int
    at: int
    kind: str
    agent_id: str
    reaction: str
    path: str = ""
    turn: int | None = None
    model: str = ""
    usage: Usage = Usage()
    tools: list[str] = []
    used: list[ModelUse] = []
    thread_id: str | None = None
    root: int | None = None
    sent_in: str = ""
    """Id of the reaction in which another agent sent the trigger, to ask this agent."""

    @property
    def is_model_call(self) -> bool:
        return self.kind in ("model_reply", USED)

    @property
    def is_empty(self) -> bool:
        """Whether the record has no usage, for example a review without a model call."""
        return self.kind != "model_reply" and not self.tools and self.usage == Usage()

    def find_cost(self, prices: Prices) -> Decimal | None:
        """Return the cost in dollars, or None if the price of a used model is unknown."""
        # A call without tokens costs nothing, even if the model's price is unknown.
        if not self.usage.prompt_tokens and not self.usage.completion_tokens:
            return Decimal(0)
        return prices.cost(self.model, self.usage) if self.model else None


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Selection of the calls to count. Times are in milliseconds since the Unix epoch.

    ``reaction`` also includes all reactions to questions that the reaction asked, at any depth.
    """

    agent_id: str | None = None
    thread_id: str | None = None
    root: int | None = None
    reaction: str | None = None
    since: int = 0
    after: int = 0
    """Skip records up to this seq. Everything that a root message caused has a higher seq than the root."""

    def admits(self, call: UsedCall) -> bool:
        return call.at >= self.since and self.thread_id in (None, call.thread_id) and self.root in (None, call.root)


@dataclass(slots=True)
class Total:
    """Sum of usage and cost. ``cost`` excludes the models in ``unpriced``, whose prices are unknown."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    tools: int = 0
    cost: Decimal = Decimal(0)
    unpriced: set[str] = field(default_factory=set)

    def add(self, call: UsedCall, prices: Prices) -> None:
        self.calls += call.is_model_call
        self.usage += call.usage
        self.tools += len(call.tools)
        cost = call.find_cost(prices)
        if cost is None:
            # List the model instead of counting zero: otherwise the sum would look complete.
            self.unpriced.add(call.model)
        else:
            self.cost += cost

    def to_json(self) -> dict[str, object]:
        return {
            "calls": self.calls,
            **_tokens_to_json(self.usage),
            "tools": self.tools,
            "usd": float(self.cost),
            "unpriced": sorted(self.unpriced),
        }


@dataclass(slots=True)
class CostReport:
    """Sums of usage and cost by group, and the total. `HEADS` defines the names of a group."""

    by: By
    groups: dict[tuple[str, ...], Total] = field(default_factory=dict)
    total: Total = field(default_factory=Total)

    def add(self, call: UsedCall, prices: Prices) -> None:
        # Skip empty records: a row of zeros would look like a model call.
        if call.is_empty:
            return
        group = tuple(_NAMES[head](call) for head in HEADS[self.by])
        self.groups.setdefault(group, Total()).add(call, prices)
        self.total.add(call, prices)

    def by_cost(self) -> list[tuple[tuple[str, ...], Total]]:
        """Return the names and sums of the groups, most expensive first."""
        return sorted(self.groups.items(), key=lambda group: (-group[1].cost, group[0]))

    def to_json(self) -> dict[str, object]:
        heads = HEADS[self.by]
        groups = [{**dict(zip(heads, names, strict=True)), **total.to_json()} for names, total in self.by_cost()]
        return {"by": self.by, "groups": groups, "total": self.total.to_json()}


async def read_cost(source: ReadableSource, wanted: CallFilter, by: By, prices: Prices | None = None) -> CostReport:
    """Sum the wanted calls page by page, so that only the sums stay in memory."""
    report = CostReport(by)
    prices = prices or Prices()
    # Find all reactions in a first pass: an asked agent's reaction may be listed before the reaction that asked.
    reactions = await _find_asked(source, wanted) if wanted.reaction is not None else None
    async for call in _read_calls(source, wanted):
        if wanted.admits(call) and (reactions is None or call.reaction in reactions):
            report.add(call, prices)
    return report


async def list_costs(source: ReadableSource, prices: Prices) -> AsyncIterator[dict[str, Any]]:
    """Yield every call as JSON with its cost in dollars (``usd``), which is null if the price is unknown."""
    async for call in _read_calls(source, CallFilter()):
        if not call.is_empty:
            cost = call.find_cost(prices)
            yield {
                **call.model_dump(
                    include={"seq", "at", "agent_id", "reaction", "model", "thread_id", "root", "sent_in"}
                ),
                "calls": int(call.is_model_call),
                **_tokens_to_json(call.usage),
                "tools": len(call.tools),
                "usd": None if cost is None else float(cost),
            }


async def _find_asked(source: ReadableSource, wanted: CallFilter) -> set[str]:
    """Return the wanted reaction and all reactions to messages that were sent in it, at any depth."""
    by_asker: dict[str, set[str]] = {}
    async for page in source.usage(wanted.agent_id, wanted.after):
        for reaction, place in page["reactions"].items():
            by_asker.setdefault(place.get("sent_in", ""), set()).add(reaction)
    reactions, new = {str(wanted.reaction)}, {str(wanted.reaction)}
    while new:
        # Skip known reactions: in records of other programs, reactions may refer to each other in a circle.
        new = set().union(*(by_asker.get(reaction, set()) for reaction in new)) - reactions
        reactions |= new
    return reactions


async def _read_calls(source: ReadableSource, wanted: CallFilter) -> AsyncIterator[UsedCall]:
    # Keep the sums across pages, because a page may end in the middle of a reaction.
    counted: dict[tuple[str, str], Usage] = {}
    async for page in source.usage(wanted.agent_id, wanted.after):
        for call in _read_page(page, counted):
            yield call


def _read_page(page: Mapping[str, Any], counted: dict[tuple[str, str], Usage]) -> Iterator[UsedCall]:
    """Yield the calls of a page. ``counted`` maps each open reaction to its usage that was already yielded.

    The record of a reaction's end repeats the usage of its replies and reviews. Only the usage beyond that sum is
    yielded, so that nothing is counted twice.
    """
    for entry in page["calls"]:
        place = page["reactions"].get(entry["reaction"], {})
        context = {"agent_id": page["agent_id"], "sent_in": place.get("sent_in", "")}
        context |= {name: place.get(name) for name in ("thread_id", "root")}
        try:
            call = UsedCall(**{**entry, **context})
        except ValueError:  # a record in another program's format
            continue
        reaction = (call.agent_id, call.reaction)
        # Each listed model has its own price, so subtract its tokens from the sum of the record.
        used = sum((use.usage for use in call.used), Usage())
        for use in call.used:
            yield call.model_copy(update={"kind": USED, "model": use.model, "usage": use.usage, "tools": []})
        rest = _subtract(call.usage, used)
        if call.kind != "finished":
            counted[reaction] = counted.get(reaction, Usage()) + used + rest
            yield call.model_copy(update={"usage": rest})
            continue
        # Remove the sum at the end of a reaction, because a long log has many reactions.
        rest = _subtract(rest, counted.pop(reaction, Usage()))
        if rest != Usage():
            yield call.model_copy(update={"usage": rest})


def _subtract(total: Usage, part: Usage) -> Usage:
    # Sums of other programs may be inconsistent, and negative tokens would lower the cost of other calls.
    return Usage(*(max(0, getattr(total, it.name) - getattr(part, it.name)) for it in fields(Usage)))


def _tokens_to_json(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
    }


_NAMES: dict[str, Callable[[UsedCall], str]] = {
    "agent": lambda call: call.agent_id,
    "model": lambda call: call.model or "-",
    "thread": lambda call: call.thread_id or "-",
    "root": lambda call: f"#{call.root}" if call.root is not None else "-",
    "reaction": lambda call: call.reaction,
    "asked in": lambda call: call.sent_in or "-",
    "turn": lambda call: f"{call.turn or '-'}{f' [{call.path}]' if call.path else ''}",
    "record": lambda call: f"#{call.seq}",
    "day": lambda call: f"{datetime.fromtimestamp(call.at / 1000, UTC):%Y-%m-%d}",
}


def parse_since(text: str, now_s: float | None = None) -> int:
    """Parse an age (``2h``, ``30m``, ``7d``), a date, or a date with a time in this machine's time zone.

    Returns milliseconds since the Unix epoch. Raises `ValueError` and `OverflowError`.
    """
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    if text[-1:] in units and text[:-1].isdigit():
        age = timedelta(**{units[text[-1]]: int(text[:-1])})
        return int(((now_s if now_s is not None else time.time()) - age.total_seconds()) * 1000)
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)


@dataclass(slots=True)
class AgentUsage:
    """Usage of one agent's reactions. ``turns`` is the number of model calls with a recorded reply."""

    reactions: int = 0
    turns: int = 0
    usage: Usage = field(default_factory=Usage)


@dataclass(slots=True)
class UsageReport:
    """Usage of a selection of reactions, by agent.

    ``hidden`` is the number of reactions whose records the caller may not see or whose records another program wrote.
    ``others`` is the usage of all other agents in the same conversations.
    """

    agents: dict[str, AgentUsage]
    hidden: int
    others: AgentUsage


async def read_usage(client: NetworkClient, noticed: Iterable[tuple[str, str]], seqs: Iterable[int]) -> UsageReport:
    """Sum the usage of the reactions to the messages ``seqs``, including open reactions.

    ``noticed`` lists additional reactions as (id, agent). Each reaction is counted once, for the agent that owns it
    according to the hub.
    """
    source, seqs = LiveSource(client), list(seqs)
    # Put the hub's entries last, so that they replace noticed entries: the hub knows the owner of each reaction.
    names = {**dict(noticed), **{reaction: agent_id for agent_id, reaction in await source.reactions_with(seqs)}}
    agents: dict[str, AgentUsage] = {}
    hidden = 0
    for reaction in await source.read_reactions((agent_id, name) for name, agent_id in sorted(names.items())):
        if reaction.run is None:
            hidden += 1
            continue
        usage = agents.setdefault(reaction.agent_id, AgentUsage())
        usage.reactions += 1
        usage.turns += len(reaction.replies)
        usage.usage += reaction.usage
    conversation = await _read_conversation_usage(client, seqs)
    counted = sum((it.usage for it in agents.values()), Usage())
    # A record may arrive between the two reads, which could make the remainder negative.
    calls = max(conversation.turns - sum(it.turns for it in agents.values()), 0)
    return UsageReport(
        dict(sorted(agents.items())), hidden, AgentUsage(0, calls, _subtract(conversation.usage, counted))
    )


async def _read_conversation_usage(client: NetworkClient, seqs: Iterable[int]) -> AgentUsage:
    """Return the sums of model calls and tokens that the hub stores for the conversations of these messages."""

    async def read(seq: int) -> tuple[int, dict[str, dict[str, int]]]:
        spent = await client.call("network.spent", {"seq": seq})
        return spent["root"], spent["of_root"]

    roots = dict(await read_concurrently(read, seqs))
    total = AgentUsage()
    for model_sums in (sums for by_model in roots.values() for sums in by_model.values()):
        tokens = dict(model_sums)
        total.turns += tokens.pop("calls")
        total.usage += Usage(**tokens)
    return total
