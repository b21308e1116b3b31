"""The origin policy decides which web pages may connect to the hub's port, and under which host names the hub serves
its own page.

A hostile page can make a visitor's browser send requests to this node. The page uses the node's address, or a name of
the attacker that the attacker points to this node (DNS rebinding). The browser reveals both: ``Origin`` is the page,
and ``Host`` is the name. Programs send no ``Origin``, so the policy does not affect their sessions. `Site` is the hub's
interface to its own page. Pure: no IO.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from websockets.datastructures import Headers

from roundelay.network.config import WebHost, read_web_host
from roundelay.network.home import is_loopback


class WebFile(NamedTuple):
    """A file of the page, with the bytes and headers that are sent to a browser."""

    headers: tuple[tuple[str, str], ...]
    body: bytes


class Site(Protocol):
    """A page that the hub's port serves."""

    def find(self, path: str, *, takes_gzip: bool) -> WebFile | None:
        """Return the file at a path, or None if there is no such file. The path begins with ``/`` and has no query."""


_ORIGIN = re.compile(r"(https?)://(.+)", re.ASCII)
_SHOWN = 100


class OriginPolicy:
    """The origin policy of one node. Browsers may use the names in ``web_hosts``, the name on which the node listens,
    and the address to which the browser connected. Over loopback, browsers may also use loopback names."""

    def __init__(self, host: str, web_hosts: Sequence[str], *, behind_proxy: bool) -> None:
        named = (read_web_host(host) for host in web_hosts)
        self._named = frozenset(host for host in named if host is not None)
        listens_on = read_web_host(f"[{host}]" if ":" in host else host)
        if listens_on is not None and _read_address(listens_on.name) is None:
            self._named |= {listens_on}
        self._behind_proxy = behind_proxy

    def find_wrong_host(self, headers: Headers, local_address: Any) -> str | None:
        """Return why the page is not served under the host name in a request. Return None if the page is served."""
        hosts = headers.get_all("Host")
        # With DNS rebinding, the attacker's name points to this node, so the browser treats this node as the attacker's
        # site. Only the name in Host reveals the attack.
        if len(hosts) != 1 or (asked := read_web_host(hosts[0])) is None:
            return "A request for a page must have exactly one Host header."
        if self._is_ours(asked, local_address):
            return None
        return (
            f"This node shows no page under the name {asked.name[:_SHOWN]}. If people reach it by that name, say so in "
            f"the node's file (web_hosts: [{asked.name[:_SHOWN]}]); on its own machine it is reached by 127.0.0.1."
        )

    def find_wrong_origin(self, headers: Headers, local_address: Any, *, is_encrypted: bool) -> str | None:
        """Return why the requesting page may not connect. Return None for this node's own page and for programs."""
        origins = headers.get_all("Origin")
        if not origins:
            return None
        hosts = headers.get_all("Host")
        match = _ORIGIN.fullmatch(origins[0])
        origin = read_web_host(match[2]) if match is not None else None
        asked = read_web_host(hosts[0]) if len(hosts) == 1 else None
        if len(origins) != 1 or match is None or origin is None or asked is None:
            return "A page may connect to the node that shows it, and this one says of itself no such place (Origin)."
        scheme = match[1]
        # A proxy may terminate TLS, so this node cannot know whether the browser loaded the page over https.
        is_encrypted = scheme == "https" if self._behind_proxy else is_encrypted
        # Compare the scheme too. Anyone on the network can forge a page of http://host, so such a page must not count
        # as a page of https://host.
        if scheme != ("https" if is_encrypted else "http") or origin.at_port(scheme) != asked.at_port(scheme):
            return (
                f"A page of {origins[0][:_SHOWN]} may not connect to {hosts[0][:_SHOWN]}: the page that this node "
                "shows may, and programs that are no page. A proxy between them has to pass on the header Host as it "
                "came, and the node has to be told of it (behind_proxy, web_hosts)."
            )
        return self.find_wrong_host(headers, local_address)

    def _is_ours(self, asked: WebHost, local_address: Any) -> bool:
        if asked in self._named or WebHost(asked.name, None) in self._named:
            return True
        local = str(local_address[0]).partition("%")[0] if isinstance(local_address, tuple) else ""
        if is_loopback(local) and _is_name_of_loopback(asked.name):
            return True
        address = _read_address(asked.name)
        return address is not None and address == _read_address(local)


def asks_for_session(headers: Headers) -> bool:
    """Return whether a request asks for a WebSocket instead of a file."""
    return any(
        protocol.strip().lower() == "websocket" for line in headers.get_all("Upgrade") for protocol in line.split(",")
    )


def accepts_gzip(headers: Headers) -> bool:
    """Return whether the client accepts gzip."""
    for line in headers.get_all("Accept-Encoding"):
        for part in line.lower().split(","):
            name, _, weight = part.partition(";")
            if name.strip() in ("gzip", "*") and not re.fullmatch(r"\s*q\s*=\s*0(\.0*)?\s*", weight):
                return True
    return False


def _is_name_of_loopback(name: str) -> bool:
    address = _read_address(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _read_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
