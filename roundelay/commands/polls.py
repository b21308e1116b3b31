"""``roundelay polls``: create polls of the mod `polls`, vote in them, and close them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.mod_calls import ListingGroup, call_mod, call_options, list_pages
from roundelay.commands.output import list_answer, show_answer
from roundelay.display.text import format_day, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable

POLL = click.argument("poll", type=click.IntRange(1), metavar="POLL")


@click.group(cls=ListingGroup, short_help="List, create and close polls, and vote.")
def polls() -> None:
    """List, create, answer and close the polls of the mod `polls`. Without a subcommand, list them."""


@polls.command("list", short_help="List polls.")
@click.option("--thread", "thread_id", metavar="ID", help="Only polls of this thread.")
@click.option("--open", "is_open", is_flag=True, help="Only polls that are open.")
@call_options
def list_polls(thread_id: str | None, is_open: bool, as_json: bool) -> None:
    """List the polls that you may see."""
    list_answer(
        {"polls": list_pages("polls.list", "polls", thread_id=thread_id, is_open=is_open)},
        {
            "POLL": lambda it: it["poll"],
            "STATE": lambda it: "open" if it["is_open"] else "closed",
            "VOTERS": lambda it: it["voters"],
            "VOTED": lambda it: "yes" if it["has_voted"] else "",
            "BY": lambda it: it["by"],
            "THREAD": lambda it: it["thread_id"],
            "QUESTION": lambda it: it["question"],
        },
        empty="There are no polls. `roundelay polls create THREAD QUESTION CHOICE CHOICE` creates one.",
        as_json=as_json,
    )


@polls.command("show", short_help="Show a poll and its result.")
@POLL
@call_options
def show_poll(poll: int, as_json: bool) -> None:
    """Show a poll. A secret poll shows its sums after its end."""
    value = call_mod("polls.results", poll=poll)
    show_answer(value, lambda _: _describe(value), as_json=as_json)


@polls.command("create", short_help="Create a poll in a thread.")
@click.argument("thread_id", metavar="THREAD")
@click.argument("question")
@click.argument("choices", nargs=-1, required=True, metavar="CHOICE...")
@click.option("--secret", is_flag=True, help="Hide who voted for what, and the sums until the end.")
@call_options
def create_poll(as_json: bool, **args: Any) -> None:
    """Create a poll for the readers of THREAD, such as channel:dev. Each reader has one vote."""
    value = call_mod("polls.create", **args)
    show_answer(value, lambda _: [f"Poll {value['poll']} is open."], as_json=as_json)


@polls.command("vote", short_help="Vote in a poll.")
@POLL
@click.argument("choice")
@call_options
def vote(poll: int, choice: str, as_json: bool) -> None:
    """Vote for CHOICE. In an open poll a new vote replaces your last one. A secret vote is final."""
    value = call_mod("polls.vote", poll=poll, choice=choice)
    text = sanitize(f"You voted for {choice} in poll {poll}.")
    show_answer(value, lambda _: [text], as_json=as_json)


@polls.command("close", short_help="Close a poll.")
@POLL
@call_options
def close_poll(poll: int, as_json: bool) -> None:
    """Close a poll that you created, and show its result."""
    value = call_mod("polls.close", poll=poll)
    show_answer(value, lambda _: _describe(value), as_json=as_json)


def _describe(value: dict[str, Any]) -> Iterable[str]:
    state = "open" if value["is_open"] else "closed"
    yield sanitize(f"Poll {value['poll']} by {value['by']} in {value['thread_id']} ({state}): {value['question']}")
    if value["is_open"] and value["closes_at"]:
        yield f"It closes at {format_day(value['closes_at'])}."
    for entry in value["choices"]:
        votes = f": {entry['votes']}" if "votes" in entry else ""
        voters = f" ({', '.join(entry['voters'])})" if entry.get("voters") else ""
        yield sanitize(f"  {entry['choice']}{votes}{voters}")
    if value["is_secret"]:
        yield f"  {value['voters']} voted in secret."
