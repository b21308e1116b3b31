"""HTTP requests to the server of a model. All models of an event loop share their connections.

This module uses `aiohttp`, which needs a seventh of the CPU time of the `openai` SDK for a request
(docs/decisions/model-http-client.md). A failed request raises `StatusError` if the server answered with an error, or
`RedirectRefused`. All other failures raise an error of `aiohttp`, an `OSError` or a `TimeoutError`.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote

import aiohttp
from yarl import URL

from roundelay.agents.loop_local import LoopLocal
from roundelay.agents.outgoing_http import check_environment, find_proxy_address, load_certificates
from roundelay.network.credentials import hide_url_secrets

MAX_CONNECTIONS = 1000
"""Maximum number of open connections of an event loop to all servers of models."""

MAX_HEADER_BYTES = 65_536
"""Maximum size of one header of a response. Some proxies send headers above the 8 KiB that `aiohttp` allows."""

MAX_ERROR_BYTES = 1_000_000
"""Maximum number of bytes to read from an error response."""

MAX_REDIRECTS = 3
CONNECT_TIMEOUT_S = 10.0
_LARGE_BYTES = 1 << 20  # `aiohttp` warns about larger bodies that are not files


class StatusError(Exception):
    """The HTTP status of a response is not a success."""

    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.text = text


class RedirectRefused(Exception):
    """A redirect was not followed, because it leads to another server, drops the body or forms a loop."""


@dataclass(slots=True, eq=False)
class _Session:
    """Session of `aiohttp` with a count of its users. The session closes with its last user or with the event loop."""

    session: aiohttp.ClientSession
    closer: AsyncGenerator[None, None]
    users: int = 0


_Key = tuple[str, int]
"""Key of a shared session: the URL of its SOCKS proxy or an empty string, and the identity of its certificates."""

_sessions: LoopLocal[dict[_Key, _Session]] = LoopLocal(dict)


@dataclass(frozen=True, slots=True)
class _Route:
    """Session and HTTP proxy for the requests to one server."""

    key: _Key
    session: aiohttp.ClientSession
    proxy: str | None


class ModelHttp:
    """HTTP client for the chat completions of one server, with its URL, headers and time limits.

    ``silence_s`` limits the time in which no byte arrives. Proxies and certificates are read from the environment at
    the first request of an event loop (`outgoing_http`). Cookies are ignored.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, silence_s: float) -> None:
        address = URL(url)
        self._headers = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        if address.user is not None or address.password is not None:
            # Credentials in the URL replace the key. Browsers and other clients do the same.
            pair = f"{unquote(address.raw_user or '')}:{unquote(address.raw_password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            address = address.with_user(None)
        self._url = address
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=min(CONNECT_TIMEOUT_S, silence_s), sock_read=silence_s
        )
        self._routes: LoopLocal[dict[str, _Route]] = LoopLocal(dict)
        """Routes of the running event loop by URL scheme. A redirect may lead from http to https."""

    @asynccontextmanager
    async def post(self, body: Mapping[str, object]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the response when its headers have arrived. Raises `ConfigError` for an invalid
        proxy or invalid certificates, `ValueError` for a body that cannot be converted to JSON, and the errors that the
        module docstring lists.
        """
        data = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        url, left = self._url, MAX_REDIRECTS
        while True:
            route = await self._find_route(url)
            async with route.session.post(
                url,
                data=data if len(data) < _LARGE_BYTES else io.BytesIO(data),
                headers=self._headers,
                proxy=route.proxy,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                if response.status < 300:
                    yield response
                    return
                target = _find_redirect(response)
                if target is None:
                    raise StatusError(response.status, response.headers, await _read_error(response))
            if left == 0:
                raise RedirectRefused(f"redirects more than {MAX_REDIRECTS} times")
            url, left = target, left - 1

    async def close(self) -> None:
        """Close the connections that no other model uses. A later request opens new connections."""
        sessions = _sessions.get()
        for route in (self._routes.pop() or {}).values():
            shared = sessions.get(route.key)
            if shared is None or shared.session is not route.session:
                continue
            shared.users -= 1
            if shared.users == 0:
                del sessions[route.key]
                await shared.closer.aclose()

    async def _find_route(self, url: URL) -> _Route:
        """Return the route for the scheme of the URL. The environment is read at the first request of an event loop."""
        routes = self._routes.get()
        route = routes.get(url.scheme)
        if route is not None and not route.session.closed:
            return route
        check_environment()  # repeat the check, because the variables may have changed since the model was created
        certificates, proxy, sessions = load_certificates(), find_proxy_address(str(url)), _sessions.get()
        is_socks = proxy is not None and proxy.startswith("socks")
        key = proxy if is_socks and proxy is not None else "", id(certificates)
        shared = sessions.get(key)
        if shared is None or shared.session.closed:
            session = _open_session(key[0], certificates)
            shared = sessions[key] = _Session(session, _close_at_end(session))
            await anext(shared.closer)  # this does not suspend, so no other task sees a session without a closer
        shared.users += 1
        route = routes[url.scheme] = _Route(key, shared.session, None if is_socks else proxy)
        return route


def _open_session(socks: str, certificates: ssl.SSLContext) -> aiohttp.ClientSession:
    if socks:
        connector_type = importlib.import_module("aiohttp_socks").ProxyConnector  # optional, without types
        connector: aiohttp.TCPConnector = connector_type.from_url(socks, ssl=certificates, limit=MAX_CONNECTIONS)
    else:
        connector = aiohttp.TCPConnector(ssl=certificates, limit=MAX_CONNECTIONS)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


async def _close_at_end(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """Close the session when this generator is closed. `asyncio.run` closes all open generators at its end, so programs
    that forget to close a model leave no open connection.
    """
    try:
        yield
    finally:
        await session.close()


def _find_redirect(response: aiohttp.ClientResponse) -> URL | None:
    """Return the target of a redirect, or None for a response that is not a redirect.

    Raises `RedirectRefused` if the redirect would drop the request's body or send the conversation to another server.
    """
    location = response.headers.get("Location")
    if response.status not in (301, 302, 303, 307, 308) or location is None:
        return None
    origin = response.url
    try:
        target = origin.join(URL(location))
        is_same = target.host == origin.host and target.scheme in (origin.scheme, "https")
    except ValueError:
        target, is_same = URL(), False
    if is_same and response.status in (307, 308):  # other redirects drop the body
        return target
    raise RedirectRefused(
        f"redirects ({response.status}) to {hide_url_secrets(location)}, which is not followed: set base_url to the "
        "address of the model's server"
    )


async def _read_error(response: aiohttp.ClientResponse) -> str:
    data = bytearray()
    async for part in response.content.iter_any():
        data += part
        if len(data) >= MAX_ERROR_BYTES:
            break
    try:
        return data[:MAX_ERROR_BYTES].decode(response.charset or "utf-8", "replace")
    except LookupError:  # a character set that Python does not know
        return data[:MAX_ERROR_BYTES].decode("utf-8", "replace")
