"""Proxy between an agent's process and its servers. The proxy reads the traffic and lets a test choose the point at
which the process ends.

One listener is in front of the hub. This listener parses the WebSocket, and shows every frame to the `Watcher` before
and after it is forwarded. The other listener is in front of the model's server and forwards bytes. When the process
has ended, its pending frames still reach the hub, and the hub's answers are still shown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

Way = Literal["up", "down"]
"""Direction of a frame: "up" to the hub, "down" to the agent."""
Frame = dict[str, Any]
READ_BYTES = 1 << 16


class Gone(Exception):
    """The agent's process has ended, so this frame is not forwarded."""


class Watcher(Protocol):
    """An object that decides which bytes and frames the proxy forwards."""

    def admit(self, size: int) -> int:
        """Return how many of these bytes may be forwarded. A result below ``size`` ends the process."""
        ...

    async def spent(self) -> None:
        """Handle the end of the byte limit: the process must be ended."""
        ...

    async def before(self, way: Way, frame: Frame) -> None:
        """Handle a received frame before it is forwarded. `Gone` prevents the forwarding."""
        ...

    async def after(self, way: Way, frame: Frame) -> None:
        """Handle a forwarded frame. May raise `Gone`."""
        ...


class AgentProxy:
    """The listeners and their connections."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._servers: list[asyncio.Server] = []
        self._links: list[_Link] = []

    async def listen(self, find_target: Callable[[], tuple[str, int]], *, has_frames: bool) -> int:
        """Forward connections to the target, which is looked up for each connection. Return the port."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            link = _Link(self._watcher, has_frames=has_frames)
            self._links.append(link)
            await link.serve(reader, writer, find_target())

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=READ_BYTES)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def settle(self) -> None:
        """Wait until every connection has ended and its data is processed."""
        for link in self._links:
            await link.is_over.wait()
        self._links.clear()

    def cut(self) -> None:
        """Drop every connection without a close frame."""
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
            pass  # nobody listens, or the connection has ended
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
            writer.write_eof()  # forwarded data arrives before the end

    async def _bring_down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cutter = _FrameCutter()
        listener: asyncio.StreamWriter | None = writer
        try:
            while data := await reader.read(READ_BYTES):
                for piece, frame in cutter.cut(data) if self._has_frames else [(data, None)]:
                    try:
                        await self._pass_on("down", piece, frame, listener)
                    except (Gone, ConnectionError):
                        listener = None  # nobody reads from the listener any more, but it is drained
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
    """Splits one direction of a connection into the head of the handshake and WebSocket frames (RFC 6455, 5.2)."""

    def __init__(self) -> None:
        self._is_open = False
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[tuple[bytes, Frame | None]]:
        """Yield each complete piece, and the decoded content of a text frame."""
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
    """Return the size of the frame that starts here and the offset of its payload, or 0 if more bytes are needed."""
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
