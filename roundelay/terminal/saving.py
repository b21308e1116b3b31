"""Save files that a message attaches, and send files from this machine."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from roundelay.display.text import sanitize
from roundelay.network.client import AnyMessage, NetworkClient, Stored
from roundelay.network.client.files import download_file, upload_file
from roundelay.network.durable_files import save_new
from roundelay.network.errors import InvalidArguments
from roundelay.network.file_references import normalize_name, read_references
from roundelay.network.units import format_file_size
from roundelay.terminal.places import Place


async def save_files(client: NetworkClient, message: AnyMessage, folder: Path) -> list[str]:
    """Save the stored files of a message into a folder, and return a line for each one. If a name is already in use,
    the new file's name gets a number.
    """
    references = read_references(message.content)
    if not references:
        raise InvalidArguments(f"#{message.seq} attaches no stored file.")
    lines = []
    for file_id, version in references:
        args = {"file": file_id, "length": 0} | ({} if version is None else {"version": version})
        described = await client.call("files.download", args)
        data = await download_file(client, file_id, int(described["version"]))
        path = await asyncio.to_thread(_save_beside, folder, normalize_name(described["name"]), data)
        lines.append(f"Saved {sanitize(str(path))} ({format_file_size(len(data))}).")
    return lines


def _save_beside(folder: Path, name: str, data: bytes) -> Path:
    stem, dot, ending = name.rpartition(".")
    for number in itertools.count(1):
        numbered = name if number == 1 else f"{stem} ({number}).{ending}" if dot else f"{name} ({number})"
        try:
            save_new(folder / numbered, data)
        except FileExistsError:
            continue
        return folder / numbered
    raise AssertionError("numbers do not end")


def _read(path: Path) -> bytes:
    return path.expanduser().read_bytes()


async def send_file(client: NetworkClient, place: Place, path: Path, text: str) -> Stored:
    """Store a file from this machine on the hub, and send it to a destination. Raises `InvalidArguments` if the file
    cannot be read.
    """
    try:
        data = await asyncio.to_thread(_read, path)
    except OSError as error:
        raise InvalidArguments(f"{sanitize(str(path))} cannot be read: {error.strerror}.") from error
    file = await upload_file(client, data, name=path.name)
    content = {"text": text, "files": [file]} if text else {"files": [file]}
    return await client.send(place.to, content, reply_to=place.reply_to, conversation=place.conversation)
