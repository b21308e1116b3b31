"""Where others reach a gateway: the hosts by which they may ask, and the URL that its documents show.

Behind a proxy a gateway cannot know its address: `public_url` names it, path prefix included. Without that, documents
show the address by which they were asked for, with the prefix that the proxy adds as ``X-Forwarded-Prefix``.
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
    """The names of a gateway that listens on ``host``: its ``public_url``, and ``web_hosts`` (`hub.example.org`)."""

    def __init__(self, host: str = "127.0.0.1", public_url: str | None = None, web_hosts: Iterable[str] = ()) -> None:
        self._url = public_url.rstrip("/") if public_url is not None else None
        parts = urlsplit(self._url) if self._url is not None else None
        self._origin = f"{parts.scheme}://{parts.netloc}".lower() if parts is not None else None
        # Clients leave the scheme's own port out of the header Host.
        own = [parts.netloc.removesuffix(DEFAULT_PORTS[parts.scheme])] if parts is not None else []
        named = (read_web_host(it) for it in (*web_hosts, *own))
        self._named = {it for it in named if it is not None}
        self._is_local = is_loopback(host)

    def find_wrong_host(self, headers: Headers) -> str | None:
        """Return why nobody may ask by this request's ``Host``, or None.

        The browser of somebody who looks at a hostile page can be made to ask a gateway on the same machine by a name
        of that page's owner (DNS rebinding), so one that listens on loopback alone goes by names that it knows.
        """
        if not self._is_local:
            return None
        asked = read_web_host(headers.get("host", ""))
        if asked is None:
            return "The request needs one header Host, with the name of a host."
        if asked in self._named or WebHost(asked.name, None) in self._named or _is_loopback_name(asked.name):
            return None
        name = asked.name[:_SHOWN]
        return (
            f"This gateway does not answer here under the name {name}. If hosts of MCP reach it by that name, its "
            f"operator says so: web_hosts: [{name}] or interop.public_url in the node's file; of roundelay gateway, "
            f"--web-host {name} or --public-url URL."
        )

    def is_own_page(self, origin: str) -> bool:
        """Whether a page of this origin is one of the public URL's."""
        return origin.lower() == self._origin

    def show_base(self, request: Request) -> str:
        """Return the URL of the gateway as the one who asks reaches it, without a slash at its end."""
        if self._url is not None:
            return self._url
        prefix = request.headers.get("x-forwarded-prefix", "")
        prefix = prefix.rstrip("/") if _PREFIX.fullmatch(prefix) else ""
        return f"{request.url.scheme}://{request.url.netloc}{prefix}"


def _is_loopback_name(name: str) -> bool:
    return is_loopback(name) or name.endswith(".localhost")
