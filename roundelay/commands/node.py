"""``roundelay up`` and ``roundelay doctor``: run a node, and check the node's requirements."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.gateway import SERVED
from roundelay.commands.options import debug_option, json_option, log_options, node_options
from roundelay.commands.output import show
from roundelay.connection import READER_ID, find_login_id
from roundelay.network.extras import name_command
from roundelay.network.platforms import find_loop_factory, has_desktop
from roundelay.nodes.reports import get_reporter

if TYPE_CHECKING:
    from roundelay.nodes.logs import LogFormat

DEFAULT_FILE = Path("roundelay.yaml")
OPENAI_MODULE = "roundelay.agents.models.openai_model"


def pick_file(file: Path | None) -> Path | None:
    """Return the given node file, or roundelay.yaml if the current folder has one, or None."""
    return file or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


@click.command(short_help="Run a node and its agents.")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--host", help="The address to listen on (default: 127.0.0.1).")
@click.option("--port", type=int, help="The port to listen on; 0 selects a free port (default: 8700).")
@click.option("--db", metavar="FILE", help="The database (default: roundelay.db).")
@click.option(
    "--durability",
    help="full: no acknowledged message is lost, even at power loss (default); normal: not by a crash; memory: "
    "nothing is kept.",
)
@click.option(
    "--log",
    metavar="URL",
    help="The shared log of several nodes, nats://HOST:PORT/STREAM or postgres://HOST/DATABASE?network=NAME: one node "
    "serves, the others wait to take over.",
)
@click.option("--name", help="The network's name, for a new database.")
@click.option("--tls-cert", metavar="FILE", help="Encrypt, with this certificate (PEM); needs --tls-key.")
@click.option("--tls-key", metavar="FILE", help="The certificate's private key (PEM).")
@click.option(
    "--registration",
    help="Where an agent may be when it binds a new id to its token: local, on this machine (default); open, "
    "anywhere; closed, nowhere.",
)
@click.option(
    "--behind-proxy",
    is_flag=True,
    default=None,
    help="Connections come through a proxy, so treat none of them as local.",
)
@click.option("--web/--no-web", default=None, help="Serve the web page (default), or not.")
@click.option("--web-link", is_flag=True, help="Print a login link for the page even without a terminal.")
@click.option(
    "--open/--no-open",
    "opens",
    default=None,
    help="Open the page in the browser, or not (default: for a new database at a terminal with a desktop).",
)
@click.option(
    "--interop/--no-interop",
    default=None,
    help="Run the gateway for programs of other protocols (default: where FILE has `interop`), or not.",
)
@click.option(
    "--interop-port", type=int, metavar="PORT", help="The gateway's port; 0 selects a free port (default: 8701)."
)
@click.option("--no-agents", is_flag=True, help="Do not start the agents that FILE declares.")
@click.option("--until-input-ends", is_flag=True, hidden=True)
@click.option("--insecure", is_flag=True, help="Listen without encryption on an address that others can reach.")
@log_options
@debug_option
def up(
    file: Path | None,
    web_link: bool,
    opens: bool | None,
    no_agents: bool,
    until_input_ends: bool,
    insecure: bool,
    interop: bool | None,
    interop_port: int | None,
    log_level: str,
    log_format: LogFormat,
    **flags: str | int | bool | tuple[str, ...] | None,
) -> None:
    """Run a node and the agents that FILE declares, until you stop the command.

    FILE defaults to roundelay.yaml in this folder, if it exists. Flags take precedence over the environment
    (ROUNDELAY_PORT and so on), and the environment over the file. When everything is ready, one line on stdout shows
    the address.
    """
    import asyncio

    from roundelay.network.config import resolve_config
    from roundelay.network.errors import ConnectError, ModError
    from roundelay.network.extras import MissingExtra, describe_missing
    from roundelay.network.home import is_loopback
    from roundelay.network.hub.process_memory import return_large_blocks
    from roundelay.nodes.logs import ProcessLog, log_to_stderr
    from roundelay.nodes.up import place_mod_error, run_node

    flags["interop.port"] = interop_port
    if interop is not None or interop_port is not None:
        # A port alone also turns on the gateway: otherwise the option would be ignored silently.
        flags["interop.serve"] = SERVED if interop in (True, None) else ()
    config, origins = resolve_config(pick_file(file), os.environ, flags)
    if config.interop.serve and find_spec("uvicorn") is None:
        raise MissingExtra(
            f"{describe_missing('gateway', 'uvicorn')}. Or start without the gateway: roundelay up --no-interop."
        )
    if config.interop.serve and not is_loopback(config.interop.host) and not insecure:
        raise click.UsageError(
            f"The gateway does not encrypt, and other machines can reach {config.interop.host}, so others could read "
            "tokens. Let it listen on 127.0.0.1, behind a TLS proxy; or, on a network that you trust, add --insecure."
        )
    if not is_loopback(config.host) and config.tls_cert is None and config.tls_key is None and not insecure:
        raise click.UsageError(
            f"The node does not encrypt, and other machines can reach {config.host}, so others could read tokens and "
            "messages. Pass --tls-cert and --tls-key; or listen on 127.0.0.1, behind a TLS proxy; or, on a network that "
            "you trust, add --insecure."
        )
    log_to_stderr(log_level, log_format)
    agents, forker = [], None
    if config.agents and not no_agents:
        from roundelay.agents.team import load_agents
        from roundelay.nodes.forker import Forker

        agents = load_agents(config.agents)
        # Start the forker before the event loop: a forked process must not inherit the loop's threads and files.
        forker = Forker.start([OPENAI_MODULE] if any(spec.model.openai is not None for spec in agents) else [])

    is_at_terminal = sys.stderr.isatty()
    if opens is None:
        # Open the page only at the first start: with a known node, every start would open another window.
        opens = is_at_terminal and has_desktop() and not config.db.exists()
    opened: Path | None = None
    reporter = get_reporter()
    command = name_command(Path.cwd())

    def announce_ready(line: str, url: str, link: str | None) -> None:
        nonlocal opened
        reporter.report_ready(line, url)
        if link is not None and opens:
            from roundelay.nodes.links import open_in_browser

            opened = open_in_browser(link)
        if link is not None:
            click.echo(f"Open {link}", err=True)
            click.echo(f"That link logs you in once, within 10 minutes; another one: {command} web", err=True)
        if is_at_terminal:
            to = f" --to {agents[0].id}" if agents else ""
            click.echo(f"Ctrl-C stops it. In another terminal: {command} chat{to}", err=True)

    work = run_node(
        config,
        agents,
        operator_id=READER_ID,
        log_level=log_level,
        until_input_ends=until_input_ends,
        announce_ready=announce_ready,
        log=ProcessLog(log_format),
        forker=forker,
        person_id=find_login_id() if config.web and (web_link or opens or is_at_terminal) else None,
    )
    return_large_blocks()
    try:
        with asyncio.Runner(loop_factory=find_loop_factory()) as runner:
            runner.run(work)
    except ConnectError as error:  # the node cannot bind the address; this is not a lost connection
        raise click.ClickException(str(error)) from error
    except ModError as error:
        raise place_mod_error(error, origins["mods"]) from error
    finally:
        if forker is not None:
            forker.join()
        if opened is not None:
            # The file contains a login link that may still be valid.
            opened.unlink(missing_ok=True)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--db", metavar="FILE", help="The node's database, as for up.")
@click.option("--log", metavar="URL", help="The shared log of several nodes, as for up.")
@click.option("--model", metavar="NAME", help="Ask this OpenAI-compatible model too.")
@click.option("--base-url", metavar="URL", help="Base URL of --model (default: the OpenAI API).")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Maximum seconds for a model's reply.",
)
@json_option
@node_options
@debug_option
def doctor(
    file: Path | None,
    db: str | None,
    log: str | None,
    model: str | None,
    base_url: str | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Check everything that a node and its agents need, and explain how to fix each problem.

    The command checks versions, the configuration, the database and its integrity, the shared log, retention, open
    files, TLS, the port and the clock. It also asks each model of FILE's agents once to call a tool. FILE may be an
    agent file.
    """
    import asyncio

    from roundelay.commands.options import find_target
    from roundelay.network.config import load_yaml
    from roundelay.nodes.doctor import examine

    if file is not None and not file.exists():
        # Raise the error for a missing file. Its name may be misspelled, and none of its settings could be checked.
        load_yaml(file)
    checks = asyncio.run(
        examine(
            pick_file(file),
            url=find_target().url,
            model=model,
            base_url=base_url,
            timeout_s=timeout_s,
            env=os.environ,
            flags={"db": db, "log": log},
        )
    )
    is_well = all(check.status != "failed" for check in checks)
    value = {"ok": is_well, "checks": [check.to_json() for check in checks]}
    show(value, lambda paint: [check.describe(paint) for check in checks], as_json=as_json)
    if not is_well:
        click.get_current_context().exit(1)
