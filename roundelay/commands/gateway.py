"""Other protocols' ways to a node: the gateway, and an MCP server for the host that starts it."""

from __future__ import annotations

import click

from roundelay.commands.options import check_url, debug_option, find_target, identity_options

MISSING = "This needs the extra interop: pip install 'roundelay[interop]'."


@click.command(short_help="Let programs in by HTTP.")
@click.option("--node", "node_url", metavar="URL", help="The node (default: the one of this machine).")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8701, show_default=True, help="0 takes any free one.")
@click.option("--insecure", is_flag=True, help="Listen on an address that others reach, although nothing is encrypted.")
@debug_option
def gateway(node_url: str | None, host: str, port: int, insecure: bool) -> None:
    """Let programs that know HTTP and JSON take part in a network, each by a participant's token.

    It runs beside the node until it is stopped, and keeps nothing: what a program has sent and received is the ledger's.
    The page `interop` of the documents tells the endpoints; /openapi.json describes them for programs.
    """
    import asyncio

    from roundelay.network.errors import ConfigError
    from roundelay.network.home import find_url, is_loopback
    from roundelay.nodes.processes import stop_signals

    if not is_loopback(host) and not insecure:
        raise click.UsageError(
            f"Nothing is encrypted here, and others can reach {host}: tokens could be read on their way. Listen on "
            "127.0.0.1, behind a TLS proxy; or, on a network that you trust, add --insecure."
        )
    try:
        from roundelay.interop.gateway import serve_gateway
    except ImportError as error:
        raise ConfigError(MISSING) from error
    url = check_url(node_url) if node_url is not None else find_url()

    async def work() -> None:
        with stop_signals() as stopping:
            async with serve_gateway(url, host, port) as own_url:
                click.echo(f"Roundelay's gateway to {url} is ready on {own_url}/ (/openapi.json tells what it takes)")
                await stopping.wait()

    asyncio.run(work())


@click.command(short_help="Let the host that starts it take part, by MCP over stdio.")
@identity_options
def mcp() -> None:
    """Serve MCP on stdin and stdout: whoever starts this takes part as one participant, --as.

    A host of MCP (an editor, a coding agent) starts it by its own configuration. Without a token an agent's is made and
    saved at its first use, as for any agent of this machine.
    """
    import asyncio

    from roundelay.network.client import NetworkClient
    from roundelay.network.errors import ConfigError

    try:
        from roundelay.interop.mcp_server import serve_stdio
    except ImportError as error:
        raise ConfigError(MISSING) from error
    target = find_target()
    if target.agent_id is None:
        raise click.UsageError("Say as whom: roundelay mcp --as ID.")
    kind = target.kind or (None if target.token is not None else "agent")
    asyncio.run(serve_stdio(NetworkClient(target.agent_id, target.url, kind=kind, token=target.token, deliver=False)))
