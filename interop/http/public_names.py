"""Host names that a gateway accepts, and the URL that it shows in its documents.

A gateway behind a proxy cannot know its own address. The operator sets the address as `public_url`, including a path
prefix. Without `public_url`, documents show the address of the request, with the prefix from the proxy's
``X-Forwarded-Prefix`` header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from roundelay.network.config import WebHost, read_web_host
from roundelay.network.extras import needs
from roundelay.network.home import is_loopback

with needs("gateway"):
    from starlette.datastructures import Headers
    from starlette.requests import Request


_PREFIX = re.compile(r"(?:/[A-Za-z0-9._~%-]+){1,16}/?", re.ASCII)
_SHOWN = 100
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class PublicNames:
    """Names of a gateway that listens on ``host``. The other names come from ``public_url`` and ``web_hosts`` (for
    example `hub.example.org`).
    """

    def __init__(self, host: str = "127.0.0.1", public_url: str | None = None, web_hosts: Iterable[str] = ()) -> None:
        self._url = public_url.rstrip("/") if public_url is not None else None
        parts = urlsplit(self._url) if self._url is not None else None
        self._origin = f"{parts.scheme}://{parts.netloc}".lower() if parts is not None else None
        # Remove the scheme's default port, because clients omit it from the Host header.
        own = [parts.netloc.removesuffix(DEFAULT_PORTS[parts.scheme])] if parts is not None else []
        hosts = map(read_web_host, (*web_hosts, *own))
        self._named = {host for host in hosts if host is not None}
        self._is_local = is_loopback(host)

    def find_wrong_host(self, headers: Headers) -> str | None:
        """Return why a request must be refused because of its ``Host`` header, or None.

        In a DNS rebinding attack, a hostile page makes a browser send requests to a gateway on the same machine, under
        a host name of the attacker. A gateway that listens only on loopback therefore accepts only names that it knows.
        """
        if not self._is_local:
            return None
        host = read_web_host(headers.get("host", ""))
        if host is None:
            return "The request must have exactly one Host header, with a host name."
        if host in self._named or WebHost(host.name, None) in self._named or _is_loopback_name(host.name):
            return None
        name = host.name[:_SHOWN]
        return (
            f"This gateway does not accept the host name {name}. If MCP hosts use this name, an operator must allow "
            f"it: with web_hosts: [{name}] or interop.public_url in the node's file, or with --web-host {name} or "
            "--public-url URL of roundelay gateway."
        )

    def is_own_page(self, origin: str) -> bool:
        """Return whether an origin equals the origin of the public URL."""
        return origin.lower() == self._origin

    def show_base(self, request: Request) -> str:
        """Return the URL at which the client reaches the gateway, without a trailing slash."""
        if self._url is not None:
            return self._url
        prefix = request.headers.get("x-forwarded-prefix", "")
        # Accept only a plain path. Any client can send this header, and its value appears in documents.
        prefix = prefix.rstrip("/") if _PREFIX.fullmatch(prefix) else ""
        return f"{request.url.scheme}://{request.url.netloc}{prefix}"


def _is_loopback_name(name: str) -> bool:
    return is_loopback(name) or name.endswith(".localhost")
