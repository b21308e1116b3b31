"""``roundelay gateway`` and ``roundelay mcp``: access to a node through other protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from roundelay.commands.options import check_url, debug_option, find_target, identity_options, log_options
from roundelay.nodes.reports import get_reporter

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from roundelay.network.client import NetworkClient
    from roundelay.network.config import Served
    from roundelay.nodes.logs import LogFormat

SERVED: tuple[Served, ...] = ("a2a", "http", "mcp", "openai", "webhooks")
"""Protocols that a gateway can serve. Copied from `network.config.Served` to keep ``--help`` fast; a test compares
both."""


def _check(value: str | None, check: Literal["check_public_url", "check_web_host"]) -> str | None:
    """Validate an option with the same check as the node file. Raises `click.BadParameter`."""
    from roundelay.network import config

    try:
        return value if value is None else str(getattr(config, check)(value))
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from error


@click.command(short_help="Serve HTTP, OpenAI, A2A and MCP clients.")
@click.option("--node", "node_url", metavar="URL", help="The node (default: the one of this machine).")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8701,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option("--insecure", is_flag=True, help="Listen without encryption on an address that others can reach.")
@click.option(
    "--serve",
    "served",
    multiple=True,
    type=click.Choice(SERVED),
    help="Protocol to serve. May be repeated (default: all; webhooks need --webhooks).",
)
@click.option(
    "--webhooks",
    "webhooks_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Post messages to webhooks, and store their registrations in this file.",
)
@click.option(
    "--webhook-host",
    "webhook_hosts",
    multiple=True,
    metavar="HOST",
    help="Allow webhooks to this host although it is not public, and without TLS. May be repeated.",
)
@click.option(
    "--public-url",
    callback=lambda _, __, value: _check(value, "check_public_url"),
    metavar="URL",
    help="Public URL of the gateway behind a proxy, with its path. A2A cards and /openapi.json show this URL.",
)
@click.option(
    "--web-host",
    "web_hosts",
    multiple=True,
    callback=lambda _, __, values: tuple(_check(it, "check_web_host") for it in values),
    metavar="HOST",
    help="Another host name of the gateway for MCP clients, behind a proxy. May be repeated.",
)
@click.option("--until-input-ends", is_flag=True, hidden=True)
@log_options
@debug_option
def gateway(
    node_url: str | None,
    host: str,
    port: int,
    insecure: bool,
    served: tuple[Served, ...],
    webhooks_file: Path | None,
    webhook_hosts: tuple[str, ...],
    public_url: str | None,
    web_hosts: tuple[str, ...],
    until_input_ends: bool,
    log_level: str,
    log_format: LogFormat,
) -> None:
    """Let programs take part in a network over HTTP, each with a participant's token.

    The gateway is a separate process that runs until you stop it. It stores only webhooks: messages are in the node's
    ledger. With `interop` in the node's file, `roundelay up` also runs a gateway. The page `interop` of the
    documentation lists the endpoints. /openapi.json describes them for programs.
    """
    import asyncio

    from roundelay.network.errors import ConfigError, ConnectError
    from roundelay.network.home import find_url, is_loopback
    from roundelay.nodes.logs import log_to_stderr
    from roundelay.nodes.processes import stop_signals, wait_for_first, wait_for_input_end

    if not is_loopback(host) and not insecure:
        raise click.UsageError(
            f"The gateway does not encrypt, and other machines can reach {host}, so others could read tokens. Listen "
            "on 127.0.0.1, behind a TLS proxy; or, on a network that you trust, add --insecure."
        )
    from roundelay.interop.gateway import serve_gateway

    log_to_stderr(log_level, log_format)
    url = check_url(node_url) if node_url is not None else find_url()

    # Webhooks need a file for their registrations. Without that file, the default excludes webhooks.
    what = served or tuple(it for it in SERVED if it != "webhooks" or webhooks_file is not None)
    if "webhooks" in what and webhooks_file is None:
        raise click.UsageError("Webhooks need a file for their registrations: --webhooks FILE.")

    reporter = get_reporter()

    async def work() -> None:
        with stop_signals() as stopping:
            serving = serve_gateway(
                url,
                host,
                port,
                served=what,
                webhooks_file=webhooks_file,
                webhook_hosts=webhook_hosts,
                public_url=public_url,
                web_hosts=web_hosts,
            )
            async with serving as own_url:
                note = "/openapi.json describes its endpoints" if not until_input_ends else " ".join(what)
                reporter.report_ready(f"Roundelay's gateway to {url} is ready on {own_url}/ ({note})", f"{own_url}/")
                await wait_for_first(stopping.wait(), *([wait_for_input_end()] if until_input_ends else []))

    try:
        asyncio.run(work())
    # the gateway cannot bind the address; report a wrong configuration, not a lost connection
    except ConnectError as error:
        raise ConfigError(str(error)) from error


@click.command(short_help="Connect an MCP host over stdio.")
@identity_options
def mcp() -> None:
    """Serve MCP on stdin and stdout. The MCP host that starts the command takes part as the participant --as ID.

    The host, such as an editor or a coding agent, starts this command from its own configuration. Without a token, the
    first use creates and saves one, as for any agent on this machine.
    """
    from roundelay.interop.mcp.stdio import HostPipe, is_sdk_installed
    from roundelay.network.extras import MissingExtra, describe_missing

    if not is_sdk_installed():
        raise MissingExtra(describe_missing("bridge", "mcp"))
    target = find_target()
    if target.agent_id is None:
        raise click.UsageError("Name the participant: roundelay mcp --as ID.")
    pipe = HostPipe()  # answers the host while the other modules are still being imported
    import asyncio

    from roundelay.network.client import NetworkClient

    kind = target.kind or (None if target.token is not None else "agent")
    client = NetworkClient(target.agent_id, target.url, kind=kind, token=target.token, deliver=False)

    @asynccontextmanager
    async def find_session(_: object) -> AsyncIterator[NetworkClient]:
        yield client

    def make_server() -> MCPServer[Any]:
        from roundelay.interop.mcp.server import make_mcp_server

        return make_mcp_server(find_session)

    async def serve() -> None:
        async with client:
            await pipe.serve(make_server)

    asyncio.run(serve())
