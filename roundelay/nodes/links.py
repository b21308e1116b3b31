"""Links that log a person in to a node's page once. The fragment of a link holds a code, which no server sees; the hub knows
only the hash of the code.

Anybody who has an unused link can use it, so it is shown to the person and written to no log.
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
    """Return the URL of the page of the hub at an address (``ws://`` or ``wss://``)."""
    return f"http{url.removeprefix('ws').rstrip('/')}/"


class NoPage(RoundelayError):
    """A node serves no page; the sentence says why."""

    code = "no_page"


def check_page(url: str) -> None:
    """Raise `NoPage` if the node at an address serves none, or `ConnectError`."""
    answer = get_from_hub(url, "/")
    # A node without a page treats the path as unknown, or as one that is for WebSockets only.
    if answer.status in (404, 426):
        raise NoPage(f"The node at {url} shows no page (web: false); start it without --no-web.")
    if answer.status != 200:
        raise NoPage(f"The node at {url} does not show its page: {answer.body.strip() or answer.status}")


async def make_link(
    client: NetworkClient, agent_id: str, *, kind: str = "human", operator: bool = False, minutes: int = MINUTES
) -> dict[str, Any]:
    """Make a link for an id with an operator's client; return its `url` and `expires_at`. Raises `RequestError`."""
    code = make_token()
    args = {"agent_id": agent_id, "kind": kind, "login_hash": hash_token(code), "operator": operator}
    # The hub gets the hash alone. Whoever reads its ledger or its log later cannot log in with that.
    made = await client.call("network.create_login", {**args, "ttl_ms": minutes * 60_000})
    # Behind a proxy the address that this client uses may mean nothing to the person's browser.
    public_url = (await client.call("network.info")).get("public_url")
    return {"url": _write_link(client.url, agent_id, code, public_url), **made}


async def make_owners_link(hub: Hub, url: str, agent_id: str) -> str:
    """Make a link for the person who started a node, inside that node, so that no participant is needed. Raises
    `ConfigError` if the id is not a person's."""
    participant = hub.state.participant(agent_id)
    if participant is not None and (participant.kind != "human" or participant.removed_seq is not None):
        what = "was removed" if participant.removed_seq is not None else f"is known here as {participant.kind}"
        raise ConfigError(f"{agent_id} {what}, so no link was made; another one: roundelay web --as ID")
    code = make_token()
    await hub.add_login(hash_token(code), agent_id, MINUTES * 60_000)
    return _write_link(url, agent_id, code, hub.view.public_url)


def _write_link(url: str, agent_id: str, code: str, public_url: str | None) -> str:
    """Return a link to the page at its public address, or else at the hub's."""
    page = page_url(url) if public_url is None else f"{public_url}/"
    # Browsers do not send the fragment, so the code appears in no access log and no Referer header.
    return f"{page}#login={agent_id}~{code}"


def open_in_browser(link: str) -> Path | None:
    """Open a link in the browser through a file that only the owner may read. Return the file, to be deleted when the node
    stops; None without a browser or a place for the file.

    Every user of the machine can read a browser's command line, and the link logs in whoever comes first.
    """
    import webbrowser

    # The browser is given a file's path alone, and the file sends it on to the link.
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}"><title>Roundelay</title>\n'
    path = home() / f"open-{os.getpid()}.html"
    try:
        path.unlink(missing_ok=True)  # left by a killed process
        save_new(path, page.encode())
        if webbrowser.open(path.resolve().as_uri()):
            return path
        # No browser took it, so nobody will read the code: remove it at once instead of when the node stops.
        path.unlink()
    except (OSError, ConfigError, webbrowser.Error):
        path.unlink(missing_ok=True)
    return None


def draw_qr(link: str) -> list[str] | None:
    """Draw a link as a QR code in terminal lines; None without the extra ``qr``."""
    try:
        import segno
    except ImportError:
        return None
    # The lowest error correction gives the smallest code, which must fit a terminal. A screen is not torn or dirty.
    rows = [list(row) for row in segno.make(link, error="l", micro=False).matrix_iter(border=4)]
    if len(rows) % 2:
        # Two rows share a line, so an odd number needs an empty one.
        rows.append([0] * len(rows[0]))
    # One character holds two modules, one above the other. Dark modules stay unprinted, as readers expect on a dark terminal.
    blocks = {(0, 0): "\u2588", (0, 1): "\u2580", (1, 0): "\u2584", (1, 1): " "}
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return ["".join(blocks[bool(up), bool(down)] for up, down in zip(*pair, strict=True)) for pair in pairs]
