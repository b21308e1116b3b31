"""Sends one signed request to a receiver: checks the addresses, signs the body, and interprets the response.

A host name is resolved once per request. All addresses of the name are checked, and the connection uses one of the
checked addresses. A name whose address changes between check and connection (DNS rebinding) therefore has no effect.
Redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import cached_property
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import httpx2
import msgspec

from roundelay.network.errors import InvalidArguments
from roundelay.network.extras import needs

with needs("gateway"):
    from standardwebhooks import Webhook


MAX_URL_CHARS = 2000
TIMEOUT_S = 15.0
"""Maximum time from resolving the host name to receiving the header of the response, in seconds."""
BODY_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
"""Maximum number of bytes that are read from a response body. The content is ignored, and is read only so that the
connection can be reused.
"""
ABOUT_THE_MESSAGE = frozenset({400, 409, 413, 415, 422, 500, 501})
"""HTTP statuses that refuse only this message. Any other status except 2xx and 410 means that the receiver is
unavailable.
"""
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
"""IPv6 addresses of the internet (RFC 4291, section 2.4). Addresses outside of this range belong to local networks, or
are translated to IPv4.
"""
_SPECIAL_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        [
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.31.196.0/24",
            "192.52.193.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
        ],
    )
)
_SPECIAL_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        ["2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3ffe::/16", "3fff::/20"],
    )
)
"""IPv6 networks that are not public. Both lists contain IANA's special-purpose registries
(https://www.iana.org/assignments/iana-ipv4-special-registry and iana-ipv6-special-registry) and multicast. Python's own
lists are older, and treat 6to4 relays as public.
"""


Sign: TypeAlias = Callable[[str, datetime, bytes], Mapping[str, str]]
"""Function that returns the signature headers of a post. The arguments of the function are the id of the post, the time
and the body.
"""


def sign_as_standard(secret: str) -> Sign:
    """Return a function that signs posts as Standard Webhooks requires. The receiver knows the secret."""
    signer = Webhook(secret)

    def sign(webhook_id: str, now: datetime, body: bytes) -> Mapping[str, str]:
        return {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(math.floor(now.timestamp())),
            "webhook-signature": signer.sign(webhook_id, now, body.decode()),
        }

    return sign


class PostAnswer(Enum):
    """Meaning of a receiver's response: whether the message was accepted, or why it was not."""

    TAKEN = "taken"
    REFUSED = "refused"
    AWAY = "away"
    GONE = "gone"


@dataclass(frozen=True)
class Posted:
    """Result of one post. ``reason`` explains the result to people, and never contains text from the receiver."""

    answer: PostAnswer
    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class WebhookUrl:
    """A URL whose form was checked. The addresses of the URL's host are checked at each post."""

    url: str
    host: str
    port: int
    is_allowed: bool
    """Whether the configuration lists this host in ``webhook_hosts``. An allowed host may have a private address, and
    its URL may use http://.
    """

    @classmethod
    def read(cls, url: str, allowed_hosts: frozenset[str]) -> Self:
        """Check a URL. Raises `InvalidArguments`, whose text explains what is allowed."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or {"https": 443, "http": 80}[parts.scheme]
            host = host if ":" in host else host.encode("idna").decode()
        except (ValueError, KeyError):
            host, port = "", 0
        if not (host and port and url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS):
            raise InvalidArguments("A webhook's url must be https://HOST/PATH, in ASCII.")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise InvalidArguments(
                "A webhook's url must not contain a user, a password or a fragment (#). Its posts are signed instead."
            )
        shown = f"[{host}]" if ":" in host else host
        is_allowed = not allowed_hosts.isdisjoint({shown, f"{shown}:{port}"})
        if parts.scheme != "https" and not is_allowed:
            raise InvalidArguments(
                f"A webhook's url must start with https://, because {host} is not listed in webhook_hosts. An operator may "
                "add it."
            )
        return cls(url, host, port, is_allowed)

    async def find_addresses(self) -> list[str]:
        """Resolve the host name. Raises `InvalidArguments` if the name has no address, or if one of its addresses is
        not allowed.

        The error has the same text in both cases, so that callers cannot discover the internal names of a network.
        """
        try:
            addresses = await _look_up(self.host, self.port)
        except OSError as error:
            if self.is_allowed:
                raise InvalidArguments(f"The host {self.host} cannot be found.") from error
            addresses = []
        # Check all addresses. An attacker may control the list, and the connection may use any address of the list.
        if not self.is_allowed and not (addresses and all(map(is_public, addresses))):
            raise InvalidArguments(
                f"{self.host} is unknown, or has an address that is not public. An operator may allow it in webhook_hosts."
            )
        return addresses


async def _look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host name. Raises `OSError`.

    Each call uses its own daemon thread. In a shared thread pool, names whose DNS server does not answer could block
    all threads, and a shutdown would wait for these threads.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[str]] = loop.create_future()

    def resolve(addresses: list[str], error: OSError | None) -> None:
        if not result.done():
            result.set_result(addresses) if error is None else result.set_exception(error)

    def work() -> None:
        addresses, failed = [], None
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except OSError as error:
            failed = error
        with suppress(RuntimeError):  # the event loop may be closed by now
            loop.call_soon_threadsafe(resolve, addresses, failed)

    threading.Thread(target=work, name="webhook-name", daemon=True).start()
    return await result


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet, and not on this machine, in a local network or inside a
    tunnel.
    """
    # Drop the zone of a link-local address (``fe80::1%eth0``), which does not affect the check.
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in _GLOBAL_UNICAST and not any(ip in network for network in _SPECIAL_V6)
    return not any(ip in network for network in _SPECIAL_V4)


class WebhookPoster:
    """Sends posts to one receiver over its own connections. Use this class with ``async with``."""

    def __init__(self, target: WebhookUrl, sign: Sign) -> None:
        self._target = target
        self._sign = sign
        self._http = httpx2.AsyncClient(
            verify=_trust.context,
            # Ignore the proxy of the environment. A proxy would resolve the name again and connect to an unchecked
            # address.
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=2, max_keepalive_connections=1),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, webhook_id: str, value: Mapping[str, Any]) -> Posted:
        """Sign a value and post it under an id. Return the meaning of the response. Failures of the receiver do not
        raise.
        """
        body = msgspec.json.encode(value)
        headers = {
            "content-type": "application/json",
            "user-agent": "Roundelay-Webhooks/1",
            "host": urlsplit(self._target.url).netloc.rpartition("@")[2],
            **self._sign(webhook_id, datetime.now(UTC), body),
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._post_to_any(await self._target.find_addresses(), headers, body)
        except InvalidArguments as error:
            return Posted(PostAnswer.AWAY, str(error))
        except TimeoutError:
            return Posted(PostAnswer.AWAY, f"no answer within {TIMEOUT_S:g} s")
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            return Posted(PostAnswer.AWAY, _describe_failure(error))
        await _read_rest(response)
        return _interpret(response.status_code, response.headers.get("retry-after", ""))

    async def _post_to_any(self, addresses: list[str], headers: dict[str, str], body: bytes) -> httpx2.Response:
        # Try the next address only after a failed connection. After any other failure, the receiver may already have
        # the post.
        for address in addresses[:-1]:
            with suppress(
                httpx2.ConnectError, httpx2.ConnectTimeout
            ):  # nothing was sent to this address, so the next one may be tried
                return await self._post_to(address, headers, body)
        return await self._post_to(addresses[-1], headers, body)

    async def _post_to(self, address: str, headers: dict[str, str], body: bytes) -> httpx2.Response:
        # Connect to the checked address. If the URL contained the name, the HTTP client would resolve the name again.
        url = httpx2.URL(self._target.url).copy_with(host=address.partition("%")[0], port=self._target.port)
        extensions = {"sni_hostname": self._target.host}  # the certificate must be valid for this name
        request = self._http.build_request("POST", url, headers=headers, content=body, extensions=extensions)
        return await self._http.send(request, stream=True)


async def _read_rest(response: httpx2.Response) -> None:
    """Read the response body within limits, and close the response."""
    read = 0
    try:
        with suppress(TimeoutError, OSError, httpx2.HTTPError):
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in response.aiter_raw():
                    read += len(part)
                    if read > MAX_ANSWER_BYTES:
                        break
    finally:
        await response.aclose()


def _describe_failure(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "no answer: its certificate is not trusted, or issued for another name"
        cause = cause.__cause__ or cause.__context__
    return f"no answer ({type(error).__name__})"


def _interpret(status: int, retry_after: str) -> Posted:
    reason = f"it answered {status}"
    if 200 <= status < 300:
        return Posted(PostAnswer.TAKEN, reason)
    if status == 410:
        return Posted(PostAnswer.GONE, reason)
    if status in ABOUT_THE_MESSAGE:
        return Posted(PostAnswer.REFUSED, reason)
    is_number = retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 10
    return Posted(PostAnswer.AWAY, reason, float(retry_after) if is_number else 0.0)


class _TrustStore:
    """The certificates that this machine trusts. Loading certificates is slow, so all receivers share one
    TLS context.
    """

    @cached_property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context()


_trust = _TrustStore()
