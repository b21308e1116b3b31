"""Stands between an agent's process and what it talks to, reads what passes, and lets a test choose where to end the process.

One listener is before the hub: there it takes the WebSocket apart, and every frame is shown to the `Watcher` before and after it is passed
on. The other is before the model's server, where bytes are bytes. Once the process is gone, what it has sent is still brought to the hub,
and what the hub answers is still shown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

Way = Literal["up", "down"]
"""To the hub, and to the agent."""
Frame = dict[str, Any]
READ_BYTES = 1 << 16


class Gone(Exception):
    """The agent's process is not there any more: this frame is not passed on."""


class Watcher(Protocol):
    """Who decides."""

    def admit(self, size: int) -> int:
        """How many of so many bytes are passed on; fewer end the process."""
        ...

    async def spent(self) -> None:
        """No further byte is passed on: the process is to be ended."""
        ...

    async def before(self, way: Way, frame: Frame) -> None:
        """A frame has come, and is passed on after this, unless it raises `Gone`."""
        ...

    async def after(self, way: Way, frame: Frame) -> None:
        """A frame was passed on. It may raise `Gone`."""
        ...


class AgentProxy:
    """The listeners and their connections."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._servers: list[asyncio.Server] = []
        self._links: list[_Link] = []

    async def listen(self, find_target: Callable[[], tuple[str, int]], *, has_frames: bool) -> int:
        """Pass on to the target, which each connection is told anew, what comes to the port that this gives."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = _Link(self._watcher, has_frames=has_frames)
            self._links.append(link)
            await link.serve(reader, writer, find_target())

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=READ_BYTES)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def settle(self) -> None:
        """Wait until every connection has ended and what came over it was taken."""
        for link in self._links:
            await link.is_over.wait()
        self._links.clear()

    def cut(self) -> None:
        """End every connection, without a word to either side."""
        for link in self._links:
            link.cut()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.cut()
        await self.settle()


class _Link:
    """One connection."""

    def __init__(self, watcher: Watcher, *, has_frames: bool) -> None:
        self.is_over = asyncio.Event()
        self._watcher = watcher
        self._has_frames = has_frames
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int]) -> None:
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*target, limit=READ_BYTES)
            self._writers.append(far_writer)
            await asyncio.gather(self._bring_up(reader, far_writer), self._bring_down(far_reader, writer))
        except ConnectionError:
            pass  # nobody is there, or not any more
        finally:
            self.cut()
            self.is_over.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _bring_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cutter = _FrameCutter()
        try:
            while data := await reader.read(READ_BYTES):
                for piece, frame in cutter.cut(data) if self._has_frames else [(data, None)]:
                    await self._pass_on("up", piece, frame, writer)
        except (Gone, ConnectionError):
            pass
        if not writer.is_closing():
            writer.write_eof()  # what was passed on arrives before the end

    async def _bring_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cutter = _FrameCutter()
        listener: asyncio.StreamWriter | None = writer
        try:
            while data := await reader.read(READ_BYTES):
                for piece, frame in cutter.cut(data) if self._has_frames else [(data, None)]:
                    try:
                        await self._pass_on("down", piece, frame, listener)
                    except (Gone, ConnectionError):
                        listener = None  # nobody hears it any more, but it is read to its end
        except ConnectionError:
            pass
        writer.close()

    async def _pass_on(self, way: Way, data: bytes, frame: Frame | None, writer: asyncio.StreamWriter | None) -> None:
        if frame is not None:
            await self._watcher.before(way, frame)
        if writer is None:
            return
        size = self._watcher.admit(len(data))
        writer.write(data[:size])
        await writer.drain()
        if size < len(data):
            await self._watcher.spent()
            raise Gone
        if frame is not None:
            await self._watcher.after(way, frame)


class _FrameCutter:
    """Cuts what goes one way into the head of the handshake and frames (RFC 6455, 5.2)."""

    def __init__(self) -> None:
        self._is_open = False
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[tuple[bytes, Frame | None]]:
        """Give each piece that is complete, and what a text frame says."""
        self._rest += data
        while True:
            if self._is_open:
                size, start = _measure(self._rest)
            else:
                size, start = self._rest.find(b"\r\n\r\n") + 4, 0
                if size < 4:
                    return
            if not size or len(self._rest) < size:
                return
            piece, self._rest = self._rest[:size], self._rest[size:]
            yield piece, _read_frame(piece, start) if self._is_open else None
            self._is_open = True


def _measure(data: bytes) -> tuple[int, int]:
    """The size of the frame that begins here and where its payload starts; 0 while that cannot be told."""
    if len(data) < 2:
        return 0, 0
    length, start = data[1] & 127, 2
    if length > 125:
        start = 4 if length == 126 else 10
        length = int.from_bytes(data[2:start])
    start += 4 * (data[1] >> 7)  # the mask
    return (start + length, start) if len(data) >= start else (0, 0)


def _read_frame(data: bytes, start: int) -> Frame | None:
    if data[0] & 15 != 1:
        return None  # ping, pong, close
    assert data[0] & 128, "neither side splits its messages"
    payload = data[start:]
    if data[1] & 128:
        mask = data[start - 4 : start] * (len(payload) // 4 + 1)
        payload = bytes(one ^ other for one, other in zip(payload, mask, strict=False))
    frame: Frame = json.loads(payload)
    return frame
