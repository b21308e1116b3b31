"""One signed request to a webhook's address: which addresses may be called, how it is signed, and what the answer
means.

An address is looked up once for each request, everything that it leads to is judged, and the connection is made to what
was judged: a name that changes its answer in between gains nothing. No redirect is followed, no proxy is asked.
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
"""From the look-up of the name to the head of the answer, by which it is judged."""
BODY_TIMEOUT_S = 3.0
CONNECT_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024
"""Of an answer's body so much is read, so that its connection can be used again; what it says is nothing to us."""
ABOUT_THE_MESSAGE = frozenset({400, 409, 413, 415, 422, 500, 501})
"""What a receiver answers to this one message; by every other answer but 2xx and 410 it takes none now."""
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
"""What is given out of IPv6 for the internet (RFC 4291, 2.4). Outside of it are local networks, and addresses that hold
one of IPv4 to which a translator leads."""
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
"""IANA's special-purpose registries (https://www.iana.org/assignments/iana-ipv4-special-registry and
iana-ipv6-special-registry), with multicast: Python's own lists are older, and call relays of 6to4 public."""


Sign: TypeAlias = Callable[[str, datetime, bytes], Mapping[str, str]]
"""Gives the headers that prove a post: of its id, of the moment and of its body."""


def sign_as_standard(secret: str) -> Sign:
    """Sign with a secret that the receiver has too, as Standard Webhooks does."""
    signer = Webhook(secret)

    def sign(webhook_id: str, now: datetime, body: bytes) -> Mapping[str, str]:
        return {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(math.floor(now.timestamp())),
            "webhook-signature": signer.sign(webhook_id, now, body.decode()),
        }

    return sign


class PostAnswer(Enum):
    """What the answer to a post means for the message."""

    TAKEN = "taken"
    REFUSED = "refused"
    AWAY = "away"
    GONE = "gone"


@dataclass(frozen=True)
class Posted:
    """How one post ended. ``told`` says it to people, without a word of the receiver's."""

    answer: PostAnswer
    told: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class WebhookUrl:
    """An address that may be called, as far as its text says."""

    url: str
    host: str
    port: int
    is_allowed: bool
    """Whether the configuration names its host: then it may be anywhere, and need not be encrypted."""

    @classmethod
    def read(cls, url: str, allowed_hosts: frozenset[str]) -> Self:
        """Raises `InvalidArguments`, which says what fits."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or {"https": 443, "http": 80}[parts.scheme]
            host = host if ":" in host else host.encode("idna").decode()
        except (ValueError, KeyError):
            host, port = "", 0
        if not (host and port and url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS):
            raise InvalidArguments("A webhook's url is to be one of https, https://HOST/PATH, in ASCII.")
        if parts.username is not None or parts.password is not None or parts.fragment:
            raise InvalidArguments("A webhook's url holds no user, no password and no #; its posts are signed instead.")
        shown = f"[{host}]" if ":" in host else host
        is_allowed = not allowed_hosts.isdisjoint({shown, f"{shown}:{port}"})
        if parts.scheme != "https" and not is_allowed:
            raise InvalidArguments(
                f"A webhook's url begins with https://. Only hosts that webhook_hosts names are called without; {host} "
                "is none of them."
            )
        return cls(url, host, port, is_allowed)

    async def find_addresses(self) -> list[str]:
        """Look its host up. Raises `InvalidArguments` where one of its addresses may not be called, and where there is
        none: in the same words, so that nobody learns which names a network has for itself."""
        try:
            addresses = await _look_up(self.host, self.port)
        except OSError as error:
            if self.is_allowed:
                raise InvalidArguments(f"The host {self.host} cannot be found.") from error
            addresses = []
        if not self.is_allowed and not (addresses and all(map(is_public, addresses))):
            raise InvalidArguments(
                f"{self.host} is not known, or leads to an address that is not public; an operator may allow it by "
                "webhook_hosts."
            )
        return addresses


async def _look_up(host: str, port: int) -> list[str]:
    """The addresses of a name. Raises `OSError`.

    Each in a thread of its own, which a stop does not wait for: of the few threads that all share, names whose server
    does not answer would take every one.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def tell(addresses: list[str], error: OSError | None) -> None:
        if not found.done():
            found.set_result(addresses) if error is None else found.set_exception(error)

    def work() -> None:
        addresses, failed = [], None
        try:
            told = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(it[4][0]) for it in told))
        except OSError as error:
            failed = error
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(tell, addresses, failed)

    threading.Thread(target=work, name="webhook-name", daemon=True).start()
    return await found


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet: none of this machine, a local network, or within another one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        return ip in _GIVEN_OUT and not any(ip in it for it in _SPECIAL_V6)
    return not any(ip in it for it in _SPECIAL_V4)


class WebhookPoster:
    """Posts to one receiver, over connections of its own. Use as ``async with``."""

    def __init__(self, target: WebhookUrl, sign: Sign) -> None:
        self._target = target
        self._sign = sign
        self._http = httpx2.AsyncClient(
            verify=_trust.context,
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
        """Post one value under its id, signed at this moment, and judge the answer. Raises nothing of the
        receiver's."""
        body = msgspec.json.encode(value)
        headers = {
            "content-type": "application/json",
            "user-agent": "Roundelay-Webhooks/1",
            "host": urlsplit(self._target.url).netloc.rpartition("@")[2],
            **self._sign(webhook_id, datetime.now(UTC), body),
        }
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._post_to_any(await self._target.find_addresses(), headers, body)
        except InvalidArguments as error:
            return Posted(PostAnswer.AWAY, str(error))
        except TimeoutError:
            return Posted(PostAnswer.AWAY, f"no answer within {TIMEOUT_S:g} s")
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            return Posted(PostAnswer.AWAY, _tell_failure(error))
        await _read_rest(answer)
        return _judge(answer.status_code, answer.headers.get("retry-after", ""))

    async def _post_to_any(self, addresses: list[str], headers: dict[str, str], body: bytes) -> httpx2.Response:
        for address in addresses[:-1]:
            with suppress(httpx2.ConnectError, httpx2.ConnectTimeout):  # nothing was sent there
                return await self._post_to(address, headers, body)
        return await self._post_to(addresses[-1], headers, body)

    async def _post_to(self, address: str, headers: dict[str, str], body: bytes) -> httpx2.Response:
        url = httpx2.URL(self._target.url).copy_with(host=address.partition("%")[0], port=self._target.port)
        extensions = {"sni_hostname": self._target.host}  # by this name its certificate is judged
        request = self._http.build_request("POST", url, headers=headers, content=body, extensions=extensions)
        return await self._http.send(request, stream=True)


async def _read_rest(answer: httpx2.Response) -> None:
    """Read an answer's body, as far as it is short and comes, and close it."""
    read = 0
    try:
        with suppress(TimeoutError, OSError, httpx2.HTTPError):
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in answer.aiter_raw():
                    read += len(part)
                    if read > MAX_ANSWER_BYTES:
                        break
    finally:
        await answer.aclose()


def _tell_failure(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "no answer: its certificate is not trusted, or not for this name"
        cause = cause.__cause__ or cause.__context__
    return f"no answer ({type(error).__name__})"


def _judge(status: int, retry_after: str) -> Posted:
    told = f"it answered {status}"
    if 200 <= status < 300:
        return Posted(PostAnswer.TAKEN, told)
    if status == 410:
        return Posted(PostAnswer.GONE, told)
    if status in ABOUT_THE_MESSAGE:
        return Posted(PostAnswer.REFUSED, told)
    is_number = retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 10
    return Posted(PostAnswer.AWAY, told, float(retry_after) if is_number else 0.0)


class _TrustStore:
    """The certificates that the machine trusts, read once for all receivers."""

    @cached_property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context()


_trust = _TrustStore()
