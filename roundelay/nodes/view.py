"""Implement ``roundelay view``: show a ledger file on a page, and leave the file unchanged.

While the page is open, a temporary folder contains a complete, checked copy of the file. A read-only hub on this copy
lets people log in and read.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from roundelay.app import serve
from roundelay.network.blobs import blob_folder
from roundelay.network.config import NodeConfig
from roundelay.network.core.state import State
from roundelay.network.errors import InternalError, LedgerError
from roundelay.network.ledger.backup import back_up
from roundelay.network.ledger.log_file import is_database
from roundelay.nodes.links import make_owners_link
from roundelay.nodes.processes import stop_signals, wait_for_first


async def show_file(path: Path, port: int, person_id: str, announce: Callable[[str, bool], None]) -> None:
    """Show a ledger file until SIGTERM or SIGINT arrives.

    ``announce`` receives the login link, and whether another program has the file open. Later writes of that program
    are not shown. Raises `ConnectError`, and `LedgerError` if the file is damaged or is not a node's database.
    """
    if not await asyncio.to_thread(is_database, path):
        raise LedgerError(
            f"{path} is not the database of a node. To make a page of an export: roundelay export --format html "
            f"--db {path}"
        )
    # SQLite deletes the -wal file when the last program closes the database, so this file shows that the database is
    # open.
    is_open = await asyncio.to_thread(Path(f"{path}-wal").exists)
    with stop_signals() as stopping, tempfile.TemporaryDirectory(prefix="roundelay-view-") as folder:
        # Even a read-only hub writes, because it stores the person's login. The original file must stay unchanged.
        copy = Path(folder) / path.name
        await asyncio.to_thread(partial(back_up, path, copy, with_blobs=False))
        await asyncio.to_thread(_link_blobs, path, copy)
        config = NodeConfig(db=copy, port=port, durability="normal", mods=("channels", "discovery", "files"))
        async with serve(config, is_read_only=True) as node:
            announce(await make_owners_link(node.hub, node.url, _choose_person(node.hub.state, person_id)), is_open)
            await wait_for_first(stopping.wait(), node.hub.status.failed.wait())
            if node.hub.status.failed.is_set():
                raise InternalError("The hub failed. The log says why. The file is unchanged.")


def _link_blobs(path: Path, copy: Path) -> None:
    """Link the copy to the original's stored files, which may be too large to copy."""
    with suppress(OSError):  # Windows may refuse links, and then the page shows no file contents
        blob_folder(copy).symlink_to(blob_folder(path.resolve()), target_is_directory=True)


def _choose_person(state: State, person_id: str) -> str:
    """Return the id with which to log in: ``person_id``, unless it belongs to a program or was removed."""

    def is_free(agent_id: str) -> bool:
        participant = state.participant(agent_id)
        # An unknown id is free too: it is registered only in the copy, which nobody else sees.
        return participant is None or (participant.kind == "human" and participant.removed_seq is None)

    return next(filter(is_free, _list_names(person_id)))


def _list_names(person_id: str) -> Iterator[str]:
    yield from (person_id, "viewer")
    yield from (f"viewer-{number}" for number in count(2))
