"""Create links that log a person in to a node's page once.

The fragment of a link contains a code. Browsers do not send fragments to servers, and the hub stores only the hash of
the code. Anybody who has an unused link can use it. Therefore a link is shown only to its person and never logged.
"""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from roundelay.network.client import NetworkClient
from roundelay.network.clock import make_token
from roundelay.network.core.joining import hash_token
from roundelay.network.durable_files import save_new
from roundelay.network.errors import ConfigError, RoundelayError
from roundelay.network.home import home
from roundelay.network.hub import Hub
from roundelay.nodes.hub_http import get_from_hub

MINUTES = 10
"""Default lifetime of a link, in minutes."""


def page_url(url: str) -> str:
    """Return the URL of the page that the hub at a WebSocket URL serves."""
    return f"http{url.removeprefix('ws').rstrip('/')}/"


class NoPage(RoundelayError):
    """Raised for a node that serves no page. The error message explains why."""

    code = "no_page"


def check_page(url: str) -> None:
    """Raise `NoPage` if the node at an address serves no page, or `ConnectError` if the node cannot be reached."""
    answer = get_from_hub(url, "/")
    # A node without a page answers that the path is unknown or that only WebSockets are accepted.
    if answer.status in (404, 426):
        raise NoPage(f"The node at {url} shows no page (web: false); start it without --no-web.")
    if answer.status != 200:
        raise NoPage(f"The node at {url} does not show its page: {answer.body.strip() or answer.status}")


async def make_link(
    client: NetworkClient, agent_id: str, *, kind: str = "human", operator: bool = False, minutes: int = MINUTES
) -> dict[str, Any]:
    """Create a login link for an id, with an operator's client. Return `url` and `expires_at`. Raises
    `RequestError`."""
    code = make_token()
    args = {"agent_id": agent_id, "kind": kind, "login_hash": hash_token(code), "operator": operator}
    # Send only the hash to the hub: a person who reads the ledger or the log cannot log in with the hash.
    made = await client.call("network.create_login", {**args, "ttl_ms": minutes * 60_000})
    # Behind a proxy, the person's browser may need a different address than this client.
    public_url = (await client.call("network.info")).get("public_url")
    return {"url": _write_link(client.url, agent_id, code, public_url), **made}


async def make_owners_link(hub: Hub, url: str, agent_id: str) -> str:
    """Create a login link for the person who started a node. Runs inside that node and needs no connected participant.

    Raises `ConfigError` if the id does not belong to a person.
    """
    participant = hub.state.participant(agent_id)
    if participant is not None and (participant.kind != "human" or participant.removed_seq is not None):
        what = "was removed" if participant.removed_seq is not None else f"is known here as {participant.kind}"
        raise ConfigError(f"{agent_id} {what}, so no link was made; another one: roundelay web --as ID")
    code = make_token()
    await hub.add_login(hash_token(code), agent_id, MINUTES * 60_000)
    return _write_link(url, agent_id, code, hub.view.public_url)


def _write_link(url: str, agent_id: str, code: str, public_url: str | None) -> str:
    """Return a login link to the page at its public address, or else at the hub's address."""
    page = page_url(url) if public_url is None else f"{public_url}/"
    # Put the code into the fragment, which appears in no access log and no Referer header.
    return f"{page}#login={agent_id}~{code}"


def open_in_browser(link: str) -> Path | None:
    """Open a link in the browser through a file that only the owner may read.

    Return the file, which the caller must delete when the node stops, or None if nothing was opened. The link itself
    must not be on a command line, because every user of the machine could read and use it.
    """
    import webbrowser

    # Pass only the path of a file to the browser. The file redirects to the link.
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}"><title>Roundelay</title>\n'
    path = home() / f"open-{os.getpid()}.html"
    try:
        path.unlink(missing_ok=True)  # a killed process may have left the file behind
        save_new(path, page.encode())
        if webbrowser.open(path.resolve().as_uri()):
            return path
        # No browser opened the file, so delete it at once.
        path.unlink()
    except (OSError, ConfigError, webbrowser.Error):
        path.unlink(missing_ok=True)
    return None


def draw_qr(link: str) -> list[str] | None:
    """Draw a link as a QR code in terminal lines. Return None if the extra ``qr`` is missing."""
    try:
        import segno
    except ImportError:
        return None
    # The lowest error correction gives the smallest code. The code must fit a terminal, and a screen has no damaged
    # spots.
    rows = [list(row) for row in segno.make(link, error="l", micro=False).matrix_iter(border=4)]
    if len(rows) % 2:
        # A line shows two rows, so an odd number of rows needs an empty row.
        rows.append([0] * len(rows[0]))
    # One character shows two modules, one above the other. Dark modules stay blank, as scanners expect on dark screens.
    blocks = {(0, 0): "\u2588", (0, 1): "\u2580", (1, 0): "\u2584", (1, 1): " "}
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return ["".join(blocks[bool(up), bool(down)] for up, down in zip(*pair, strict=True)) for pair in pairs]
