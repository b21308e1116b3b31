"""``roundelay reactions``: list reactions, show the records of a reaction, and stop a reaction."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import ask_hub, check_id, db_option, identity_options, json_option, read_run
from roundelay.commands.output import show, show_answer, show_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roundelay.display.screen import Paint
    from roundelay.runs.reading import Record
    from roundelay.runs.source import Source

MAX_LAST = 500


@click.group(short_help="List, show and stop agents' reactions.")
def reactions() -> None:
    """List the reactions of agents, show the records of one reaction, or stop it.

    Operators see all reactions. With --as ID --as-kind agent, you see only the reactions of that agent. People who use
    the owner's token are operators.
    """


@reactions.command("list", short_help="List open and recent reactions.")
@click.option("--agent", "agent_id", metavar="ID", callback=check_id, help="Only this agent.")
@click.option("--open", "only_open", is_flag=True, help="Only open reactions.")
@click.option(
    "--last",
    type=click.IntRange(1, MAX_LAST),
    default=100,
    show_default=True,
    metavar="N",
    help="Also show reactions whose prompt contains one of the last N messages.",
)
@db_option
@json_option
@identity_options
def list_command(agent_id: str | None, only_open: bool, last: int, db: Path | None, as_json: bool) -> None:
    """List open reactions, and reactions whose prompt contains one of the last messages, oldest first."""
    from roundelay.runs.reactions import list_open_reactions, list_reactions

    found = read_run(db, list_open_reactions if only_open else lambda source: list_reactions(source, last))
    shown = [it.to_json() for it in found if agent_id in (None, it.agent_id)]
    show_list(
        {"reactions": shown},
        {
            "REACTION": lambda it: it["reaction"],
            "AGENT": lambda it: it["agent_id"],
            "TRIGGER": lambda it: f"#{it['trigger']}",
            "THREAD": lambda it: it["thread_id"],
            "STATE": lambda it: it["state"],
            "TURNS": lambda it: it["turns"],
        },
        empty="There are none.",
        as_json=as_json,
    )


@reactions.command("show", short_help="Show the records of REACTION.")
@click.argument("reaction")
@click.option(
    "--agent",
    "agent_id",
    metavar="ID",
    callback=check_id,
    help="Show only the records of this agent, if several agents used the same reaction id.",
)
@db_option
@json_option
@identity_options
def show_command(reaction: str, agent_id: str | None, db: Path | None, as_json: bool) -> None:
    """Show the records of REACTION: its prompt, replies, tool calls with results, and end."""
    from roundelay.display.screen import CONTINUED, Screen, format_time
    from roundelay.display.text import sanitize, sanitize_lines
    from roundelay.network.errors import UnknownMessage
    from roundelay.runs.reactions import describe_record
    from roundelay.runs.reading import choose_author

    async def read(source: Source) -> tuple[list[Record], str]:
        return await source.records(reaction, agent_id), source.epoch

    records, epoch = read_run(db, read)
    if not records:
        raise UnknownMessage(f"There is no reaction {reaction!r} that you may read; see: roundelay reactions list")
    # Any participant may write records with this reaction id. Show the records of one author: mixed records would show
    # a reaction that never happened.
    author = choose_author(reaction, records, epoch)
    for other in sorted({str(it["agent_id"]) for it in records} - {author}):
        Screen(sys.stderr).note(f"{sanitize(other)} used this id too; show its records with --agent {sanitize(other)}")
    records = [it for it in records if it["agent_id"] == author]

    def describe(paint: Paint) -> Iterator[str]:
        for record in records:
            stamp = paint.dim(f"{format_time(record['at'])} #{record['seq']}")
            first, *others = sanitize_lines(describe_record(record))
            yield "\n".join([f"{stamp} {first}", *(CONTINUED + line for line in others)])

    value = {"reaction": reaction, "records": records}
    show_answer(value, describe, as_json=as_json)


@reactions.command("cancel", short_help="Ask REACTION to stop.")
@click.argument("reaction")
@json_option
@identity_options
def cancel_command(reaction: str, as_json: bool) -> None:
    """Ask REACTION to stop. If its agent is offline, the reaction stops when the agent reconnects."""
    from roundelay.display.text import sanitize
    from roundelay.network.errors import UnknownMessage

    stopped = ask_hub(lambda client: client.call("network.cancel", {"reaction": reaction}))["reactions"]
    if not stopped:
        raise UnknownMessage(f"You may stop no open reaction {reaction!r}; see: roundelay reactions list")
    show({"reactions": stopped}, lambda _: [f"Asked {sanitize(reaction)} to stop."], as_json=as_json)
