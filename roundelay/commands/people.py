"""``roundelay chat``, ``roundelay tui`` and ``roundelay send``: take part in a network as a person."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import SEQ, check_place, identity_options, join, json_option, read_address, run
from roundelay.commands.output import show
from roundelay.network.extras import how_to_add

if TYPE_CHECKING:
    from roundelay.network.client import Stored


@click.command(short_help="Chat as a person, line by line.")
@click.option(
    "--to",
    metavar="PLACE",
    callback=check_place,
    help="First recipient of your lines: ID, channel:NAME or thread:SEQ (default: broadcast).",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 86_400),
    metavar="SECONDS",
    help="Seconds to stay after the end of the input (default: until no agent is working).",
)
@identity_options
def chat(to: str | None, wait_s: float | None) -> None:
    """Join the network as a person. Each line is a message; /help lists the commands.

    From a pipe, it sends every line, waits for the answers, and leaves.
    """

    async def converse() -> bool:
        from roundelay.terminal.converse import run_chat

        async with join(as_person=True, reconnect=True) as client:
            return await run_chat(client, to=to, wait_s=wait_s)

    if not run(converse()):
        click.get_current_context().exit(1)


@click.command(short_help="Chat full screen: inbox, threads, agents, cost, search.")
@click.option(
    "--to",
    metavar="PLACE",
    callback=check_place,
    help="The thread to begin with: ID, channel:NAME, thread:SEQ, broadcast (default: the list of threads).",
)
@identity_options
def tui(to: str | None) -> None:
    """Join the network as a person, full screen: inbox, threads, why, agents, cost and search, by mouse and keys.

    Press ? for the list of keys.

    The command needs the extra `tui`: pip install 'roundelay[tui]'
    """
    from roundelay.network.errors import ConfigError

    if find_spec("textual") is None:
        raise ConfigError(
            f"The full-screen terminal needs the extra tui. Run: {how_to_add('tui')}. `roundelay chat` needs no extra."
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("roundelay tui needs a terminal. In a pipe, use roundelay chat.")
    if (term := os.environ.get("TERM", "")) in ("dumb", "unknown"):
        raise click.UsageError(f"This terminal cannot show a full screen (TERM={term}). Use roundelay chat instead.")

    async def show_screens() -> int:
        from roundelay.tui.app import run_terminal

        async with join(as_person=True, reconnect=True) as client:
            return await run_terminal(client, to)

    if code := run(show_screens()):
        click.get_current_context().exit(code)


@click.command()
@click.argument("to", callback=read_address)
@click.argument("text")
@click.option("--reply-to", type=SEQ, metavar="SEQ", help="The message that this one answers.")
@click.option(
    "--requires-response", "needed", multiple=True, metavar="ID", help="Participant who must answer. May be repeated."
)
@click.option(
    "--conversation", metavar="ID", help="Name of a conversation with a participant: each is a separate thread."
)
@click.option(
    "--id",
    "--message-id",
    "message_id",
    metavar="ID",
    help="Id of the message. A repeated send with the same id stores nothing twice.",
)
@json_option
@identity_options
def send(
    to: str,
    text: str,
    reply_to: int | None,
    needed: tuple[str, ...],
    conversation: str | None,
    message_id: str | None,
    as_json: bool,
) -> None:
    """Send TEXT and wait until it is stored.

    TO is an ID, broadcast, channel:NAME or mod:ID. If TEXT is -, it is read from stdin.
    """
    try:
        content = sys.stdin.read().removesuffix("\n") if text == "-" else text
        content.encode()  # Python decodes a byte that is not UTF-8 to a lone surrogate
    except UnicodeError:
        raise click.UsageError("The text is not UTF-8, so nothing is sent. `iconv -t UTF-8` converts it.") from None
    if not content.strip():
        raise click.UsageError("There is nothing to send: the text is empty.")

    recipient = to.removeprefix("agent:") if to.startswith("agent:") else ""

    async def deliver() -> tuple[Stored, bool]:
        from roundelay.network.clock import random_id
        from roundelay.network.errors import ConnectError
        from roundelay.runs.lists import is_offline

        # Choose the id here, not in the client: after a lost connection the error message must contain the id.
        chosen, is_joined = message_id or random_id(), False
        try:
            async with join(as_person=True) as client:
                is_joined = True
                needs = list(needed) or None
                stored = await client.send(
                    to,
                    content,
                    reply_to=reply_to,
                    conversation=conversation,
                    requires_response=needs,
                    message_id=chosen,
                )
                # Check for an offline recipient: otherwise a person would wait for an answer that cannot come yet.
                waits = not as_json and recipient != "" and await is_offline(client, recipient)
                return stored, waits
        except ConnectError as error:
            # Raise the error without the id if nothing can have been stored, or if the user has passed the id.
            if not is_joined or message_id is not None:
                raise
            raise ConnectError(f"{error} With --message-id {chosen} the message is not stored twice.") from error

    stored, waits = run(deliver())
    told = f"Stored as #{stored.seq} in {stored.thread_id}{' (by an earlier send)' if stored.duplicate else ''}."
    value = {"seq": stored.seq, "thread_id": stored.thread_id, "message_id": stored.id, "duplicate": stored.duplicate}
    offline = [f"{recipient} is offline. The message waits until {recipient} joins."] if waits else []
    show(value, lambda _: [told, *offline], as_json=as_json)
