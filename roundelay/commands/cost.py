"""``roundelay cost``: show the tokens that models used, and their cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import SEQ, check_id, db_option, identity_options, json_option, read_run
from roundelay.commands.output import show

if TYPE_CHECKING:
    from roundelay.runs.cost import CostReport
    from roundelay.runs.source import Source

GROUPS = ("agent", "model", "thread", "root", "reaction", "turn", "call", "day")
"""Ways to group the sums. Copied from `runs.cost.GROUPS`, because importing that module would slow down every
command."""


@click.command(short_help="Show the tokens that models used, and their cost.")
@click.option("--by", type=click.Choice(GROUPS), default="agent", show_default=True, help="How to group the sums.")
@click.option("--agent", "agent_id", metavar="ID", callback=check_id, help="Only this agent.")
@click.option("--thread", "thread_id", metavar="ID", help="Only reactions to messages of this thread.")
@click.option("--root", type=SEQ, metavar="SEQ", help="Only the conversation that began with this message.")
@click.option("--reaction", metavar="ID", help="Only this reaction.")
@click.option("--since", metavar="WHEN", help="Only records since 2h or 7d ago, or since a date like 2026-01-31.")
@db_option
@json_option
@identity_options
def cost(
    by: str,
    agent_id: str | None,
    thread_id: str | None,
    root: int | None,
    reaction: str | None,
    since: str | None,
    db: Path | None,
    as_json: bool,
) -> None:
    """Show the tokens that models used, and their cost where prices are known.

    If an agent runs inside another agent's call, its usage counts toward the calling agent. Operators see all agents.
    With --as ID --as-kind agent, only the records of that agent are counted. People who use the owner's token are
    operators.
    """
    from roundelay.runs.cost import CallFilter, parse_since, read_cost
    from roundelay.runs.cost_text import describe_cost

    try:
        since_ms = parse_since(since) if since is not None else 0
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{since!r} is not a time. Write 2h, 7d, or a date like 2026-01-31.", param_hint="--since"
        ) from error
    wanted = CallFilter(agent_id, thread_id, root, reaction, since_ms, after=root or 0)

    async def read(source: Source) -> CostReport:
        report = await read_cost(source, wanted, by)  # type: ignore[arg-type]  # click has checked the choice
        if root is not None and not report.groups:
            await source.chain(root)  # raises if the message does not exist
        return report

    report = read_run(db, read)
    show(report.to_json(), lambda paint: [describe_cost(report, paint=paint)], as_json=as_json)
