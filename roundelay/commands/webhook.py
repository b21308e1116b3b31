"""``roundelay webhook``: register, list, test, resume and remove the gateway's webhooks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import Function, Kind, ask_hub, check_id, find_target, identity_options, json_option
from roundelay.commands.output import print_json, show_list
from roundelay.connection import READER_ID
from roundelay.display.text import format_day

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

TIMEOUT_S = 30.0


@click.group(short_help="Post a participant's messages to an address.")
def webhook() -> None:
    """Post each message that is delivered to a participant to an https address, with a signature.

    The gateway posts them (`interop` in the node's file, or roundelay gateway --webhooks FILE). The page `interop` of
    the documentation has the guarantees.
    """


def _gateway_option(function: Function) -> Function:
    function = click.option(
        "--gateway", metavar="URL", help="URL of the gateway (default: that of this machine's node)."
    )(function)
    return identity_options(function)


def _of_option(function: Function) -> Function:
    return click.option("--of", metavar="ID", callback=check_id, help="Owner of the webhook. For operators.")(function)


@webhook.command(short_help="Register a participant's webhook.")
@click.argument("address", metavar="URL")
@click.option(
    "--secret-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Sign with the secret in this file, whsec_... (default: a new one).",
)
@json_option
@_gateway_option
def add(address: str, secret_file: Path | None, gateway: str | None, as_json: bool) -> None:
    """Post each new message for --as ID to URL, and print the signing secret. The secret cannot be shown again.

    With --token, the token's participant registers the webhook. An operator on the node's machine needs no token: the
    command creates a separate token for the webhook.
    """
    target = find_target()
    agent_id = target.agent_id
    if agent_id is None:
        raise click.UsageError("Name the participant whose messages to post: roundelay webhook add URL --as ID.")
    body = {"url": address}
    if secret_file is not None:
        # Read the secret from a file: other users of the machine can see the options of a process.
        body["secret"] = secret_file.read_text(encoding="utf-8").strip()
    if target.token is not None:
        made = _ask_gateway("POST", "/v1/webhook", gateway, (agent_id, target.token), body)
    else:
        # The gateway stores the token that it receives. Create a token for this webhook, and never send the operator's.
        made = _register_with_new_token(agent_id, gateway, body)
    if as_json:
        print_json(made)
        return
    # Print only the secret on stdout, so that a script can store it. The explanation goes to stderr.
    click.echo(made["secret"])
    click.echo(
        f"The gateway posts messages for {made['participant']} to {made['url']}, signed with this secret.", err=True
    )


@webhook.command("list", short_help="List webhooks and their state.")
@json_option
@_gateway_option
def list_webhooks(gateway: str | None, as_json: bool) -> None:
    """List webhooks and their state. For operators. With --token, list only the webhooks of the token's participant."""
    who = _find_caller()
    found = (
        {"webhooks": [_ask_gateway("GET", "/v1/webhook", gateway, who)]}
        if find_target().token is not None
        else _ask_gateway("GET", "/v1/webhooks", gateway, who)
    )
    show_list(
        found,
        {
            "ID": lambda it: it["participant"],
            "STATE": lambda it: it["state"],
            "URL": lambda it: it["url"],
            "SINCE": lambda it: format_day(it["created_at"]),
            "FAILING SINCE": lambda it: format_day(it["failing_since"]) if it["failing_since"] else "",
            "WHY": lambda it: it["why"],
        },
        empty="There are no webhooks.",
        as_json=as_json,
    )


@webhook.command()
@_of_option
@_gateway_option
def remove(of: str | None, gateway: str | None) -> None:
    """Remove a webhook. Messages that the receiver did not accept stay unhandled in the ledger."""
    whose = _whose(of)
    _ask_gateway("DELETE", "/v1/webhook", gateway, _find_caller(), whose)
    click.echo("Removed.")


@webhook.command()
@_of_option
@_gateway_option
def test(of: str | None, gateway: str | None) -> None:
    """Post a test event, and show the outcome."""
    whose = _whose(of)
    tried = _ask_gateway("POST", "/v1/webhook/test", gateway, _find_caller(), whose)
    click.echo(f"{tried['answer']}: {tried['told']}")
    # Exit with 1 after a failed test, so that monitoring can use the exit code.
    if tried["answer"] != "taken":
        click.get_current_context().exit(1)


@webhook.command(short_help="Resume a paused webhook, or retry one at once.")
@_of_option
@_gateway_option
def resume(of: str | None, gateway: str | None) -> None:
    """Resume a webhook that is paused or is waiting to retry: post to it again at once."""
    whose = _whose(of)
    resumed = _ask_gateway("POST", "/v1/webhook/resume", gateway, _find_caller(), whose)
    click.echo(f"The webhook of {resumed['participant']} is active again.")


def _whose(of: str | None) -> dict[str, str]:
    """Return the owner of the webhook as query parameters, from --of, --as or --token."""
    target = find_target()
    named = of or target.agent_id
    if named is None:
        raise click.UsageError(
            "Name the owner of the webhook with --of ID. `roundelay webhook list` lists the webhooks."
        )
    return {"participant": named}


def _register_with_new_token(agent_id: str, gateway: str | None, body: dict[str, str]) -> dict[str, Any]:
    """Register a webhook with a new token that only the gateway stores.

    Ask the gateway first whether it would accept the webhook: a refusal then leaves no unused token.
    """
    target = find_target()
    kind = target.kind
    _ask_gateway("POST", "/v1/webhook/check", gateway, _find_caller(), body)
    token, is_first = _make_token(agent_id, kind)
    made = None
    try:
        made = _ask_gateway("POST", "/v1/webhook", gateway, (agent_id, token), body)
    finally:
        # Revoke after Ctrl-C too, because it is then unknown whether the gateway has received the token.
        if made is None:
            _take_back(agent_id, is_first)
    return made


def _find_caller() -> tuple[str, str]:
    """Return the caller's id and token from --as and --token. The default caller is the owner of this machine's node.

    Raises `ConfigError`.
    """
    from roundelay.network.errors import ConfigError
    from roundelay.network.home import find_owner_token, find_url

    target = find_target()
    if target.token is not None:
        if target.agent_id is None:
            raise click.UsageError("Name the owner of the token with --as ID.")
        return target.agent_id, target.token
    token = find_owner_token(target.url or find_url())
    if token is None:
        raise ConfigError("If the node runs on another machine, pass --as ID and --token TOKEN.")
    # The owner's token identifies the commands' own service. Here, --as names the owner of the webhook, not the caller.
    target.agent_id = target.kind = None

    # registers the caller, because the gateway rejects unknown participants
    async def join(client: NetworkClient) -> None:
        await client.call("network.info")

    ask_hub(join)
    return READER_ID, token


def _make_token(agent_id: str, chosen: Kind | None) -> tuple[str, bool]:
    """Create a token for a participant's webhook as an operator. Return the token, and whether the participant has no
    other token.
    """
    from roundelay.network.clock import make_token
    from roundelay.network.core.joining import hash_token
    from roundelay.runs.lists import list_participants, list_tokens

    made = make_token()

    async def create(client: NetworkClient) -> bool:
        known = {it["agent_id"]: it["kind"] for it in await list_participants(client)}
        # A program reads a webhook's messages, so register a new participant as a service.
        kind = known.get(agent_id, "service")
        valid = {it["agent_id"] for it in await list_tokens(client) if not it["revoked"]}
        # revoking is not safe for a person or an agent: they may have sessions with the owner's token
        is_first = kind == "service" and agent_id not in valid
        args = {"agent_id": agent_id, "kind": chosen or kind, "token_hash": hash_token(made)}
        # Send the hub only the hash. This process gives the token itself only to the gateway.
        if (warning := (await client.call("network.create_token", args)).get("warning")) is not None:
            click.echo(f"Warning: {warning}", err=True)
        return is_first

    return made, ask_hub(create)


def _take_back(agent_id: str, is_first: bool) -> None:
    """Revoke the token of a webhook that could not be registered.

    Revoking affects all tokens of an id. If the id has other tokens, revoke nothing and inform the operator.
    """

    async def revoke(client: NetworkClient) -> None:
        await client.call("network.revoke_token", {"agent_id": agent_id})

    # Revoking is safe only if the id had no other token that could be in use.
    if is_first:
        ask_hub(revoke)
        return
    told = f"An unused token of {agent_id} remains valid. To revoke it with all other tokens of {agent_id}, run"
    click.echo(f"{told}: roundelay token revoke {agent_id}", err=True)


def _ask_gateway(
    method: str, path: str, gateway: str | None, who: tuple[str, str], given: dict[str, str] | None = None
) -> dict[str, Any]:
    """Send a request to the gateway and return its answer. Raises `ConnectError`, `ConfigError`, or `ClickException` if
    the gateway refuses."""
    import httpx2

    from roundelay.network.errors import ConfigError, ConnectError
    from roundelay.network.home import find_url, node_at

    node = node_at(find_target().url or find_url())
    url = gateway or (node.gateway if node is not None else "")
    if not url:
        raise ConfigError(
            "No gateway is known here. Start the node with roundelay up --interop, or with `interop` in its file; or "
            "start roundelay gateway --webhooks FILE, and name it with --gateway URL."
        )
    sent: dict[str, Any] = {"json": given or {}} if method == "POST" else {"params": given or {}}
    try:
        answer = httpx2.request(
            method,
            url.rstrip("/") + path,
            headers={"Authorization": f"Bearer {who[0]}:{who[1]}"},
            timeout=TIMEOUT_S,
            # A proxy from the environment would receive the owner's token, and it cannot reach a gateway on loopback.
            trust_env=False,
            **sent,
        )
        value: dict[str, Any] = answer.json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConnectError(f"No gateway answers at {url} ({type(error).__name__}).") from error
    if answer.is_success:
        return value
    problem = value.get("error", {})
    # This error code means that the gateway runs without webhooks. Name the option that turns them on.
    if problem.get("code") == "unknown_operation":
        raise ConfigError(f"The gateway at {url} serves no webhooks: start it with --webhooks FILE.")
    raise click.ClickException(str(problem.get("message", f"The gateway answered {answer.status_code}.")))
