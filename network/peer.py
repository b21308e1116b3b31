"""What a WebSocket's transport knows of the other end: where it is, by which way it came, what it has yet to take."""

from __future__ import annotations

import fcntl
import ipaddress
import struct
import termios
from functools import lru_cache
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers

from .entries import Peer

_FORWARDING_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via")


def describe_peer(connection: ServerConnection) -> Peer:
    headers: Headers = connection.request.headers if connection.request is not None else Headers()
    is_forwarded = any(name in headers for name in ("Origin", *_FORWARDING_HEADERS))
    is_loopback = all(_is_loopback(address) for address in (connection.local_address, connection.remote_address))
    return Peer(is_loopback=is_loopback, has_browser_headers=is_forwarded)


def crowd_of(address: Any) -> str:
    """What a socket's remote address counts as where places are shared out: itself, or, as whoever has one IPv6 address has many, its /64."""
    return _crowd_of_host(str(address[0]) if isinstance(address, tuple) and address else "")


@lru_cache(maxsize=1024)
def _crowd_of_host(host: str) -> str:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


def _is_loopback(address: Any) -> bool:
    try:
        return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
    except (TypeError, ValueError, IndexError):
        return False


def count_unsent(sock: Any) -> int:
    """How many bytes of a socket's send queue in the kernel the other end's TCP has not taken; 0 where the system does not tell."""
    try:
        (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
    except (OSError, AttributeError, ValueError):  # closed, or a system that does not tell
        return 0
    return int(queued)
