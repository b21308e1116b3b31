"""Commands that only look: who is there, what was said, how the hub does. They call operations and leave no mark on anybody's inbox."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import click

from roundelay.clean_text import clean, clean_json
from roundelay.commands.options import identity_options, join_as_reader, json_option, run

if TYPE_CHECKING:
    from roundelay.network.client import AnyMessage, NetworkClient

MAX_PAGE = 500


@click.command()
@click.option("--online/--offline", default=None, help="Only those who are connected, or are not.")
@json_option
@identity_options
def agents(as_json: bool, online: bool | None) -> None:
    """List agents, people and services, and what they say they do."""

    async def show() -> None:
        from roundelay.lists import list_participants

        async with join_as_reader() as client:
            value = {"agents": await list_participants(client, online=online)}
        if as_json:
            _print_json(value)
            return
        from roundelay.terminal import Screen, format_participants

        screen = Screen(sys.stdout)
        table = format_participants(value["agents"], paint=screen.paint)
        screen.write(table if value["agents"] else "Nobody is registered yet.")

    run(show())


@click.command()
@click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="How many at most.")
@json_option
@identity_options
def threads(as_json: bool, limit: int) -> None:
    """List the threads, the newest first."""

    from roundelay.lists import list_threads

    async def show() -> None:
        async with join_as_reader() as client:
            value = {"threads": await list_threads(client, most=limit)}
        if as_json:
            _print_json(value)
            return
        from roundelay.terminal import Screen, format_table

        screen = Screen(sys.stdout)
        rows = [
            (it["thread_id"], it["messages"], f"#{it['last_seq']}", _join_ids(it["readers"])) for it in value["threads"]
        ]
        head = ("THREAD", "MESSAGES", "LAST", "READERS")
        screen.write(format_table(head, rows, paint=screen.paint) if rows else "Nothing has been said yet.")

    run(show())


@click.command(short_help="Show the messages of a thread.")
@click.argument("thread")
@click.option("--limit", type=click.IntRange(1, MAX_PAGE), default=50, show_default=True, help="How many at most.")
@click.option("--before", type=click.IntRange(1), metavar="SEQ", help="Only messages older than this one.")
@json_option
@identity_options
def history(thread: str, as_json: bool, limit: int, before: int | None) -> None:
    """Show the messages of a thread: broadcast, channel:NAME, direct:A~B, thread:SEQ."""

    async def show() -> None:
        args: dict[str, object] = {"thread_id": thread, "limit": limit}
        if before is not None:
            args["before"] = before
        async with join_as_reader() as client:
            value = await client.call("network.history", args)
        if as_json:
            _print_json(value)
            return
        from roundelay.network.messages import message_from_wire
        from roundelay.terminal import Screen

        screen = Screen(sys.stdout)
        messages = [message_from_wire(message) for message in value["messages"]]
        if value["has_more"]:
            screen.note(f"There is more: --before {messages[0].seq}")
        for message in messages:
            screen.message(message)
        if not messages:
            screen.note("Nothing has been said here yet.")

    run(show())


@click.command(short_help="Show what the node is and how it does.")
@click.option(
    "--over", "over_s", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS",
    help="How long to count for the rates.",
)  # fmt: skip
@json_option
@identity_options
def status(as_json: bool, over_s: float) -> None:
    """Show what the node is and how it does: sessions, backlog, commits, rates.

    The rates are those of the next second, or of --over. With --json there is every figure; docs/operations.md says what each means.
    """
    import asyncio

    from roundelay.nodes.status import compute_rates, describe_figures, describe_quotas

    async def show() -> None:
        async with join_as_reader() as client:
            before = await _read_figures(client)
            began = time.perf_counter()
            await asyncio.sleep(over_s)
            info = await client.call("network.info")
            figures = await _read_figures(client)
            rates = compute_rates(before, figures, time.perf_counter() - began)
            quotas = await _read_quotas(client)
            value = {"url": client.url, **info, "figures": figures, "rates": rates, "quotas": quotas}
        if as_json:
            _print_json(value)
            return
        from roundelay.terminal import Screen

        screen = Screen(sys.stdout)
        lines = {"url": client.url, **info, **describe_figures(figures, rates), **describe_quotas(quotas)}
        for name, shown in lines.items():
            text = ", ".join(shown) if isinstance(shown, list) else str(shown)
            screen.write(f"{name:<14} {clean(text)}")

    run(show())


@click.command(short_help="Follow the conversation, as it is stored.")
@click.option(
    "--last", type=click.IntRange(0, MAX_PAGE), default=0, metavar="N", help="Begin with the last N messages."
)
@click.option("--thread", metavar="ID", help="Only this thread.")
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@json_option
@identity_options
def tail(as_json: bool, last: int, thread: str | None, count: int | None) -> None:
    """Follow the conversation: every message that you may read, as it is stored.

    Operators read everything, and people who use the owner's token are such; with --as ID --as-kind agent it is what that
    agent may read. Nothing counts as delivered or handled by it. With --json each line is one message.
    """

    def show(message: AnyMessage) -> bool:
        """Show a message if it is wanted; True when it was the last one."""
        nonlocal count
        if thread is not None and message.thread_id != thread:
            return False
        if as_json:
            click.echo(clean_json(message.model_dump_json(exclude_none=True)))
        else:
            screen.message(message)
        count = count - 1 if count is not None else None
        return count == 0

    async def follow() -> None:
        async with join_as_reader(reconnect=True) as client, asyncio.TaskGroup() as group:
            watching = group.create_task(watch(client))
            try:
                await show_all(client)
            finally:
                watching.cancel()

    async def show_all(client: NetworkClient) -> None:
        follower = Follower(client)
        for message in await follower.begin(last, thread):
            if show(message):
                return
        notes.note(f"Following {client.url}; Ctrl-C ends.")
        if thread is not None and not follower.has_thread:
            notes.note(
                f"There is no thread {clean(thread)} yet that you may read; this waits for its first message. "
                "`roundelay threads` lists those that there are."
            )
        async for message in follower.messages():
            if show(message):
                return

    async def watch(client: NetworkClient) -> None:
        """Tell of a lost connection, which would otherwise look like a silent conversation."""
        patience = patience_for_output()
        async for event in client.events():
            if patience.take(event) and isinstance(event, (Reconnecting, Reconnected)):
                notes.event(event)

    import asyncio

    from roundelay.network.client import Reconnected, Reconnecting
    from roundelay.patience import patience_for_output
    from roundelay.reading.follow import Follower
    from roundelay.terminal import Screen

    screen, notes = Screen(sys.stdout), Screen(sys.stderr)
    run(follow())


async def _read_quotas(client: NetworkClient) -> list[dict[str, Any]]:
    """Who uses how much of its quota; nobody of a hub from before there were any."""
    from roundelay.network.errors import UnknownOperation

    try:
        quotas: list[dict[str, Any]] = (await client.call("network.quotas"))["quotas"]
    except UnknownOperation:
        return []
    return quotas


async def _read_figures(client: NetworkClient) -> dict[str, float]:
    """The hub's figures, by its operation; from a hub that has none, or to a participant who may not call it, from ``/metrics``."""
    import asyncio

    from roundelay.network.errors import Forbidden, UnknownOperation

    try:
        figures: dict[str, float] = await client.call("network.status")
        return figures
    except (UnknownOperation, Forbidden):
        return await asyncio.to_thread(_fetch_metrics, client.url)


def _fetch_metrics(url: str) -> dict[str, float]:
    from roundelay.nodes.hub_http import get_from_hub

    text = get_from_hub(url, "/metrics").body
    lines = [line.removeprefix("roundelay_").split(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {line[0]: float(line[1]) for line in lines if len(line) == 2}


def _join_ids(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 6 else f"{', '.join(ids[:5])} and {len(ids) - 5} more"


def _print_json(value: Any) -> None:
    from pydantic_core import to_json  # not at the start of every command

    # a number that no double holds is null, here as in every message: JSON has no infinity
    click.echo(clean_json(to_json(value, indent=None if not sys.stdout.isatty() else 2, inf_nan_mode="null").decode()))
