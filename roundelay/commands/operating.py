"""``roundelay backup`` and ``roundelay dead-letters``: copy a node's data, and handle messages that failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundelay.commands.node import pick_file
from roundelay.commands.options import (
    SEQ,
    Function,
    ask_hub,
    check_id,
    db_option,
    debug_option,
    identity_options,
    json_option,
    read_run,
)
from roundelay.commands.output import show, show_list
from roundelay.display.text import format_day

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient
    from roundelay.runs.source import Source

MAX_LISTED = 1000


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--db",
    type=click.Path(readable=False, path_type=Path),
    metavar="FILE",
    help="The database (default: that of the node running here, or else of roundelay.yaml).",
)
@json_option
@debug_option
def backup(file: Path, db: Path | None, as_json: bool) -> None:
    """Copy a running node's database into FILE, and its stored files into FILE.files.

    When the command ends, the copy is complete, checked and on disk. A node that starts from the copy begins a new
    epoch, because the copy lacks all later messages.
    """
    from roundelay.network.ledger.backup import back_up

    source = db or _find_database()
    made = back_up(source, file)
    size = file.stat().st_size
    value = {"file": str(file), "database": str(source), "head": made.head, "bytes": size}
    blobs = made.blobs
    if blobs.count or blobs.damaged:
        value |= {"files": blobs.count, "files_bytes": blobs.size, "damaged_files": [*blobs.damaged]}

    def describe(_: object) -> list[str]:
        lines = [f"Wrote {file}: {source} up to #{made.head}, {size / 2**20:.1f} MiB."]
        if blobs.count:
            lines.append(f"Wrote {file}.files: {blobs.count} contents, {blobs.size / 2**20:.1f} MiB.")
        if blobs.damaged:
            lines.append(
                f"{len(blobs.damaged)} contents are missing or damaged and not in the backup. roundelay doctor lists them."
            )
        return lines

    show(value, describe, as_json=as_json)


def _find_database() -> Path:
    """Return the database of the only node that runs on this machine, or else the configured database. Raises
    `ConfigError`."""
    from roundelay.network.config import resolve_config
    from roundelay.network.errors import ConfigError
    from roundelay.network.home import running_nodes

    running = [Path(node.owner_file.removesuffix(".owner")) for node in running_nodes()]
    if len(running) == 1:
        return running[0]
    configured = resolve_config(pick_file(None), os.environ, {})[0].db
    # The configuration here may be out of date, and users would notice a backup of the wrong network too late.
    if running and configured.resolve() not in running:
        shown = ", ".join(map(str, running))
        raise ConfigError(f"Several nodes run here, with the databases {shown}; name one of them with --db.")
    return configured


@click.group("dead-letters", short_help="List, retry and drop messages that failed at their recipient.")
def dead_letters() -> None:
    """List, retry and drop dead letters: messages that failed five times at their recipient.

    Operators see all dead letters. With --as ID --as-kind agent, you see only those of that agent. People who use the
    owner's token are operators.
    """


def _owner_option(function: Function) -> Function:
    return click.option("--of", metavar="ID", callback=check_id, help="Only the dead letters of this participant.")(
        function
    )


def _letter_options(function: Function) -> Function:
    function = _owner_option(json_option(identity_options(function)))
    return click.argument("seqs", metavar="SEQ...", nargs=-1, required=True, type=SEQ)(function)


@dead_letters.command("list", short_help="List dead letters and why they failed.")
@_owner_option
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_LISTED),
    default=100,
    show_default=True,
    help="Maximum number of dead letters.",
)
@db_option
@json_option
@identity_options
def list_letters(of: str | None, limit: int, db: Path | None, as_json: bool) -> None:
    """List dead letters with the reason of their last failure."""
    from roundelay.network.errors import UnknownRecipient

    async def read(source: Source) -> list[dict[str, Any]]:
        letters = await source.dead_letters(of, limit)
        # Without this check, a mistyped name would show an empty list, as if no message had failed.
        if of is not None and not letters and not await source.knows(of):
            raise UnknownRecipient(
                f"Nobody is registered as {of!r}. `roundelay agents` lists the registered participants."
            )
        return letters

    show_list(
        {"dead_letters": read_run(db, read)},
        {
            "MESSAGE": lambda it: f"#{it['seq']}",
            "RECIPIENT": lambda it: it["agent_id"],
            "AT": lambda it: format_day(it["at"]),
            "ATTEMPTS": lambda it: it["attempts"],
            "REASON": lambda it: it["reason"],
        },
        empty="There are no dead letters.",
        as_json=as_json,
    )


@dead_letters.command()
@_letter_options
def retry(seqs: tuple[int, ...], of: str | None, as_json: bool) -> None:
    """Deliver these messages again, with five new attempts."""
    _take("network.retry_dead_letter", seqs, of, as_json=as_json, done="is delivered again to")


@dead_letters.command()
@_letter_options
def drop(seqs: tuple[int, ...], of: str | None, as_json: bool) -> None:
    """Drop these dead letters. The messages stay in their threads."""
    _take("network.drop_dead_letter", seqs, of, as_json=as_json, done="is no longer a dead letter of")


def _take(op: str, seqs: tuple[int, ...], of: str | None, *, as_json: bool, done: str) -> None:
    from roundelay.runs.lists import list_dead_letters

    async def take(client: NetworkClient) -> list[dict[str, Any]]:
        letters = await list_dead_letters(client, recipient=of, limit=MAX_LISTED)
        # Look up all numbers before the first call, so that a wrong number changes nothing.
        chosen = [{"agent_id": _find_owner(letters, seq), "seq": seq} for seq in dict.fromkeys(seqs)]
        for letter in chosen:
            await client.call(op, letter)
        return chosen

    taken = ask_hub(take)
    told = [f"#{letter['seq']} {done} {letter['agent_id']}." for letter in taken]
    show({"dead_letters": taken}, lambda _: told, as_json=as_json)


def _find_owner(letters: list[dict[str, Any]], seq: int) -> str:
    """Return the recipient of a dead letter. Raises `UnknownMessage` or `InvalidArguments`."""
    from roundelay.network.errors import InvalidArguments, UnknownMessage

    owners = [str(it["agent_id"]) for it in letters if it["seq"] == seq]
    if not owners:
        more = " among the first thousand; name its recipient with --of" if len(letters) == MAX_LISTED else ""
        raise UnknownMessage(f"There is no dead letter #{seq}{more}. `roundelay dead-letters list` lists them.")
    if len(owners) > 1:
        raise InvalidArguments(f"#{seq} is a dead letter of {', '.join(owners)}; name one recipient with --of.")
    return owners[0]
