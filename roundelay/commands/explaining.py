"""Commands that explain a run: why something was said, what came of it, and the whole of it as a file or a document.

Each reads a live node, under the caller's rights, or with --db a ledger's file, which needs no node.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from roundelay.commands.options import Function, debug_option, identity_options, join_as_reader, json_option, run

if TYPE_CHECKING:
    from roundelay.reading.sources import FileSource, LiveSource

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LEDGER = click.Path(readable=False, path_type=Path)
"""Looked at by who opens it, who says the same of it in every command."""


def _db_option(function: Function) -> Function:
    return click.option(
        "--db", "db", type=_LEDGER, metavar="FILE", help="Read this ledger or export of one, without a node."
    )(function)


@asynccontextmanager
async def _open_source(db: Path | None) -> AsyncIterator[LiveSource | FileSource]:
    from roundelay.network.ledger_file import open_log
    from roundelay.reading.sources import FileSource, LiveSource

    if db is not None:
        with open_log(db) as log:
            yield FileSource(log)
            if log.damaged:
                shown = ", ".join(f"#{seq}" for seq in sorted(log.damaged)[:5])
                click.echo(
                    f"{len(log.damaged)} damaged {'row is' if len(log.damaged) == 1 else 'rows are'} left out ({shown}); "
                    "roundelay doctor tells more.",
                    err=True,
                )
        return
    async with join_as_reader() as client:
        yield LiveSource(client)


@click.command(short_help="Tell why a message was said.")
@click.argument("seq", type=click.IntRange(1))
@_db_option
@json_option
@identity_options
def why(seq: int, db: Path | None, as_json: bool) -> None:
    """Tell why a message was said: the call, the model's reply, what its prompt held, and so on up to the root.

    SEQ is the number that every list shows as #SEQ. Records are an agent's own and operators' to see.
    """
    from roundelay.reading.why import describe_steps, explain
    from roundelay.terminal import Screen

    async def show() -> None:
        async with _open_source(db) as source:
            steps = await explain(source, seq)
        if as_json:
            click.echo(json.dumps({"chain": [step.to_json() for step in steps]}))
            return
        screen = Screen(sys.stdout)
        for line in describe_steps(steps, paint=screen.paint):
            screen.write(line)

    run(show())


@click.command(short_help="Show everything that followed from a message.")
@click.argument("seq", type=click.IntRange(1))
@_db_option
@json_option
@identity_options
def impact(seq: int, db: Path | None, as_json: bool) -> None:
    """Show everything that followed from a message, as a tree of reactions and messages."""
    from roundelay.reading.why import describe_effect, follow
    from roundelay.terminal import Screen

    async def show() -> None:
        async with _open_source(db) as source:
            effect = await follow(source, seq)
        if as_json:
            click.echo(json.dumps(effect.to_json()))
            return
        screen = Screen(sys.stdout)
        for line in describe_effect(effect, paint=screen.paint):
            screen.write(line)
        screen.note(f"{_count(effect.followed, 'message')} followed.")

    run(show())


@click.command(short_help="Write the log, a transcript or a diagram.")
@click.option(
    "--format", "format_", type=click.Choice(("jsonl", "markdown", "mermaid")), default="jsonl", show_default=True,
    help="The log itself, a transcript, or a sequence diagram.",
)  # fmt: skip
@click.option("--thread", metavar="ID", help="Only this thread.")
@click.option("--root", type=click.IntRange(1), metavar="SEQ", help="Only what followed from this first message.")
@click.option("--from", "first", type=click.IntRange(1), metavar="SEQ", help="Only from this seq on.")
@click.option("--to", "last", type=click.IntRange(1), metavar="SEQ", help="Only up to this seq.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Not to stdout.")
@_db_option
@identity_options
def export(
    format_: str, thread: str | None, root: int | None, first: int | None, last: int | None, output: Path | None,
    db: Path | None,
) -> None:  # fmt: skip
    """Write the log, losing nothing (jsonl), or what was said (markdown, mermaid).

    The log is for operators; what was said holds what the caller may read. A whole jsonl export can be replayed.
    """
    from roundelay.reading.exporting import Part, replace_file, write_log, write_messages

    if first is not None and last is not None and first > last:
        raise click.UsageError(f"--from {first} lies behind --to {last}; nothing is between them.")
    part = Part(thread, root, first or 1, last)

    async def write(file: TextIO) -> None:
        async with _open_source(db) as source:
            if format_ == "jsonl":
                await write_log(source, part, file)
            else:
                await write_messages(source, part, file, as_markdown=format_ == "markdown")

    if output is None:
        run(write(sys.stdout))
        return
    with replace_file(output) as file:
        run(write(file))
    click.echo(f"Written: {output}", err=True)


@click.command(short_help="Write what each agent's model replied as a tape.")
@click.argument("ledger", type=_LEDGER)
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), default=Path("tapes"), show_default=True,
    metavar="DIR", help="Where the tapes go, one for each agent.",
)  # fmt: skip
@debug_option
def tapes(ledger: Path, output: Path) -> None:
    """Write the recorded replies of each agent's model as a tape: `model: {replay: tapes/ID.jsonl}` plays it.

    LEDGER is a node's database, or an export of one. A tape is made of lines that people can read and edit.
    """
    from roundelay.agents.models.tape import write_tape
    from roundelay.network.errors import ConfigError
    from roundelay.network.ledger_file import read_log
    from roundelay.reading.recording import Recording

    made = Recording(*read_log(ledger)).make_tapes()
    if not made:
        raise ConfigError(f"{ledger} holds no reply of a model, so there is nothing to make a tape of")
    for agent_id, turns in sorted(made.items()):
        path = output / f"{agent_id}.jsonl"
        write_tape(path, agent_id, turns)
        click.echo(f"{path}: {_count(len(turns), 'turn')}")


@click.command(short_help="Run recorded agents again and compare.")
@click.argument("ledger", type=_LEDGER)
@click.argument("files", nargs=-1, type=_FILE)
@click.option(
    "--agents",
    "factory",
    metavar="MODULE:FUNCTION",
    help="Runners made in Python: what this function gives, a list of them.",
)
@click.option(
    "--run-tool",
    "run_tools",
    multiple=True,
    metavar="NAME",
    help="Run this tool again, instead of its recorded results.",
)
@click.option("--lenient", is_flag=True, help="Go on over a prompt that is another one now, and tell them all.")
@json_option
@debug_option
def replay(
    ledger: Path, files: tuple[Path, ...], factory: str | None, run_tools: tuple[str, ...], lenient: bool, as_json: bool
) -> None:
    """Run the agents of a recorded ledger again, on their recorded replies, and compare message by message.

    FILES are agent files, or a node's file, whose limits, mods and visibility hold then too. LEDGER is a node's database, or an export
    of one. It needs no node and no model, and nothing outside is written to. Agents without a file keep the part that the log has.
    Exit code 1 says that something is not as it was, or that nothing was run.
    """
    import logging

    from roundelay.clean_text import clean
    from roundelay.replay.files import load_replay
    from roundelay.replay.run import replay as play
    from roundelay.replay.run import write_report
    from roundelay.terminal import Screen

    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())  # what went wrong then goes wrong again, and is no news
    recording, runners, options = load_replay(ledger, files, factory, frozenset(run_tools), is_lenient=lenient)
    report = play(recording, runners, options)
    if as_json:
        click.echo(write_report(report))
    else:
        screen = Screen(sys.stdout)
        for note in report.notes:
            screen.note(clean(note))
        if report.recorded:
            screen.note(f"Played from the log, having no file: {', '.join(map(clean, report.recorded))}")
        for difference in report.differences:
            screen.error(str(difference))
        count = ", ".join((_count(report.messages, "message"), _count(report.turns, "turn")))
        count += f" of {_count(len(report.played), 'agent')}"
        if not report.played:
            screen.error("Nothing was run again: none of these agents has a part in this ledger that can be.")
        elif report.is_same:
            screen.write(f"As it was: {count}.")
        else:
            screen.write(f"Not as it was, after {count}.")
    if not report.is_same or not report.played:
        raise SystemExit(1)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
