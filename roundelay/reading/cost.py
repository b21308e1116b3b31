"""What models cost, read page by page from the ledger: ``roundelay cost``. Only what the caller may see: an agent its own, an operator all."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec

from roundelay.agents.features.prices import Prices, write_dollars
from roundelay.agents.features.usage import HEADS, By, Reader, Total, UsedCall, add_up
from roundelay.clean_text import clean
from roundelay.network.client import NetworkClient
from roundelay.terminal import Paint, format_table

PAGE = 500


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which calls are asked for. Times are in milliseconds since the Unix epoch."""

    agent_id: str | None = None
    thread_id: str | None = None
    root: int | None = None
    reaction: str | None = None
    since: int = 0
    after: int = 0
    """No record at or below this seq is read: what followed from a root came after it."""

    def admits(self, call: UsedCall) -> bool:
        return (
            call.at >= self.since
            and self.thread_id in (None, call.thread_id)
            and self.root in (None, call.root)
            and self.reaction in (None, call.reaction)
        )


@dataclass(slots=True)
class CostReport:
    """The sums of the groups, and of all."""

    by: By
    groups: dict[tuple[str, ...], Total] = field(default_factory=dict)

    @property
    def total(self) -> Total:
        total = Total()
        for each in self.groups.values():
            total.calls += each.calls
            total.usage += each.usage
            total.tools += each.tools
            total.cost += each.cost
            total.unpriced |= each.unpriced
        return total


async def read_cost(client: NetworkClient, wanted: Wanted, by: By, prices: Prices | None = None) -> CostReport:
    """Add up the calls that are wanted. Reads pages, and keeps the sums alone."""
    report = CostReport(by)
    prices = prices or Prices()
    async for calls in _read_pages(client, wanted):
        add_up((call for call in calls if wanted.admits(call)), by, prices, report.groups)
    return report


async def _read_pages(client: NetworkClient, wanted: Wanted) -> AsyncIterator[list[UsedCall]]:
    agent_id, is_first = wanted.agent_id, True
    while is_first or agent_id is not None:
        is_first = False
        reader, after, has_more = Reader(), wanted.after, True
        while has_more:
            args = {"after": after, "limit": PAGE, **({"agent_id": agent_id} if agent_id is not None else {})}
            page = await client.call("network.usage", args)
            yield list(reader.read(page))
            has_more = page["has_more"]
            after = page["calls"][-1]["seq"] if page["calls"] else after
        agent_id = page["next_agent"] if wanted.agent_id is None else None


def read_since(text: str, now_s: float | None = None) -> int:
    """Read a time: ``2h``, ``30m``, ``7d`` ago, or a date, or a date with a time (of this machine's zone). Raises `ValueError` and `OverflowError`."""
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
    rows = [
        (*map(clean, names), *_row(total))
        for names, total in sorted(report.groups.items(), key=lambda it: (-it[1].cost, it[0]))
    ]
    if len(rows) > 1:
        rows.append(("all", *("" for _ in heads[1:]), *_row(report.total)))
    head = (*(it.upper() for it in heads), "CALLS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "TOOLS", "COST")
    table = format_table(head, rows, paint=paint)
    unknown = sorted(report.total.unpriced)
    if not unknown:
        return table
    names = ", ".join(clean(name) if name else "what no model is named for" for name in unknown)
    advice = (
        "Prices come from genai-prices: pip install 'roundelay[prices]'"
        if find_spec("genai_prices") is None
        else "genai-prices, which tells them, knows none."
    )
    return f"{table}\nNo price is known of: {names}. {advice}"


def cost_to_json(report: CostReport) -> dict[str, object]:
    """The same for programs; dollars as numbers, ``unpriced`` the models that they leave out."""
    heads = HEADS[report.by]
    groups = [{**dict(zip(heads, names, strict=True)), **_write(total)} for names, total in report.groups.items()]
    return {"by": report.by, "groups": groups, "total": _write(report.total)}


def _row(total: Total) -> tuple[object, ...]:
    usage = total.usage
    cost = write_dollars(total.cost) if total.cost or not total.unpriced else "?"
    if total.cost and total.unpriced:
        cost += "+?"
    return (
        total.calls, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens, total.tools, cost,
    )  # fmt: skip


def _write(total: Total) -> dict[str, object]:
    usage = total.usage
    return {
        "calls": total.calls, "prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens, "reasoning_tokens": usage.reasoning_tokens, "tools": total.tools,
        "usd": float(total.cost), "unpriced": sorted(total.unpriced),
    }  # fmt: skip
