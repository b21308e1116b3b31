"""Speaks docs/protocol.md on a raw socket: the handshake, frames as bytes, and ids and tokens in the form of a
client's. `load` is built on this module.

The module keeps no state and measures nothing.
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
    """The server refused, closed, stalled, lost, repeated or reordered something, so there is no valid result."""


def make_message_id() -> bytes:
    """Return an ordered message id, like the network's own client: the time, followed by random bits."""
    return b"%012x" % (time.time_ns() // 1_000_000) + os.urandom(10).hex().encode()


def make_random_id() -> bytes:
    """Return a random message id, like other clients. Random ids are scattered over the index of the ledger."""
    return os.urandom(16).hex().encode()


def make_token(agent_id: str) -> str:
    """Return the token of a participant: 32 bytes in base64url. A participant has the same token on each of its
    connections.
    """
    return base64.urlsafe_b64encode(hashlib.sha256(agent_id.encode()).digest()).rstrip(b"=").decode()


def encode_send(message_id: bytes, to: str, filler: bytes, size_bytes: int) -> bytes:
    """Return a `send` frame. The content differs in each message, so that no component can benefit from repetition."""
    return b'{"type":"send","message_id":"%s","to":"%s","content":"%s"}' % (
        message_id,
        to.encode(),
        (message_id + filler)[:size_bytes],
    )


def encode_masked_frame(payload: bytes, mask: bytes, head: int = 0x81) -> bytes:
    """Return a masked, unfragmented frame, as clients send it (RFC 6455, section 5.2)."""
    length = len(payload)
    if length < 126:
        header = struct.pack("!BB", head, 0x80 | length)
    elif length < 65536:
        header = struct.pack("!BBH", head, 0x80 | 126, length)
    else:
        header = struct.pack("!BBQ", head, 0x80 | 127, length)
    return header + mask + apply_mask(payload, mask)


def find_payload(data: bytes, position: int) -> tuple[int, int]:
    """Return the start and the end of the payload of the unmasked frame at `position`. If the frame is incomplete, the
    end is greater than the length of the data.
    """
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
    """Return the HTTP request that opens a WebSocket at a URL."""
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
        part = opened.recv(4096)  # contains only the handshake, because the server sends frames after `hello`
        if not part:
            raise LoadError(f"no WebSocket at {url}: {answer!r}")
        answer += part
    if not answer.startswith(b"HTTP/1.1 101"):
        raise LoadError(f"no WebSocket at {url}: {answer.splitlines()[0]!r}")
    return opened
