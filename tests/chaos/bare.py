"""A participant on a bare socket that reads exactly as much as the test says: nothing, a kilobyte per second, or
everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from tests.support.node import Node
from tests.support.wire import SUBPROTOCOL, hello_frame

ACK_EVERY = 64
READ_BYTES = 1 << 18
_TEXT, _CLOSE, _PING, _PONG = 0x1, 0x8, 0x9, 0xA


class BareClient:
    """One session. ``seqs`` holds the delivered seqs in order. ``on_frame`` gets every frame, including deliveries."""

    def __init__(self, sock: socket.socket) -> None:
        self.seqs: list[int] = []
        self.close_code: int | None = None
        """Close code of the connection: 1006 without a close frame, None while the connection is open."""
        self.on_frame: Callable[[dict[str, Any]], None] = lambda frame: None
        self.answers_pings = True
        self._sock = sock
        self._received = bytearray()
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, node: Node, agent_id: str, *, receive_buffer_bytes: int | None = None) -> Self:
        """Connect and send hello, but do not read the welcome."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            return await cls._greet(sock, node, agent_id)
        except BaseException:  # cancelled too
            sock.close()
            raise

    @classmethod
    async def _greet(cls, sock: socket.socket, node: Node, agent_id: str) -> Self:
        target = urlsplit(node.url)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (target.hostname, target.port))
        handshake = (
            f"GET / HTTP/1.1\r\nHost: {target.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: {SUBPROTOCOL}\r\n\r\n"
        )
        await loop.sock_sendall(sock, handshake.encode())
        client = cls(sock)
        answer = client._received
        while b"\r\n\r\n" not in answer:
            data = await loop.sock_recv(sock, 1024)
            assert data, "the hub refused the connection"
            answer += data
        head, _, rest = bytes(answer).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101"), head
        client._received = bytearray(rest)
        await client.send_frame(hello_frame(agent_id, token=node.token_of(agent_id)))
        return client

    def close(self) -> None:
        self._sock.close()

    async def send_frame(self, frame: Mapping[str, Any]) -> None:
        await self._write(_TEXT, json.dumps(frame).encode())

    async def take(self, max_bytes: int = READ_BYTES) -> None:
        """Read once from the socket. Return at once if the connection has ended."""
        if self.close_code is not None:
            return
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, max_bytes)
        except OSError:
            data = b""
        if not data:
            self.close_code = 1006
            return
        self._received += data
        await self._parse()

    async def read(self) -> None:
        """Read until the connection has ended."""
        while self.close_code is None:
            await self.take()

    async def read_up_to(self, seq: int) -> None:
        """Read until this message was delivered or the connection has ended."""
        while self.close_code is None and not (self.seqs and self.seqs[-1] >= seq):
            await self.take()

    async def _parse(self) -> None:
        received, position = self._received, 0
        while len(received) - position >= 2:
            start, size = position + 2, received[position + 1]
            if size >= 126:
                width = 2 if size == 126 else 8
                if len(received) < start + width:
                    break
                size = int.from_bytes(received[start : start + width], "big")
                start += width
            if len(received) < start + size:
                break
            await self._take_frame(received[position] & 0x0F, bytes(received[start : start + size]))
            position = start + size
        del received[:position]

    async def _take_frame(self, opcode: int, payload: bytes) -> None:
        if opcode == _CLOSE:
            self.close_code = int.from_bytes(payload[:2], "big")
        elif opcode == _PING and self.answers_pings:
            await self._write(_PONG, payload)
        elif opcode == _TEXT:
            frame = json.loads(payload)
            if frame["type"] == "deliver":
                self.seqs.append(frame["message"]["seq"])
                if len(self.seqs) % ACK_EVERY == 0:
                    await self.send_frame({"type": "ack", "seq": self.seqs[-1]})
            self.on_frame(frame)

    async def _write(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big") if size < 65536 else b""
        length = length or b"\xff" + size.to_bytes(8, "big")
        data = bytes([0x80 | opcode]) + length + b"\0\0\0\0" + payload  # masked with zeros
        async with self._writing:
            try:
                await asyncio.get_running_loop().sock_sendall(self._sock, data)
            except OSError:
                self.close_code = self.close_code or 1006


async def read_without_pongs(node: Node, agent_id: str) -> int | None:
    """Read everything and send no pongs, until the hub closes the connection. Return the close code."""
    client = await BareClient.open(node, agent_id)
    client.answers_pings = False
    try:
        await client.read()
    finally:
        client.close()
    return client.close_code


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise ProcessLookupError(os.strerror(3))
