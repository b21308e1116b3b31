"""``roundelay up``: a node, and a process of its own for each agent that its file declares, and for the gateway.

Such a process is started again when it ends with an error, later each time, and ends with the node: at its stop by
SIGTERM, at a crash because its input ends. What a process prints goes to stderr, with the agent's id before it; stdout
has the one line that says ready.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from roundelay.app import Node, StoppedWaiting, serve
from roundelay.network.client import NetworkClient
from roundelay.network.clock import make_token
from roundelay.network.cluster.shared_log import LogUnavailable
from roundelay.network.config import NodeConfig, load_yaml
from roundelay.network.core.ids import describe_reserved
from roundelay.network.core.joining import describe_look_alike, hash_token
from roundelay.network.core.rights import Rights
from roundelay.network.errors import ConfigError, ConnectError, InternalError, LedgerError, ModError, RoundelayError
from roundelay.network.home import (
    agent_token,
    announce_node,
    derive_agent_token,
    home,
    node_at,
    owner_token,
    saved_tokens,
)
from roundelay.network.hub import Hub
from roundelay.network.hub.memory import keep_what_is_there
from roundelay.network.ledger import LogFull
from roundelay.network.ledger.database_lock import explain
from roundelay.network.log_urls import hide_password
from roundelay.network.platforms import is_read_only, raise_file_limit
from roundelay.network.tls import read_certificate, server_context
from roundelay.nodes.hub_http import TIMEOUT_S, read_readiness
from roundelay.nodes.links import make_owners_link
from roundelay.nodes.logs import Voice
from roundelay.nodes.processes import stop_signals, wait_for_first, wait_for_input_end
from roundelay.nodes.supervised import (
    GATEWAY_READY,
    AgentProcess,
    GatewayProcess,
    KeptProcess,
    NodeAgents,
    webhooks_file,
)
from roundelay.terminal.text import clean

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
FEW_FILES = 1024
NEEDED = ("network.window", "network.records", "network.history")
"""What an agent calls to see what it works on, and to go on with it after a crash."""

Say = Callable[[str], None]


async def run_node(
    config: NodeConfig,
    agents: Sequence[AgentSpec],
    *,
    operator_id: str,
    log_level: str,
    until_input_ends: bool,
    announce_ready: Callable[[str, str | None], None],
    voice: Voice,
    person_id: str | None = None,
) -> None:
    """Run a node with its agents until SIGTERM, SIGINT or, if asked, the end of the input; both are stopped in good
    order.

    ``announce_ready`` gets the ready line once every agent has joined, or has failed at it, and with ``person_id`` a
    link that logs that person in to the page. ``operator_id`` asks a node that listens there already for its name.
    Raises what `serve` raises, `ConfigError` when an agent's file is
    wrong, and `InternalError` when the hub fails.
    """
    check_folder(config.db)
    say = voice.say
    tls, certificate = load_tls(config)
    with (
        stop_signals() as stopping,
        suppress(StoppedWaiting),
        _Announcement(config, certificate, say) as note,
        ExitStack() as stack,
    ):
        ours = _Agents(agents, config, say)

        async def let_in(hub: Hub, url: str) -> None:
            await ours.let_in(hub, reachable_url(url))

        async with _listening(config, tls, operator_id, let_in, note.leave, stopping, say) as node:
            warn_of_few_files(say)
            if exposed := find_exposed(config):
                say(describe_exposed(exposed))
            for sentence in describe_locked_out(node.hub.state.rights, [spec.id for spec in agents]):
                say(sentence)
            url = reachable_url(node.url)
            keep_what_is_there()
            place = {"url": url, "network": node.hub.name, "database": str(config.db), "agents": len(agents)}
            _logger.info("the node listens", extra=place)
            snapshots = Path(stack.enter_context(TemporaryDirectory(prefix="roundelay-")))
            own = [
                AgentProcess(spec, node.hub, url, log_level=log_level, voice=voice, snapshots=snapshots)
                for spec in ours.specs
            ]
            node.hub.supervisor = NodeAgents(own)
            processes: list[KeptProcess] = [*own]
            gateway = None
            if config.interop.serve:
                gateway = GatewayProcess(config, url, log_level=log_level, voice=voice)
                processes.append(gateway)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(process.keep()) for process in processes]
                tasks.append(group.create_task(node.hub.supervisor.watch_files(say)))

                async def announce(line: str) -> None:
                    if gateway is not None and gateway.is_ready:
                        note.tell_gateway(gateway.url)
                        line += f"\n{GATEWAY_READY}{url} is ready on {gateway.url} ({' '.join(config.interop.serve)})"
                    link = None if person_id is None else await _make_link(node.hub, url, person_id, say)
                    announce_ready(line, link)

                settling = _announce_when_settled(node, config, processes, announce, say)
                tasks.append(group.create_task(settling))
                input_end = [wait_for_input_end()] if until_input_ends else []
                await wait_for_first(stopping.wait(), node.hub.failed.wait(), *input_end)
                _logger.info("the node stops", extra={"url": url, "has_failed": node.hub.failed.is_set()})
                for task in tasks:
                    task.cancel()
            if node.hub.failed.is_set():
                raise InternalError(
                    "The hub failed, and the log says at what; nothing acknowledged is lost: start the node again."
                )
    _logger.info("the node has stopped", extra={"url": listening_url(config)})


@asynccontextmanager
async def _listening(
    config: NodeConfig,
    tls: ssl.SSLContext | None,
    operator_id: str,
    prepare: Callable[[Hub, str], Awaitable[None]],
    listens: Say,
    stopping: asyncio.Event,
    say: Say,
) -> AsyncIterator[Node]:
    """As `serve`; where a node listens already the `ConnectError` says which. Of a log that cannot be had at the start,
    as at a mistyped address, no file is left that this start has made."""
    index = (Path(f"{config.db}{it}") for it in ("", "-wal", "-shm", ".head", ".owner"))
    new = [] if config.log is None else [it for it in index if not it.exists()]
    async with AsyncExitStack() as stack:
        try:
            node = await stack.enter_async_context(
                serve(config, tls=tls, prepare=prepare, stopping=stopping, listens=listens, say=say)
            )
        except LogUnavailable:  # whoever gets so far has the database for itself
            for path in new:
                path.unlink(missing_ok=True)
            raise
        except ConnectError as error:
            url = listening_url(config)
            if await asyncio.to_thread(read_readiness, url) is None:
                raise
            raise ConnectError(
                f"Cannot listen on {config.host}:{config.port}: {await _name_node(url, operator_id)} listens there "
                "already. "
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
    node: Node,
    config: NodeConfig,
    processes: Sequence[KeptProcess],
    announce: Callable[[str], Awaitable[None]],
    say: Say,
) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            for process in processes:
                await process.settled.wait()
    except TimeoutError:
        say(f"Not ready yet: {', '.join(it.name for it in processes if not it.settled.is_set())}.")
    await announce(
        describe_node(node, config, [it.name for it in processes if it.is_ready and isinstance(it, AgentProcess)])
    )


async def _make_link(hub: Hub, url: str, person_id: str, say: Say) -> str | None:
    try:
        return await make_owners_link(hub, url, person_id)
    except (ConfigError, LedgerError) as error:
        say(str(error))
        return None


def check_folder(db: Path) -> None:
    """Raises `LedgerError` when the database cannot be written there. Makes nothing yet: whatever else is wrong is to
    leave no trace."""
    try:
        if db.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        if db.is_symlink() and not db.resolve().parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "")  # only the folder of the name that was given is made
        folder = next(it for it in db.resolve().parents if it.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EROFS if is_read_only(folder) else errno.EACCES, "")
    except (OSError, RuntimeError) as error:
        raise explain(error, db) from error


def place_mod_error(error: ModError, origin: str) -> ConfigError:
    """What is wrong with a mod, with the place where it is named: ``origin`` is that of the field `mods`, of
    `resolve_config`."""
    kind, _, place = origin.partition(" ")
    if kind != "file":
        return ConfigError(f"{place}: {error}" if place else str(error))
    path, _, line = place.rpartition(":")
    root = load_yaml(Path(path)).value
    listed = root["mods"].value if isinstance(root, dict) and "mods" in root else None
    items = listed if isinstance(listed, list) else []
    return ConfigError(str(error), path=path, line=next((it.line for it in items if it.value == error.mod), int(line)))


def load_tls(config: NodeConfig) -> tuple[ssl.SSLContext | None, str]:
    """The node's TLS context and its certificate as PEM; None and nothing if it does not encrypt. Raises
    `ConfigError`."""
    if config.tls_cert is None and config.tls_key is None:
        return None, ""
    if config.tls_key is None:
        raise ConfigError(f"tls_cert ({config.tls_cert}) needs tls_key too: the certificate's private key.")
    if config.tls_cert is None:
        raise ConfigError(f"tls_key ({config.tls_key}) needs tls_cert too: the key's certificate.")
    return server_context(config.tls_cert, config.tls_key), read_certificate(config.tls_cert)


def find_exposed(config: NodeConfig) -> list[Path]:
    """Of the files that hold a node's secrets, those that others on this machine may read: key, owner's token,
    database, webhooks."""
    files = [config.tls_key, Path(f"{config.db}.owner"), config.db, webhooks_file(config)]
    return [path for path in files if path is not None and _mode_of(path) & 0o044]


def describe_exposed(paths: Sequence[Path]) -> str:
    return f"Others on this machine may read {' and '.join(map(str, paths))}; take that from them: chmod 600"


def describe_locked_out(rights: Rights | None, agent_ids: Sequence[str]) -> Iterator[str]:
    """Which of a node's own agents its page of rights lets do nothing: those that may not read what they work on,
    or write to nobody."""
    if rights is None:
        return
    for agent_id in agent_ids:
        calls = [rights.decide("call", agent_id, "agent", op) for op in NEEDED]
        if (at := next((at for at, it in enumerate(calls) if not it.allowed), None)) is not None:
            refused = f"{agent_id} may not call {NEEDED[at]}: {calls[at].rule}."
            yield f"{refused} Without it what {agent_id} is sent becomes a dead letter."
        if not any(rights.list_rules(verb, agent_id, "agent") for verb in ("send", "broadcast", "write")):
            yield f"{agent_id} may write to nobody, by `rights` in the node's file: what it answers is refused."


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def warn_of_few_files(say: Say) -> None:
    """Say so when this process may open few files: each connection is one."""
    limit = raise_file_limit()
    if limit < FEW_FILES:
        say(f"At most {limit} files may be open here, and each connection is one; raise it: ulimit -Hn 65536")


def describe_node(node: Node, config: NodeConfig, agent_ids: Sequence[str]) -> str:
    """The ready line."""
    database = "none" if config.durability == "memory" else str(config.db)
    parts = [f"network {node.hub.name}", f"database {database}"]
    if config.log is not None:
        parts.append(f"log {hide_password(config.log)}")
    parts.append(f"durability {node.durability}")
    if agent_ids:
        parts.append(f"agents {' '.join(agent_ids)}")
    return f"Roundelay is ready at {node.url} ({', '.join(parts)})"


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


class _Agents:
    """The agents that a node runs, and their tokens."""

    def __init__(self, specs: Sequence[AgentSpec], config: NodeConfig, say: Say) -> None:
        self.specs = list(specs)
        self._config = config
        self._say = say

    async def let_in(self, hub: Hub, url: str) -> None:
        """Bind the tokens that the agents have here, before anybody else can use their ids first. An id that is
        somebody else's raises `ConfigError`; a node of several leads all the same, and does not run that one.

        Tokens are kept by the hub's address, so an agent has another one on another port: it is let in with that too.
        At each node that shares a log it has also one that is made of the owner's token, so that the others may run it.
        """
        for spec in list(self.specs):
            try:
                await self._let_in(hub, url, spec.id)
            except (ConfigError, LogFull) as error:
                if self._config.log is None:
                    raise
                self._say(f"{error} This node leads without {spec.id}.")
                self.specs.remove(spec)

    async def _let_in(self, hub: Hub, url: str, agent_id: str) -> None:
        tokens = []
        if self._config.log is not None:
            tokens.append(derive_agent_token(owner_token(self._config.db), agent_id))
        tokens.insert(0, agent_token(url, agent_id, (lambda: tokens[0]) if tokens else make_token))
        hashes = dict.fromkeys(map(hash_token, tokens))
        unknown = [it for it in hashes if hub.state.get("token", it) is None]
        if len(unknown) == len(hashes):
            _check_ours(hub, agent_id, self._config)
        if unknown and hub.state.participant(agent_id) is None and not hub.state.has_token(agent_id):
            passes_for = describe_reserved(agent_id, hub.mod_ids) or describe_look_alike(hub.state, agent_id)
            if passes_for is not None:
                self._say(
                    f"Warning: the agent {agent_id} {passes_for}: people and models may take its words for another's."
                )
        for it in unknown:
            await hub.bind_tokens({agent_id: it})


def _check_ours(hub: Hub, agent_id: str, config: NodeConfig) -> None:
    """Raises `ConfigError` if somebody else has an id: a participant that is no agent, or whoever holds a token
    that this user has not."""
    participant = hub.state.participant(agent_id)
    if participant is not None and participant.kind != "agent":
        raise ConfigError(f"Agent {agent_id}: the network knows {agent_id} as {participant.kind}; choose another id.")
    valid = {key for key, token in hub.state.tokens(agent_id).items() if not token.revoked}
    if valid and valid.isdisjoint(hash_token(token) for token in saved_tokens(agent_id)):
        way = (
            f" --db {config.db}, and start again"
            if config.log is None
            else ", while this node leads, and start it again"
        )
        raise ConfigError(
            f"Agent {agent_id}: its id is bound to a token that is not among yours ({home() / 'tokens'}). Who holds "
            f"that joins as {agent_id}. "
            f"If nobody should, or it is lost: roundelay token revoke {agent_id}{way}. If "
            f"somebody else runs {agent_id} by right, "
            "take it out of `agents`."
        )


class _Announcement:
    """The note by which commands on this machine find the node, as long as it listens."""

    def __init__(self, config: NodeConfig, certificate: str, say: Say) -> None:
        self._owner = Path(f"{config.db}.owner")
        self._certificate = certificate
        self._say = say
        self._url = ""
        self._path: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def leave(self, url: str) -> None:
        self._url = reachable_url(url)
        self.tell_gateway("")

    def tell_gateway(self, gateway: str) -> None:
        """Leave it with the gateway's address."""
        try:
            self._path = announce_node(self._url, self._owner, certificate=self._certificate, gateway=gateway)
        except (OSError, ConfigError) as error:
            told = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            self._say(f"No note of this node could be left ({told}); commands need --url {self._url}")
