"""Tokens: who may join as what. Made here and shown once; the hub gets and keeps only hashes."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import (
    Function,
    Kind,
    check_id,
    identity_options,
    join_as_reader,
    json_option,
    run,
)
from roundelay.identity import READER_ID

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient


@click.group()
def token() -> None:
    """Make, list and revoke tokens. An operator's command.

    On the node's machine agents need none: the first use of an id binds the token that the client made for itself.
    """


def token_options(function: Function) -> Function:
    function = click.option(
        "--db", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
        help="Do it in this database, while no node runs on it.",
    )(function)  # fmt: skip
    return identity_options(function)


@token.command()
@click.argument("agent_id", metavar="ID", callback=check_id)
@click.option(
    "--kind", type=click.Choice(("agent", "human", "service")), default="agent", show_default=True, help="What ID is."
)
@click.option("--operator", is_flag=True, help="Let it read and manage everything.")
@json_option
@token_options
def create(agent_id: str, kind: Kind, operator: bool, as_json: bool, db: Path | None) -> None:
    """Make a token for ID and print it; it cannot be shown again."""

    async def make() -> str:
        from roundelay.network.auth import hash_token, make_token

        made = make_token()
        args = {"agent_id": agent_id, "kind": kind, "token_hash": hash_token(made), "operator": operator}
        async with _operate(db) as client:
            await client.call("network.create_token", args)
        return made

    made = run(make())
    if as_json:
        click.echo(json.dumps({"agent_id": agent_id, "kind": kind, "operator": operator, "token": made}))
        return
    click.echo(made)
    rights = ", with an operator's rights" if operator else ""
    click.echo(
        f"This token lets {agent_id} join as {kind}{rights}. It is not shown again; "
        f"give it as ROUNDELAY_TOKEN, and revoke it with: roundelay token revoke {agent_id}",
        err=True,
    )


@token.command("list")
@json_option
@token_options
def list_tokens(as_json: bool, db: Path | None) -> None:
    """List who has tokens, without the tokens."""

    from roundelay import lists

    async def show() -> None:
        async with _operate(db) as client:
            value = {"tokens": await lists.list_tokens(client)}
        if as_json:
            click.echo(json.dumps(value))
            return
        from datetime import UTC, datetime

        from roundelay.terminal import Screen, format_table

        screen = Screen(sys.stdout)
        rows = []
        for it in value["tokens"]:
            made_at = datetime.fromtimestamp(it["created_at"] / 1000, UTC).astimezone()
            rights = "operator" if it["operator"] else ""
            state = "revoked" if it["revoked"] else "valid"
            rows.append((it["agent_id"], it["kind"], state, f"{made_at:%Y-%m-%d %H:%M}", f"{it['hash']}...", rights))
        head = ("ID", "KIND", "STATE", "MADE", "HASH", "RIGHTS")
        screen.write(format_table(head, rows, paint=screen.paint) if rows else "There are no tokens yet.")

    run(show())


@token.command()
@click.argument("agent_id", metavar="ID", callback=check_id)
@json_option
@token_options
def revoke(agent_id: str, as_json: bool, db: Path | None) -> None:
    """Revoke every token of ID; its sessions are closed."""

    async def refuse() -> int:
        async with _operate(db) as client:
            value = await client.call("network.revoke_token", {"agent_id": agent_id})
        revoked: int = value["revoked"]
        return revoked

    count = run(refuse())
    if as_json:
        click.echo(json.dumps({"agent_id": agent_id, "revoked": count}))
        return
    click.echo(f"Revoked {count} token{'' if count == 1 else 's'} of {agent_id}.")


@asynccontextmanager
async def _operate(db: Path | None) -> AsyncIterator[NetworkClient]:
    """A client with an operator's rights: of the node that runs, or of a database that no node has open."""
    if db is None:
        async with join_as_reader() as client:
            yield client
        return
    from roundelay.app import Network

    async with Network.open(db) as network:
        yield await network.join(READER_ID, kind="service")
