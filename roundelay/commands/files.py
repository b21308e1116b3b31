"""``roundelay files``: list, store and fetch the files of the mod `files`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from roundelay.commands.mod_calls import ListingGroup, call_options, list_pages
from roundelay.commands.options import join, run
from roundelay.commands.output import list_answer, show
from roundelay.display.text import format_day


@click.group(cls=ListingGroup, short_help="List, store and fetch files.")
def files() -> None:
    """List, store and fetch the files of the mod `files`. A file has an id such as f-e5de420e26b-c230542c."""


@files.command("list", short_help="List files.")
@click.option("--thread", metavar="ID", help="Only files in messages of this thread.")
@call_options
def list_files(as_json: bool, thread: str | None) -> None:
    """List the files that you may read, newest first."""
    from roundelay.network.units import format_file_size

    list_answer(
        {"files": list_pages("files.list", "files", thread_id=thread)},
        {
            "FILE": lambda it: it["file"],
            "NAME": lambda it: it["name"],
            "SIZE": lambda it: format_file_size(it["size"]),
            "VERSION": lambda it: it["version"],
            "OWNER": lambda it: it["owner"],
            "AT": lambda it: format_day(it["at"]),
        },
        empty="There are no files. `roundelay files put PATH` stores one.",
        as_json=as_json,
    )


@files.command(short_help="Store a file, and send it.")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--to", metavar="ADDRESS", help="Send it in a message to agent:ID, channel:NAME or broadcast.")
@click.option("--text", default="", help="The text of the message.")
@click.option("--name", metavar="NAME", help="The name to show (default: that of PATH).")
@click.option(
    "--file", "file_id", metavar="FILE", help="Store the content as a new version of this file, which you must own."
)
@call_options
def put(path: Path, as_json: bool, to: str | None, text: str, name: str | None, file_id: str | None) -> None:
    """Store the file at PATH. Only you can read it until a message attaches it (--to)."""
    value = run(_put(path, to, text, name or path.name, file_id))
    sent = f" and sent it to {to} in #{value['seq']}" if "seq" in value else ""
    show(value, lambda _: [f"Stored {value['name']} as {value['file']}{sent}."], as_json=as_json)


async def _put(path: Path, to: str | None, text: str, name: str, file_id: str | None) -> dict[str, Any]:
    import asyncio

    from roundelay.network.client.files import upload_file

    data = await asyncio.to_thread(path.read_bytes)
    async with join(as_person=True) as client:
        value = await upload_file(client, data, name=name, file=file_id)
        if to is not None:
            args = {"to": to, "files": [value["file"]], "text": text}
            value |= await client.call(
                "files.attach", args, call_id=f"attach:{value['file']}:{value['version']}:{to}"[:128]
            )
        return value


@files.command(short_help="Fetch a file.")
@click.argument("file_id", metavar="FILE")
@click.argument("path", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--version", type=click.IntRange(1), help="An earlier version.")
@call_options
def get(file_id: str, path: Path | None, as_json: bool, version: int | None) -> None:
    """Fetch FILE and write it to PATH, or to its own name in this folder. An existing file is never overwritten. With -
    as PATH, write it to stdout."""
    from roundelay.network.durable_files import save_new
    from roundelay.network.errors import ConfigError
    from roundelay.network.file_references import normalize_name

    value, data = run(_get(file_id, version))
    if path is not None and str(path) == "-":
        sys.stdout.buffer.write(data)
        return
    # The file's owner chose the name. Normalize it again, because an older node may have stored an unsafe name.
    target = path or Path(normalize_name(value["name"]))
    try:
        save_new(target, data)
    except FileExistsError as error:
        raise ConfigError(f"{target} exists. Name another PATH.") from error
    show({**value, "path": str(target)}, lambda _: [f"Wrote {target} ({len(data)} bytes)."], as_json=as_json)


async def _get(file_id: str, version: int | None) -> tuple[dict[str, Any], bytes]:
    from roundelay.network.client.files import download_file

    async with join(as_person=True) as client:
        args = {"file": file_id} | ({} if version is None else {"version": version})
        value: dict[str, Any] = await client.call("files.download", {**args, "length": 0})
        del value["data"]
        return value, await download_file(client, file_id, int(value["version"]))
