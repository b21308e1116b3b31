"""Connections before their welcome: the limit on their number, and the facts that the transport knows about the peer.

The hub always accepts a new connection. When the limit is reached, the hub evicts a pending connection of the source
with the most pending connections, namely the connection that has made no progress for the longest time. A connection
makes progress when it is opened and when it requests a session. So no source can keep out other sources. Silent
connections cannot keep out new connections of the same source either: a new connection is safe until ``places`` later
connections have arrived. Works in memory; `connection` closes evicted connections.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

from websockets.asyncio.server import ServerConnection
from websockets.datastructures import Headers

from roundelay.network.core.entries import Peer
from roundelay.network.home import is_loopback


class PendingConnection(Protocol):
    """A connection before its welcome. Limits count the connection under the address ``source`` (`source_of`)."""

    source: str

    def evict(self) -> None:
        """End the connection at once."""


class HandshakeLimiter:
    """Limiter that allows at most ``places`` pending connections. ``evicted`` counts the connections that the limiter
    ended to make room for new connections."""

    def __init__(self, places: int) -> None:
        self.evicted = 0
        self._places = places
        self._taken = 0
        self._by_source: dict[str, dict[PendingConnection, None]] = {}
        """Pending connections by source. The connections of a source are sorted by the time of their last progress. A
        source without connections is removed."""

    def add(self, connection: PendingConnection) -> None:
        """Add a new connection, or a connection that the hub refused after its admission. Idempotent."""
        connections = self._by_source.setdefault(connection.source, {})
        if connection in connections:
            return
        connections[connection] = None
        self._taken += 1
        # Add the connection before the eviction, so that it counts for its source. A source with the most connections
        # then loses one of its own.
        if self._taken > self._places:
            self.evict_one()

    def record_progress(self, connection: PendingConnection) -> None:
        """Record that a connection made progress towards its welcome. Other connections of its source are then evicted
        first."""
        connections = self._by_source.get(connection.source, {})
        if connection in connections:
            del connections[connection]
            # A dict keeps insertion order, so adding the connection again moves it to the end.
            connections[connection] = None

    def move(self, connection: PendingConnection, source: str) -> None:
        """Count a connection under another source from now on. This also counts as progress."""
        if connection in self._by_source.get(connection.source, {}):  # a missing connection has ended
            self.remove(connection)
            connection.source = source
            self.add(connection)

    def remove(self, connection: PendingConnection) -> None:
        """Remove a connection that has ended or whose participant is known. Idempotent."""
        connections = self._by_source.get(connection.source, {})
        if connection in connections:
            del connections[connection]
            self._taken -= 1
            if not connections:
                del self._by_source[connection.source]

    def evict_one(self) -> bool:
        """Evict one pending connection. Return False if no connection is pending."""
        if not self._by_source:
            return False
        most_crowded = max(self._by_source.values(), key=len)
        oldest = next(iter(most_crowded))
        self.remove(oldest)
        self.evicted += 1
        # Remove and count first: `evict` may close the connection at once, which calls `remove` again.
        oldest.evict()
        return True

    def evict_all(self) -> None:
        """End every pending connection."""
        while self.evict_one():
            pass


_FORWARDING_HEADERS = (
    "Forwarded",
    "Via",
    "X-Real-IP",
    "X-Client-IP",
    "X-Cluster-Client-IP",
    "True-Client-IP",
    "CF-Connecting-IP",
)


def describe_peer(connection: ServerConnection, *, behind_proxy: bool) -> Peer:
    """Return what is known about a peer. Behind a proxy, no connection counts as local, whatever its address."""
    headers: Headers = connection.request.headers if connection.request is not None else Headers()
    # Check both ends: a peer is local only if both of its connection's addresses are loopback addresses.
    is_near = all(is_loopback(_host_of(address)) for address in (connection.local_address, connection.remote_address))
    is_local = is_near and not behind_proxy and not _is_forwarded(headers) and _names_loopback(headers)
    return Peer(is_local=is_local, is_page="Origin" in headers)


def read_forwarded_address(headers: Headers) -> str | None:
    """Return the client address that the last proxy added to ``X-Forwarded-For``. Return None if the header has no
    valid address.

    Only the last address counts, because the client may have sent the others itself.
    """
    lines = headers.get_all("X-Forwarded-For")
    last = lines[-1].rpartition(",")[2].strip() if lines else ""
    for host in (last, last.rpartition(":")[0].strip("[]")):  # some proxies add the port
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            continue
    return None


def _is_forwarded(headers: Headers) -> bool:
    return any(name in headers for name in _FORWARDING_HEADERS) or any(
        name.lower().startswith("x-forwarded") for name in headers
    )


def _names_loopback(headers: Headers) -> bool:
    """Return whether the Host header is a name or address of this machine that works only on this machine, such as
    ``localhost``."""
    hosts = headers.get_all("Host")
    # Several Host headers are an attack: a proxy and a server might choose different ones.
    if len(hosts) != 1:
        return False
    name = urlsplit(f"//{hosts[0]}").hostname or ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def source_of(address: Any) -> str:
    """Return the source of a socket's remote address: an IPv4 address, or the /64 network of an IPv6 address. The owner
    of one IPv6 address usually owns its whole /64."""
    return _source_of_host(_host_of(address))


def _host_of(address: Any) -> str:
    """Return the host of a socket's address, or an empty string for a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) and address else ""


@lru_cache(maxsize=1024)
def _source_of_host(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    # A socket may show the same peer with its IPv4 address or with the mapped IPv6 address. Count both as one source.
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
