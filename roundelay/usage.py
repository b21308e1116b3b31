"""What reactions cost in tokens, read back from their records. Only what the caller may see: an agent its own, an operator all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from roundelay.agents.models.model import Usage
from roundelay.agents.records import fetch_records, read_records
from roundelay.network.client import NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.terminal import Paint, format_table

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
    """By agent, and how many reactions could not be read: not ours to see, or not in our shape."""

    agents: tuple[AgentUsage, ...]
    hidden: int


async def find_reactions(client: NetworkClient, seqs: Iterable[int]) -> set[ReactionOf]:
    """The reactions whose prompt holds one of these messages, which the caller must be able to read."""
    room = asyncio.Semaphore(READS_AT_ONCE)

    async def read(seq: int) -> set[ReactionOf]:
        async with room:
            status = await client.call("network.message_status", {"seq": seq})
        return {(it["reaction"], it["agent_id"]) for it in status["recipients"] if "reaction" in it}

    return set().union(*await asyncio.gather(*map(read, seqs)))


async def read_usage(client: NetworkClient, reactions: Iterable[ReactionOf]) -> UsageReport:
    """Add up the recorded replies of these reactions, unfinished ones included."""
    totals: dict[str, AgentUsage] = {}
    hidden = 0
    for reaction, agent_id in sorted(reactions):
        records = await fetch_records(client.call, reaction)
        try:
            run = read_records(records)
            replies = [reply for it in (run, *run.children.values()) for reply in it.replies.values()]
        except (RoundelayError, ValueError, TypeError, KeyError, AttributeError):  # another program's, of its own shape
            records = []
        if not records:
            hidden += 1
            continue
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
    if not report.agents:
        return "\n".join(notes or ["No agent has reacted yet to what was said since you joined."])
    total = sum((agent.usage for agent in report.agents), Usage())
    rows = [_row(agent.agent_id, agent.reactions, agent.turns, agent.usage) for agent in report.agents]
    reactions, turns = (sum(agent.reactions for agent in report.agents), sum(agent.turns for agent in report.agents))
    head = ("AGENT", "REACTIONS", "TURNS", "PROMPT", "CACHED", "COMPLETION")
    return "\n".join([format_table(head, [*rows, _row("all", reactions, turns, total)], paint=paint), *notes])


def _row(name: str, reactions: int, turns: int, usage: Usage) -> tuple[object, ...]:
    return (name, reactions, turns, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
