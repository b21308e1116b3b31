"""A node in the test's event loop that commands find like any other node on this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from roundelay.network.home import announce_node
from tests.support.node import DEFAULT_MODS, Node, running_node


@asynccontextmanager
async def announced_node(
    folder: Path, *, limits: Mapping[str, int] | None = None, mods: Sequence[str] = DEFAULT_MODS
) -> AsyncIterator[Node]:
    """Run a node in memory. Write its node file and the owner's token where `roundelay up` writes them."""
    async with running_node(db=folder / "node.db", limits=limits, mods=mods) as node:
        note = announce_node(node.url, folder / "node.db.owner")
        try:
            yield node
        finally:
            note.unlink()
