"""What reactions cost in tokens, read back from their records. Only what the caller may see: an agent its own, an operator all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from roundelay.agents.models.model import Usage
from roundelay.agents.records import fetch_fates, fetch_records
from roundelay.network.client import NetworkClient
from roundelay.reading.recording import read_run
from roundelay.terminal import Paint, format_table

A = TypeVar("A")
B = TypeVar("B")

READS_AT_ONCE = 16
"""Well below `max_reads`, which other calls of the session count in too."""
ReactionOf = tuple[str, str]
"""A reaction's id and its agent's."""


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """What one agent's reactions used. ``turns`` are model calls whose reply was recorded."""

    agent_id: str
    reactions: int
    turns: int
    usage: Usage


@dataclass(frozen=True, slots=True)
class UsageReport:
    """By agent, and how many reactions could not be read: not ours to see, or not in our shape. ``others``: the model
    calls, and their tokens, of whoever else worked in the same conversations."""

    agents: tuple[AgentUsage, ...]
    hidden: int
    others: tuple[int, Usage] = (0, Usage())


async def read_few_at_once(read: Callable[[A], Awaitable[B]], items: Iterable[A]) -> list[B]:
    """Read all of these from the hub, as many at a time as it takes from one session."""
    room = asyncio.Semaphore(READS_AT_ONCE)

    async def read_one(item: A) -> B:
        async with room:
            return await read(item)

    return await asyncio.gather(*map(read_one, items))


async def find_reactions(client: NetworkClient, seqs: Iterable[int]) -> set[ReactionOf]:
    """The reactions whose prompt holds one of these messages, which the caller must be able to read."""

    async def read(seq: int) -> set[ReactionOf]:
        return {(it["reaction"], it["agent_id"]) for it in await fetch_fates(client.call, seq) if "reaction" in it}

    return set().union(*await read_few_at_once(read, seqs))


async def read_spent(client: NetworkClient, seqs: Iterable[int]) -> tuple[int, Usage]:
    """Give the model calls of the conversations of these messages, and their tokens, as the hub has added them up."""

    async def read(seq: int) -> tuple[int, dict[str, dict[str, int]]]:
        spent = await client.call("network.spent", {"seq": seq})
        return spent["root"], spent["of_root"]

    roots = dict(await read_few_at_once(read, seqs))
    sums = [it for of_root in roots.values() for it in of_root.values()]
    tokens = (Usage(**{name: value for name, value in it.items() if name != "calls"}) for it in sums)
    return sum(it["calls"] for it in sums), sum(tokens, Usage())


def add_others(report: UsageReport, spent: tuple[int, Usage]) -> UsageReport:
    """Give the report with what is in ``spent`` beyond its agents."""
    calls, usage = spent
    told = sum((it.usage for it in report.agents), Usage())
    rest = {it.name: max(getattr(usage, it.name) - getattr(told, it.name), 0) for it in fields(Usage)}
    return replace(report, others=(max(calls - sum(it.turns for it in report.agents), 0), Usage(**rest)))


async def read_usage(client: NetworkClient, reactions: Iterable[ReactionOf]) -> UsageReport:
    """Add up the recorded replies of these reactions, unfinished ones included."""
    totals: dict[str, AgentUsage] = {}
    hidden = 0

    async def read(reaction: ReactionOf) -> list[Mapping[str, Any]]:
        return await fetch_records(client.call, *reaction)

    ordered = sorted(reactions)
    fetched = await read_few_at_once(read, ordered)
    for (_, agent_id), records in zip(ordered, fetched, strict=True):
        run = read_run(records)
        if run is None:
            hidden += 1
            continue
        replies = [reply for it in (run, *run.children.values()) for reply in it.replies.values()]
        before = totals.get(agent_id, AgentUsage(agent_id, 0, 0, Usage()))
        used = sum((reply.usage for reply in replies), before.usage)
        totals[agent_id] = AgentUsage(agent_id, before.reactions + 1, before.turns + len(replies), used)
    return UsageReport(tuple(totals[agent_id] for agent_id in sorted(totals)), hidden)


def describe_usage(report: UsageReport, *, paint: Paint) -> str:
    """A table with a line for each agent and their sum, or why there is none."""
    notes = []
    if report.hidden:
        count = "1 reaction is" if report.hidden == 1 else f"{report.hidden} reactions are"
        notes.append(
            f"{count} hidden: records are for their agent and for operators, and some agents keep their own kind."
        )
    calls, elsewhere = report.others
    if not report.agents and not calls:
        return "\n".join(notes or ["No agent has reacted yet to what was said since you joined."])
    total = sum((agent.usage for agent in report.agents), elsewhere)
    rows = [_row(agent.agent_id, agent.reactions, agent.turns, agent.usage) for agent in report.agents]
    reactions, turns = (sum(agent.reactions for agent in report.agents), sum(agent.turns for agent in report.agents))
    if calls:
        rows.append(_row("others", "", calls, elsewhere))
        turns += calls
        notes.append(
            "Others are those that were asked in the same conversations, and reviews: the hub tells their sum."
        )
    head = ("AGENT", "REACTIONS", "TURNS", "PROMPT", "CACHED", "COMPLETION")
    return "\n".join([format_table(head, [*rows, _row("all", reactions, turns, total)], paint=paint), *notes])


def _row(name: str, reactions: int | str, turns: int, usage: Usage) -> tuple[object, ...]:
    return (name, reactions, turns, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
