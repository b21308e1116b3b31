"""Implement ``roundelay up``: run a node, with supervised processes for its agents and for the gateway.

A supervised process is started again when it fails (`supervised`). When the node stops, it stops the process with
SIGTERM. When the node crashes, the process stops because its input ends. The output of a process goes to standard
error, prefixed with the agent's id. Standard output contains only the ready line.
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
from roundelay.display.text import sanitize
from roundelay.network.client import NetworkClient
from roundelay.network.clock import make_token
from roundelay.network.cluster.shared_log import LogUnavailable
from roundelay.network.config import NodeConfig, load_yaml
from roundelay.network.core.joining import describe_look_alike, hash_token
from roundelay.network.core.reserved_ids import describe_reserved
from roundelay.network.core.rights import Rights
from roundelay.network.errors import ConfigError, ConnectError, InternalError, LedgerError, ModError, RoundelayError
from roundelay.network.extras import name_command
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
from roundelay.network.hub.process_memory import freeze_startup_objects
from roundelay.network.ledger import LogFull
from roundelay.network.ledger.storage_errors import explain
from roundelay.network.log_urls import hide_password
from roundelay.network.platforms import is_read_only, raise_file_limit
from roundelay.network.tls import read_certificate, server_context
from roundelay.nodes.forker import Forker
from roundelay.nodes.hub_http import TIMEOUT_S, is_hub_ready
from roundelay.nodes.links import make_owners_link
from roundelay.nodes.logs import ProcessLog
from roundelay.nodes.processes import stop_signals, wait_for_first, wait_for_input_end
from roundelay.nodes.shared_process import SharedProcess, closing_processes, group_agents
from roundelay.nodes.supervised import AgentProcess, GatewayProcess, NodeAgents, SupervisedProcess, webhooks_file

if TYPE_CHECKING:
    from roundelay.agents.team import AgentSpec

_logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
FEW_FILES = 1024
NEEDED = ("network.window", "network.records", "network.history")
"""Operations that an agent needs to read its work, and to resume the work after a crash."""

Write = Callable[[str], None]


async def run_node(
    config: NodeConfig,
    agents: Sequence[AgentSpec],
    *,
    operator_id: str,
    log_level: str,
    until_input_ends: bool,
    announce_ready: Callable[[str, str, str | None], None],
    log: ProcessLog,
    person_id: str | None = None,
    forker: Forker | None = None,
) -> None:
    """Run a node with its agents until SIGTERM or SIGINT arrives. With ``until_input_ends``, the end of the input also
    stops the node.

    ``announce_ready`` is called when every agent has joined or failed. Its arguments are the ready line, the node's
    address and, if ``person_id`` is set, a link that logs that person in to the page. If another node already listens
    at the address, ``operator_id`` is used to ask that node for its name. Raises the errors of `serve`, `ConfigError`
    for a wrong agent file, and `InternalError` if the hub fails.
    """
    # Check the folder first, so that a start in a wrong folder leaves no files.
    check_folder(config.db)
    write = log.write
    tls, certificate = load_tls(config)
    with (
        stop_signals() as stopping,
        suppress(StoppedWaiting),
        _Announcement(config, certificate, write) as announcement,
        ExitStack() as stack,
    ):
        own_agents = _OwnAgents(agents, config, write)

        async def let_in(hub: Hub, url: str) -> None:
            await own_agents.let_in(hub, reachable_url(url))

        async with _listening(config, tls, operator_id, let_in, announcement.publish, stopping, write) as node:
            warn_of_few_files(write)
            if exposed := find_exposed(config):
                write(describe_exposed(exposed))
            for sentence in describe_locked_out(node.hub.state.rights, [spec.id for spec in agents]):
                write(sentence)
            url = reachable_url(node.url)
            freeze_startup_objects()
            place = {"url": url, "network": node.hub.name, "database": str(config.db), "agents": len(agents)}
            _logger.info("the node listens", extra=place)
            snapshots = Path(stack.enter_context(TemporaryDirectory(prefix="roundelay-")))
            if forker is not None:
                forker.watch()
                stack.callback(forker.close)
            shared: dict[str, SharedProcess] = {}
            for name, agent_ids in group_agents(own_agents.specs).items():
                process = SharedProcess(
                    name, agent_ids, url, log_level=log_level, log=log, folder=snapshots, forker=forker
                )
                shared |= dict.fromkeys(agent_ids, process)
            agent_processes = [
                AgentProcess(
                    spec,
                    node.hub,
                    url,
                    log_level=log_level,
                    log=log,
                    snapshots=snapshots,
                    shared=shared.get(spec.id),
                    forker=forker,
                )
                for spec in own_agents.specs
            ]
            node.hub.view.supervisor = NodeAgents(agent_processes)
            processes: list[SupervisedProcess] = [*agent_processes]
            gateway = None
            if config.interop.serve:
                gateway = GatewayProcess(config, url, log_level=log_level, log=log)
                processes.append(gateway)
            async with closing_processes(set(shared.values())), asyncio.TaskGroup() as group:
                tasks = [group.create_task(process.supervise()) for process in processes]
                tasks.append(group.create_task(node.hub.view.supervisor.watch_files(write)))

                async def announce(line: str) -> None:
                    if gateway is not None and gateway.is_ready:
                        announcement.add_gateway(gateway.url)
                        served = " ".join(config.interop.serve)
                        line += f"\nRoundelay's gateway to {url} is ready on {gateway.url} ({served})"
                    # Create the link late: its lifetime begins now, and the start may have taken long.
                    link = None if person_id is None else await _make_link(node.hub, url, person_id, write)
                    announce_ready(line, node.url, link)

                settled = _announce_when_settled(node, config, processes, announce, write)
                tasks.append(group.create_task(settled))
                input_end = [wait_for_input_end()] if until_input_ends else []
                await wait_for_first(stopping.wait(), node.hub.status.failed.wait(), *input_end)
                _logger.info("the node stops", extra={"url": url, "has_failed": node.hub.status.failed.is_set()})
                for it in shared.values():
                    it.is_closing = True
                for task in tasks:
                    task.cancel()
            if node.hub.status.failed.is_set():
                raise InternalError(
                    "The hub failed. The log says why. Nothing acknowledged is lost: start the node again."
                )
    _logger.info("the node has stopped", extra={"url": listening_url(config)})


@asynccontextmanager
async def _listening(
    config: NodeConfig,
    tls: ssl.SSLContext | None,
    operator_id: str,
    prepare: Callable[[Hub, str], Awaitable[None]],
    listens: Write,
    stopping: asyncio.Event,
    write: Write,
) -> AsyncIterator[Node]:
    """Run a node as `serve` does, with more helpful errors.

    If another node listens at the address, the `ConnectError` names that node. If the shared log cannot be reached, for
    example because of a mistyped address, the files of this start are deleted.
    """
    index = (Path(f"{config.db}{it}") for it in ("", "-wal", "-shm", ".head", ".owner"))
    # Delete only files that this start created, because an index from an earlier start is valuable.
    new = [] if config.log is None else [it for it in index if not it.exists()]
    async with AsyncExitStack() as stack:
        try:
            node = await stack.enter_async_context(
                serve(config, tls=tls, prepare=prepare, stopping=stopping, listens=listens, say=write)
            )
        except LogUnavailable:  # this start holds the database lock, so no other process uses the new files
            for path in new:
                path.unlink(missing_ok=True)
            raise
        except ConnectError as error:
            url = listening_url(config)
            # If another program uses the port, advice about nodes would be misleading.
            if await asyncio.to_thread(is_hub_ready, url) is None:
                raise
            name = await _name_node(url, operator_id)
            raise ConnectError(
                f"Cannot listen on {config.host}:{config.port}: {describe_other_node(url, name, config)}"
            ) from error
        yield node


def describe_other_node(url: str, network: str | None, config: NodeConfig) -> str:
    """Describe which node uses the address, and what to do. ``network`` is None if this user does not own that node."""
    command = name_command(Path.cwd())
    if network is None:
        return f"somebody else's Roundelay node listens there already. Choose another port: {command} up --port PORT"
    announced = node_at(url)
    database = None if announced is None else Path(announced.owner_file.removesuffix(".owner"))
    where = "" if database is None else f" (database {sanitize(str(database))})"
    if database is not None and database.absolute() == config.db.absolute():
        return f"your node of the network {network}{where} runs already. Talk to it: {command} chat --url {url}"
    return (
        f"your node of the network {network}{where} listens there already. For a second node choose another port: "
        f"{command} up --port PORT. To talk to the first one: {command} chat --url {url}"
    )


async def _name_node(url: str, operator_id: str) -> str | None:
    """Return the name of the network at an address, or None if the owner's token is not on this machine."""
    try:
        async with (
            asyncio.timeout(TIMEOUT_S),
            NetworkClient(operator_id, url, kind="service", reconnect=False) as client,
        ):
            return sanitize(client.welcome.network.name)
    except (RoundelayError, TimeoutError):
        return None


async def _announce_when_settled(
    node: Node,
    config: NodeConfig,
    processes: Sequence[SupervisedProcess],
    announce: Callable[[str], Awaitable[None]],
    write: Write,
) -> None:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            for process in processes:
                await process.settled.wait()
    except TimeoutError:
        missing = (process.name for process in processes if not process.settled.is_set())
        # Announce the node anyway: one slow agent must not keep people from the other agents.
        write(f"Not ready yet: {', '.join(missing)}.")
    ready = [process.name for process in processes if process.is_ready and isinstance(process, AgentProcess)]
    await announce(describe_node(node, config, ready))


async def _make_link(hub: Hub, url: str, person_id: str, write: Write) -> str | None:
    try:
        return await make_owners_link(hub, url, person_id)
    except (ConfigError, LedgerError) as error:
        write(str(error))
        return None


def check_folder(db: Path) -> None:
    """Raise `LedgerError` if the folder of the database is not writable. Creates nothing, so that a failed start leaves
    no files.
    """
    try:
        if db.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        if db.is_symlink() and not db.resolve().parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, ""
            )  # the node creates missing folders for ``db``, but not for the target of a symbolic link
        folder = next(parent for parent in db.resolve().parents if parent.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EROFS if is_read_only(folder) else errno.EACCES, "")
    except (OSError, RuntimeError) as error:
        raise explain(error, db) from error


def place_mod_error(error: ModError, origin: str) -> ConfigError:
    """Return a mod's error with the file and line that name the mod.

    ``origin`` is the place where `mods` was set, as `resolve_config` returns it.
    """
    # Only an origin in a file has a line. Other origins are a flag, an environment variable or the default.
    kind, _, place = origin.partition(" ")
    if kind != "file":
        return ConfigError(f"{place}: {error}" if place else str(error))
    path, _, line = place.rpartition(":")
    root = load_yaml(Path(path)).value
    listed = root["mods"].value if isinstance(root, dict) and "mods" in root else None
    items = listed if isinstance(listed, list) else []
    # A list may span many lines, so use the line of the mod's name if it is found.
    mod_line = next((item.line for item in items if item.value == error.mod), int(line))
    return ConfigError(str(error), path=path, line=mod_line)


def load_tls(config: NodeConfig) -> tuple[ssl.SSLContext | None, str]:
    """Return the node's TLS context and its certificate as PEM, or None and "" without TLS. Raises `ConfigError`."""
    if config.tls_cert is None and config.tls_key is None:
        return None, ""
    if config.tls_key is None:
        raise ConfigError(f"tls_cert ({config.tls_cert}) needs tls_key too: the certificate's private key.")
    if config.tls_cert is None:
        raise ConfigError(f"tls_key ({config.tls_key}) needs tls_cert too: the key's certificate.")
    return server_context(config.tls_cert, config.tls_key), read_certificate(config.tls_cert)


def find_exposed(config: NodeConfig) -> list[Path]:
    """Return the files with a node's secrets that other users of this machine may read.

    Checks the key, the owner's token, the database and the webhook registrations.
    """
    files = [config.tls_key, Path(f"{config.db}.owner"), config.db, webhooks_file(config)]
    return [path for path in files if path is not None and _mode_of(path) & 0o044]


def describe_exposed(paths: Sequence[Path]) -> str:
    return f"Others on this machine may read {' and '.join(map(str, paths))}; restrict access: chmod 600"


def describe_locked_out(rights: Rights | None, agent_ids: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each of the node's agents that the configured rights make useless.

    Such an agent may not read its work, or may not write to any participant.
    """
    if rights is None:
        return
    for agent_id in agent_ids:
        calls = [rights.decide("call", agent_id, "agent", op) for op in NEEDED]
        refused = next((index for index, call in enumerate(calls) if not call.allowed), None)
        if refused is not None:
            sentence = f"{agent_id} may not call {NEEDED[refused]}: {calls[refused].rule}."
            yield f"{sentence} Without it, every message to {agent_id} becomes a dead letter."
        # The recipients of answers are unknown now, so only an agent without any right to write is sure to fail.
        if not any(rights.list_rules(verb, agent_id, "agent") for verb in ("send", "broadcast", "write")):
            yield f"{agent_id} may write to nobody, because of `rights` in the node's file, so its answers are refused."


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def warn_of_few_files(write: Write) -> None:
    """Warn if this process may open only few files, because each connection needs an open file."""
    limit = raise_file_limit()
    if limit < FEW_FILES:
        write(f"This process may open {limit} files, and each connection takes one; raise the limit: ulimit -Hn 65536")


def describe_node(node: Node, config: NodeConfig, agent_ids: Sequence[str]) -> str:
    """Return the line that reports that the node is ready."""
    database = "none" if config.durability == "memory" else str(config.db)
    parts = [f"network {node.hub.name}", f"database {database}"]
    if config.log is not None:
        parts.append(f"log {hide_password(config.log)}")
    parts.append(f"durability {node.durability}")
    if agent_ids:
        parts.append(f"agents {' '.join(agent_ids)}")
    return f"Roundelay is ready at {node.url} ({', '.join(parts)})"


def listening_url(config: NodeConfig) -> str:
    """Return the URL with which clients on this machine reach the node that listens at the configured address."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = reachable_url(f"{'ws' if config.tls_cert is None else 'wss'}://{host}:{config.port}/")
    node = node_at(url)
    return url if node is None else node.url


def reachable_url(url: str) -> str:
    """Return the URL with which clients on this machine reach a node. A node that listens on all addresses is reached
    at the loopback address.
    """
    host = urlsplit(url).hostname
    return {"0.0.0.0": url.replace("0.0.0.0", "127.0.0.1"), "::": url.replace("[::]", "[::1]")}.get(host or "", url)


class _OwnAgents:
    """Agents that a node runs, with their tokens."""

    def __init__(self, specs: Sequence[AgentSpec], config: NodeConfig, write: Write) -> None:
        self.specs = list(specs)
        self._config = config
        self._write = write

    async def let_in(self, hub: Hub, url: str) -> None:
        """Bind the agents' tokens before another client can use the agents' ids.

        Raises `ConfigError` for an id that belongs to another participant. With a shared log, the node starts without
        that agent instead. Tokens are stored per hub address, so an agent has a different token for each port. With a
        shared log, an agent also has a token derived from the owner's token, so that every node can run the agent.
        """
        # Iterate over a copy, because the loop removes items from the list.
        for spec in list(self.specs):
            try:
                await self._let_in(hub, url, spec.id)
            except (ConfigError, LogFull) as error:
                if self._config.log is None:
                    raise
                # A leader serves the whole network, so a conflict about one agent's id must not stop the leader.
                self._write(f"{error} This node leads without {spec.id}.")
                self.specs.remove(spec)

    async def _let_in(self, hub: Hub, url: str, agent_id: str) -> None:
        tokens = []
        if self._config.log is not None:
            tokens.append(derive_agent_token(owner_token(self._config.db), agent_id))
        # A stored token remains valid. Derive the token only if none is stored, so that the agent needs no second
        # token.
        tokens.insert(0, agent_token(url, agent_id, (lambda: tokens[0]) if tokens else make_token))
        hashes = dict.fromkeys(map(hash_token, tokens))
        unknown = [token_hash for token_hash in hashes if hub.state.get("token", token_hash) is None]
        # If one token of the id is known, the id belongs to this user, even if the id has other tokens.
        if len(unknown) == len(hashes):
            _check_own(hub, agent_id, self._config)
        # Warn only about a new id: at later starts, people already know the agent, and the warning would be useless.
        if unknown and hub.state.participant(agent_id) is None and not hub.state.has_token(agent_id):
            confusion = describe_reserved(agent_id, hub.view.mod_ids) or describe_look_alike(hub.state, agent_id)
            if confusion is not None:
                self._write(
                    f"Warning: the agent {agent_id} {confusion}: people and models may confuse it with another "
                    "participant."
                )
        for token_hash in unknown:
            await hub.bind_tokens({agent_id: token_hash})


def _check_own(hub: Hub, agent_id: str, config: NodeConfig) -> None:
    """Raise `ConfigError` if an id belongs to a person or a service, or to a token that this user does not have."""
    participant = hub.state.participant(agent_id)
    if participant is not None and participant.kind != "agent":
        raise ConfigError(f"Agent {agent_id}: the network knows {agent_id} as {participant.kind}; choose another id.")
    # A revoked token admits no client, so the id is free.
    valid = {key for key, token in hub.state.tokens(agent_id).items() if not token.revoked}
    if valid and valid.isdisjoint(hash_token(token) for token in saved_tokens(agent_id)):
        revoke = (
            f" --db {config.db}, and start again"
            if config.log is None
            else ", while this node leads, and start it again"
        )
        raise ConfigError(
            f"Agent {agent_id}: its id is bound to a token that is not among yours ({home() / 'tokens'}). Its holder "
            f"joins as {agent_id}. "
            f"If nobody should, or the token is lost: roundelay token revoke {agent_id}{revoke}. If "
            f"somebody else runs {agent_id}, "
            "remove it from `agents`."
        )


class _Announcement:
    """File in which commands on this machine find the address of the node while it listens."""

    def __init__(self, config: NodeConfig, certificate: str, write: Write) -> None:
        self._owner = Path(f"{config.db}.owner")
        self._certificate = certificate
        self._write = write
        self._url = ""
        self._path: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def publish(self, url: str) -> None:
        self._url = reachable_url(url)
        self.add_gateway("")

    def add_gateway(self, gateway: str) -> None:
        """Write the file again, with the gateway's address."""
        try:
            self._path = announce_node(self._url, self._owner, certificate=self._certificate, gateway=gateway)
        except (OSError, ConfigError) as error:
            reason = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
            self._write(f"This node could not be announced ({reason}); commands need --url {self._url}")
