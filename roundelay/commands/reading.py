"""Commands that only read: participants, threads, messages and the state of the hub. These commands change no inbox."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import (
    SEQ,
    ask_hub,
    db_option,
    find_target,
    identity_options,
    join,
    json_option,
    read_run,
    run,
)
from roundelay.commands.output import list_answer, print_answer, show_answer
from roundelay.display.text import sanitize, sanitize_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from roundelay.network.client import AnyMessage, NetworkClient

MAX_PAGE = 500


@click.command()
@click.option(
    "--online/--offline", default=None, help="Only connected participants, or only disconnected participants."
)
@json_option
@identity_options
def agents(as_json: bool, online: bool | None) -> None:
    """List agents, people and services with their descriptions."""
    from roundelay.display.screen import Paint, format_participants
    from roundelay.runs.lists import list_participants

    found = ask_hub(lambda client: list_participants(client, online=online))

    def describe(paint: Paint) -> list[str]:
        nobody = {None: "registered yet", True: "online", False: "offline"}[online]
        return [format_participants(found, paint=paint) if found else f"Nobody is {nobody}."]

    show_answer({"agents": found}, describe, as_json=as_json)


@click.command()
@click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="Maximum number.")
@db_option
@json_option
@identity_options
def threads(as_json: bool, limit: int, db: Path | None) -> None:
    """List threads, newest first."""
    # a ledger file does not record the readers of a thread
    head, name = ("READERS", "readers") if db is None else ("SENDERS", "senders")
    list_answer(
        {"threads": read_run(db, lambda source: source.threads(limit))},
        {
            "THREAD": lambda it: it["thread_id"],
            "TITLE": lambda it: it.get("title", ""),
            "MESSAGES": lambda it: it["messages"],
            "LAST": lambda it: f"#{it['last_seq']}",
            **({"UNREAD": lambda it: str(it["unread"] or "")} if db is None else {}),
            head: lambda it: _join_ids(it[name]),
            **({"TAKEN OVER BY": lambda it: it.get("held", {}).get("by", "")} if db is None else {}),
        },
        empty="Nothing has been said yet.",
        as_json=as_json,
    )


def _join_ids(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 6 else f"{', '.join(ids[:5])} and {len(ids) - 5} more"


@click.command(short_help="Show the messages of a thread.")
@click.argument("thread")
@click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="Maximum number.")
@click.option("--before", type=SEQ, metavar="SEQ", help="Only messages older than this one.")
@db_option
@json_option
@identity_options
def history(thread: str, as_json: bool, limit: int, before: int | None, db: Path | None) -> None:
    """Show the messages of a thread: broadcast, channel:NAME, direct:A~B, thread:SEQ."""
    value = read_run(db, lambda source: source.history(thread, limit, before))
    _show_messages(value, empty="Nothing has been said here yet.", as_json=as_json)


@click.command("open", short_help="Show what a conversation waits for.")
@click.argument("seq", type=SEQ)
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), metavar="SECONDS", help="Wait until the conversation is quiet."
)
@json_option
@identity_options
def open_items(seq: int, as_json: bool, wait_s: float | None) -> None:
    """Show what is still open in the conversation of message SEQ: which participant it waits for, and since when.

    With --wait, the exit code is 1 if something is still open when the wait ends.
    """
    import time

    import msgspec

    from roundelay.runs.open_items import describe_open

    found = ask_hub(lambda client: client.wait_until_quiet(seq, wait_s or 0.0))
    now_ms = time.time_ns() // 1_000_000
    show_answer(
        msgspec.to_builtins(found),
        lambda _: describe_open(found, now_ms),
        as_json=as_json,
    )
    if wait_s is not None and not found.is_quiet:
        sys.exit(1)


@click.command(short_help="Find messages by their words.")
@click.argument("words", nargs=-1, required=True)
@click.option("--thread", metavar="ID", help="Only in this thread.")
@click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=20, show_default=True, help="Maximum number.")
@click.option("--before", type=SEQ, metavar="SEQ", help="Only messages older than this one.")
@json_option
@identity_options
def search(words: tuple[str, ...], as_json: bool, thread: str | None, limit: int, before: int | None) -> None:
    """Find the newest messages that contain all WORDS. A word such as invoi* matches every word that begins with invoi."""
    args = {"query": " ".join(words), "thread_id": thread, "limit": limit, "before": before}
    given = {name: value for name, value in args.items() if value is not None}
    value = ask_hub(lambda client: client.call("network.search", given))
    _show_messages(value, empty="Nothing was found.", as_json=as_json)


def _show_messages(value: Mapping[str, Any], *, empty: str, as_json: bool) -> None:
    """Print one page of messages, oldest first. If there are earlier messages, name the option that shows them."""
    from roundelay.display.screen import Screen
    from roundelay.network.messages import message_from_wire

    if as_json:
        print_answer(value)
        return
    screen = Screen(sys.stdout)
    messages = [message_from_wire(message) for message in value["messages"]]
    if value["has_more"]:
        screen.note(f"There is more: --before {value.get('next') or messages[0].seq}")
    for message in messages:
        screen.message(message)
    if not messages:
        screen.note(empty)


@click.command(short_help="Show the state of the node.")
@click.option(
    "--over",
    "over_s",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds during which to measure rates.",
)
@json_option
@identity_options
def status(as_json: bool, over_s: float) -> None:
    """Show the state of the node: sessions, backlog, commits, rates.

    Rates are measured during the next second, or during --over. --json shows every figure, and docs/operations.md
    explains the figures.
    """
    from roundelay.network.errors import ConnectError
    from roundelay.network.home import find_url
    from roundelay.nodes.status import describe_status, read_alone, read_status

    urls = find_target().url or find_url()
    try:
        value = ask_hub(lambda client: read_status(client, urls, over_s))
    except ConnectError:
        # A node that waits for leadership refuses connections, but still answers over HTTP.
        alone = read_alone(urls)
        if alone is not None:  # a read replica answered while there is no leader
            show_answer(alone, lambda _: describe_status(alone), as_json=as_json)
        raise
    show_answer(value, lambda _: describe_status(value), as_json=as_json)


@click.command(short_help="Follow messages as they are stored.")
@click.option(
    "--last", type=click.IntRange(0, MAX_PAGE), default=0, metavar="N", help="Start with the last N messages."
)
@click.option("--thread", metavar="ID", help="Only this thread.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@json_option
@identity_options
def tail(as_json: bool, last: int, thread: str | None, count: int | None) -> None:
    """Follow every message that you may read, as it is stored.

    Operators read everything, and people who use the owner's token are operators. With --as ID --as-kind agent, you see
    the messages that the agent may read. The command does not deliver messages or mark them as handled. With --json,
    each line is one message.
    """

    import asyncio

    from roundelay.connection import make_output_limit
    from roundelay.display.screen import Screen
    from roundelay.network.client import Reconnected, Reconnecting
    from roundelay.runs.node_source import LiveSource

    # Write notes to stderr, because the messages on stdout may be piped into a program.
    screen, notes = Screen(sys.stdout), Screen(sys.stderr)

    async def read(client: NetworkClient) -> AsyncIterator[AnyMessage]:
        source = LiveSource(client)
        for message in await source.read_last(last, thread):
            yield message
        notes.note(f"Following {client.url}; Ctrl-C ends.")
        if thread is not None and not source.has_thread:
            notes.note(
                f"You may read no thread {sanitize(thread)} yet; the command waits for its first message. "
                "`roundelay threads` lists the threads."
            )
        async for message in source.follow():
            yield message

    async def watch(client: NetworkClient) -> None:
        """Report a lost connection. Without this report, a lost connection would look like silence."""
        patience = make_output_limit()
        async for event in client.events():
            if patience.handle_event(event) and isinstance(event, (Reconnecting, Reconnected)):
                notes.event(event)

    async def follow() -> None:
        shown = 0
        async with join(reconnect=True) as client, asyncio.TaskGroup() as group:
            watching = group.create_task(watch(client))
            async for message in read(client):
                if thread not in (None, message.thread_id):
                    continue
                if as_json:
                    click.echo(sanitize_json(message.model_dump_json(exclude_none=True)))
                else:
                    screen.message(message)
                shown += 1
                if shown == count:
                    break
            watching.cancel()

    run(follow())
