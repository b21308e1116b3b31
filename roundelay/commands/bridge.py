"""``roundelay bridge``: connect coding agents that people already run to a network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import check_url, debug_option, json_option

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from roundelay.interop.bridge.hosts import Host
    from roundelay.interop.bridge.installer import FileChange

NAMES = ("claude", "codex", "gemini", "opencode", "cursor")
"""Names of the supported coding agents. Copied from `interop.bridge.hosts`, which is slow to import."""

host_argument = click.argument("host", metavar="HOST", type=click.Choice(NAMES))
project_option = click.option(
    "--project",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    default=".",
    metavar="DIR",
    help="The project (default: this folder).",
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Show what would change, as a diff, and change nothing.")


@click.group(short_help="Connect a coding agent to the network.")
def bridge() -> None:
    """Connect a coding agent (claude, codex, gemini, opencode, cursor) to a network.

    `install` adds an MCP server and hooks to the project's files for the coding agent. Through the MCP server, the
    agent sends messages and asks questions. The hooks show messages from others to the agent while it works. The page
    `bridge` of the documentation lists the features that each coding agent supports.
    """


@bridge.command()
@host_argument
@project_option
@click.option("--url", metavar="URL", help="The hub (default: searched at each start, as by other commands).")
@click.option(
    "--command", metavar="WORDS", help="Command with which the agent starts roundelay (default: the one found here)."
)
@click.option("--wake", is_flag=True, help="Preview: wake HOST when it is idle and a message arrives (claude, codex).")
@dry_run_option
@json_option
@debug_option
def install(
    host: str, project: Path, url: str | None, command: str | None, wake: bool, dry_run: bool, as_json: bool
) -> None:
    """Add the MCP server and the hooks to a project's files for HOST. Running the command again changes nothing."""
    from roundelay.interop.bridge import installer
    from roundelay.interop.mcp.stdio import is_sdk_installed
    from roundelay.network.extras import MissingExtra, describe_missing

    # Without this check, the host would later start a command that cannot run.
    if command is None and not is_sdk_installed():
        raise MissingExtra(describe_missing("bridge", "mcp"))
    chosen = _find(host)
    changes = installer.plan_install(chosen, project, url=check_url(url) if url else None, command=command, wakes=wake)
    if not dry_run:
        installer.install(chosen, project, changes)
    # A second run changes nothing, so its user has already taken these steps.
    steps = [chosen.needs, chosen.wakes_by if wake else ""] if any(it.is_change for it in changes) else []
    needs = " ".join(f"{it}." for it in steps if it)
    _tell(chosen, project, changes, dry_run=dry_run, as_json=as_json, needs=needs)


@bridge.command(short_help="Remove the bridge from a project's files.")
@host_argument
@project_option
@dry_run_option
@json_option
@debug_option
def remove(host: str, project: Path, dry_run: bool, as_json: bool) -> None:
    """Remove the bridge from a project's files.

    Each file is restored. If a file was changed since, only the bridge's entries are removed. A file that cannot be
    edited safely, such as one with comments, is reported and stays as it is. The exit code is then 1.
    """
    from roundelay.interop.bridge import installer

    chosen = _find(host)
    changes = installer.plan_remove(chosen, project)
    if not dry_run:
        installer.remove(chosen, project, changes)
    _tell(chosen, project, changes, dry_run=dry_run, as_json=as_json)


@bridge.command(short_help="Show the coding agents that have the bridge.")
@click.argument("host", metavar="HOST", type=click.Choice(NAMES), required=False)
@project_option
@json_option
@debug_option
def status(host: str | None, project: Path, as_json: bool) -> None:
    """Show the coding agents that have the bridge in a project, and their ids in the network."""
    from roundelay.commands.output import show_list
    from roundelay.interop.bridge.installer import find_state, is_waking
    from roundelay.interop.bridge.participants import list_names, show_path

    listed = []
    for name in (host,) if host is not None else NAMES:
        participants = [
            {"agent_id": agent_id, "is_running": it.is_running}
            for agent_id, it in list_names().items()
            if (it.host, it.project) == (name, show_path(project))
        ]
        state, wakes = find_state(_find(name), project), is_waking(_find(name), project)
        listed.append({"host": name, "state": state, "wakes": wakes, "participants": participants})
    show_list(
        {"hosts": listed},
        {
            "HOST": lambda it: it["host"],
            "STATE": lambda it: f"{it['state']}{', wakes' if it['wakes'] else ''}",
            "PARTICIPANTS": lambda it: ", ".join(
                f"{one['agent_id']}{' (runs)' if one['is_running'] else ''}" for one in it["participants"]
            ),
        },
        empty="",
        as_json=as_json,
    )


@bridge.command(hidden=True)
@host_argument
@click.option("--url", metavar="URL", envvar="ROUNDELAY_URL")
def deliver(host: str, url: str | None) -> None:
    """Handle one hook of HOST: read the hook's event from stdin, and write the text for HOST's model to stdout."""
    from roundelay.interop.bridge.hooks import run_hook as answer

    answer(_find(host), url)


@bridge.command(hidden=True)
@host_argument
@click.option("--url", metavar="URL", envvar="ROUNDELAY_URL")
@debug_option
def mcp(host: str, url: str | None) -> None:
    """Serve MCP on stdin and stdout for HOST. HOST starts this command and joins the network as a separate
    participant.
    """
    from roundelay.interop.bridge.participants import is_woken
    from roundelay.interop.mcp.stdio import HostPipe, is_sdk_installed
    from roundelay.network.extras import MissingExtra, describe_missing

    if not is_sdk_installed():
        raise MissingExtra(describe_missing("bridge", "mcp"))
    chosen = _find(host)
    # Only the SDK can push events to a host. If the bridge may wake the host, use the SDK from the start.
    pipe = HostPipe() if not is_woken(chosen) else None
    import asyncio

    from roundelay.interop.bridge.session import BridgeSession

    async def serve() -> None:
        async with BridgeSession(chosen, url) as session:

            def make_server() -> MCPServer[Any]:
                from roundelay.interop.mcp.server import make_mcp_server

                return make_mcp_server(session.lend)

            if pipe is not None:
                await pipe.serve(make_server)
            else:
                from roundelay.interop.bridge.wakeups import serve_waking

                await serve_waking(make_server(), session)

    asyncio.run(serve())


def _find(name: str) -> Host:
    from roundelay.interop.bridge.hosts import HOSTS

    return HOSTS[name]


def _tell(
    host: Host, project: Path, changes: list[FileChange], *, dry_run: bool, as_json: bool, needs: str = ""
) -> None:
    from roundelay.commands.output import show
    from roundelay.display.text import sanitize_lines
    from roundelay.interop.bridge.participants import show_path

    listed: list[dict[str, Any]] = [
        {"path": it.path, "change": it.describe(), **({"problem": it.problem} if it.problem else {})} for it in changes
    ]
    if dry_run:
        for told, change in zip(listed, changes, strict=True):
            told["diff"] = "\n".join(change.diff())
    value = {
        "host": host.name,
        "project": show_path(project),
        "is_dry_run": dry_run,
        "files": listed,
        "needs": needs or None,
    }

    def describe(_: object) -> list[str]:
        problems = [f"{it['path']} is left as it is. {it['problem']}" for it in listed if "problem" in it]
        if dry_run:
            lines = [line for it in listed for line in it["diff"].splitlines()] or ["Nothing would change."]
        else:
            lines = [f"{it['path']}: {it['change']}" for it in listed]
        told = [*lines, *problems, *([needs] if needs else [])]
        return [line for it in told for line in sanitize_lines(it)]

    show(value, describe, as_json=as_json)
    if any(it.problem for it in changes):
        raise SystemExit(1)
