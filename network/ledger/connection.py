"""`SqliteConnection`: one connection to a SQLite file, with its own thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class SqliteConnection:
    """A connection whose thread runs one function at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roundelay-ledger")
        self._db: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file. Raises `sqlite3.Error`."""
        loop = asyncio.get_running_loop()
        self._db = await loop.run_in_executor(self._thread, self._connect)

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the connection's thread. The function runs to its end even if the caller is cancelled."""
        assert self._db is not None, "a connection is opened before it is used"
        # There is only one thread, so functions run in the order of the calls. A cancelled caller never leaves half of
        # a transaction.
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._db)

    async def close(self) -> None:
        """Close the connection after the running function has ended. The thread ends even if this raises
        `sqlite3.Error`."""
        try:
            if self._db is not None:
                await self.run(sqlite3.Connection.close)
        finally:
            self._thread.shutdown(wait=False)

    def _connect(self) -> sqlite3.Connection:
        # Set no isolation level. Otherwise the `sqlite3` module would begin transactions itself, at points that this
        # code does not choose.
        return sqlite3.connect(self._path, isolation_level=None, cached_statements=256)
