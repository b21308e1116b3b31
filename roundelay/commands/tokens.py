"""``roundelay token``: create, list and revoke tokens. A token is shown once, and the hub stores only its hash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from roundelay.commands.options import Function, Kind, ask_hub, check_id, identity_options, json_option, run
from roundelay.commands.output import print_json, show, show_list
from roundelay.connection import READER_ID
from roundelay.display.text import format_day
from roundelay.network.text import count

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

T = TypeVar("T")


@click.group()
def token() -> None:
    """Create, list and revoke tokens. For operators.

    Agents on the node's machine need no token. A client there creates one, and its first use binds the id to that
    token.
    """


def token_options(function: Function) -> Function:
    function = click.option(
        "--db",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Use this database, while no node runs on it.",
    )(function)
    return identity_options(function)


@token.command()
@click.argument("agent_id", metavar="ID", callback=check_id)
@click.option(
    "--kind", type=click.Choice(("agent", "human", "service")), default="agent", show_default=True, help="Kind of ID."
)
@click.option("--operator", is_flag=True, help="Make ID an operator, who may read and manage everything.")
@json_option
@token_options
def create(agent_id: str, kind: Kind, operator: bool, as_json: bool, db: Path | None) -> None:
    """Create a token for ID and print it. The token cannot be shown again."""

    from roundelay.network.clock import make_token
    from roundelay.network.core.joining import hash_token

    # Create the token here and send the hub only the hash, so that no ledger or log contains the token.
    made = make_token()
    args = {"agent_id": agent_id, "kind": kind, "token_hash": hash_token(made), "operator": operator}
    answer = _operate(db, lambda client: client.call("network.create_token", args))
    if answer.get("warning") is not None:
        click.echo(f"Warning: {answer['warning']}", err=True)
    if as_json:
        print_json({"agent_id": agent_id, "kind": kind, "operator": operator, "token": made})
        return
    # Print only the token on stdout, so that a script can capture it. The advice goes to stderr.
    click.echo(made)
    rights = ", with an operator's rights" if operator else ""
    click.echo(
        f"This token lets {agent_id} join as {kind}{rights}. It is not shown again; "
        f"give it as ROUNDELAY_TOKEN, and revoke it with: roundelay token revoke {agent_id}",
        err=True,
    )


@token.command("list", short_help="List tokens and the number of sessions that use each.")
@json_option
@token_options
def list_tokens(as_json: bool, db: Path | None) -> None:
    """List tokens by their hashes, and the number of sessions that use each.

    A browser that logged in by a link has its own token. `roundelay token revoke ID --hash HASH` logs that browser out.
    """
    from roundelay.runs import lists

    show_list(
        {"tokens": _operate(db, lists.list_tokens)},
        {
            "ID": lambda it: it["agent_id"],
            "KIND": lambda it: it["kind"],
            "STATE": lambda it: "revoked" if it["revoked"] else "valid",
            "MADE": lambda it: format_day(it["created_at"]),
            "HASH": lambda it: f"{it['hash']}...",
            "SESSIONS": lambda it: str(it.get("sessions", "")),
            "RIGHTS": lambda it: "operator" if it["operator"] else "",
        },
        empty="There are no tokens yet.",
        as_json=as_json,
    )


@token.command(short_help="Revoke the tokens of ID and close their sessions.")
@click.argument("agent_id", metavar="ID", callback=check_id)
@click.option(
    "--hash",
    "token_hash",
    metavar="HASH",
    help="Revoke only the token with this hash, as `roundelay token list` shows it.",
)
@json_option
@token_options
def revoke(agent_id: str, token_hash: str | None, as_json: bool, db: Path | None) -> None:
    """Revoke all tokens of ID, or only the token HASH. Sessions that use a revoked token are closed."""

    only = {} if token_hash is None else {"token_hash": token_hash.removesuffix("...")}
    number = _operate(db, lambda client: client.call("network.revoke_token", {"agent_id": agent_id, **only}))["revoked"]
    told = f"Revoked {count(number, 'token')} of {agent_id}."
    show({"agent_id": agent_id, "revoked": number}, lambda _: [told], as_json=as_json)


def _operate(db: Path | None, work: Callable[[NetworkClient], Awaitable[T]]) -> T:
    """Call ``work`` with an operator's rights, on the running node or on a database that no node has open."""
    if db is None:
        return ask_hub(work)
    from roundelay.app import Network

    async def open_and_work() -> T:
        async with Network.open(db) as network:
            return await work(await network.join(READER_ID, kind="service"))

    return run(open_and_work())
