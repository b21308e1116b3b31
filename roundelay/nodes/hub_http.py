"""Plain HTTP requests to a hub's port, for health, metrics and time. All functions block, so call them in a thread."""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import msgspec

from roundelay.network.errors import ConnectError
from roundelay.network.readiness import Readiness
from roundelay.network.tls import client_context, explain_failure

TIMEOUT_S = 3.0


MAX_BODY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """HTTP response of a hub. ``date_s`` is the hub's clock in seconds since the Unix epoch, or None if the response
    has no time."""

    status: int
    body: str
    date_s: float | None


def get_from_hub(url: str, path: str, *, accept: str = "*/*") -> HubAnswer:
    """Fetch a path from the hub's port. Raises `ConnectError`."""
    parts = urlsplit(url)
    host, is_tls = parts.hostname or "127.0.0.1", parts.scheme == "wss"
    port = parts.port or (443 if is_tls else 80)
    connection: http.client.HTTPConnection
    if is_tls:
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=client_context(url))
    else:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Accept": accept})
        response = connection.getresponse()
        # Another program may listen at the address. It may send an endless response, or bytes that are not text.
        body = response.read(MAX_BODY_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConnectError(explain_failure(url, error)) from error
    except UnicodeError as error:  # the address contains an invalid host name
        raise ConnectError(f"There can be no hub at {url}, because the host name is invalid ({error}).") from error
    except http.client.HTTPException as error:
        raise ConnectError(
            f"The program that listens at {url} is not a Roundelay hub: {str(error) or type(error).__name__}."
        ) from error
    finally:
        connection.close()
    return HubAnswer(response.status, body, _read_date(response.getheader("Date")))


def fetch_readiness(url: str) -> Readiness | None:
    """Return whether the node at an address accepts sessions, or None if another program answers. Raises
    `ConnectError`.
    """
    answer = get_from_hub(url, "/readyz", accept="application/json")
    try:
        return msgspec.json.decode(answer.body, type=Readiness)
    except msgspec.DecodeError:  # another program listens at the address
        return None


def is_hub_ready(url: str) -> bool | None:
    """Return whether the hub at an address accepts sessions, or None if no hub answers."""
    try:
        readiness = fetch_readiness(url)
    except ConnectError:
        return None
    return readiness.ready if readiness is not None else None


def _read_date(header: str | None) -> float | None:
    try:
        return parsedate_to_datetime(header).timestamp() if header else None
    except ValueError:
        return None
