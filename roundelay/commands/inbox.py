"""``roundelay inbox``: list the decisions, questions, failures and budgets that wait for a person."""

from __future__ import annotations

from typing import Any

import click

from roundelay.commands.options import identity_options, join, json_option, run
from roundelay.commands.output import list_answer
from roundelay.display.text import format_day

MAX_LISTED = 1000
IN_WORDS = {"dead_letter": "failed", "fault": "cannot answer"}


@click.command(short_help="List what waits for you.")
@click.option(
    "--limit", type=click.IntRange(1, MAX_LISTED), default=100, show_default=True, help="Maximum number of entries."
)
@json_option
@identity_options
def inbox(limit: int, as_json: bool) -> None:
    """List what waits for you or for --as ID.

    The list has calls to decide on, unanswered questions, failed messages, stopped conversations and spent budgets.
    """
    list_answer(
        {"items": run(_read(limit))},
        {
            "WHAT": lambda it: IN_WORDS.get(it["kind"], it["kind"]),
            "MESSAGE": lambda it: f"#{it['seq']}" if it["seq"] else "",
            "AGENT": lambda it: it.get("agent_id", ""),
            "THREAD": lambda it: it.get("thread_id", ""),
            "AT": lambda it: format_day(it["at"]),
            "TEXT": lambda it: it["text"],
        },
        empty="Nothing waits for you.",
        as_json=as_json,
    )


async def _read(limit: int) -> list[dict[str, Any]]:
    from roundelay.runs.lists import list_inbox

    async with join(as_person=True) as client:
        return await list_inbox(client, limit=limit)
