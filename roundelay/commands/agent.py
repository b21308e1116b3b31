"""Agents as processes: run those of some files."""

from __future__ import annotations

from pathlib import Path

import click

from roundelay.commands.options import debug_option, find_target, log_option, node_options


@click.group()
def agent() -> None:
    """Run agents."""


@agent.command("run")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--only", multiple=True, metavar="ID", help="Only this agent of the files; may be repeated.")
@click.option("--until-input-ends", is_flag=True, hidden=True)
@log_option
@node_options
@debug_option
def run_command(files: tuple[Path, ...], only: tuple[str, ...], until_input_ends: bool, log_level: str) -> None:
    """Run the agents of FILES in this process, until it is stopped.

    A file holds one agent, several, or a node whose agents are meant. An agent that runs elsewhere already is taken over.
    """
    import asyncio

    from roundelay.logs import log_to_stderr
    from roundelay.run_agents import read_agents, run_agents

    log_to_stderr(log_level)
    target = find_target()
    asyncio.run(
        run_agents(
            read_agents(files, only),
            url=target.url,
            token=target.token,
            until_input_ends=until_input_ends,
            say=click.echo,
            note=lambda text: click.echo(text, err=True),
        )
    )
