"""``roundelay web`` and ``roundelay view``: create login links, and show a ledger file on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from roundelay.commands.options import (
    LEDGER_PATH,
    debug_option,
    find_target,
    identity_options,
    join,
    json_option,
    run,
)
from roundelay.commands.output import show
from roundelay.connection import find_login_id
from roundelay.network.extras import how_to_add

if TYPE_CHECKING:
    from pathlib import Path

    from roundelay.network.client import NetworkClient


@click.command(short_help="Create a link that logs in to the page once.")
@click.option("--operator", is_flag=True, help="Log in as an operator, who may read and manage everything.")
@click.option("--minutes", type=click.IntRange(1, 1440), default=10, show_default=True, help="Lifetime of the link.")
@click.option("--open", "opens", is_flag=True, help="Open the link in this machine's browser.")
@click.option("--qr", "shows_qr", is_flag=True, help="Show the link as a QR code too, for a phone.")
@json_option
@identity_options
def web(operator: bool, minutes: int, opens: bool, shows_qr: bool, as_json: bool) -> None:
    """Create a link that logs in to the node's page once, as the login user or as --as ID. For operators.

    With the owner's token, the link may be for any participant. With --token, the link is for the token's participant.
    """
    import asyncio

    from roundelay.network.errors import ConfigError
    from roundelay.network.home import is_loopback
    from roundelay.nodes.links import check_page, draw_qr, make_link

    if shows_qr and draw_qr("") is None:
        raise ConfigError(f"A QR code needs the extra qr. Run: {how_to_add('qr')}")
    target = find_target()
    own_id = find_login_id() if target.token is None else target.agent_id
    agent_id, kind = target.agent_id or find_login_id(), target.kind or "human"
    if target.token is None:
        target.agent_id = target.kind = None  # the owner creates the link, even for another participant

    async def make(client: NetworkClient) -> dict[str, Any]:
        await asyncio.to_thread(check_page, client.url)
        is_operator = operator or agent_id == own_id
        made = await make_link(client, agent_id, kind=kind, operator=is_operator, minutes=minutes)
        return {"agent_id": agent_id, "kind": kind, "operator": is_operator, **made}

    async def join_and_make() -> dict[str, Any]:
        async with join() as client:
            return await make(client)

    link = run(join_and_make())
    if (warning := link.pop("warning", None)) is not None:
        click.echo(f"Warning: {warning}", err=True)
    show(link, lambda _: [link["url"]], as_json=as_json)
    rights = ", with an operator's rights" if link["operator"] else ""
    click.echo(
        f"The link logs {agent_id} in{rights}, once, within {minutes} minutes. Anyone who has the link can use it.",
        err=True,
    )
    if shows_qr:
        for line in draw_qr(link["url"]) or ():
            click.echo(line, err=True)
    host = urlsplit(link["url"]).hostname or ""
    if shows_qr and is_loopback(host):
        click.echo(
            f"Only this machine can reach {host}. For other machines, set public_url in the node's file to an address "
            "at which they reach the page.",
            err=True,
        )
    if opens and not _open(link["url"]):
        click.echo("No browser could be opened here; open the link yourself.", err=True)


@click.command(short_help="Show a ledger's file in a browser.")
@click.argument("file", type=LEDGER_PATH)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on (default: any free one).")
@click.option(
    "--open/--no-open", "opens", default=True, help="Open the page in this machine's browser (default), or not."
)
@debug_option
def view(file: Path, port: int, opens: bool) -> None:
    """Show a ledger's file in a browser, on a read-only copy of the node's page. Ctrl-C ends the command.

    FILE is a node's database or a backup. The command does not change FILE: it makes a copy in a temporary folder when
    it starts, and the page shows that copy.
    """
    from roundelay.network.errors import ConnectError
    from roundelay.nodes.view import show_file

    def announce(link: str, is_open: bool) -> None:
        if is_open:
            click.echo(f"{file} may be in use. The page does not show what is written to it from now on.", err=True)
        click.echo(link)
        click.echo("That link logs you in once, within 10 minutes. Ctrl-C ends it.", err=True)
        if opens and not _open(link):
            click.echo("No browser could be opened here; open the link yourself.", err=True)

    try:
        run(show_file(file, port, find_login_id(), announce))
    except ConnectError as error:  # the command cannot bind the address; this is not a lost connection
        raise click.ClickException(str(error)) from error


def _open(url: str) -> bool:
    import webbrowser

    return webbrowser.open(url)
