"""The command ``roundelay``: its command groups, global options, and the error handling for all commands.

The commands are defined in `roundelay.commands` and import heavy modules only when they run, so that every command
starts fast. An error is printed as one sentence on stderr and sets the exit code: 1 for a failure, 2 for wrong usage or
a wrong file, 3 for no connection to a hub. ``--debug`` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from roundelay.commands import (
    agent,
    approvals,
    bridge,
    calling,
    cluster,
    cost,
    docs,
    explaining,
    files,
    gateway,
    inbox,
    node,
    notes,
    operating,
    people,
    polls,
    reactions,
    reading,
    rights,
    scenario,
    setup,
    tasks,
    timers,
    tokens,
    web,
    webhook,
)
from roundelay.commands.options import debug_option, node_options
from roundelay.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED, explain, list_errors
from roundelay.garbage import collect_seldom
from roundelay.nodes.reports import get_reporter

EXPECTED = {
    "stop": "There is no command stop. Stop a node with Ctrl-C in its terminal, SIGTERM, `systemctl stop roundelay` or "
    "`docker compose stop`. Stop one of its agents with `roundelay agent stop NAME`.",
    "start": "There is no command start. Start a node with `roundelay up`, one of its agents with `roundelay agent start NAME`.",
    "restart": "There is no command restart. Stop the node and run `roundelay up`. Restart one of its agents with "
    "`roundelay agent restart NAME`.",
    "reload": "There is no command reload. `roundelay agent reload NAME` applies a changed agent file.",
    "logs": "There is no command logs. A node logs to its terminal (`roundelay up --log-level info`), under systemd to "
    "`journalctl -u roundelay`, in a container to `docker compose logs`. Messages: `roundelay tail`.",
    "run": "There is no command run. `roundelay up` runs a node with its agents, `roundelay agent run FILE` agents alone.",
    "login": "There is no command login. `roundelay web` creates a link that logs in to the page.",
    "sessions": "There is no command sessions. `roundelay token list` shows logins, `roundelay agents` who is connected.",
    "tokens": "There is no command tokens. Did you mean `roundelay token list`?",
    "channels": "There is no command channels. `roundelay threads` lists threads, `roundelay call channels.list` channels.",
}
"""Advice for commands that people try although they do not exist."""


GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Start": (setup.demo, setup.init, node.up, agent.agent, node.doctor),
    "Talk": (people.chat, people.tui, web.web, people.send, inbox.inbox, approvals.approvals),
    "Inspect": (
        reading.tail,
        reading.agents,
        reading.threads,
        reading.history,
        reading.open_items,
        reading.search,
        reading.status,
        reactions.reactions,
        cost.cost,
        explaining.why,
        explaining.impact,
        explaining.export,
        web.view,
    ),
    "Share": (
        files.files,
        notes.notes,
        polls.polls,
        tasks.tasks,
        timers.timers,
    ),
    "Operate": (
        tokens.token,
        rights.rights,
        operating.dead_letters,
        operating.backup,
        cluster.cluster,
        setup.config,
    ),
    "Test": (scenario.scenario, explaining.replay, explaining.tapes),
    "Connect": (calling.call, gateway.gateway, gateway.mcp, webhook.webhook, bridge.bridge),
    "Help": (docs.docs, setup.completion),
}
"""All commands, grouped by purpose."""
WIDEST = max(len(str(command.name)) for group in GROUPS.values() for command in group)


class RootGroup(click.Group):
    """The command ``roundelay``. Its help lists the commands by topic, in the order of ``GROUPS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in GROUPS.items():
            rows = [(str(command.name), command.get_short_help_str(limit=100)) for command in commands]
            with formatter.section(title):
                # Use one width for all sections, so that the descriptions line up in one column.
                formatter.write_dl(rows, col_max=30, col_spacing=2 + WIDEST - max(len(name) for name, _ in rows))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # If a command with this name is registered later, run the command instead of showing the advice.
        if args and args[0] in EXPECTED and args[0] not in self.commands:
            raise click.UsageError(EXPECTED[args[0]])
        return super().resolve_command(ctx, args)


@click.group(
    cls=RootGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success, 1 failure, 2 wrong usage or file, 3 no connection to a hub, or connection lost.",
)
@click.version_option(package_name="roundelay", message="%(prog)s %(version)s")
@node_options
@debug_option
def cli() -> None:
    """Let agents, people and programs talk in threads, on one durable ledger.

    Try `roundelay demo`. Or run `roundelay init`, `roundelay up`, and in another terminal `roundelay chat`.
    """


for group in GROUPS.values():
    for command in group:
        cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    A hook always exits with 0, even if its environment is wrong, because coding agents treat exit code 2 as a veto.
    """
    if arguments is None:  # this process runs nothing but the command
        collect_seldom()
    code = _run(arguments)
    is_hook = list(sys.argv[1:] if arguments is None else arguments)[:2] == ["bridge", "deliver"]
    sys.exit(0 if is_hook else code)


def _run(arguments: Sequence[str] | None) -> int:
    reporter = get_reporter()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # without this, printing a character that the terminal's encoding lacks would raise an error
            reconfigure(errors="backslashreplace")
    # `python -m roundelay` includes the current folder in the import path, and `up` starts agents that way. Add the
    # folder for the script too: otherwise agents find a user's tools and the script does not.
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        code = cli.main(args=arguments, prog_name="roundelay", standalone_mode=False)
        # Flush here, not at exit: at exit a closed pipe can no longer set the exit code.
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 (last resort of every command: report any error)
        if isinstance(next(list_errors(error)), BrokenPipeError):
            # The program that reads our output has closed the pipe, as `head` does. Redirect stdout, because Python
            # would fail when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILURE
        sentence, code = explain(error)
        if is_debugging():
            click.echo(_format_traceback(error), err=True)
        else:
            reporter.report_error(sentence)
        return code
    return code if isinstance(code, int) else 0


def _format_traceback(error: Exception) -> str:
    import traceback

    from roundelay.network.credentials import hide_secrets

    return hide_secrets("".join(traceback.format_exception(error))).rstrip()


def is_debugging() -> bool:
    """Whether ``--debug`` or ``ROUNDELAY_DEBUG`` asks for tracebacks."""
    return os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0")
