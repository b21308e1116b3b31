"""Shared options of commands, and the connections that the options define.

`node_options` is on the root command and on each command that connects. ``roundelay --url X agents`` and ``roundelay
agents --url X`` are therefore equal. Without options, commands use the node of this machine (`roundelay.network.home`).
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from roundelay.connection import READER_ID, find_login_id

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient
    from roundelay.runs.source import Source

Kind = Literal["agent", "human", "service"]
Function = TypeVar("Function", bound=Callable[..., object])
T = TypeVar("T")
_ID = r"[a-z0-9][a-z0-9._-]{0,63}"


@dataclass
class Target:
    """Hub and identity that the options select; None for an option that was not given."""

    url: str | None = None
    token: str | None = None
    agent_id: str | None = None
    kind: Kind | None = None


def find_target() -> Target:
    """Return the target of the running command, from the options of the command and its groups."""
    # All groups and commands of one command line share this object and write their options into it.
    return click.get_current_context().ensure_object(Target)


def _keep(name: str, check: Callable[[str], str] = str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """Return an option callback that stores an option's value in the target.

    Users may write the option before or after the command's name, and click reads the environment for both. An option
    before the command's name takes precedence over the environment.
    """

    def keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        target = context.ensure_object(Target)
        is_of_environment = context.get_parameter_source(parameter.name or "") is ParameterSource.ENVIRONMENT
        # The command reads the environment after the group has stored a typed option. The typed option must not be
        # overwritten.
        if value is not None and (getattr(target, name) is None or not is_of_environment):
            setattr(target, name, check(value))

    return keep


def check_url(value: str) -> str:
    """Validate the URL of a hub, or several URLs separated by commas."""
    from roundelay.network.errors import ConfigError
    from roundelay.network.home import read_urls

    try:
        return read_urls(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _read_token(value: str) -> str:
    """Check that a token can be sent in an HTTP header, and return the token."""
    from roundelay.network.credentials import read_secret
    from roundelay.network.errors import ConfigError

    try:
        # Check before connecting. The error names the option and the wrong character, and never shows the token.
        return read_secret(value, "--token or ROUNDELAY_TOKEN")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _check_id(value: str) -> str:
    if not re.fullmatch(_ID, value):
        raise click.BadParameter(f"{value!r} is not a valid id; use lower case letters, digits, '.', '_' and '-'.")
    return value


class _Seq(click.ParamType[int]):
    """Click type for the number of a message, with or without #."""

    name = "seq"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        # Screens show messages as #17, so people paste numbers with a #.
        number = str(value).removeprefix("#")
        # Sequence numbers begin at 1.
        if not (number.isdecimal() and int(number)):
            self.fail(f"{value!r} is not the number of a message; write 17, or '#17' in quotes.", param, ctx)
        return int(number)


SEQ = _Seq()


def check_id(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Validate a participant's id. Callback of an option."""
    return _check_id(value) if value is not None else None


def check_place(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Validate an address, a thread or a participant's id. Callback of an option."""
    if value is not None and not re.fullmatch(rf"broadcast|(agent:)?{_ID}|(channel|direct|mod|thread):\S+", value):
        raise click.BadParameter(
            f"{value!r} is not a place; write an ID, broadcast, channel:NAME, mod:ID or thread:SEQ."
        )
    return value


def read_address(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Return an address. Callback of an argument. A bare id becomes the address of that participant."""
    from roundelay.network.addresses import complete_address  # imported here so that commands start fast

    address = complete_address(value)
    if not re.fullmatch(rf"broadcast|(agent|channel|mod):{_ID}", address):
        raise click.BadParameter(
            f"{value!r} is not an address; write an ID, broadcast, channel:NAME or mod:ID, all in lower case."
        )
    return address


def _keep_debug(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        os.environ["ROUNDELAY_DEBUG"] = "1"  # child processes also read this variable


def node_options(function: Function) -> Function:
    """Add ``--url`` and ``--token``."""
    function = click.option(
        "--token",
        metavar="TOKEN",
        expose_value=False,
        callback=_keep("token", _read_token),
        envvar="ROUNDELAY_TOKEN",
        help="Your token; needed only if the node is on another machine.  [env: ROUNDELAY_TOKEN]",
    )(function)
    return click.option(
        "--url",
        metavar="URL",
        expose_value=False,
        callback=_keep("url", check_url),
        envvar="ROUNDELAY_URL",
        help="URL of the hub (default: the node on this machine).  [env: ROUNDELAY_URL]",
    )(function)


def identity_options(function: Function) -> Function:
    """Add `node_options`, ``--as`` and ``--as-kind``."""
    function = click.option(
        "--as-kind",
        type=click.Choice(("human", "service", "agent")),
        expose_value=False,
        callback=_keep("kind"),
        help="Kind of the participant that --as names (default: the kind in its token, otherwise human).",
    )(function)
    function = click.option(
        "--as",
        metavar="ID",
        expose_value=False,
        callback=_keep("agent_id", _check_id),
        envvar="ROUNDELAY_AS",
        help="Connect as this participant.  [env: ROUNDELAY_AS]",
    )(function)
    return debug_option(node_options(function))


def debug_option(function: Function) -> Function:
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_keep_debug,
        is_eager=True,
        help="Show tracebacks.  [env: ROUNDELAY_DEBUG]",
    )(function)


LEDGER_PATH = click.Path(readable=False, path_type=Path)
"""Click type for the path of a database. The code that opens the database checks the path, so that all commands report
the same errors."""


def db_option(function: Function) -> Function:
    return click.option(
        "--db",
        "db",
        type=LEDGER_PATH,
        metavar="FILE",
        help="Read this ledger, or a jsonl export of it, without a node.",
    )(function)


def json_option(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def log_options(function: Function) -> Function:
    """Add ``--log-level`` and ``--log-format``."""
    function = click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        help="Format of the log: text (default) or lines of JSON.",
    )(function)
    return click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error"), case_sensitive=False),
        default="warning",
        help="Minimum level of the log on stderr (default: warning).",
    )(function)


def silence_logs() -> None:
    """Hide logs without a configured handler, so that users see only the command's own output."""
    import logging

    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine and return its result. Logs are hidden."""
    import asyncio

    silence_logs()
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise SystemExit(143) from None  # SIGTERM also cancels the coroutine, so that the terminal is restored


def ask_hub(work: Callable[[NetworkClient], Awaitable[T]]) -> T:
    """Call ``work`` with a connection that only reads, and return the result."""

    async def join_and_work() -> T:
        async with join() as client:
            return await work(client)

    return run(join_and_work())


def read_run(db: Path | None, read: Callable[[Source], Coroutine[Any, Any, T]]) -> T:
    """Call ``read`` with a source: a ledger file, or the node that the options select. Return the result."""
    from roundelay.network.ledger.log_file import open_log
    from roundelay.runs.file_source import FileSource
    from roundelay.runs.node_source import LiveSource

    if db is None:
        return ask_hub(lambda client: read(LiveSource(client)))
    with open_log(db) as log:
        found = run(read(FileSource(log)))
        # Warn on stderr, because programs parse stdout.
        if log.damaged:
            rows = "row is" if len(log.damaged) == 1 else "rows are"
            shown = ", ".join(f"#{seq}" for seq in sorted(log.damaged)[:5])
            click.echo(
                f"{len(log.damaged)} damaged {rows} left out ({shown}); roundelay doctor shows details.", err=True
            )
    return found


@asynccontextmanager
async def join(*, as_person: bool = False, reconnect: bool = False) -> AsyncIterator[NetworkClient]:
    """Connect as ``--as``. Without ``--as``, connect as the login user if ``as_person``, or else as the commands' own
    service.

    Without ``reconnect``, a lost connection ends the command. The owner's token registers each new id that connects.
    A command that only reads must not register its id by mistake, so an unknown id raises `UnknownRecipient`.
    """
    from roundelay.network.client import NetworkClient
    from roundelay.network.errors import ConnectError, Forbidden, NotAuthenticated
    from roundelay.network.frames import READ_ONLY_QUERY
    from roundelay.network.home import find_owner_token, running_nodes

    target = find_target()
    usual: Kind = "human" if as_person or target.agent_id is not None else "service"
    is_left_to_token = target.kind is None and target.token is not None and target.agent_id is not None
    agent_id = target.agent_id or (find_login_id() if as_person else READER_ID)

    def make_client(kind: Kind | None) -> NetworkClient:
        return NetworkClient(agent_id, target.url, kind=kind, token=target.token, reconnect=reconnect)

    client = make_client(None if is_left_to_token else target.kind or usual)
    try:
        is_reading = READ_ONLY_QUERY in client.url  # a read replica cannot register participants
        is_doubtful = not as_person and target.agent_id is not None and target.token is None and not is_reading
        if is_doubtful and find_owner_token(client.url):
            await _check_registered(agent_id, client.url)
        try:
            await client.connect()
        except NotAuthenticated:
            if not is_left_to_token:
                raise
            client = make_client(usual)  # the owner's token does not determine the kind of a new participant
            await client.connect()
    except NotAuthenticated as error:
        raise NotAuthenticated(f"{error} {_advise(target)}") from error
    except Forbidden as error:
        told = _advise(target) if target.token is not None else ""
        if READ_ONLY_QUERY in client.url and target.agent_id is None:
            told = f"{agent_id} has never joined this network: name a participant to read as with --as."
        raise Forbidden(f"{error} {told}".strip()) from error
    finally:  # a read replica may have reported the leader's address while connecting
        if target.url is None and (others := {node.url for node in running_nodes()} - {client.url}):
            known = ", ".join(sorted(others))
            told = f"Several nodes run here. The command uses {client.url}. Choose another one with --url {known}"
            click.echo(f"* {told}", err=True)
    try:
        yield client
        if client.as_of is not None:
            click.echo(f"* {_tell_age(client)}", err=True)
    except ConnectError as error:
        raise ConnectError(f"{error} Check that the hub at {client.url} is running, and run this again.") from error
    finally:
        await client.close()


def _tell_age(client: NetworkClient) -> str:
    from roundelay.display.text import sanitize

    leader = client.welcome.follows.leader if client.welcome.follows is not None else ""
    moment = datetime.fromtimestamp((client.as_of or 0) / 1000).astimezone().isoformat(" ", "seconds")
    return f"Read at a node that follows {sanitize(leader) or 'another one'}, as of {moment}."


async def _check_registered(agent_id: str, url: str) -> None:
    """Raise `UnknownRecipient` for an id that is not registered. Connecting with the owner's token would register the
    id."""
    from roundelay.network.client import NetworkClient
    from roundelay.runs.lists import list_participants
    from roundelay.terminal.places import check_recipient

    async with NetworkClient(READER_ID, url, kind="service", reconnect=False) as reader:
        known = [str(it["agent_id"]) for it in await list_participants(reader)]
    if agent_id != READER_ID:
        check_recipient(agent_id, known)


def _advise(target: Target) -> str:
    if target.token is None:
        return (
            "If the node runs on another machine, pass --as ID and --token TOKEN; "
            "an operator creates a token with: roundelay token create ID --kind human"
        )
    if target.agent_id is None:
        return "Name the owner of the token with --as (and --as-kind)."
    return "Check --as, --as-kind and --token."
