"""Agents: run those of some files, or try one without a node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import check_id, debug_option, find_target, json_option, log_options, node_options, run
from roundelay.terminal.connection import login_id

if TYPE_CHECKING:
    from roundelay.nodes.logs import LogFormat


@click.group()
def agent() -> None:
    """Run agents."""


@agent.command("run")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--only", multiple=True, metavar="ID", help="Only this agent of the files; may be repeated.")
@click.option("--until-input-ends", is_flag=True, hidden=True)
@log_options
@node_options
@debug_option
def run_command(
    files: tuple[Path, ...], only: tuple[str, ...], until_input_ends: bool, log_level: str, log_format: LogFormat
) -> None:
    """Run the agents of FILES in this process, until it is stopped.

    A file holds one agent, several, or a node whose agents are meant. An agent that runs elsewhere already is taken
    over.
    """
    import asyncio

    from roundelay.agents.team import build_runner
    from roundelay.nodes.logs import Voice, log_to_stderr
    from roundelay.nodes.run_agents import read_agents, run_agents

    log_to_stderr(log_level, log_format)
    target = find_target()
    asyncio.run(
        run_agents(
            [build_runner(spec) for spec in read_agents(files, only)],
            url=target.url,
            token=target.token,
            until_input_ends=until_input_ends,
            say=click.echo,
            note=Voice(log_format).say,
        )
    )


@agent.command("try", short_help="Send one message to the agent of FILE and show what it does.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("message")
@click.option("--agent", "agent_id", metavar="ID", help="Which agent, if FILE has several.")
@click.option("--as", "person", metavar="ID", callback=check_id, help="Who writes (default: the login user).")
@click.option("--approve", "approves", is_flag=True, help="Approve calls that need it, instead of denying them.")
@json_option
@log_options
@debug_option
def try_command(
    file: Path,
    message: str,
    agent_id: str | None,
    person: str | None,
    approves: bool,
    as_json: bool,
    log_level: str,
    log_format: LogFormat,
) -> None:
    """Send one MESSAGE to the agent of FILE and show what it does, turn by turn.

    It runs in a network of its own, in memory: nobody else is there, and nothing is kept. Its tools and its model are
    the real ones.
    """
    from roundelay.nodes.logs import log_to_stderr
    from roundelay.nodes.run_agents import read_agents
    from roundelay.nodes.try_agent import make_show, pick_agent, try_agent

    log_to_stderr(log_level, log_format)
    spec = pick_agent(read_agents([file], [agent_id] if agent_id is not None else []), agent_id)
    show = make_show(as_json=as_json)
    is_done = run(try_agent(spec, message, person=person or login_id(), approves=approves, show=show))
    if not is_done:
        raise SystemExit(1)
