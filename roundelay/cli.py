"""The command ``roundelay``: its groups, its global options, and how every command fails.

The commands are in `roundelay.commands`; what they need is imported when one runs, so that ``--help`` is quick. An
error is one sentence on stderr and an exit code: 1 a failure, 2 wrong usage or a wrong file, 3 no hub to connect to.
``--debug`` shows the traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
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
    gateway,
    inbox,
    node,
    operating,
    people,
    reactions,
    reading,
    rights,
    scenario,
    setup,
    tokens,
    web,
    webhook,
)
from roundelay.commands.options import debug_option, node_options
from roundelay.garbage import collect_seldom
from roundelay.nodes.reports import get_reporter

EXIT_FAILURE, EXIT_USAGE, EXIT_NO_CONNECTION, EXIT_INTERRUPTED = 1, 2, 3, 130


EXPECTED = {
    "stop": "There is no command stop. A node stops by Ctrl-C in its terminal, by SIGTERM, or by `systemctl stop roundelay` "
    "or `docker compose stop`; one agent of it by `roundelay agent stop NAME`.",
    "start": "There is no command start. A node starts by `roundelay up`, one agent of it by `roundelay agent start NAME`.",
    "restart": "There is no command restart. Stop the node and start it by `roundelay up`; for one agent of it: "
    "`roundelay agent restart NAME`.",
    "reload": "There is no command reload. `roundelay agent reload NAME` applies a changed agent file.",
    "logs": "There is no command logs. A node logs to its terminal (`roundelay up --log-level info`), under systemd to "
    "`journalctl -u roundelay`, in a container to `docker compose logs`. What is said in the network: `roundelay tail`.",
    "run": "There is no command run. `roundelay up` runs a node with its agents, `roundelay agent run FILE` agents alone.",
    "login": "There is no command login. `roundelay web` makes a link that logs in to the page.",
    "sessions": "There is no command sessions. `roundelay token list` shows who is logged in, `roundelay agents` who is here.",
    "tokens": "There is no command tokens. Did you mean `roundelay token list`?",
    "channels": "There is no command channels. `roundelay threads` lists threads, `roundelay call channels.list` channels.",
}
"""Commands that people try, and what to use instead."""


class _Commands(click.Group):
    """Lists the commands in the order in which one meets them, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in EXPECTED and args[0] not in self.commands:
            raise click.UsageError(EXPECTED[args[0]])
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or file, 3 no hub to connect to, or lost.",
)
@click.version_option(package_name="roundelay", message="%(prog)s %(version)s")
@node_options
@debug_option
def cli() -> None:
    """Agents, people and programs converse in threads, on one durable ledger.

    Try `roundelay demo`. Or `roundelay init`, `roundelay up`, and in another terminal `roundelay chat`.
    """


for command in (
    setup.demo,
    setup.init,
    node.up,
    agent.agent,
    people.chat,
    people.tui,
    people.send,
    web.web,
    web.view,
    inbox.inbox,
    approvals.approvals,
    reading.tail,
    reading.agents,
    reading.threads,
    reading.history,
    reading.search,
    reading.status,
    reactions.reactions,
    cost.cost,
    explaining.why,
    explaining.impact,
    explaining.export,
    explaining.replay,
    explaining.tapes,
    scenario.scenario,
    calling.call,
    operating.dead_letters,
    operating.backup,
    cluster.cluster,
    tokens.token,
    rights.rights,
    node.doctor,
    setup.config,
    gateway.gateway,
    gateway.mcp,
    webhook.webhook,
    bridge.bridge,
    docs.docs,
    setup.completion,
):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave the process. A hook ends with 0 also where its very environment is wrong: coding
    agents take a 2 for a veto."""
    if arguments is None:  # the process is this command's
        collect_seldom()
    code = _run(arguments)
    is_hook = list(sys.argv[1:] if arguments is None else arguments)[:2] == ["bridge", "deliver"]
    sys.exit(0 if is_hook else code)


def _run(arguments: Sequence[str] | None) -> int:
    reporter = get_reporter()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to fail
    # A `python -m` has the folder where one stands in its import path, and the agents of `up` run so; the script has
    # not.
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        code = cli.main(args=arguments, prog_name="roundelay", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 (a command's boundary: whatever it is becomes a sentence, or a traceback)
        if isinstance(next(_leaves(error)), BrokenPipeError):
            # Whoever read our output has left, as `head` does. Nothing may be written at exit either.
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
    """Whether tracebacks are wanted: ``--debug``, or the environment says so."""
    return os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0")


def explain(error: BaseException) -> tuple[str, int]:
    """The sentence and the exit code for an error that nobody handled."""
    from roundelay.display.screen import tell_person
    from roundelay.display.text import sanitize, sanitize_lines
    from roundelay.network.credentials import hide_secrets
    from roundelay.network.errors import ConfigError, ConnectError, RoundelayError

    first = next(_leaves(error))
    match first:
        case ConnectError():
            code = EXIT_NO_CONNECTION
        case ConfigError():
            code = EXIT_USAGE
        case _:
            code = EXIT_FAILURE
    if isinstance(first, RoundelayError):
        sentence = tell_person(sanitize(hide_secrets(str(first))))
        pasted = (
            sanitize_lines(hide_secrets(first.to_paste)) if isinstance(first, ConfigError) and first.to_paste else []
        )
        return "\n".join([sentence, *pasted]), code
    if isinstance(first, OSError) and first.strerror:
        place = f"{first.filename}: " if first.filename is not None else ""
        return sanitize(f"{place}{first.strerror}; check the path and its permissions."), code
    told = hide_secrets(str(first))
    return sanitize(f"Unexpected {type(first).__name__}: {told}. The same command with --debug shows where."), code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in a group, the group of a task group's say; an error that is none is its own."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
