"""The page: links that log in to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import find_target, identity_options, join, json_option, run
from roundelay.commands.output import show
from roundelay.terminal.connection import login_id

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient


@click.command(short_help="Make a link that logs in to the page, once.")
@click.option("--operator", is_flag=True, help="Let it read and manage everything, as your own link does.")
@click.option(
    "--minutes", type=click.IntRange(1, 1440), default=10, show_default=True, help="How long the link can be used."
)
@click.option("--open", "opens", is_flag=True, help="Open it in this machine's browser.")
@json_option
@identity_options
def web(operator: bool, minutes: int, opens: bool, as_json: bool) -> None:
    """Make a link that logs in to the node's page, once: for the login user, or --as ID. An operator's command.

    With the owner's token the link may be anybody's; with --token it is that participant's own.
    """
    import asyncio

    from roundelay.nodes.links import check_page, make_link

    target = find_target()
    own_id = login_id() if target.token is None else target.agent_id
    agent_id, kind = target.agent_id or login_id(), target.kind or "human"
    if target.token is None:
        target.agent_id = target.kind = None  # who asks is the owner, whoever the link is for

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
    click.echo(f"It logs {agent_id} in{rights}, once, within {minutes} minutes: whoever has it can use it.", err=True)
    if opens and not _open(link["url"]):
        click.echo("No browser could be opened here; open the link yourself.", err=True)


def _open(url: str) -> bool:
    import webbrowser

    return webbrowser.open(url)
