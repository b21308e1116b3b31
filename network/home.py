"""Files of this machine's user: tokens, and notes about the nodes that run on this machine.

The files are in ``$ROUNDELAY_HOME``, or else in ``~/.roundelay``: ``tokens/HOST_PORT/AGENT_ID`` and
``nodes/PORT.json``. They have mode 0600, in folders of mode 0700. The files are small. They are read and written
synchronously, and only at start-up.
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
"""Default time limit of a connection attempt. It is twice the time in which a hub waits for a hello, so that a slow hub
can still answer."""


class RunningNode(Struct, frozen=True):
    """Note about a node that runs on this machine. The node may have died since it wrote the note."""

    url: str
    owner_file: str
    pid: int
    certificate: str = ""
    """PEM certificate of a node with TLS. Clients on this machine trust exactly this certificate."""
    gateway: str = ""
    """Address of the node's gateway, if the node runs one."""
    started: str = ""
    """Start of the node's process (`find_process_start`), which tells it from a later process with the same pid."""

    def is_alive(self) -> bool:
        # Process ids are reused. Without this, an unrelated process could be taken for a node that has died.
        if self.started and find_process_start(self.pid) != self.started:
            return False
        return is_process_alive(self.pid)


def find_process_start(pid: int) -> str:
    """Return the boot and the start time of a process. A later process with the same pid has a different value. Empty
    if the system does not provide these times, or no such process runs."""
    process = read_process(pid)
    return f"{boot_id()}/{process.started}" if process is not None else ""


def expand_url(url: str) -> str:
    """Expand the short form of the addresses of one network's nodes, separated by commas. ``roundelay://A,B:8701/`` is
    short for ``ws://A:8700/,ws://B:8701/``; ``roundelays://`` means ``wss://``. Other texts are returned unchanged."""
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
    """Return the folder of these files, which may not exist yet. Raises `ConfigError` for a user without a home
    folder."""
    chosen = os.environ.get("ROUNDELAY_HOME")
    return Path(chosen) if chosen else find_user_folder() / ".roundelay"


def find_user_folder() -> Path:
    """Return the user's home folder. Raises `ConfigError` for a user id without a home, as in containers."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            "This user has no name and no home folder, so there is no place for tokens and notes of nodes. Set "
            "ROUNDELAY_HOME to a folder that this user alone can write, or set HOME."
        ) from error


def _list_home(pattern: str) -> list[Path]:
    """Return the files in the home folder that match a pattern. Empty for a user without a home folder."""
    try:
        return sorted(home().glob(pattern))
    except ConfigError:
        return []


def agent_token(url: str, agent_id: str, make: Callable[[], str] = make_token) -> str:
    """Return the token of an agent at one hub. A new token is saved before its first use. Raises `ConfigError`."""
    return _read_or_make(token_path(url, agent_id), make)


class AgentToken:
    """The token of an agent in one network. ``urls`` are the addresses of the network's nodes, separated by commas.

    The agent has the same token at all these addresses, and at a node to which one of them redirects. A token that one
    node has accepted is known to all nodes.
    """

    def __init__(self, urls: str, agent_id: str) -> None:
        self._urls = urls.split(",")
        self._agent_id = agent_id
        self._path = Path()
        self._token = ""
        self._is_untried = False
        """Whether the token was made for the hub to which it is presented, and that hub has not answered yet."""

    def present(self, url: str) -> str:
        """Return the token to present to the hub at this URL. It is the saved token of the first address that has one,
        or of this hub. Otherwise a new token is made and saved for this hub. Raises `ConfigError`."""
        self._is_untried = False
        if not self._token:
            # The given addresses first: a node to which they redirect may have no saved token, but shares theirs.
            paths = [token_path(address, self._agent_id) for address in (*self._urls, url)]
            self._path, new_token = next((path for path in paths if path.exists()), paths[-1]), make_token()
            self._token = _read_or_make(self._path, lambda: new_token)
            self._is_untried = self._token == new_token
        return self._token

    def save(self, url: str) -> None:
        """Save the token for the hub at this URL, which has accepted the token. Also save it for the addresses that
        have no token. Raises `ConfigError`."""
        self._is_untried = False
        for path in (token_path(address, self._agent_id) for address in (*self._urls, url)):
            if not path.exists():
                _read_or_make(path, lambda: self._token)

    def discard(self) -> str:
        """Handle a refusal by the hub to which the token was presented. Delete a token that was made for this hub, so
        that the file does not hide a token that is found later. Returns a sentence about the token's file."""
        if not self._is_untried:
            return f"The token that was shown is the one in {self._path}."
        self._is_untried, self._token = False, ""
        with suppress(OSError):
            self._path.unlink()
        return f"None was saved in {self._path}, and the one that was made now is not kept."


def derive_agent_token(owner: str, agent_id: str) -> str:
    """Return an agent's token at every node of one owner. It is derived from the owner's token, and the owner's token
    cannot be computed from it."""
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
    """Return all saved tokens of an id, one for each hub. Unreadable files are left out."""
    tokens = []
    for path in _list_home(f"tokens/*/{agent_id}"):  # an id contains no wildcards
        with suppress(ConfigError):
            tokens.append(read_token(path))
    return tokens


def owner_token(database: Path) -> str:
    """Return the owner's token of a node with this database. The token is in ``FILE.owner``, which is created if it is
    missing. Raises `ConfigError`."""
    return _read_or_make(Path(f"{database}.owner"), make_token)


def read_token(path: Path) -> str:
    """Read a token file. Raises `ConfigError`, which says what to do."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"Cannot read the token in {path}: {describe_os_error(error, path, 'read')}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds no token; delete it to have a new one made.") from error
    if not token:
        raise ConfigError(f"{path} is empty; delete it to have a new one made.")
    return token


def _read_or_make(path: Path, make: Callable[[], str]) -> str:
    """Return the token in a file. If there is none, save a new token. It is synced before the hub can see it, because a
    hub accepts no other token for this id afterwards."""
    if path.exists():
        with suppress(OSError):  # the writer may have been killed before it synced the name
            sync(path.parent)
        return read_token(path)
    token = make()
    try:
        # Save before anybody sees the token: a token that the hub has bound and nobody has saved locks the agent out.
        save_new(path, f"{token}\n".encode("ascii"))
    except FileExistsError:  # another process was faster
        return _read_or_make(path, make)
    except OSError as error:
        raise ConfigError(f"Cannot save a token in {path}: {describe_os_error(error, path)}.") from error
    return token


def announce_node(url: str, owner_file: Path, *, certificate: str = "", gateway: str = "") -> Path:
    """Write the note that a node runs on this machine. The caller deletes the note when the node stops."""
    port = urlsplit(url).port
    path = home() / "nodes" / f"{port}.json"
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    # The absolute path: clients run in other folders.
    node = RunningNode(
        url, str(owner_file.resolve()), os.getpid(), certificate, gateway, find_process_start(os.getpid())
    )
    with open(draft, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(node))
    # By a rename, so that a client that reads the note at this moment sees a whole one.
    draft.replace(path)
    return path


def running_nodes() -> list[RunningNode]:
    """Return this user's running nodes on this machine, newest first. Notes of older releases come last, because their
    pid may belong to another process by now."""
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
    """Return the default hub: ``$ROUNDELAY_URL``, the node that runs on this machine, or the default address.

    Among several nodes, prefer the node whose database is in the current folder, then the newest node.
    """
    chosen = os.environ.get("ROUNDELAY_URL")
    if chosen:
        return chosen
    nodes = running_nodes()
    # A person who works in a node's folder means that node, whichever was started last.
    here = [node for node in nodes if Path(node.owner_file).parent == Path.cwd()] if len(nodes) > 1 else []
    return [*here, *nodes][0].url if nodes else DEFAULT_URL


def find_connect_timeout_s() -> float:
    """Return the default time that a client waits for the ``welcome``: ``$ROUNDELAY_CONNECT_TIMEOUT_S``, or a constant.

    Raises `ConfigError`.
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
    """Return the default token of a participant: ``$ROUNDELAY_TOKEN``, or the owner's token. None for an agent if the
    variable is not set: agents then use an `AgentToken`."""
    named = read_secret(os.environ.get("ROUNDELAY_TOKEN", ""), "the variable ROUNDELAY_TOKEN")
    # Never the owner's token for an agent: it would give a program the rights of an operator.
    return named or (None if kind == "agent" else find_owner_token(url))


def find_owner_token(url: str) -> str | None:
    """Return the owner's token for a hub, or None. It is ``$ROUNDELAY_OWNER_TOKEN``, or the token of the first running
    node on this machine with one of these URLs."""
    chosen = read_secret(os.environ.get("ROUNDELAY_OWNER_TOKEN", ""), "the variable ROUNDELAY_OWNER_TOKEN")
    if chosen:
        return chosen
    for node in map(node_at, url.split(",")):
        if node is not None and Path(node.owner_file).exists():
            return read_token(Path(node.owner_file))
    return None


def node_at(url: str) -> RunningNode | None:
    """Return the node on this machine with this URL, or None. The URL may use this machine's host name or a loopback
    address."""
    wanted = urlsplit(url)
    for node in running_nodes():
        parts = urlsplit(node.url)
        # Compare hosts too: a hub on another machine with the same port must not receive this node's token.
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
