"""What models used and what that cost, from the ledger's records: ``roundelay cost`` by groups, ``/cost`` of a chat by
agents.

Only what the caller may see is counted: an agent sees its own records, an operator all. ``network.usage`` gives the
records: a reply, of an agent that runs inside of a call too; what tools and middleware used, by model; a review; and
the end of a reaction, which tells what no other record told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, get_args

from pydantic import BaseModel

from roundelay.agents.models.model import ModelUse, Usage
from roundelay.agents.models.tokens import Prices, has_price_table, write_dollars
from roundelay.display.screen import Paint, format_table
from roundelay.display.text import clean
from roundelay.network.client import NetworkClient
from roundelay.network.extras import how_to_add
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
"""What the names of a group are."""

FIGURES = ("CALLS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "TOOLS", "COST")
"""What stands beside the names."""


class UsedCall(BaseModel):
    """What a record tells of tokens: as a whole, less what it tells by model (``used``), which are calls of their own.
    ``path`` is empty but for an agent inside of a call."""

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
    """The reaction that sent the message which the call's one is to: of whoever asked this agent."""


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Which calls are asked for. Times are in milliseconds since the Unix epoch. With a ``reaction`` come those of the
    agents that it asked, and so on."""

    agent_id: str | None = None
    thread_id: str | None = None
    root: int | None = None
    reaction: str | None = None
    since: int = 0
    after: int = 0
    """No record at or below this seq is read: what followed from a root came after it."""

    def admits(self, call: UsedCall) -> bool:
        return call.at >= self.since and self.thread_id in (None, call.thread_id) and self.root in (None, call.root)


@dataclass(slots=True)
class Total:
    """A sum. ``unpriced``: models whose price is not known; ``cost`` is that of the others."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    tools: int = 0
    cost: Decimal = Decimal(0)
    unpriced: set[str] = field(default_factory=set)

    def add(self, call: UsedCall, prices: Prices) -> None:
        self.calls += call.kind in ("model_reply", USED)
        self.usage += call.usage
        self.tools += len(call.tools)
        if not call.usage.prompt_tokens and not call.usage.completion_tokens:
            return
        cost = prices.cost(call.model, call.usage) if call.model else None
        if cost is None:
            self.unpriced.add(call.model)
        else:
            self.cost += cost

    def to_json(self) -> dict[str, object]:
        """Give it for programs; dollars as a number, ``unpriced`` the models that it leaves out."""
        usage = self.usage
        return {
            "calls": self.calls,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
            "tools": self.tools,
            "usd": float(self.cost),
            "unpriced": sorted(self.unpriced),
        }


@dataclass(slots=True)
class CostReport:
    """The sums of the groups, by their names (`HEADS`), and of all."""

    by: By
    groups: dict[tuple[str, ...], Total] = field(default_factory=dict)
    total: Total = field(default_factory=Total)

    def add(self, call: UsedCall, prices: Prices) -> None:
        """Add a call to its group. A record of the loop's own that used nothing (a review that asked no model) makes no
        group."""
        if call.kind != "model_reply" and not call.tools and call.usage == Usage():
            return
        group = tuple(_NAMES[head](call) for head in HEADS[self.by])
        self.groups.setdefault(group, Total()).add(call, prices)
        self.total.add(call, prices)

    def by_cost(self) -> list[tuple[tuple[str, ...], Total]]:
        """Give the groups with their names, the dearest first."""
        return sorted(self.groups.items(), key=lambda it: (-it[1].cost, it[0]))

    def to_json(self) -> dict[str, object]:
        heads = HEADS[self.by]
        groups = [{**dict(zip(heads, names, strict=True)), **it.to_json()} for names, it in self.by_cost()]
        return {"by": self.by, "groups": groups, "total": self.total.to_json()}


async def read_cost(source: ReadableSource, wanted: CallFilter, by: By, prices: Prices | None = None) -> CostReport:
    """Add up the calls that are wanted. Reads pages, and keeps the sums alone."""
    report = CostReport(by)
    prices = prices or Prices()
    within = await _find_asked(source, wanted) if wanted.reaction is not None else None
    told: dict[tuple[str, str], Usage] = {}
    async for page in source.usage(wanted.agent_id, wanted.after):
        for call in _read_page(page, told):
            if wanted.admits(call) and (within is None or call.reaction in within):
                report.add(call, prices)
    return report


async def _find_asked(source: ReadableSource, wanted: CallFilter) -> set[str]:
    """Give the wanted reaction and those to messages that were sent in it, and so on."""
    sent: dict[str, set[str]] = {}
    async for page in source.usage(wanted.agent_id, wanted.after):
        for reaction, place in page["reactions"].items():
            sent.setdefault(place.get("sent_in", ""), set()).add(reaction)
    found, news = {str(wanted.reaction)}, {str(wanted.reaction)}
    while news:
        news = set().union(*(sent.get(it, set()) for it in news)) - found
        found |= news
    return found


def _read_page(page: Mapping[str, Any], told: dict[tuple[str, str], Usage]) -> Iterator[UsedCall]:
    """Give the calls of a page, of one agent. Of the end of a reaction, only what it tells beyond its replies and
    reviews (``told``, of each agent's reaction that is open); nothing for none."""
    for written in page["calls"]:
        place = page["reactions"].get(written["reaction"], {})
        more = {"agent_id": page["agent_id"], "sent_in": place.get("sent_in", "")}
        more |= {name: place.get(name) for name in ("thread_id", "root")}
        try:
            call = UsedCall(**{**written, **more})
        except ValueError:  # another program's, of its own shape
            continue
        reaction = (call.agent_id, call.reaction)
        used = sum((it.usage for it in call.used), Usage())
        for it in call.used:
            yield call.model_copy(update={"kind": USED, "model": it.model, "usage": it.usage, "tools": []})
        rest = _subtract(call.usage, used)
        if call.kind != "finished":
            told[reaction] = told.get(reaction, Usage()) + used + rest
            yield call.model_copy(update={"usage": rest})
            continue
        rest = _subtract(rest, told.pop(reaction, Usage()))
        if rest != Usage():
            yield call.model_copy(update={"usage": rest})


def _subtract(total: Usage, told: Usage) -> Usage:
    return Usage(*(max(0, getattr(total, it.name) - getattr(told, it.name)) for it in fields(Usage)))


_NAMES: dict[str, Callable[[UsedCall], str]] = {
    "agent": lambda it: it.agent_id,
    "model": lambda it: it.model or "-",
    "thread": lambda it: it.thread_id or "-",
    "root": lambda it: f"#{it.root}" if it.root is not None else "-",
    "reaction": lambda it: it.reaction,
    "asked in": lambda it: it.sent_in or "-",
    "turn": lambda it: f"{it.turn or '-'}{f' [{it.path}]' if it.path else ''}",
    "record": lambda it: f"#{it.seq}",
    "day": lambda it: f"{datetime.fromtimestamp(it.at / 1000, UTC):%Y-%m-%d}",
}


def read_since(text: str, now_s: float | None = None) -> int:
    """Read a time: ``2h``, ``30m``, ``7d`` ago, or a date, or a date with a time (of this machine's zone). Raises
    `ValueError` and `OverflowError`."""
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    if text[-1:] in units and text[:-1].isdigit():
        ago = timedelta(**{units[text[-1]]: int(text[:-1])})
        return int(((now_s if now_s is not None else time.time()) - ago.total_seconds()) * 1000)
    return int(datetime.fromisoformat(text).astimezone(UTC).timestamp() * 1000)


def describe_cost(report: CostReport, *, paint: Paint) -> str:
    """A table with a line for each group and their sum."""
    if not report.groups:
        return "No model was asked, as far as you may see: records are for their agent and for operators."
    heads = HEADS[report.by]
    rows = [(*names, *list_figures(total)) for names, total in report.by_cost()]
    if len(rows) > 1:
        rows.append(("all", *("" for _ in heads[1:]), *list_figures(report.total)))
    head = (*(it.upper() for it in heads), *FIGURES)
    table = format_table(head, rows, paint=paint)
    unknown = sorted(report.total.unpriced)
    if not unknown:
        return table
    names = ", ".join(clean(name) if name else "what no model is named for" for name in unknown)
    advice = (
        f"Prices come from genai-prices. Run: {how_to_add('prices')}"
        if not has_price_table()
        else "genai-prices, which tells them, knows none."
    )
    return f"{table}\nNo price is known of: {names}. {advice}"


def list_figures(total: Total) -> tuple[object, ...]:
    """Give a sum as what stands in a table, in the order of `FIGURES`."""
    used = total.usage
    cost = write_dollars(total.cost) if total.cost or not total.unpriced else "?"
    if total.cost and total.unpriced:
        cost += "+?"
    tokens = (used.prompt_tokens, used.cached_tokens, used.completion_tokens, used.reasoning_tokens)
    return (total.calls, *tokens, total.tools, cost)


@dataclass(slots=True)
class AgentUsage:
    """What one agent's reactions used. ``turns`` are model calls whose reply was recorded."""

    reactions: int = 0
    turns: int = 0
    usage: Usage = field(default_factory=Usage)


@dataclass(slots=True)
class UsageReport:
    """What some reactions used, by agent; ``hidden`` are those whose records are not ours to see, or not in our shape.
    ``others``: the model calls, and their tokens, of whoever else worked in the same conversations."""

    agents: dict[str, AgentUsage]
    hidden: int
    others: AgentUsage


async def read_usage(client: NetworkClient, noticed: Iterable[tuple[str, str]], seqs: Iterable[int]) -> UsageReport:
    """Add up what reactions used on these messages, unfinished ones included. ``noticed`` are further ones, each by its
    id and with its agent; whose a reaction is the hub says, where it knows, and none counts twice."""
    source, seqs = LiveSource(client), list(seqs)
    named = {**dict(noticed), **{reaction: agent_id for agent_id, reaction in await source.reactions_with(seqs)}}
    agents: dict[str, AgentUsage] = {}
    hidden = 0
    for reaction in await source.read_reactions((agent_id, it) for it, agent_id in sorted(named.items())):
        if reaction.run is None:
            hidden += 1
            continue
        of_agent = agents.setdefault(reaction.agent_id, AgentUsage())
        of_agent.reactions += 1
        of_agent.turns += len(reaction.replies)
        of_agent.usage += reaction.usage
    spent = await _read_spent(client, seqs)
    told = sum((it.usage for it in agents.values()), Usage())
    calls = max(spent.turns - sum(it.turns for it in agents.values()), 0)
    return UsageReport(dict(sorted(agents.items())), hidden, AgentUsage(0, calls, _subtract(spent.usage, told)))


async def _read_spent(client: NetworkClient, seqs: Iterable[int]) -> AgentUsage:
    """Give the model calls of the conversations of these messages, and their tokens, as the hub has added them up."""

    async def read(seq: int) -> tuple[int, dict[str, dict[str, int]]]:
        spent = await client.call("network.spent", {"seq": seq})
        return spent["root"], spent["of_root"]

    roots = dict(await read_concurrently(read, seqs))
    total = AgentUsage()
    for of_model in (it for of_root in roots.values() for it in of_root.values()):
        tokens = dict(of_model)
        total.turns += tokens.pop("calls")
        total.usage += Usage(**tokens)
    return total


def describe_usage(report: UsageReport, *, paint: Paint) -> str:
    """A table with a line for each agent and their sum, or why there is none."""
    notes = []
    if report.hidden:
        count = "1 reaction is" if report.hidden == 1 else f"{report.hidden} reactions are"
        notes.append(
            f"{count} hidden: records are for their agent and for operators, and some agents keep their own kind."
        )
    others = report.others
    if not report.agents and not others.turns:
        return "\n".join(notes or ["No agent has reacted yet to what was said since you joined."])
    rows = [_row(agent_id, it) for agent_id, it in report.agents.items()]
    if others.turns:
        rows.append(("others", "", *_row("", others)[2:]))
        notes.append(
            "Others are those that were asked in the same conversations, and reviews: the hub tells their sum."
        )
    known = [*report.agents.values(), others]
    total = sum((it.usage for it in known), Usage())
    rows.append(_row("all", AgentUsage(sum(it.reactions for it in known), sum(it.turns for it in known), total)))
    head = ("AGENT", "REACTIONS", "TURNS", "PROMPT", "CACHED", "COMPLETION")
    return "\n".join([format_table(head, rows, paint=paint), *notes])


def _row(name: str, it: AgentUsage) -> tuple[object, ...]:
    return (name, it.reactions, it.turns, it.usage.prompt_tokens, it.usage.cached_tokens, it.usage.completion_tokens)
