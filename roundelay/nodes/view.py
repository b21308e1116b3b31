"""``roundelay view``: the page on a ledger's file, which stays as it is. A copy of the file, complete and checked,
stands in a folder of its own for as long as somebody looks; a hub on the copy lets them log in and read, and takes
nothing else.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from roundelay.app import serve
from roundelay.network.config import NodeConfig
from roundelay.network.core.state import State
from roundelay.network.errors import InternalError, LedgerError
from roundelay.network.ledger.log_file import is_database
from roundelay.network.ledger.upkeep import back_up
from roundelay.nodes.links import make_owners_link
from roundelay.nodes.processes import stop_signals, wait_for_first


async def show_file(path: Path, port: int, person_id: str, announce: Callable[[str, bool], None]) -> None:
    """Show a file until SIGTERM or SIGINT. ``announce`` gets the link that logs in, once, and whether somebody has the
    file open, whose further writing is not shown.

    Raises `LedgerError` for what is no node's database, or none that is whole, and `ConnectError`.
    """
    if not await asyncio.to_thread(is_database, path):
        raise LedgerError(
            f"{path} is no node's database; an export of one becomes a page by: roundelay export --format html --db "
            f"{path}"
        )
    is_open = await asyncio.to_thread(Path(f"{path}-wal").exists)
    with stop_signals() as stopping, tempfile.TemporaryDirectory(prefix="roundelay-view-") as folder:
        copy = Path(folder) / path.name
        await asyncio.to_thread(back_up, path, copy)
        config = NodeConfig(db=copy, port=port, durability="normal")
        async with serve(config, is_read_only=True) as node:
            announce(await make_owners_link(node.hub, node.url, _choose_person(node.hub.state, person_id)), is_open)
            await wait_for_first(stopping.wait(), node.hub.failed.wait())
            if node.hub.failed.is_set():
                raise InternalError("The hub failed, and the log says at what; the file is as it was.")


def _choose_person(state: State, person_id: str) -> str:
    """Give the id to look as: this one, unless it is no person's there."""

    def is_free(agent_id: str) -> bool:
        found = state.participant(agent_id)
        return found is None or (found.kind == "human" and found.removed_seq is None)

    return next(filter(is_free, _list_names(person_id)))


def _list_names(person_id: str) -> Iterator[str]:
    yield from (person_id, "viewer")
    yield from (f"viewer-{number}" for number in count(2))
