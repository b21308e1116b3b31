"""A connection between a browser and a node that a test can cut and restore. Playwright's offline mode does not
affect WebSockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

READ_BYTES = 1 << 16


class Line:
    """TCP proxy on a fixed port. While it is cut, it refuses new connections and drops existing ones."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.hostname is not None
        assert target.port is not None
        self._target = (target.hostname, target.port)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            node_reader, node_writer = await asyncio.open_connection(*self._target)
            self._open.add(node_writer)
            await asyncio.gather(self._pass(reader, node_writer), self._pass(node_reader, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(READ_BYTES):
                writer.write(data)
                await writer.drain()
        self._open.discard(writer)
        writer.close()


@asynccontextmanager
async def line_to(url: str) -> AsyncIterator[Line]:
    line = Line(url)
    await line.mend()
    try:
        yield line
    finally:
        await line.cut()
