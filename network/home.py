"""The user's files for Roundelay on this machine: tokens, and notes about the nodes that run here.

The files are in ``$ROUNDELAY_HOME``, or else in ``~/.roundelay``: ``tokens/HOST_PORT/AGENT_ID`` and
``nodes/PORT.json``. The files have mode 0600, and their folders have mode 0700. This module reads and writes the files
synchronously, because they are small and used only at start-up.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from .clock import make_token
from .credentials import read_secret
from .durable_files import describe_os_error, make_folder, open_private, save_new, sync
from .errors import ConfigError
from .platforms import boot_id, is_process_alive, read_process

DEFAULT_PORT = 8700
DEFAULT_URL = f"ws://127.0.0.1:{DEFAULT_PORT}/"
CONNECT_TIMEOUT_S = 20.0
"""Default time limit of a connection attempt, in seconds. The limit is twice the time that a hub waits for a hello, so
that a slow hub can still answer."""


class RunningNode(Struct, frozen=True):
    """Note about a node that runs on this machine. The node may have ended since it wrote the note."""

    url: str
    owner_file: str
    pid: int
    certificate: str = ""
    """PEM certificate of a node with TLS. Clients on this machine trust exactly this certificate."""
    gateway: str = ""
    """Address of the node's gateway, if the node runs one."""
    started: str = ""
    """Start of the node's process (`find_process_start`), which distinguishes it from a later process with the same
    pid."""

    def is_alive(self) -> bool:
        # The system reuses process ids. Without this check, an unrelated process could be mistaken for a node that has
        # ended.
        if self.started and find_process_start(self.pid) != self.started:
            return False
        return is_process_alive(self.pid)


def find_process_start(pid: int) -> str:
    """Return the machine's boot id and the start time of a process, or an empty text if they are unknown or the process
    does not run. Another process that gets the same pid later has a different value."""
    process = read_process(pid)
    return f"{boot_id()}/{process.started}" if process is not None else ""


def expand_url(url: str) -> str:
    """Expand the short form of the addresses of a network's nodes. ``roundelay://A,B:8701/`` becomes
    ``ws://A:8700/,ws://B:8701/``, and ``roundelays://`` becomes ``wss://``. Other texts are returned unchanged."""
    match = re.fullmatch(r"roundelay(s?)://([^/?#\s]+)/?", url)
    if match is None:
        return url
    hosts = [host if re.search(r":\d+$", host) else f"{host}:{DEFAULT_PORT}" for host in match[2].split(",")]
    return ",".join(f"ws{match[1]}://{host}/" for host in hosts)


def read_urls(text: str) -> str:
    """Check and return the addresses of one network's nodes, separated by commas. Raises `ConfigError`."""
    expanded = expand_url(text)
    if "," in expanded:
        return ",".join(read_urls(url) for url in expanded.split(","))
    try:
        parts = urlsplit(expanded)
        is_url = parts.scheme in ("ws", "wss") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{expanded!r} is not the address of a hub. Write ws://HOST:PORT/, wss://HOST:PORT/, or roundelay://HOST,HOST/ "
            "for the nodes of one network."
        )
    return expanded


def home() -> Path:
    """Return the folder of Roundelay's files for this user. The folder may not exist yet. Raises `ConfigError` for a
    user without a home folder."""
    chosen = os.environ.get("ROUNDELAY_HOME")
    return Path(chosen) if chosen else find_user_folder() / ".roundelay"


def find_user_folder() -> Path:
    """Return the user's home folder. Raises `ConfigError` if the user has none, for example in a container."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            "This user has no name and no home folder, so tokens and notes about nodes cannot be stored. Set "
            "ROUNDELAY_HOME to a folder that only this user can write, or set HOME."
        ) from error


def _list_home(pattern: str) -> list[Path]:
    """Return the files in Roundelay's folder that match a pattern, or no files for a user without a home folder."""
    try:
        return sorted(home().glob(pattern))
    except ConfigError:
        return []


def agent_token(url: str, agent_id: str, make: Callable[[], str] = make_token) -> str:
    """Return the token of an agent at one hub. If the agent has none, make a token and save it before its first use.
    Raises `ConfigError`."""
    return _read_or_make(token_path(url, agent_id), make)


class AgentToken:
    """The token of an agent in one network. ``urls`` are the addresses of the network's nodes, separated by commas.

    The agent uses the same token at all these addresses, and at each node that one of them redirects to. A token that
    one node has accepted is valid at all nodes of the network.
    """

    def __init__(self, urls: str, agent_id: str) -> None:
        self._urls = urls.split(",")
        self._agent_id = agent_id
        self._path = Path()
        self._token = ""
        self._is_untried = False
        """Whether the token was just made for this hub, and the hub has not accepted or refused it yet."""

    def present(self, url: str) -> str:
        """Return the token to present to the hub at this URL: the first token that is saved for one of the network's
        addresses or for this hub. If there is none, make a token and save it for this hub. Raises `ConfigError`."""
        self._is_untried = False
        if not self._token:
            # Try the given addresses first. They may redirect to a node that has no saved token but accepts the token
            # of these addresses.
            paths = [token_path(address, self._agent_id) for address in (*self._urls, url)]
            self._path, new_token = next((path for path in paths if path.exists()), paths[-1]), make_token()
            self._token = _read_or_make(self._path, lambda: new_token)
            self._is_untried = self._token == new_token
        return self._token

    def save(self, url: str) -> None:
        """Save the token after the hub at this URL has accepted it. The token is saved for this hub and for each
        address of the network that has no saved token. Raises `ConfigError`."""
        self._is_untried = False
        for path in (token_path(address, self._agent_id) for address in (*self._urls, url)):
            if not path.exists():
                _read_or_make(path, lambda: self._token)

    def discard(self) -> str:
        """Handle a hub's refusal of the token. A token that was just made for this hub is deleted, because its file
        would hide a valid token that is saved later. Returns a sentence about the token's file for the user."""
        if not self._is_untried:
            return f"The refused token is in {self._path}."
        self._is_untried, self._token = False, ""
        with suppress(OSError):
            self._path.unlink()
        return f"No token was saved in {self._path}. The new token that was tried has been deleted."


def derive_agent_token(owner: str, agent_id: str) -> str:
    """Return an agent's token at every node of one owner. The token is derived from the owner's token by a one-way
    function: the agent cannot compute the owner's token."""
    digest = hmac.new(owner.encode(), f"roundelay agent {agent_id}".encode(), "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def token_path(url: str, agent_id: str) -> Path:
    """Return the path of an agent's token for one hub."""
    parts = urlsplit(url)
    host = parts.hostname or "local"
    if host in ("localhost", "::1"):
        host = "127.0.0.1"  # all loopback names share one folder
    return home() / "tokens" / f"{host}_{parts.port or 0}" / agent_id


def saved_tokens(agent_id: str) -> list[str]:
    """Return all saved tokens of an agent id, one for each hub. Unreadable files are skipped."""
    tokens = []
    for path in _list_home(f"tokens/*/{agent_id}"):  # an id contains no wildcards
        with suppress(ConfigError):
            tokens.append(read_token(path))
    return tokens


def owner_token(database: Path) -> str:
    """Return the owner's token of the node with this database. The file ``DATABASE.owner`` contains the token, and is
    created if it is missing. Raises `ConfigError`."""
    return _read_or_make(Path(f"{database}.owner"), make_token)


def read_token(path: Path) -> str:
    """Read a token file. Raises a `ConfigError` whose text states what the user can do."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"Cannot read the token in {path}: {describe_os_error(error, path, 'read')}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} contains no token; delete this file to create a new token.") from error
    if not token:
        raise ConfigError(f"{path} is empty; delete this file to create a new token.")
    return token


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Return the token in a file. If the file is missing, save a new token first. The new token is synced to disk
    before any hub receives it, because the hub will accept no other token for this id."""
    if path.exists():
        with suppress(OSError):  # the process that wrote the file may have been killed before it synced the folder
            sync(path.parent)
        return read_token(path)
    token = make()
    try:
        # Save the token before a hub sees it. If the token were lost after a hub accepted it, the agent could never
        # join that hub again.
        save_new(path, f"{token}\n".encode("ascii"))
    except FileExistsError:  # Another process has just created the file.
        return _read_or_make(path, make)
    except OSError as error:
        raise ConfigError(f"Cannot save a token in {path}: {describe_os_error(error, path)}.") from error
    return token


def announce_node(url: str, owner_file: Path, *, certificate: str = "", gateway: str = "") -> Path:
    """Write a note that a node runs on this machine. The caller deletes the note when the node stops."""
    port = urlsplit(url).port
    path = home() / "nodes" / f"{port}.json"
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # Write the absolute path, because clients run in other folders.
    node = RunningNode(
        url, str(owner_file.resolve()), os.getpid(), certificate, gateway, find_process_start(os.getpid())
    )
    with open(draft, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(node))
    # Replace the note with a rename, so that a client that reads it at this moment sees a complete note.
    draft.replace(path)
    return path


def running_nodes() -> list[RunningNode]:
    """Return this user's running nodes on this machine, newest first. Notes that older releases wrote are last, because
    the pid in such a note may belong to another process."""
    alive: list[tuple[bool, float, RunningNode]] = []
    for path in _list_home("nodes/*.json"):
        try:
            node = msgspec.json.decode(path.read_bytes(), type=RunningNode)
            modified = path.stat().st_mtime
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
        if node.is_alive():
            alive.append((bool(node.started), modified, node))
    return [node for *_, node in sorted(alive, key=lambda item: item[:2], reverse=True)]


def find_url() -> str:
    """Return the URL of the default hub: ``$ROUNDELAY_URL``, the node that runs on this machine, or the default
    address.

    If several nodes run, prefer the node whose database is in the current folder, then the newest node.
    """
    chosen = os.environ.get("ROUNDELAY_URL")
    if chosen:
        return chosen
    nodes = running_nodes()
    # A person who works in a node's folder means that node, even if another node was started later.
    here = [node for node in nodes if Path(node.owner_file).parent == Path.cwd()] if len(nodes) > 1 else []
    return [*here, *nodes][0].url if nodes else DEFAULT_URL


def find_connect_timeout_s() -> float:
    """Return the default time that a client waits for the ``welcome`` frame, in seconds.

    The time is ``$ROUNDELAY_CONNECT_TIMEOUT_S`` or else `CONNECT_TIMEOUT_S`. Raises `ConfigError`.
    """
    chosen = os.environ.get("ROUNDELAY_CONNECT_TIMEOUT_S")
    if not chosen:
        return CONNECT_TIMEOUT_S
    try:
        timeout_s = float(chosen)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= 24 * 3600:
        raise ConfigError(
            f"the environment variable ROUNDELAY_CONNECT_TIMEOUT_S must be a number of seconds from 0 to 86400, not "
            f"{chosen!r}"
        )
    return timeout_s


def find_token(url: str, kind: str) -> str | None:
    """Return the default token of a participant: ``$ROUNDELAY_TOKEN``, or else the owner's token. Agents never get the
    owner's token: without the variable, this function returns None for them, and they use an `AgentToken`."""
    named = read_secret(os.environ.get("ROUNDELAY_TOKEN", ""), "the variable ROUNDELAY_TOKEN")
    # An agent with the owner's token would have the rights of an operator.
    return named or (None if kind == "agent" else find_owner_token(url))


def find_owner_token(url: str) -> str | None:
    """Return the owner's token for a hub: ``$ROUNDELAY_OWNER_TOKEN``, or the token of the first node on this machine
    with one of these URLs. Return None if there is no such node."""
    chosen = read_secret(os.environ.get("ROUNDELAY_OWNER_TOKEN", ""), "the variable ROUNDELAY_OWNER_TOKEN")
    if chosen:
        return chosen
    for node in map(node_at, url.split(",")):
        if node is not None and Path(node.owner_file).exists():
            return read_token(Path(node.owner_file))
    return None


def node_at(url: str) -> RunningNode | None:
    """Return the node on this machine that has this URL, or None. The URL may contain the host of the node's own URL or
    any loopback address."""
    wanted = urlsplit(url)
    for node in running_nodes():
        parts = urlsplit(node.url)
        # Compare hosts too, because a hub on another machine with the same port must not receive this node's token.
        is_here = wanted.hostname == parts.hostname or is_loopback(wanted.hostname or "")
        if is_here and parts.port == wanted.port:
            return node
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback name of this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
