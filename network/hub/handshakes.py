"""Who may come in: the places of connections that were not welcomed yet (`HandshakeLimiter`), and what a transport knows of the
other end.

The places are bounded in number. A newcomer always gets one, and for it another one makes room: of the address that
holds most places the connection that made its last step (it came, or asked for a session) the longest ago. So an
address can neither keep others out, nor, by connections that say nothing, those that share it: a newcomer is out of
their reach until as many came after it as there are places. The gate decides in memory; `connection` ends what has to
go."""

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
    """A connection that has a place. ``crowd``: what counts as one address (`source_of`)."""

    source: str

    def evict(self) -> None:
        """End the connection, now."""


class HandshakeLimiter:
    """At most ``places`` newcomers at a time. ``made_room`` counts those that were ended for others."""

    def __init__(self, places: int) -> None:
        self.evicted = 0
        self._places = places
        self._taken = 0
        self._lines: dict[str, dict[PendingConnection, None]] = {}
        """By crowd, in the order in which they got on; no line is empty."""

    def add(self, newcomer: PendingConnection) -> None:
        """One more has come, or will be no participant's connection after all. Idempotent."""
        line = self._lines.setdefault(newcomer.source, {})
        if newcomer in line:
            return
        line[newcomer] = None
        self._taken += 1
        if self._taken > self._places:
            self.evict_one()

    def record_progress(self, newcomer: PendingConnection) -> None:
        """It has done the next step towards its welcome."""
        line = self._lines.get(newcomer.source, {})
        if newcomer in line:
            del line[newcomer]
            line[newcomer] = None

    def move(self, newcomer: PendingConnection, crowd: str) -> None:
        """It counts with another address from now on; it has got on."""
        if newcomer in self._lines.get(newcomer.source, {}):  # else it has gone meanwhile
            self.remove(newcomer)
            newcomer.source = crowd
            self.add(newcomer)

    def remove(self, newcomer: PendingConnection) -> None:
        """It needs its place no longer: the hub knows who it is, or it is gone. Idempotent."""
        line = self._lines.get(newcomer.source, {})
        if newcomer in line:
            del line[newcomer]
            self._taken -= 1
            if not line:
                del self._lines[newcomer.source]

    def evict_one(self) -> bool:
        """One of them makes room. False if there is none."""
        if not self._lines:
            return False
        crowded = max(self._lines.values(), key=len)
        oldest = next(iter(crowded))
        self.remove(oldest)
        self.evicted += 1
        oldest.evict()
        return True

    def evict_all(self) -> None:
        """All of them go: nobody is let in any more."""
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
    """``behind_proxy``: connections come through a proxy, so that none is local, whatever its address."""
    headers: Headers = connection.request.headers if connection.request is not None else Headers()
    is_near = all(is_loopback(_host_of(address)) for address in (connection.local_address, connection.remote_address))
    is_local = is_near and not behind_proxy and not _is_forwarded(headers) and _names_loopback(headers)
    return Peer(is_local=is_local, is_page="Origin" in headers)


def read_forwarded_address(headers: Headers) -> str | None:
    """The address that the last proxy says it was asked from: all before it may be anybody's invention. None if it
    says nothing of use."""
    lines = headers.get_all("X-Forwarded-For")
    last = lines[-1].rpartition(",")[2].strip() if lines else ""
    for host in (last, last.rpartition(":")[0].strip("[]")):  # some proxies write the port too
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
    """Whether the request was meant for this machine by a name that only this machine has for it."""
    hosts = headers.get_all("Host")
    if len(hosts) != 1:
        return False
    name = urlsplit(f"//{hosts[0]}").hostname or ""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def source_of(address: Any) -> str:
    """What a socket's remote address counts as where places are shared out: itself, or, as whoever has one IPv6 address
    has many, its /64."""
    return _crowd_of_host(_host_of(address))


def _host_of(address: Any) -> str:
    """The host of a socket's address; empty where it has none, as a Unix socket."""
    return str(address[0]) if isinstance(address, tuple) and address else ""


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
