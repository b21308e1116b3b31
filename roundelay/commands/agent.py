"""``roundelay agent``: run agents from files, try an agent without a node, and control the node's agents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.options import (
    ask_hub,
    check_id,
    debug_option,
    find_target,
    identity_options,
    json_option,
    log_options,
    node_options,
    run,
)
from roundelay.commands.output import show, show_list
from roundelay.connection import find_login_id
from roundelay.network.extras import name_command
from roundelay.nodes.reports import get_reporter

if TYPE_CHECKING:
    from roundelay.network.operations.reading import AgentAction
    from roundelay.nodes.logs import LogFormat


@click.group()
def agent() -> None:
    """Run agents and control those that a node runs."""


@agent.command("run")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--only", multiple=True, metavar="ID", help="Run only this agent of the files. May be repeated.")
@click.option("--until-input-ends", is_flag=True, hidden=True)
@click.option("--as-loaded", type=click.Path(path_type=Path), hidden=True)
@log_options
@node_options
@debug_option
def run_command(
    files: tuple[Path, ...],
    only: tuple[str, ...],
    until_input_ends: bool,
    as_loaded: Path | None,
    log_level: str,
    log_format: LogFormat,
) -> None:
    """Run the agents of FILES in this process until you stop it.

    A file declares one agent, several agents, or a node with agents. If an agent already runs elsewhere, this process
    replaces it.
    """
    import asyncio

    from roundelay.agent_files import read_agents
    from roundelay.agents.team import build_runner
    from roundelay.network.yaml import override_file
    from roundelay.nodes.logs import ProcessLog, log_to_stderr
    from roundelay.nodes.processes import end_after_supervisor
    from roundelay.nodes.run_agents import run_agents

    # Call this before importing the agents' code, because that import may hang.
    end_after_supervisor()
    log_to_stderr(log_level, log_format)
    # The file may have changed since the node loaded it. Run the version that the node has validated.
    if as_loaded is not None:
        override_file(files[0], as_loaded.read_bytes())
    target = find_target()
    asyncio.run(
        run_agents(
            [build_runner(spec) for spec in read_agents(files, only)],
            url=target.url,
            token=target.token,
            until_input_ends=until_input_ends,
            reporter=get_reporter(),
            log=ProcessLog(log_format),
        )
    )


@agent.command("host", hidden=True)
@click.option("--board", required=True, type=click.Path(path_type=Path, exists=True))
@log_options
@node_options
@debug_option
def host_command(board: Path, log_level: str, log_format: LogFormat) -> None:
    """Run the agents that a node assigns to this process. The node itself starts this command."""
    import asyncio

    from roundelay.nodes.agent_host import host_agents
    from roundelay.nodes.logs import ProcessLog, log_to_stderr
    from roundelay.nodes.processes import end_after_supervisor
    from roundelay.nodes.work_board import WorkBoard

    end_after_supervisor()
    target = find_target()
    asyncio.run(
        host_agents(
            url=target.url,
            token=target.token,
            board=WorkBoard(board),
            log=ProcessLog(log_format),
            begin_log=lambda: log_to_stderr(log_level, log_format),
        )
    )


@agent.command("try", short_help="Send one message to the agent of FILE and show what it does.")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("message")
@click.option("--agent", "agent_id", metavar="ID", help="Agent to try, if FILE has several.")
@click.option(
    "--as", "person", metavar="ID", callback=check_id, help="Sender of the message (default: the login user)."
)
@click.option("--approve", "approves", is_flag=True, help="Approve calls that need approval, instead of denying them.")
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

    The agent runs alone in a temporary network in memory, and nothing is stored. Its tools and its model are real.
    """
    from roundelay.agent_files import read_agents
    from roundelay.nodes.logs import log_to_stderr
    from roundelay.nodes.try_agent import make_show, pick_agent, try_agent

    log_to_stderr(log_level, log_format)
    spec = pick_agent(read_agents([file], [agent_id] if agent_id is not None else []), agent_id)
    show = make_show(as_json=as_json)
    is_done = run(try_agent(spec, message, person=person or find_login_id(), approves=approves, show=show))
    if not is_done:
        raise SystemExit(1)


# --- the agents that a node runs


@agent.command("list", short_help="List the agents of the node and the state of their processes.")
@json_option
@identity_options
def list_command(as_json: bool) -> None:
    """List the agents that the node runs, with the state of their processes and any changed files. For operators.

    To list everybody who has joined the network, run `roundelay agents`.
    """
    from roundelay.runs.lists import list_node_agents

    show_list(
        {"agents": ask_hub(list_node_agents)},
        {
            "AGENT": lambda it: it["agent_id"],
            "PROCESS": lambda it: it["state"].replace("_", " "),
            "PID": lambda it: str(it.get("pid", "")),
            "FILE": lambda it: it["file"],
            "NOTE": _describe_note,
        },
        empty="This node runs no agents: its file declares none.",
        as_json=as_json,
    )


def _describe_note(agent: dict[str, Any]) -> str:
    if error := agent.get("error"):
        return str(error)
    if agent["has_changed"]:
        return f"changed; apply: {name_command(Path.cwd())} agent reload {agent['agent_id']}"
    return f"isolated: {reason}" if (reason := agent.get("isolated")) else ""


def _add_action(name: AgentAction, short: str, done: str, details: str = "") -> None:
    @agent.command(name, help=f"{short[:-1]}{details}. For operators.", short_help=short)
    @click.argument("agent_id", metavar="NAME", callback=check_id)
    @json_option
    @identity_options
    def control(agent_id: str, as_json: bool) -> None:
        args = {"agent_id": agent_id, "action": name}
        told: dict[str, Any] = ask_hub(lambda client: client.call("network.control_agent", args))
        error = f": {told['error'].removesuffix('.')}" if "error" in told else ""
        sentence = f"{agent_id} {done if told['state'] in _DONE else told['state']}{error}."
        show(told, lambda _: [sentence], as_json=as_json)
        if told["state"] not in _DONE:
            raise SystemExit(1)


_DONE = ("running", "stopped")
_add_action("start", "Start the agent NAME of the node, which was stopped.", "is running")
_add_action("stop", "Stop the agent NAME of the node, until it is started again.", "is stopped")
_add_action(
    "restart", "Restart the process of the agent NAME.", "was restarted", ", with its file as the node loaded it"
)
_add_action("reload", "Restart the agent NAME with its current file.", "was reloaded with its current file")
