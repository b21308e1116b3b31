"""Commands that explain a run: ``why``, ``impact``, ``export``, ``replay`` and ``tapes``.

Each command reads a live node with the caller's rights. With ``--db``, the command reads a ledger file instead.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from roundelay.commands.options import (
    LEDGER_PATH,
    SEQ,
    db_option,
    debug_option,
    identity_options,
    json_option,
    read_run,
    silence_logs,
)
from roundelay.commands.output import print_json, show
from roundelay.network.text import count

if TYPE_CHECKING:
    from roundelay.runs.source import Source

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Explain why a message was sent.")
@click.argument("seq", type=SEQ)
@db_option
@json_option
@identity_options
def why(seq: int, db: Path | None, as_json: bool) -> None:
    """Explain why a message was sent: the call, the model's reply, the prompt, and so on up to the root.

    SEQ is the number that lists show as #SEQ. Only an agent and operators can see the agent's records.
    """
    from roundelay.runs.why import explain
    from roundelay.runs.why_text import describe_steps

    steps = read_run(db, lambda source: explain(source, seq))
    chain = {"chain": [step.to_json() for step in steps]}
    show(chain, lambda paint: describe_steps(steps, paint=paint), as_json=as_json)


@click.command(short_help="Show what followed from a message.")
@click.argument("seq", type=SEQ)
@db_option
@json_option
@identity_options
def impact(seq: int, db: Path | None, as_json: bool) -> None:
    """Show everything that followed from a message, as a tree of reactions and messages."""
    from roundelay.display.screen import Screen
    from roundelay.runs.why import follow
    from roundelay.runs.why_text import describe_effect

    effect = read_run(db, lambda source: follow(source, seq))
    show(effect.to_json(), lambda paint: describe_effect(effect, paint=paint), as_json=as_json)
    if not as_json:
        Screen(sys.stdout).note(f"{count(effect.count, 'message')} followed.")


@click.command(short_help="Export the log, a transcript, a diagram or a page.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(("jsonl", "markdown", "mermaid", "html")),
    default="jsonl",
    show_default=True,
    help="The log itself, a transcript, a sequence diagram, or a page for a browser.",
)
@click.option("--thread", metavar="ID", help="Only this thread.")
@click.option("--root", type=SEQ, metavar="SEQ", help="Only the conversation with this root.")
@click.option("--from", "first", type=SEQ, metavar="SEQ", help="Start at this message.")
@click.option("--to", "last", type=SEQ, metavar="SEQ", help="End at this message.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file instead of stdout.",
)
@db_option
@identity_options
def export(
    format_: str,
    thread: str | None,
    root: int | None,
    first: int | None,
    last: int | None,
    output: Path | None,
    db: Path | None,
) -> None:
    """Export the complete log (jsonl), the messages (markdown, mermaid), or one page for a browser (html).

    Only operators may export the log. The other formats contain the messages that the caller may read. `roundelay
    replay` can run a complete jsonl export. The page opens from disk without a network. It also contains records, with
    the arguments and results of tools.
    """
    from roundelay.display.text import sanitize_json
    from roundelay.network.durable_files import replace_file
    from roundelay.runs.export import Part, write_log, write_messages
    from roundelay.runs.page import write_page

    if first is not None and last is not None and first > last:
        raise click.UsageError(f"--from {first} is after --to {last}, so the range is empty.")
    part = Part(thread, root, first or 1, last)

    async def write(source: Source, file: TextIO) -> None:
        if format_ == "jsonl":
            # The output may go to a file or a pipe, which must receive the unchanged log. Sanitize only for a terminal.
            is_shown = file is sys.stdout and sys.stdout.isatty()
            await write_log(source, part, (lambda text: file.write(sanitize_json(text))) if is_shown else file.write)
        elif format_ == "html":
            file.write(await write_page(source, part, now_s=time.time(), nonce=secrets.token_urlsafe(24)))
        else:
            await write_messages(source, part, file, as_markdown=format_ == "markdown")

    if output is None or str(output) == "-":
        read_run(db, lambda source: write(source, sys.stdout))
        return
    # If the export fails, an older file stays complete.
    with replace_file(output) as file:
        read_run(db, lambda source: write(source, file))
    click.echo(f"Written: {output}", err=True)


@click.command(short_help="Write the recorded replies of each agent's model as a tape.")
@click.argument("ledger", type=LEDGER_PATH)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tapes"),
    show_default=True,
    metavar="DIR",
    help="Folder of the tapes, one for each agent.",
)
@debug_option
def tapes(ledger: Path, output: Path) -> None:
    """Write the recorded replies of each agent's model as a tape. `model: {replay: tapes/ID.jsonl}` replays the tape.

    LEDGER is a node's database or a jsonl export. A tape is a text file that people can read and edit.
    """
    from roundelay.agents.models.tape import write_tape
    from roundelay.display.text import sanitize
    from roundelay.network.errors import ConfigError
    from roundelay.network.ledger.log_file import read_log
    from roundelay.runs.recording import Recording

    made = Recording(*read_log(ledger)).make_tapes()
    if not made:
        raise ConfigError(f"{ledger} contains no reply of a model, so no tape can be made")
    for agent_id, turns in sorted(made.items()):
        # The process of an agent chose this id. Unchecked, the id could name a file in another folder.
        if not re.fullmatch(r"\w[\w. -]{0,63}", agent_id):
            click.echo(f"Skipped, because this id cannot be a file name: {sanitize(agent_id[:80])}", err=True)
            continue
        path = output / f"{agent_id}.jsonl"
        write_tape(path, agent_id, turns)
        click.echo(f"{path}: {count(len(turns), 'turn')}")


@click.command(short_help="Run recorded agents again and compare the results.")
@click.argument("ledger", type=LEDGER_PATH)
@click.argument("files", nargs=-1, type=_FILE)
@click.option(
    "--agents",
    "factory",
    metavar="MODULE:FUNCTION",
    help="A Python function that returns a list of runners.",
)
@click.option(
    "--run-tool",
    "run_tools",
    multiple=True,
    metavar="NAME",
    help="Run this tool again instead of using its recorded results.",
)
@click.option("--lenient", is_flag=True, help="Continue after a changed prompt, and report every change.")
@json_option
@debug_option
def replay(
    ledger: Path, files: tuple[Path, ...], factory: str | None, run_tools: tuple[str, ...], lenient: bool, as_json: bool
) -> None:
    """Run the agents of a recorded ledger again on their recorded replies, and compare every message.

    FILES are agent files, or a node file. The limits, mods and visibility of a node file apply. LEDGER is a node's
    database or a jsonl export. The replay needs no node and no model, and changes nothing outside. The messages of
    agents without a file are taken from LEDGER. The exit code is 1 if anything differs or no agent ran.
    """
    from roundelay.display.screen import Screen
    from roundelay.display.text import sanitize
    from roundelay.runs.replay import load_replay
    from roundelay.runs.replay import replay as play

    silence_logs()  # The replay repeats the errors of the recorded run. Do not log them a second time.
    recording, runners, options = load_replay(ledger, files, factory, frozenset(run_tools), is_lenient=lenient)
    report = play(recording, runners, options)
    if as_json:
        print_json(report.to_json())
    else:
        screen = Screen(sys.stdout)
        for note in report.notes:
            screen.note(sanitize(note))
        if report.recorded:
            screen.note(
                f"Taken from the log, because these agents have no file: {', '.join(map(sanitize, report.recorded))}"
            )
        for difference in report.differences:
            screen.error(str(difference))
        of = f"{count(report.turns, 'turn')} of {count(len(report.played), 'agent')}"
        played = f"{count(report.messages, 'message')}, {of}"
        if not report.played:
            screen.error(
                "Nothing was replayed, because this ledger contains nothing of these agents that can be replayed."
            )
        elif report.is_same:
            screen.write(f"No differences: {played}.")
        else:
            screen.write(f"Differences found after {played}.")
    if not report.is_same or not report.played:
        raise SystemExit(1)
