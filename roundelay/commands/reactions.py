"""An operator's commands for what agents do: list their reactions, read one's records, stop one."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import check_id, identity_options, join_as_reader, json_option, run

if TYPE_CHECKING:
    from roundelay.reading.reactions import ListedReaction

MAX_LAST = 500


@click.group(short_help="What agents do: list, show, stop it.")
def reactions() -> None:
    """What agents do: list their reactions, read the records of one, stop one.

    Operators see everybody's; with --as ID --as-kind agent it is that agent's own. People who use
    the owner's token are operators.
    """


@reactions.command("list", short_help="List what is open, and what came of the last messages.")
@click.option("--agent", "agent_id", metavar="ID", callback=check_id, help="Only those of this agent.")
@click.option("--open", "only_open", is_flag=True, help="Only those that have not finished.")
@click.option(
    "--last", type=click.IntRange(1, MAX_LAST), default=100, show_default=True, metavar="N",
    help="Beside the open ones, those that the last N messages are part of.",
)  # fmt: skip
@json_option
@identity_options
def list_command(agent_id: str | None, only_open: bool, last: int, as_json: bool) -> None:
    """List the open reactions, and those that the last messages are part of, the oldest first."""
    from roundelay.clean_text import clean
    from roundelay.reading.reactions import list_open_reactions, list_reactions
    from roundelay.terminal import Screen, format_table

    async def show() -> None:
        async with join_as_reader() as client:
            found = await (list_open_reactions(client) if only_open else list_reactions(client, last))
        shown = [it for it in found if agent_id in (None, it.agent_id)]
        if as_json:
            click.echo(json.dumps({"reactions": [it.to_json() for it in shown]}))
            return
        screen = Screen(sys.stdout)
        head = ("REACTION", "AGENT", "TRIGGER", "THREAD", "STATE", "TURNS")
        rows = [_row(it) for it in shown]
        screen.write(format_table(head, rows, paint=screen.paint) if rows else "There are none.")

    def _row(it: ListedReaction) -> tuple[object, ...]:
        return (clean(it.reaction), clean(it.agent_id), f"#{it.trigger}", clean(it.thread_id), it.state, it.turns)

    run(show())


@reactions.command("show", short_help="Show the records of REACTION.")
@click.argument("reaction")
@click.option(
    "--agent", "agent_id", metavar="ID", callback=check_id,
    help="What this agent wrote, where others wrote under the same id.",
)  # fmt: skip
@json_option
@identity_options
def show_command(reaction: str, agent_id: str | None, as_json: bool) -> None:
    """Show the records of REACTION: prompt, replies, calls with their results, the end."""
    from pydantic_core import to_json

    from roundelay.agents.records import fetch_records
    from roundelay.clean_text import clean, clean_json, clean_lines
    from roundelay.network.errors import UnknownMessage
    from roundelay.reading.reactions import choose_author, describe_record
    from roundelay.terminal import CONTINUED, Screen, format_time

    async def show() -> None:
        async with join_as_reader() as client:
            records = await fetch_records(client.call, reaction, agent_id)
            epoch = client.welcome.network.epoch
        if not records:
            raise UnknownMessage(f"There is no reaction {reaction!r} that you may read; see: roundelay reactions list")
        author = choose_author(reaction, records, epoch)
        for other in sorted({str(it["agent_id"]) for it in records} - {author}):
            Screen(sys.stderr).note(f"{clean(other)} has used this id too; what it wrote: --agent {clean(other)}")
        records = [it for it in records if it["agent_id"] == author]
        if as_json:
            # a number that no double holds is null: JSON has no infinity
            click.echo(clean_json(to_json({"reaction": reaction, "records": records}, inf_nan_mode="null").decode()))
            return
        screen = Screen(sys.stdout)
        for record in records:
            first, *others = clean_lines(describe_record(record))
            stamp = screen.paint.dim(f"{format_time(record['at'])} #{record['seq']}")
            screen.write("\n".join([f"{stamp} {first}", *(CONTINUED + line for line in others)]))

    run(show())


@reactions.command("cancel", short_help="Ask REACTION to stop.")
@click.argument("reaction")
@json_option
@identity_options
def cancel_command(reaction: str, as_json: bool) -> None:
    """Ask REACTION to stop; one whose agent is away stops when it is back."""
    from roundelay.clean_text import clean
    from roundelay.network.errors import UnknownMessage

    async def cancel() -> None:
        async with join_as_reader() as client:
            stopped = (await client.call("network.cancel", {"reaction": reaction}))["reactions"]
        if not stopped:
            raise UnknownMessage(f"No reaction {reaction!r} is open that you may stop; see: roundelay reactions list")
        click.echo(json.dumps({"reactions": stopped}) if as_json else f"Asked {clean(reaction)} to stop.")

    run(cancel())
