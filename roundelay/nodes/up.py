"""``roundelay up``: a node, and a process of its own for each agent that its file declares.

An agent's process is started again when it ends with an error, later each time, and ends with the node: at its stop by SIGTERM, at a crash
because its input ends. What a process prints goes to stderr, with the agent's id before it; stdout has the one line that says ready.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from roundelay.app import Node, raise_file_limit, serve
from roundelay.clean_text import clean, clean_lines
from roundelay.network.auth import hash_token
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig, load_yaml
from roundelay.network.errors import ConfigError, ConnectError, InternalError, ModError, RoundelayError
from roundelay.network.home import agent_token, announce_node, node_at
from roundelay.network.ledger_failures import explain
from roundelay.network.local import LocalTransport
from roundelay.network.tls import read_certificate, server_context
from roundelay.nodes.endings import stop_signals, wait_for_first
from roundelay.nodes.hub_http import TIMEOUT_S, read_readiness

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

FIRST_DELAY_S, MAX_DELAY_S = 0.5, 60.0
STEADY_S = 60.0
"""A process that lived so long begins again with the first delay."""
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
LAST_WORDS_S = 1.0
WRONG_FILE = 2
"""Exit code of an agent whose file is wrong; starting it again would not help."""
MAX_LINE_BYTES = 64 * 1024
FEW_FILES = 1024

Say = Callable[[str], None]


async def run_node(
    config: NodeConfig, agents: Sequence[AgentSpec], *, operator_id: str, log_level: str, announce_ready: Say, say: Say
) -> None:
    """Run a node with its agents until SIGTERM or SIGINT; both are stopped in good order.

    ``announce_ready`` gets the ready line once every agent has joined, or has failed at it. ``operator_id`` lets the agents in where they
    would be refused. Raises what `serve` raises, `ConfigError` when an agent's file is wrong, and `InternalError` when the hub fails.
    """
    check_folder(config.db)
    tls, certificate = load_tls(config)
    with stop_signals() as stopping:
        async with _listening(config, tls, operator_id) as node:
            warn_of_few_files(say)
            url = reachable_url(node.url)
            with _announced(url, config, certificate, say):
                await _let_in(node, url, [spec.id for spec in agents], operator_id)
                processes = [AgentProcess(spec, url, log_level=log_level, say=say) for spec in agents]
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(process.keep()) for process in processes]
                    settling = _announce_when_settled(node, config, processes, announce_ready, say)
                    tasks.append(group.create_task(settling))
                    await wait_for_first(stopping.wait(), node.hub.failed.wait())
                    for task in tasks:
                        task.cancel()
            if node.hub.failed.is_set():
                raise InternalError(
                    "The hub failed, and the log says at what; nothing acknowledged is lost: start the node again."
                )


@asynccontextmanager
async def _listening(config: NodeConfig, tls: ssl.SSLContext | None, operator_id: str) -> AsyncIterator[Node]:
    """As `serve`; where a node listens already the `ConnectError` says which."""
    async with AsyncExitStack() as stack:
        try:
            node = await stack.enter_async_context(serve(config, tls=tls))
        except ConnectError as error:
            url = listening_url(config)
            if await asyncio.to_thread(read_readiness, url) is None:
                raise
            raise ConnectError(
                f"Cannot listen on {config.host}:{config.port}: {await _name_node(url, operator_id)} listens there already. "
                f"Go on with that one (roundelay chat --url {url}), or choose another --port and another --db."
            ) from error
        yield node


async def _name_node(url: str, operator_id: str) -> str:
    """What to call the node at an address: by its network's name, if its owner's token is at hand."""
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            NetworkClient(operator_id, url, kind="service", reconnect=False) as client,
        ):
            return f"the node of the network {clean(client.welcome.network.name)}"
    except (RoundelayError, TimeoutError):
        return "a Roundelay node"


async def _announce_when_settled(
    node: Node, config: NodeConfig, processes: Sequence[AgentProcess], announce_ready: Say, say: Say
) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            for process in processes:
                await process.settled.wait()
    except TimeoutError:
        say(f"Not ready yet: {', '.join(it.agent_id for it in processes if not it.settled.is_set())}.")
    announce_ready(describe_node(node, config, [process.agent_id for process in processes if process.is_ready]))


def check_folder(db: Path) -> None:
    """Raises `LedgerError` when the database cannot be written there. Makes nothing yet: whatever else is wrong is to leave no trace."""
    try:
        if db.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        if db.is_symlink() and not db.resolve().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "")  # only the folder of the name that was given is made
        folder = next(it for it in db.resolve().parents if it.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(folder, os.W_OK | os.X_OK):
            is_fixed = os.statvfs(folder).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if is_fixed else errno.EACCES, "")
    except (OSError, RuntimeError) as error:
        raise explain(error, db) from error


def place_mod_error(error: ModError, origin: str) -> ConfigError:
    """What is wrong with a mod, with the place where it is named: ``origin`` is that of the field `mods`, of `resolve_config`."""
    kind, _, place = origin.partition(" ")
    if kind != "file":
        return ConfigError(f"{place}: {error}" if place else str(error))
    path, _, line = place.rpartition(":")
    root = load_yaml(Path(path)).value
    listed = root["mods"].value if isinstance(root, dict) and "mods" in root else None
    items = listed if isinstance(listed, list) else []
    return ConfigError(str(error), path=path, line=next((it.line for it in items if it.value == error.mod), int(line)))


def load_tls(config: NodeConfig) -> tuple[ssl.SSLContext | None, str]:
    """The node's TLS context and its certificate as PEM; None and nothing if it does not encrypt. Raises `ConfigError`."""
    if config.tls_cert is None and config.tls_key is None:
        return None, ""
    if config.tls_key is None:
        raise ConfigError(f"tls_cert ({config.tls_cert}) needs tls_key too: the certificate's private key.")
    if config.tls_cert is None:
        raise ConfigError(f"tls_key ({config.tls_key}) needs tls_cert too: the key's certificate.")
    return server_context(config.tls_cert, config.tls_key), read_certificate(config.tls_cert)


def warn_of_few_files(say: Say) -> None:
    """Say so when this process may open few files: each connection is one."""
    limit = raise_file_limit()
    if limit < FEW_FILES:
        say(f"At most {limit} files may be open here, and each connection is one; raise it: ulimit -Hn 65536")


def describe_node(node: Node, config: NodeConfig, agent_ids: Sequence[str]) -> str:
    """The ready line."""
    database = "none" if config.durability == "memory" else str(config.db)
    parts = [f"network {node.hub.name}", f"database {database}", f"durability {config.durability}"]
    if agent_ids:
        parts.append(f"agents {' '.join(agent_ids)}")
    return f"Roundelay is ready at {node.url} ({', '.join(parts)})"


def is_loopback_host(host: str) -> bool:
    """Whether only this machine can connect to what listens there."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def listening_url(config: NodeConfig) -> str:
    """The URL for clients on this machine of whatever listens where a node with this configuration would."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = reachable_url(f"{'ws' if config.tls_cert is None else 'wss'}://{host}:{config.port}/")
    node = node_at(url)
    return url if node is None else node.url


def reachable_url(url: str) -> str:
    """The URL for clients on this machine: a node on every address is reached by loopback."""
    host = urlsplit(url).hostname
    return {"0.0.0.0": url.replace("0.0.0.0", "127.0.0.1"), "::": url.replace("[::]", "[::1]")}.get(host or "", url)


class AgentProcess:
    """The process of one agent, started again when it fails."""

    def __init__(self, spec: AgentSpec, url: str, *, log_level: str, say: Say) -> None:
        self.agent_id = spec.id
        self.settled = asyncio.Event()
        """The agent has joined, or has failed once."""
        self.is_ready = False
        self._spec = spec
        self._url = url
        self._log_level = log_level
        self._say = say
        self._error = ""

    async def keep(self) -> None:
        """Run it until it ends by itself, or until cancelled, which stops it. Raises `ConfigError` when it cannot begin."""
        delay_s = FIRST_DELAY_S
        while True:
            started_at = time.monotonic()
            self._error = ""
            code = await self._run_once()
            if code == WRONG_FILE and not self.settled.is_set():
                raise ConfigError(self._error or f"Agent {self.agent_id} cannot start.")
            self.settled.set()
            if code == 0:
                self._say(f"Agent {self.agent_id} has ended.")
                return
            if time.monotonic() - started_at > STEADY_S:
                delay_s = FIRST_DELAY_S
            if self._error:
                self._say(f"{self.agent_id}: Error: {self._error}")
            ending = f"exit code {code}" if code > 0 else f"signal {-code}"
            self._say(f"Agent {self.agent_id} has ended with {ending}; it starts again in {delay_s:g} s.")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_DELAY_S)

    async def _run_once(self) -> int:
        command = [sys.executable, "-m", "roundelay", "agent", "run", str(self._spec.path), "--only", self.agent_id]
        command += ["--url", self._url, "--log-level", self._log_level, "--until-input-ends"]
        # A token in the environment is one participant's, and not this agent's: that one is in the user's folder.
        env = {name: value for name, value in os.environ.items() if name not in ("ROUNDELAY_TOKEN", "ROUNDELAY_URL")}
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**env, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the node, which then stops its agents
        )
        assert process.stdout is not None
        hearing = asyncio.create_task(self._hear(process.stdout))
        try:
            await asyncio.shield(hearing)
            return await process.wait()
        finally:
            self.is_ready = False
            await _stop(process)
            # Also what it says at its end; but a process that it has left behind may hold its output open.
            await asyncio.wait([hearing], timeout=LAST_WORDS_S)
            hearing.cancel()

    async def _hear(self, output: asyncio.StreamReader) -> None:
        async for line in _read_lines(output):
            self._take_line(line)

    def _take_line(self, line: str) -> None:
        if line.startswith(ready_line(self.agent_id, "")):
            self.is_ready = True
            self.settled.set()
        elif line.startswith("Error: "):
            self._error = clean(line.removeprefix("Error: "))
        else:
            self._say(f"{self.agent_id}: {clean_lines(line)[0]}")


def ready_line(agent_id: str, url: str) -> str:
    """What an agent's process prints when the agent has joined; also how its beginning is recognised."""
    return f"Agent {agent_id} is ready at {url}"


async def _read_lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines without their ends; one that is too long comes in pieces."""
    rest = b""
    while data := await stream.read(MAX_LINE_BYTES):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process: asked at first, then killed. Nothing is left of it."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _let_in(node: Node, url: str, agent_ids: Sequence[str], operator_id: str) -> None:
    """Make sure that the tokens which the agents have here are taken.

    Most times there is nothing to do: the first use of an id binds its token. But tokens are kept by the hub's address, so on another
    port an agent has another one; and away from loopback nothing is bound.
    """
    state = node.hub.state
    unknown = {}
    for agent_id in agent_ids:
        token_hash = hash_token(agent_token(url, agent_id))
        is_first_use = state.participant(agent_id) is None and is_loopback_host(urlsplit(url).hostname or "")
        if not is_first_use and state.get("token", token_hash) is None:
            unknown[agent_id] = token_hash
    if not unknown:
        return
    async with NetworkClient(operator_id, kind="service", transport=LocalTransport(node.hub)) as client:
        for agent_id, token_hash in unknown.items():
            args = {"agent_id": agent_id, "kind": "agent", "token_hash": token_hash}
            await client.call("network.create_token", args)


@contextmanager
def _announced(url: str, config: NodeConfig, certificate: str, say: Say) -> Iterator[None]:
    """Leave the note by which commands on this machine find the node, as long as it runs."""
    note = None
    try:
        note = announce_node(url, Path(f"{config.db}.owner"), certificate=certificate)
    except OSError as error:
        say(f"No note of this node could be left ({error.strerror}: {error.filename}); commands need --url {url}")
    try:
        yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)
