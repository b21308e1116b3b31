"""Format costs as tables for a terminal. The only IO is a check whether a price table is installed."""

from __future__ import annotations

from roundelay.agents.models.model import Usage
from roundelay.agents.models.tokens import has_price_table, write_dollars
from roundelay.display.screen import Paint, format_table
from roundelay.display.text import sanitize
from roundelay.network.extras import how_to_add
from roundelay.network.text import count
from roundelay.runs.cost import HEADS, AgentUsage, CostReport, Total, UsageReport

FIGURES = ("CALLS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "TOOLS", "COST")
"""Headings of the columns with figures. These columns follow the columns that name a group."""


def describe_cost(report: CostReport, *, paint: Paint) -> str:
    """Return a table with a line for each group and the total."""
    if not report.groups:
        return "No model calls that you may see. Records are visible to their agent and to operators."
    heads = HEADS[report.by]
    rows = [(*names, *list_figures(total)) for names, total in report.by_cost()]
    # With one group, the total would repeat the line of that group.
    if len(rows) > 1:
        rows.append(("all", *("" for _ in heads[1:]), *list_figures(report.total)))
    head = (*(name.upper() for name in heads), *FIGURES)
    table = format_table(head, rows, paint=paint)
    unpriced = sorted(report.total.unpriced)
    if not unpriced:
        return table
    names = ", ".join(sanitize(name) if name else "calls that name no model" for name in unpriced)
    advice = "genai-prices does not list them."
    if not has_price_table():
        advice = f"Prices come from genai-prices. Run: {how_to_add('prices')}"
    return f"{table}\nNo known price for: {names}. {advice}"


def list_figures(total: Total) -> tuple[object, ...]:
    """Return the table cells of a sum, in the order of `FIGURES`. An unknown price is shown as a question mark."""
    usage = total.usage
    # Show the zero of a free model. Only an unknown price becomes a question mark.
    cost = write_dollars(total.cost) if total.cost or not total.unpriced else "?"
    if total.cost and total.unpriced:
        cost += "+?"
    tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens)
    return (total.calls, *tokens, total.tools, cost)


def describe_usage(report: UsageReport, *, paint: Paint) -> str:
    """Return a table with a line for each agent and for the total, or a sentence that explains why there is no
    table."""
    notes = []
    if report.hidden:
        hidden = f"{count(report.hidden, 'reaction')} {'is' if report.hidden == 1 else 'are'} hidden"
        notes.append(
            f"{hidden}. Records are visible to their agent and to operators; some programs keep their own kind."
        )
    others = report.others
    if not report.agents and not others.turns:
        return "\n".join(notes or ["No agent has reacted since you joined."])
    rows = [_make_row(agent_id, usage) for agent_id, usage in report.agents.items()]
    if others.turns:
        rows.append(("others", "", *_make_row("", others)[2:]))
        notes.append("Others: agents that were asked in the same conversations, and reviews. The hub gives their sum.")
    usages = [*report.agents.values(), others]
    tokens = sum((usage.usage for usage in usages), Usage())
    total = AgentUsage(sum(it.reactions for it in usages), sum(it.turns for it in usages), tokens)
    rows.append(_make_row("all", total))
    head = ("AGENT", "REACTIONS", "TURNS", "PROMPT", "CACHED", "COMPLETION")
    return "\n".join([format_table(head, rows, paint=paint), *notes])


def _make_row(name: str, usage: AgentUsage) -> tuple[object, ...]:
    tokens = usage.usage
    return (name, usage.reactions, usage.turns, tokens.prompt_tokens, tokens.cached_tokens, tokens.completion_tokens)
