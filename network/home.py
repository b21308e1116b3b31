"""What this machine remembers for its user: tokens, and which nodes run here.

It stands under ``$ROUNDELAY_HOME``, else ``~/.roundelay``: ``tokens/HOST_PORT/AGENT_ID`` and ``nodes/PORT.json``, mode
0600 in folders of 0700. These are small files, read and written synchronously at start-up only."""

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
"""Twice what a hub gives a newcomer until its hello: what is slow there has answered by then."""


class RunningNode(Struct, frozen=True):
    """A node that said it runs here; it may have died since."""

    url: str
    owner_file: str
    pid: int
    certificate: str = ""
    """PEM, of a node that encrypts: by it clients here know the node."""
    gateway: str = ""
    """Where its gateway is, if it runs one."""
    started: str = ""
    """When its process started (`find_process_start`); a later process with the same pid is another one."""

    def is_alive(self) -> bool:
        if self.started and find_process_start(self.pid) != self.started:
            return False
        return is_process_alive(self.pid)


def find_process_start(pid: int) -> str:
    """The boot in which a process started, and when: this tells it from a later one with its pid. Empty where the
    system does not say, or nothing runs under the pid."""
    process = read_process(pid)
    return f"{boot_id()}/{process.started}" if process is not None else ""


def expand_url(url: str) -> str:
    """The addresses of one network's nodes, with commas between them: ``roundelay://A,B:8701/`` is short for
    ``ws://A:8700/,ws://B:8701/``, ``roundelays://`` for those with ``wss://``. What is neither stays as it is."""
    found = re.fullmatch(r"roundelay(s?)://([^/?#\s]+)/?", url)
    if found is None:
        return url
    hosts = [it if re.search(r":\d+$", it) else f"{it}:{DEFAULT_PORT}" for it in found[2].split(",")]
    return ",".join(f"ws{found[1]}://{it}/" for it in hosts)


def read_urls(text: str) -> str:
    """The addresses of one network's nodes, with commas between them, each of which is one. Raises `ConfigError`."""
    expanded = expand_url(text)
    if "," in expanded:
        return ",".join(read_urls(it) for it in expanded.split(","))
    try:
        parts = urlsplit(expanded)
        is_url = parts.scheme in ("ws", "wss") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(
            f"{expanded!r} is no address of a hub; write ws://HOST:PORT/, wss://HOST:PORT/, or roundelay://HOST,HOST/ "
            "for the nodes of one network."
        )
    return expanded


def home() -> Path:
    """The folder; it may not exist yet. Raises `ConfigError` for a user that has none."""
    chosen = os.environ.get("ROUNDELAY_HOME")
    return Path(chosen) if chosen else find_user_folder() / ".roundelay"


def find_user_folder() -> Path:
    """The home folder of the user. Raises `ConfigError` for a user id without one, as containers have."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise ConfigError(
            "This user has no name and no home folder, so there is no place for tokens and notes of nodes. Set "
            "ROUNDELAY_HOME to a folder that this user alone can write, or set HOME."
        ) from error


def _list_home(pattern: str) -> list[Path]:
    """The files of the folder that match; none of a user without one."""
    try:
        return sorted(home().glob(pattern))
    except ConfigError:
        return []


def agent_token(url: str, agent_id: str, make: Callable[[], str] = make_token) -> str:
    """The token of an agent at one hub: read, or made and saved before it is first used. Raises `ConfigError`."""
    return _read_or_make(token_path(url, agent_id), make)


class AgentToken:
    """An agent's token in one network, of which a client was told the addresses, ``urls`` with commas between them. It
    is the same at each, and at a node that one of them names: what one has let in is known to all."""

    def __init__(self, urls: str, agent_id: str) -> None:
        self._urls = urls.split(",")
        self._agent_id = agent_id
        self._path = Path()
        self._token = ""
        self._is_untried = False
        """It was made for the hub that it is shown to, which has not answered yet."""

    def present(self, url: str) -> str:
        """What to show to the hub at this URL: what is saved for the first of the addresses that has one, or for that
        hub, or else a new one, which is saved for it. Raises `ConfigError`."""
        self._is_untried = False
        if not self._token:
            paths = [token_path(it, self._agent_id) for it in (*self._urls, url)]
            self._path, made = next((it for it in paths if it.exists()), paths[-1]), make_token()
            self._token = _read_or_make(self._path, lambda: made)
            self._is_untried = self._token == made
        return self._token

    def save(self, url: str) -> None:
        """The hub at this URL has let it in: it is saved for that, and for those of the addresses that have none.
        Raises `ConfigError`."""
        self._is_untried = False
        for path in (token_path(it, self._agent_id) for it in (*self._urls, url)):
            if not path.exists():
                _read_or_make(path, lambda: self._token)

    def discard(self) -> str:
        """The hub that it was shown to refuses it. One that was made for that hub is not kept, so that it hides none
        that is found later. Gives a sentence of where it is from."""
        if not self._is_untried:
            return f"The token that was shown is the one in {self._path}."
        self._is_untried, self._token = False, ""
        with suppress(OSError):
            self._path.unlink()
        return f"None was saved in {self._path}, and the one that was made now is not kept."


def derive_agent_token(owner: str, agent_id: str) -> str:
    """The token that an agent has at every node of one owner: made of the owner's token, by which nobody can tell
    it."""
    digest = hmac.new(owner.encode(), f"roundelay agent {agent_id}".encode(), "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def token_path(url: str, agent_id: str) -> Path:
    """Where the token of an agent at one hub is kept."""
    parts = urlsplit(url)
    host = parts.hostname or "local"
    if host in ("localhost", "::1"):
        host = "127.0.0.1"  # this machine has one name here
    return home() / "tokens" / f"{host}_{parts.port or 0}" / agent_id


def saved_tokens(agent_id: str) -> list[str]:
    """All tokens of an id that this user has: one for each hub that it was used at. What cannot be read is left out."""
    found = []
    for path in _list_home(f"tokens/*/{agent_id}"):  # an id has no character that means something here
        with suppress(ConfigError):
            found.append(read_token(path))
    return found


def owner_token(database: Path) -> str:
    """The owner's token of a node with this database: read from ``FILE.owner``, or made. Raises `ConfigError`."""
    return _read_or_make(Path(f"{database}.owner"), make_token)


def read_token(path: Path) -> str:
    """Read a token file. Raises `ConfigError` that says what to do."""
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
    """The token in a file, on the disk before anybody can have seen it: a hub that has bound it takes no other."""
    if path.exists():
        with suppress(OSError):  # it may have been named a moment ago, by a process that was killed
            sync(path.parent)
        return read_token(path)
    token = make()
    try:
        save_new(path, f"{token}\n".encode("ascii"))
    except FileExistsError:  # another process was faster
        return _read_or_make(path, make)
    except OSError as error:
        raise ConfigError(f"Cannot save a token in {path}: {describe_os_error(error, path)}.") from error
    return token


def announce_node(url: str, owner_file: Path, *, certificate: str = "", gateway: str = "") -> Path:
    """Leave a note that a node runs here; the caller deletes it when the node stops."""
    port = urlsplit(url).port
    path = home() / "nodes" / f"{port}.json"
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    node = RunningNode(
        url, str(owner_file.resolve()), os.getpid(), certificate, gateway, find_process_start(os.getpid())
    )
    with open(draft, "wb", opener=open_private) as file:
        file.write(msgspec.json.encode(node))
    draft.replace(path)
    return path


def running_nodes() -> list[RunningNode]:
    """The nodes of this user on this machine, the newest first; notes of dead ones are skipped. A note of an older
    release, whose pid may be somebody else's by now, stands behind those of which the process is known."""
    found: list[tuple[bool, float, RunningNode]] = []
    for path in _list_home("nodes/*.json"):
        try:
            node = msgspec.json.decode(path.read_bytes(), type=RunningNode)
            modified = path.stat().st_mtime
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
        if node.is_alive():
            found.append((bool(node.started), modified, node))
    return [node for *_, node in sorted(found, key=lambda item: item[:2], reverse=True)]


def find_url() -> str:
    """The hub to talk to when nothing is said: ``$ROUNDELAY_URL``, the node that runs here, or the default.

    Of several nodes the one whose database is in the current folder, else the newest.
    """
    chosen = os.environ.get("ROUNDELAY_URL")
    if chosen:
        return chosen
    nodes = running_nodes()
    here = [node for node in nodes if Path(node.owner_file).parent == Path.cwd()] if len(nodes) > 1 else []
    return [*here, *nodes][0].url if nodes else DEFAULT_URL


def find_connect_timeout_s() -> float:
    """How long a client waits on its way to a hub's welcome when nothing is said: ``$ROUNDELAY_CONNECT_TIMEOUT_S``, or
    the default.

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
    """With what a participant joins when no token is given: ``$ROUNDELAY_TOKEN``, or the owner's. None for an agent
    without the former: it has an `AgentToken`."""
    named = read_secret(os.environ.get("ROUNDELAY_TOKEN", ""), "the variable ROUNDELAY_TOKEN")
    return named or (None if kind == "agent" else find_owner_token(url))


def find_owner_token(url: str) -> str | None:
    """The owner's token for a hub: ``$ROUNDELAY_OWNER_TOKEN``, or that of the node here with this URL, of several with
    the first of them that runs; None if there is none."""
    chosen = read_secret(os.environ.get("ROUNDELAY_OWNER_TOKEN", ""), "the variable ROUNDELAY_OWNER_TOKEN")
    if chosen:
        return chosen
    for node in map(node_at, url.split(",")):
        if node is not None and Path(node.owner_file).exists():
            return read_token(Path(node.owner_file))
    return None


def node_at(url: str) -> RunningNode | None:
    """The node of this machine with this URL, by its own host or by loopback; None if there is none."""
    wanted = urlsplit(url)
    for node in running_nodes():
        parts = urlsplit(node.url)
        # A hub on another machine that has the same port must not be shown this one's token.
        is_here = wanted.hostname == parts.hostname or is_loopback(wanted.hostname or "")
        if is_here and parts.port == wanted.port:
            return node
    return None


def is_loopback(host: str) -> bool:
    """Whether a host, by the address or name of a socket or a URL, is this machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
