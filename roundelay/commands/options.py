"""Options that several commands share, and the connection that they ask for.

`node_options` stands on the command group and on each command that connects, so that ``roundelay --url X agents`` and
``roundelay agents --url X`` are the same. Without any, the node of this machine is found (`roundelay.network.home`).
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import click

from roundelay.identity import READER_ID, login_id

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

Kind = Literal["agent", "human", "service"]
Function = TypeVar("Function", bound=Callable[..., object])
T = TypeVar("T")


@dataclass
class Target:
    """The hub to talk to, and as whom, as far as it was said."""

    url: str | None = None
    token: str | None = None
    agent_id: str | None = None
    kind: Kind | None = None


def find_target() -> Target:
    """What the options of the running command and of its groups said."""
    return click.get_current_context().ensure_object(Target)


def _check_url(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("ws", "wss") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        raise click.BadParameter(f"{value!r} is no address of a hub; write ws://HOST:PORT/ or wss://HOST:PORT/.")
    context.ensure_object(Target).url = value


def _keep_token(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.ensure_object(Target).token = value


def _keep_id(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", value):
            raise click.BadParameter(f"{value!r} is no id; use lower case letters, digits, '.', '_' and '-'.")
        context.ensure_object(Target).agent_id = value


def _keep_kind(context: click.Context, _parameter: click.Parameter, value: Kind | None) -> None:
    if value is not None:
        context.ensure_object(Target).kind = value


def _keep_debug(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        os.environ["ROUNDELAY_DEBUG"] = "1"  # also for the processes that are started


def node_options(function: Function) -> Function:
    """Add ``--url`` and ``--token``."""
    function = click.option(
        "--token", metavar="TOKEN", expose_value=False, callback=_keep_token, envvar="ROUNDELAY_TOKEN",
        help="Who you are to the hub; needed only on another machine than the node's.  [env: ROUNDELAY_TOKEN]",
    )(function)  # fmt: skip
    return click.option(
        "--url", metavar="URL", expose_value=False, callback=_check_url, envvar="ROUNDELAY_URL",
        help="The hub; without it the node that runs on this machine.  [env: ROUNDELAY_URL]",
    )(function)  # fmt: skip


def identity_options(function: Function) -> Function:
    """Add `node_options`, ``--as`` and ``--as-kind``."""
    function = click.option(
        "--as-kind", type=click.Choice(("human", "service", "agent")), expose_value=False, callback=_keep_kind,
        help="What --as is (default: human).",
    )(function)  # fmt: skip
    function = click.option(
        "--as", metavar="ID", expose_value=False, callback=_keep_id, envvar="ROUNDELAY_AS",
        help="As whom.  [env: ROUNDELAY_AS]",
    )(function)  # fmt: skip
    return debug_option(node_options(function))


def debug_option(function: Function) -> Function:
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_keep_debug, is_eager=True,
        help="Show tracebacks.  [env: ROUNDELAY_DEBUG]",
    )(function)  # fmt: skip


def json_option(function: Function) -> Function:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(function)


def log_option(function: Function) -> Function:
    return click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error"), case_sensitive=False),
        default="warning",
        help="What goes to stderr (default: warning).",
    )(function)


def read_address(text: str) -> str:
    """An address as it was typed: a bare id means that participant."""
    return text if ":" in text or text == "broadcast" else f"agent:{text}"


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; silent but for its own output."""
    import asyncio
    import logging

    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise SystemExit(143) from None  # SIGTERM, where it is handled to put the terminal in order


@asynccontextmanager
async def join_as_person() -> AsyncIterator[NetworkClient]:
    """Join as ``--as``, or as the login user."""
    target = find_target()
    async with _join(target.agent_id or login_id(), target.kind or "human") as client:
        yield client


@asynccontextmanager
async def join_as_reader() -> AsyncIterator[NetworkClient]:
    """Join as ``--as``, or as a service of the command line's own, with the owner's rights."""
    target = find_target()
    kind = target.kind or ("human" if target.agent_id is not None else "service")
    async with _join(target.agent_id or READER_ID, kind) as client:
        yield client


@asynccontextmanager
async def _join(agent_id: str, kind: Kind) -> AsyncIterator[NetworkClient]:
    from roundelay.network.client import NetworkClient
    from roundelay.network.errors import Forbidden, NotAuthenticated

    target = find_target()
    client = NetworkClient(agent_id, target.url, kind=kind, token=target.token)
    try:
        await client.connect()
    except NotAuthenticated as error:
        raise NotAuthenticated(f"{error} {_advise(target)}") from error
    except Forbidden as error:
        raise Forbidden(f"{error} {_advise(target)}" if target.token is not None else str(error)) from error
    try:
        yield client
    finally:
        await client.close()


def _advise(target: Target) -> str:
    if target.token is None:
        return (
            "Away from the node's machine give --as ID and --token TOKEN; "
            "its operator makes one: roundelay token create ID --kind human"
        )
    if target.agent_id is None:
        return "Say with --as (and --as-kind) whose token it is."
    return "Check --as, --as-kind and --token."
