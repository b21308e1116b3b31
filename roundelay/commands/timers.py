"""``roundelay timers``: manage reminders and routines of the mod `timers`."""

from __future__ import annotations

from typing import Any

import click

from roundelay.commands.mod_calls import ListingGroup, call_mod, call_options, list_pages
from roundelay.commands.output import list_answer, show_answer
from roundelay.display.text import sanitize


@click.group(cls=ListingGroup, short_help="List, create and cancel reminders and routines.")
def timers() -> None:
    """List, create and cancel the timers of the mod `timers`. Without a subcommand, list them."""


@timers.command("list", short_help="List timers.")
@call_options
def list_timers(as_json: bool) -> None:
    """List the timers that you created or receive."""
    list_answer(
        {"timers": list_pages("timers.list", "timers")},
        {
            "TIMER": lambda it: it["timer"],
            "NEXT": lambda it: it["local_time"],
            "REPEATS": lambda it: it.get("cron", ""),
            "BY": lambda it: it["by"],
            "TO": lambda it: it["to"],
            "TEXT": lambda it: it["text"],
        },
        empty="There are no timers. `roundelay timers create TEXT --in MINUTES` creates one.",
        as_json=as_json,
    )


@timers.command("create", short_help="Create a timer.")
@click.argument("text")
@click.option("--in", "in_minutes", type=float, metavar="MINUTES", help="Once, after MINUTES.")
@click.option("--at", metavar="TIME", help="Once, as in ISO 8601: 2026-03-01T18:00.")
@click.option("--cron", metavar="EXPRESSION", help="Repeatedly: '0 8 * * *' is every day at 8.")
@click.option("--timezone", metavar="ZONE", help="Time zone of --at and --cron (UTC), such as Europe/Berlin.")
@click.option("--to", metavar="ID", help="Whom to send it to (you).")
@click.option("--missed", type=click.Choice(("run", "skip")), help="What to do with missed times (run).")
@call_options
def create_timer(as_json: bool, **args: Any) -> None:
    """Send TEXT later, to yourself or to --to ID. If the recipient is an agent, the message wakes it."""
    value = call_mod("timers.create", **args)
    text = f"Timer {value['timer']} sends to {value['to']} at {value['local_time']}."
    show_answer(value, lambda _: [sanitize(text)], as_json=as_json)


@timers.command("cancel", short_help="Cancel a timer.")
@click.argument("timer", type=click.IntRange(1), metavar="TIMER")
@call_options
def cancel_timer(timer: int, as_json: bool) -> None:
    """Cancel a timer that you created or receive."""
    value = call_mod("timers.cancel", timer=timer)
    show_answer(value, lambda _: [f"Timer {timer} is cancelled."], as_json=as_json)
