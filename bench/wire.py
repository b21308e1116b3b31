"""docs/protocol.md on a raw socket: the handshake, frames as bytes, and ids and tokens like a client's. The base of
`load`.

Never keeps state or measures.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import struct
import time
from urllib.parse import urlsplit

from websockets.speedups import apply_mask

CONNECT_TIMEOUT_S = 30.0


class LoadError(Exception):
    """The server refused, closed, stalled, lost, repeated or reordered something: no number can be given."""


def make_message_id() -> bytes:
    """As the network's own client makes them: the time, then random bits."""
    return b"%012x" % (time.time_ns() // 1_000_000) + os.urandom(10).hex().encode()


def make_random_id() -> bytes:
    """As other clients make them: of nothing but random bits, so that each stands somewhere else in an index."""
    return os.urandom(16).hex().encode()


def make_token(agent_id: str) -> str:
    """32 bytes in base64url, the same on each connection of one participant."""
    return base64.urlsafe_b64encode(hashlib.sha256(agent_id.encode()).digest()).rstrip(b"=").decode()


def encode_send(message_id: bytes, to: str, filler: bytes, size_bytes: int) -> bytes:
    """A `send` whose content differs from that of every other, so that nothing on the way can profit from repetition."""
    return b'{"type":"send","message_id":"%s","to":"%s","content":"%s"}' % (
        message_id,
        to.encode(),
        (message_id + filler)[:size_bytes],
    )


def encode_masked_frame(payload: bytes, mask: bytes, head: int = 0x81) -> bytes:
    """A masked, unfragmented frame, as clients send them (RFC 6455, 5.2)."""
    length = len(payload)
    if length < 126:
        header = struct.pack("!BB", head, 0x80 | length)
    elif length < 65536:
        header = struct.pack("!BBH", head, 0x80 | 126, length)
    else:
        header = struct.pack("!BBQ", head, 0x80 | 127, length)
    return header + mask + apply_mask(payload, mask)


def find_payload(data: bytes, position: int) -> tuple[int, int]:
    """(start, end) of the payload of the unmasked frame at `position`; the end is past the data if it is incomplete."""
    length = data[position + 1]
    if length < 126:
        return position + 2, position + 2 + length
    header = 4 if length == 126 else 10
    if len(data) < position + header:
        return len(data) + 1, len(data) + 1
    return position + header, position + header + int.from_bytes(data[position + 2 : position + header], "big")


def leading_run(data: bytes) -> int:
    """Return the number of equal bytes at the beginning of `data`."""
    return len(data) - len(data.lstrip(data[:1]))


def websocket_request(url: str) -> bytes:
    """Return the HTTP request for a WebSocket at a URL."""
    address, key = urlsplit(url), base64.b64encode(os.urandom(16)).decode()
    place = (address.path or "/") + (f"?{address.query}" if address.query else "")
    return (
        f"GET {place} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        "Upgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Protocol: roundelay.v1\r\n\r\n"
    ).encode()


def open_websocket(url: str, source: str | None) -> socket.socket:
    address = urlsplit(url)
    if address.hostname is None or address.port is None:
        raise LoadError(f"not a WebSocket URL with a host and a port: {url!r}")
    origin = (source, 0) if source is not None else None
    opened = socket.create_connection(
        (address.hostname, address.port), timeout=CONNECT_TIMEOUT_S, source_address=origin
    )
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.sendall(websocket_request(url))
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        part = opened.recv(4096)  # never more than the handshake: the server speaks after `hello`
        if not part:
            raise LoadError(f"no WebSocket at {url}: {answer!r}")
        answer += part
    if not answer.startswith(b"HTTP/1.1 101"):
        raise LoadError(f"no WebSocket at {url}: {answer.splitlines()[0]!r}")
    return opened
